"""Mistakes: a function of the library made wrong for the time of a test.

A mutant is a function with wrong arguments (`given`) or a wrong result
(`returned`), and names the test that must notice it, as on the command line.
So it repeats nothing of the test, and shows that this very test is worth its
time. `tests/test_mutants.py` runs them; those of the cache have random walks
of their own, see `tests/cache/mutation.py`.
"""

import contextlib
import dataclasses
import importlib
import inspect
import sys
import types
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import jax
import pytest

Wrong = Callable[[Callable], Callable]
"""Makes a wrong function from the right one."""

_OPTIONS = ("-q", "-x", "-s", "--no-header", "--tb=no", "-W", "ignore")
_WITHOUT = ("cacheprovider", "faulthandler", "xdist")
_PACKAGES = ("jaxkv", "jaxkv_kernels", "tests")


@dataclasses.dataclass(frozen=True)
class Mistake:
  """One mistake.

  Attributes:
    place: "module:function" or "module:Class.method".
    wrong: makes the function with the mistake.
    test: the name of a test, or of a class of tests, that must fail.
  """

  place: str
  wrong: Wrong
  test: str

  @contextlib.contextmanager
  def made(self) -> Iterator[None]:
    """For a block in which the library has the mistake."""
    right, places = found(self.place)
    wrong = self.wrong(right)
    with pytest.MonkeyPatch.context() as patch:
      for owner, attribute in places:
        patch.setattr(owner, attribute, wrong)
      yield

  def is_noticed(self) -> bool:
    """Whether the test fails with the mistake, compiled with it."""
    # What a test module imports while a mistake is there, it would keep.
    home = self.test.partition("::")[0].removesuffix(".py").replace("/", ".")
    importlib.import_module(home)
    with self.made():
      jax.clear_caches()
      try:
        return _fails(self.test)
      finally:
        jax.clear_caches()


def table(
  package: str, folder: str, rows: dict[str, tuple[str, Wrong, str]]
) -> dict[str, Mistake]:
  """Mistakes by their names.

  Args:
    package: what `place` of each row is in.
    folder: what `test` of each row is in.
    rows: for each name `place`, `wrong` and `test` of a `Mistake`.
  """
  return {
    name: Mistake(f"{package}.{place}", wrong, f"{folder}/{test}")
    for name, (place, wrong, test) in rows.items()
  }


def found(place: str) -> tuple[Callable, list[tuple[Any, str]]]:
  """A function, and (owner, name) of all places that know it.

  Args:
    place: "module:function" or "module:Class.method".
  """
  name, function = place.split(":")
  *owners, attribute = function.split(".")
  owner: Any = importlib.import_module(name)
  for part in owners:
    owner = getattr(owner, part)
  right = getattr(owner, attribute)
  aliases = [
    (module, alias)
    for module in list(sys.modules.values())
    if module.__name__.partition(".")[0] in _PACKAGES
    for alias, value in list(vars(module).items())
    if value is right
  ]
  return right, [(owner, attribute), *aliases]


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


def _fails(test: str) -> bool:
  """Whether a test fails; one that does not run at all is an error."""
  without = [word for name in _WITHOUT for word in ("-p", f"no:{name}")]
  with pytest.MonkeyPatch.context() as patch:
    # Options of the outer run may belong to a plugin that is left out here.
    patch.delenv("PYTEST_ADDOPTS", raising=False)
    code = pytest.main([*_OPTIONS, *without, test])
  known = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
  if code not in known:
    raise ValueError(f"`test` must be the name of a test, got {test!r}: {code}")
  return code == pytest.ExitCode.TESTS_FAILED
