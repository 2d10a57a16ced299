"""Puts a small mistake into the library, for the time of a test."""

import contextlib
import dataclasses
import inspect
import pathlib
import sys
import textwrap
import types
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import pytest

Wrong = Callable[[Callable], Callable]
"""Makes a wrong function from the right one."""


@dataclasses.dataclass(frozen=True)
class Mistake:
  """One mistake, and the check that must notice it.

  Attributes:
    place: "module:function" or "module:Class.method" in `package`.
    wrong: makes the function with the mistake: one of `given`, `returned` and
      `text`, or a function of its own.
    check: what is run with the mistake; takes an empty folder.
    package: the package of the place.
  """

  place: str
  wrong: Wrong
  check: Callable[[pathlib.Path], object]
  package: str

  @contextlib.contextmanager
  def made(self) -> Iterator[None]:
    """For a block in which the library has the mistake."""
    right, places = found(self.package, self.place)
    wrong = self.wrong(right)
    with pytest.MonkeyPatch.context() as patch:
      for owner, attribute in places:
        patch.setattr(owner, attribute, wrong)
      yield

  def dies(self, folder: pathlib.Path) -> None:
    """Passes if the check fails; an error is no failure of a check."""
    with self.made(), pytest.raises((AssertionError, pytest.fail.Exception)):
      self.check(folder)


def found(
  package: str, place: str
) -> tuple[Callable, list[tuple[object, str]]]:
  """A function, and (owner, name) of all places of the library that have it.

  Args:
    package: "jaxkv._src.cache", for example.
    place: "module:function" or "module:Class.method" in the package.
  """
  name, function = place.split(":")
  home, _, attribute = f"{name}.{function}".rpartition(".")
  owner = sys.modules[f"{package}.{name}"]
  if home != name:
    owner = getattr(owner, home.removeprefix(f"{name}."))
  right = getattr(owner, attribute)
  aliases = [
    (module, alias)
    for module in list(sys.modules.values())
    if module.__name__.partition(".")[0] == "jaxkv"
    for alias, value in vars(module).items()
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
