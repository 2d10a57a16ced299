"""Puts a small mistake into the library, for the time of a test."""

import dataclasses
import functools
import inspect
import sys
import textwrap
from collections.abc import Callable

import jax
import pytest

from tests.pair import VERBS
from tests.setups import CLASSIC
from tests.setups import MERGE
from tests.setups import Setup
from tests.setups import small

CURRENT = small(201, 2, groups=2, window=3, worse="crowded tight", **MERGE)
DUPLICATES = small(202, 2, window=3, worse="crowded tight", **CLASSIC)
# Half a ring of 16 entries for 15 pages: swept at every turn.
ONE_WINDOW = small(203, 2, worse="tight", num_pages=16, **CLASSIC)
# Nine pages for four slots of four: sequences are refused at every turn.
SCARCE = small(204, 2, num_pages=10)

quick = functools.partial(
  jax.jit, compiler_options={"xla_backend_optimization_level": 0}
)


@dataclasses.dataclass(frozen=True)
class Mutant:
  """One mistake.

  Attributes:
    place: "module:function" in `jaxkv.cache`.
    old: a piece of the function's text; every occurrence is replaced.
    new: what stands there instead.
    verbs: which verbs get the mistake, enough to see it. Each is compiled
      again, all others are not.
    setup: the cache in which it shows.
  """

  place: str
  old: str
  new: str
  verbs: tuple[str, ...]
  setup: Setup = CURRENT

  def verbs_with_it(self) -> dict[str, Callable]:
    """The table of verbs, with the mistake in some of them."""
    name, function = self.place.split(":")
    right = getattr(sys.modules[f"jaxkv.cache.{name}"], function)
    wrong = self._rewritten(right)
    places = [
      (module, alias)
      for module in list(sys.modules.values())
      if module.__name__.startswith("jaxkv.cache.")
      for alias, value in vars(module).items()
      if value is right
    ]
    return VERBS | {
      verb: _compiled_anew(
        wrong if VERBS[verb] is right else VERBS[verb], places, wrong
      )
      for verb in self.verbs
    }

  def _rewritten(self, function: Callable) -> Callable:
    text = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    if self.old not in text:
      pytest.fail(f"{self.place} does not contain {self.old!r} any more")
    module = sys.modules[inspect.unwrap(function).__module__]
    namespace = dict(vars(module))
    exec(text.replace(self.old, self.new), namespace)
    return namespace[inspect.unwrap(function).__name__]


def _compiled_anew(verb: Callable, places: list, wrong: Callable) -> Callable:
  """A verb that is traced with the mistake, as no other verb is."""
  plain = inspect.unwrap(verb)
  compiled = quick(lambda *arguments: plain(*arguments))

  def call(*arguments):
    with pytest.MonkeyPatch.context() as patch:
      for module, alias in places:
        patch.setattr(module, alias, wrong)
      return compiled(*arguments)

  return call
