"""Mutants of the cache: applies a wrong function to verbs during a test."""

import dataclasses
import inspect
from collections.abc import Callable

import jax
import pytest

from tests.cache.pair import VERBS
from tests.cache.setups import CLASSIC
from tests.cache.setups import CLASSIC_PREFIXES
from tests.cache.setups import DRAFT
from tests.cache.setups import LONG
from tests.cache.setups import MERGE
from tests.cache.setups import Chunk
from tests.cache.setups import Full
from tests.cache.setups import Setup
from tests.cache.setups import State
from tests.cache.setups import Window
from tests.cache.setups import small
from tests.tools.mistakes import Wrong
from tests.tools.mistakes import found

CURRENT = small(201, 2, groups=2, window=3, worse="crowded tight", **MERGE)
DUPLICATES = small(202, 2, window=3, worse="crowded tight", **CLASSIC)
# Half a ring of 16 entries for 15 pages: swept at every turn.
ONE_WINDOW = small(203, 2, worse="tight", num_pages=16, **CLASSIC)
# Eight pages for four slots of four: sequences are refused at every turn.
SCARCE = small(204, 2, num_pages=9)
SLIDING = small(205, 2, (Window(4),), **LONG)
# A page more than the window: rolled back within it, keys may be gone.
NARROW = small(210, 4, (Window(2),))
# Neither size divides the other: hits end at every sixth token.
HYBRID = small(
  206, 1, (Full(page_size=2), Window(4, page_size=3)), pages_per_slot=12
)
PUBLISHED = small(
  211, 2, (Window(3), Full(page_size=4)), **LONG, **CLASSIC_PREFIXES
)
DRAFTED = small(207, 1, (Window(3), Full(page_size=2)), **LONG, **DRAFT)
# No full attention, so that kinds shorten a hit more than once. No page is ever
# lost or held twice, so that `evict` makes holes in what is cached.
WINDOWS = small(
  208,
  1,
  (Window(2), Window(5)),
  num_pages=300,
  pages_per_slot=12,
  **DRAFT,
  **MERGE,
)
KEPT = small(
  212, 2, (Window(3), Full(page_size=4)), prefix_retention_interval=0, **LONG
)
STATES = small(215, 2, (State(), Full()), num_pages=60, **LONG)
POOLS = small(216, 2, (Full(), State(pool=1)), num_pages=(22, 7), **LONG)
CHUNKED = small(209, 2, (Chunk(6),), **LONG)


@dataclasses.dataclass(frozen=True)
class Mutant:
  """One mutant.

  Attributes:
    place: "module:function" or "module:Class.method" in `jaxkv._src`.
    wrong: makes the wrong function: `given`, `returned`, or a custom one.
    verbs: the verbs with the mutant, enough to notice it. Only these are
      compiled again.
    setup: the cache in which the mutant is noticed.
    others: weights of other verbs in the walks, if they help to notice it.
  """

  place: str
  wrong: Wrong
  verbs: tuple[str, ...]
  setup: Setup = CURRENT
  others: tuple[tuple[str, int], ...] = ()

  def verbs_with_it(self) -> dict[str, Callable]:
    """Returns the table of verbs, some of them with the mutant."""
    right, aliases = found(f"jaxkv._src.{self.place}")
    wrong = self.wrong(right)
    return VERBS | {
      verb: _compiled_anew(
        wrong if VERBS[verb] is right else VERBS[verb], aliases, wrong
      )
      for verb in self.verbs
    }


def _compiled_anew(verb: Callable, aliases: list, wrong: Callable) -> Callable:
  """Returns a verb that is traced with the mutant, unlike all other verbs."""
  plain = inspect.unwrap(verb)
  compiled = jax.jit(lambda state, **named: plain(state, **named))

  def call(state, **named):
    with pytest.MonkeyPatch.context() as patch:
      for module, alias in aliases:
        patch.setattr(module, alias, wrong)
      return compiled(state, **named)

  return call
