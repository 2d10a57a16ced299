"""Puts a small mistake into the library, for the time of a test."""

import dataclasses
import inspect
import sys
import textwrap
import types
from collections.abc import Callable
from typing import Any

import jax
import pytest

from jaxkv import CrossAttention
from tests.cache.pair import VERBS
from tests.cache.setups import CLASSIC
from tests.cache.setups import CLASSIC_PREFIXES
from tests.cache.setups import DRAFT
from tests.cache.setups import LONG
from tests.cache.setups import MERGE
from tests.cache.setups import NO_CACHING
from tests.cache.setups import Chunk
from tests.cache.setups import Full
from tests.cache.setups import Setup
from tests.cache.setups import State
from tests.cache.setups import Window
from tests.cache.setups import small

CURRENT = small(201, 2, groups=2, window=3, worse="crowded tight", **MERGE)
DUPLICATES = small(202, 2, window=3, worse="crowded tight", **CLASSIC)
# Half a ring of 16 entries for 15 pages: swept at every turn.
ONE_WINDOW = small(203, 2, worse="tight", num_pages=16, **CLASSIC)
UNCACHED = small(213, 2, num_pages=9, **NO_CACHING)
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
ENCODER = small(
  213, 2, (CrossAttention(page_size=4), Full()), **LONG, **NO_CACHING
)
AGED = small(214, 2, num_pages=12, track_residency=True)
SCRATCH = small(
  215, 2, (State(num_speculative=2), Full()), num_pages=60, **LONG
)
LOGGED = small(
  216,
  1,
  (Full(page_size=4), Window(2)),
  window=2,
  event_log=300,
  **LONG,
  **MERGE,
)
CHUNKED = small(209, 2, (Chunk(6),), **LONG)


Wrong = Callable[[Callable], Callable]
"""Makes a wrong function from the right one."""


@dataclasses.dataclass(frozen=True)
class Mutant:
  """One mistake.

  Attributes:
    place: "module:function" or "module:Class.method" in `jaxkv._src.cache`.
    wrong: makes the function with the mistake: one of `given`, `returned` and
      `text`, or a function of its own.
    verbs: which verbs get the mistake, enough to see it. Each is compiled
      again, all others are not.
    setup: the cache in which it shows.
    others: weights of other verbs in the walks, where that helps it to show.
  """

  place: str
  wrong: Wrong
  verbs: tuple[str, ...]
  setup: Setup = CURRENT
  others: tuple[tuple[str, int], ...] = ()

  def verbs_with_it(self) -> dict[str, Callable]:
    """The table of verbs, with the mistake in some of them."""
    name, function = self.place.split(":")
    home, _, attribute = f"{name}.{function}".rpartition(".")
    owner = sys.modules[f"jaxkv._src.cache.{name}"]
    if home != name:
      owner = getattr(owner, home.removeprefix(f"{name}."))
    right = getattr(owner, attribute)
    wrong = self.wrong(right)
    places = [(owner, attribute)] + [
      (module, alias)
      for module in list(sys.modules.values())
      if module.__name__.startswith("jaxkv._src.cache.")
      for alias, value in vars(module).items()
      if value is right
    ]
    return VERBS | {
      verb: _compiled_anew(
        wrong if VERBS[verb] is right else VERBS[verb], places, wrong
      )
      for verb in self.verbs
    }


def given(**changes: Callable[[types.SimpleNamespace], object]) -> Wrong:
  """The right function with wrong arguments.

  Args:
    **changes: for some parameters a function of all arguments, which are
      attributes named after their parameters.
  """

  def wrong(right: Callable) -> Callable:
    if not changes.keys() <= inspect.signature(right).parameters.keys():
      pytest.fail(
        f"{right.__qualname__} has no parameters {[*changes]} any more"
      )

    def call(*args, **kwargs):
      arguments, bound = _bound(right, args, kwargs)
      changed = {name: change(arguments) for name, change in changes.items()}
      bound.arguments |= changed
      return right(*bound.args, **bound.kwargs)

    return call

  return wrong


def returned(change: Callable[[Any, types.SimpleNamespace], object]) -> Wrong:
  """The right function, whose result is then made wrong.

  Args:
    change: takes the result and all arguments, as for `given`.
  """

  def wrong(right: Callable) -> Callable:
    def call(*args, **kwargs):
      arguments, _ = _bound(right, args, kwargs)
      return change(right(*args, **kwargs), arguments)

    return call

  return wrong


def _bound(function, args, kwargs):
  """Arguments by the names of their parameters, defaults included."""
  bound = inspect.signature(function).bind(*args, **kwargs)
  bound.apply_defaults()
  return types.SimpleNamespace(**bound.arguments), bound


def text(old: str, new: str) -> Wrong:
  """A function with a piece of its text replaced, at every occurrence.

  For a mistake inside of a function that no argument and no result shows. It
  has to be said again when that function is written in another way.
  """

  def wrong(right: Callable) -> Callable:
    plain = inspect.unwrap(right)
    source = textwrap.dedent(inspect.getsource(plain))
    if old not in source:
      pytest.fail(f"{plain.__qualname__} does not contain {old!r} any more")
    namespace = dict(vars(sys.modules[plain.__module__]))
    exec(source.replace(old, new), namespace)
    return namespace[plain.__name__]

  return wrong


def _compiled_anew(verb: Callable, places: list, wrong: Callable) -> Callable:
  """A verb that is traced with the mistake, as no other verb is."""
  plain = inspect.unwrap(verb)
  compiled = jax.jit(lambda state, **named: plain(state, **named))

  def call(state, **named):
    with pytest.MonkeyPatch.context() as patch:
      for module, alias in places:
        patch.setattr(module, alias, wrong)
      return compiled(state, **named)

  return call
