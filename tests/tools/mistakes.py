"""Mutants: replace a function of the library by a wrong one during a test.

A mutant calls a function with wrong arguments (`given`) or changes its result
(`returned`), and names the test that must fail. `tests/test_mutants.py` runs
all mutants, except those of the cache, see `tests/cache/mutation.py`.
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
_DISABLED = ("cacheprovider", "faulthandler", "xdist")
_PACKAGES = ("jaxkv", "jaxkv_kernels", "tests")


@dataclasses.dataclass(frozen=True)
class Mistake:
  """One mutant.

  Attributes:
    place: "module:function" or "module:Class.method".
    wrong: makes the wrong function from the right one.
    test: the name of a test, or of a class of tests, that must fail.
  """

  place: str
  wrong: Wrong
  test: str

  @contextlib.contextmanager
  def made(self) -> Iterator[None]:
    """Applies the mutant to the library within a block."""
    right, places = found(self.place)
    wrong = self.wrong(right)
    with pytest.MonkeyPatch.context() as patch:
      for owner, attribute in places:
        patch.setattr(owner, attribute, wrong)
      yield

  def is_noticed(self) -> bool:
    """Returns True if the test fails with the mutant."""
    # Imported before the mutant is applied: a test module would otherwise keep
    # the wrong function after the block.
    module = self.test.partition("::")[0].removesuffix(".py").replace("/", ".")
    importlib.import_module(module)
    with self.made():
      # Programs compiled earlier do not contain the mutant.
      jax.clear_caches()
      try:
        return _fails(self.test)
      finally:
        jax.clear_caches()


def table(
  package: str, folder: str, rows: dict[str, tuple[str, Wrong, str]]
) -> dict[str, Mistake]:
  """Makes mutants by name, with places in a package and tests in a folder."""
  return {
    name: Mistake(f"{package}.{place}", wrong, f"{folder}/{test}")
    for name, (place, wrong, test) in rows.items()
  }


def found(place: str) -> tuple[Callable, list[tuple[Any, str]]]:
  """Returns a function, and all references to it as pairs (owner, name)."""
  name, function = place.split(":")
  *owners, attribute = function.split(".")
  owner: Any = importlib.import_module(name)
  for part in owners:
    owner = getattr(owner, part)
  right = getattr(owner, attribute)
  # `from module import function` makes a reference in the importing module.
  aliases = [
    (module, alias)
    for module in list(sys.modules.values())
    if module.__name__.partition(".")[0] in _PACKAGES
    for alias, value in list(vars(module).items())
    if value is right
  ]
  return right, [(owner, attribute), *aliases]


def given(**changes: Callable[[types.SimpleNamespace], object]) -> Wrong:
  """Makes a mutant that changes arguments.

  Args:
    **changes: the new value of a parameter, as a function of a namespace of all
      arguments.
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
  """Makes a mutant that changes the result.

  Args:
    change: maps the result and a namespace of all arguments to a new result.
  """

  def wrong(right: Callable) -> Callable:
    def call(*args, **kwargs):
      arguments, _ = _bound(right, args, kwargs)
      return change(right(*args, **kwargs), arguments)

    return call

  return wrong


def _bound(function, args, kwargs):
  """Binds arguments, with defaults, to their parameters."""
  bound = inspect.signature(function).bind(*args, **kwargs)
  bound.apply_defaults()
  return types.SimpleNamespace(**bound.arguments), bound


def _fails(test: str) -> bool:
  """Returns True if a test fails; raises if it does not run at all."""
  disabled = [word for name in _DISABLED for word in ("-p", f"no:{name}")]
  with pytest.MonkeyPatch.context() as patch:
    # Options of the outer run may belong to a plugin that is disabled here.
    patch.delenv("PYTEST_ADDOPTS", raising=False)
    code = pytest.main([*_OPTIONS, *disabled, test])
  valid_codes = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
  if code not in valid_codes:
    raise ValueError(f"`test` must be the name of a test, got {test!r}: {code}")
  return code == pytest.ExitCode.TESTS_FAILED
