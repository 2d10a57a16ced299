"""No hit holds anything but its tokens' K/V, and nothing relied on is written.

The default run takes a random walk in one of the caches, `--all` in twelve,
`--deep` in every one, and `python -m tests.shadow_fuzz` makes as many calls as
one likes. Planted mistakes show that a walk finds what it is there for.
"""

import pytest

from tests.cache.moves import WEIGHTS
from tests.cache.mutants import each_page_alone
from tests.cache.mutation import Mutant
from tests.cache.setups import LONG
from tests.cache.setups import SETUPS
from tests.cache.setups import Full
from tests.cache.setups import Window
from tests.cache.setups import small
from tests.cache.shadow_memory import FalseContent
from tests.cache.shadow_setups import SHADOWED
from tests.cache.shadow_user import User
from tests.cache.shadow_user import stroll
from tests.tools.mistakes import given
from tests.tools.mistakes import returned
from tests.tools.tiers import slow_except

PLAIN = small(421, 2)
ROOMY = small(422, 2, num_pages=60)
WINDOWS = small(423, 2, (Window(4), Full()), num_pages=60, **LONG)

LOOKED_UP = ("commit", "commit_slots", "admit", "match", "pin")

PLANTED = {
  "the salt is ignored": Mutant(
    "cache.state:roots",
    given(salts=lambda g: None),
    ("admit", "match", "pin"),
    ROOMY,
  ),
  "the tokens before a page are ignored": Mutant(
    "cache.prefix.hashing:chain_keys", each_page_alone, LOOKED_UP, ROOMY
  ),
  "a fork owes no copy": Mutant(
    "cache.group_kinds:GroupSizes.open_pages",
    returned(lambda out, g: out & False),
    ("fork",),
    PLAIN,
  ),
  "a hit lacks a page of the window": Mutant(
    "cache.group_kinds:SlidingWindow.num_skipped_tokens",
    returned(lambda out, g: out + g.self.window // 2),
    ("admit",),
    WINDOWS,
  ),
  "pages are published before they are full": Mutant(
    "cache.prefix.prefix_rules:final_pages",
    given(tokens=lambda g: g.tokens + 1),
    ("commit", "commit_slots"),
    PLAIN,
  ),
  "a page that is rolled back stays cached": Mutant(
    "cache.pool.page_pool:unpublish",
    returned(lambda out, g: (g.pool, out[1])),
    ("truncate", "truncate_slots"),
    ROOMY,
  ),
  "pages are found after a new epoch": Mutant(
    "cache.prefix.hashing:root_key",
    given(epoch=lambda g: g.epoch * 0),
    ("new_epoch", "admit", "match", "pin"),
    ROOMY,
    (("new_epoch", 8),),
  ),
  "a page that is handed out stays cached": Mutant(
    "cache.pool.page_pool:unpublish",
    returned(lambda out, g: (g.pool, out[1])),
    ("allocate", "allocate_slots"),
    PLAIN,
  ),
}

_PLANTED_CALLS = 400
_SEEDS = 6
# The state machine walks through most of `SETUPS` with `--all`.
_LIKE_OTHERS = {
  *("draft_states", "few_pages", "kept_of_16"),
  *("pages_of_16", "merged_windows", "states_and_full"),
}
_CACHES = [
  pytest.param(name, marks=pytest.mark.deep)
  if name
  in (SETUPS.keys() - {"hybrid", "windows", "retained_offload"}) | _LIKE_OTHERS
  else name
  for name in SHADOWED
]


@slow_except("name", SHADOWED, "hybrid")
@pytest.mark.parametrize("name", _CACHES)
def test_pages_hold_the_expected_content(name, request):
  deep = request.config.getoption("--deep")
  setup = SHADOWED[name]
  calls = 4_000 if deep else 400
  with setup.patched():
    user = User(setup)
    stroll(user, 0, calls)
  # Fewer where many calls fail, as in pages of one token.
  assert user.counts["sequences checked"] > calls // 2
  # A window of one token needs no page of a prefix, so it alone never hits.
  if deep and setup.config.prefix_caching and name != "one_alone":
    assert user.counts["hits"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_planted_mistakes_are_found(name):
  planted = PLANTED[name]
  weights = WEIGHTS | dict(planted.others)
  with planted.setup.patched(), pytest.raises(FalseContent):
    verbs = planted.verbs_with_it()
    for seed in range(_SEEDS):
      stroll(User(planted.setup, verbs), seed, _PLANTED_CALLS, weights)
