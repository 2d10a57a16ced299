"""Broken caches, continued: groups that leave pages behind, mixed page sizes.

See `mutants.py`.
"""

from dataclasses import replace

import jax.numpy as jnp

from tests.cache.mutation import CHUNKED
from tests.cache.mutation import DRAFTED
from tests.cache.mutation import HYBRID
from tests.cache.mutation import KEPT
from tests.cache.mutation import NARROW
from tests.cache.mutation import PUBLISHED
from tests.cache.mutation import SLIDING
from tests.cache.mutation import WINDOWS
from tests.cache.mutation import Mutant
from tests.tools.mistakes import given
from tests.tools.mistakes import returned

LOOK = ("match",)
RECYCLE = ("recycle",)
COMMIT = ("commit",)
# Many share a page that waits for its key.
FORKS = (("fork", 30), ("admit", 2))
HOLES = (("evict", 24), ("match", 24), ("new_epoch", 0))
HOLES += (("reset_prefix_cache", 0),)


def _as_much_behind(state, g):
  """The new state, with the leading columns of the old one."""
  return replace(state, num_skipped_pages=g.state.num_skipped_pages)


def _all_at_once(g):
  """Room for the whole prompt, however little was asked for."""
  asked = g.num_tokens
  return None if asked is None else jnp.where(asked > 0, g.lengths, asked)


WINDOW_MUTANTS = {
  # --- what is left behind ---------------------------------------------------
  "a chunk is over one token early": Mutant(
    "cache.group_kinds:ChunkedLocal.num_skipped_tokens",
    given(num_tokens=lambda g: g.num_tokens + 1),
    RECYCLE,
    CHUNKED,
  ),
  "a fork has no null pages": Mutant(
    "cache.pool.page_table:fill_before",
    returned(lambda out, g: g.table),
    ("fork",),
    SLIDING,
  ),
  "a fork takes null pages for pages": Mutant(
    "cache.steps.reserve:reservation",
    given(first=lambda g: g.first * 0),
    ("fork",),
    SLIDING,
  ),
  "truncate needs no page that is gone": Mutant(
    "cache.group_kinds:GroupSizes.skipped_pages",
    returned(lambda out, g: out + 99),
    ("truncate",),
    SLIDING,
  ),
  "truncate reads keys that are gone": Mutant(
    "cache.verbs.truncate:_needs_recycled",
    given(state=lambda g: replace(g.state, hashes=None)),
    ("truncate",),
    NARROW,
    (("recycle", 12),),
  ),
  "a rolled back slot left as much behind": Mutant(
    "cache.verbs.truncate:truncate",
    returned(lambda out, g: (_as_much_behind(out[0], g), out[1])),
    ("truncate",),
    SLIDING,
  ),
  # --- what is found ---------------------------------------------------------
  "a window is found without its first page": Mutant(
    "cache.group_kinds:SlidingWindow.num_skipped_tokens",
    given(num_tokens=lambda g: g.num_tokens + 1),
    LOOK,
    SLIDING,
  ),
  "the last token may be cached as well": Mutant(
    "cache.group_kinds:GroupKind.longest_hit",
    given(limit=lambda g: g.limit + g.page_size),
    LOOK,
    SLIDING,
  ),
  "a hit ends anywhere": Mutant(
    "cache.group_kinds:GroupKind.longest_hit",
    given(align=lambda g: 1),
    LOOK,
    PUBLISHED,
  ),
  "a hit needs the whole prefix": Mutant(
    "cache.group_kinds:GroupSizes.skipped_pages",
    given(tokens=lambda g: g.tokens * 0),
    ("admit",),
    SLIDING,
  ),
  "a draft model gets no page to compute": Mutant(
    "cache.group_kinds:GroupKind.longest_hit",
    given(drop=lambda g: g.drop & False),
    LOOK,
    DRAFTED,
  ),
  "a draft model proves nothing behind a hit": Mutant(
    "cache.prefix.prefix_rules:lookup_bound",
    returned(lambda out, g: (g.length, out[1])),
    LOOK,
    DRAFTED,
  ),
  "a page is left out in every round": Mutant(
    "cache.prefix.prefix_rules:lookup_bound",
    given(dropped=lambda g: g.dropped & False),
    LOOK,
    WINDOWS,
    HOLES,
  ),
  # --- what is published -----------------------------------------------------
  "pages that no hit can use are published": Mutant(
    "cache.prefix.prefix_rules:published",
    returned(lambda out, g: g.pages >= 0),
    COMMIT,
    HYBRID,
  ),
  "nobody keeps where sequences diverged": Mutant(
    "cache.prefix.prefix_rules:_retained_prefixes",
    given(boundary=lambda g: g.boundary * 0),
    COMMIT,
    KEPT,
  ),
  "pages are published before all groups end one": Mutant(
    "cache.prefix.prefix_rules:final_pages",
    returned(lambda out, g: g.config.sizes.full_pages(g.tokens)),
    COMMIT,
    HYBRID,
  ),
  "the page behind an aligned prefix is not published": Mutant(
    "cache.prefix.prefix_rules:final_pages",
    given(config=lambda g: replace(g.config, use_eagle=False)),
    COMMIT,
    DRAFTED,
  ),
  "two forks publish one page at once": Mutant(
    "arrays.indexing:any_earlier",
    returned(lambda out, g: out & False),
    COMMIT,
    HYBRID,
    FORKS,
  ),
  # --- sizes -----------------------------------------------------------------
  "a small page holds the tokens behind it too": Mutant(
    "cache.steps.publish:_page_tokens",
    given(step=lambda g: g.step * 0 + 99),
    COMMIT,
    HYBRID,
  ),
  "a prompt gets all its pages at once": Mutant(
    "cache.verbs.admit:admit",
    given(num_tokens=_all_at_once),
    ("admit",),
    SLIDING,
  ),
}
