"""A mistake in a function of the library, and the test that must notice it.

The test is named as on the command line and runs in this process, with its
fixtures, while the mistake is there. So a mutant repeats nothing of the test,
and shows that this very test is worth its time. The cache has walks of its own
for that, see `tests/cache/mutation.py`.
"""

import contextlib
import dataclasses
import importlib
import sys
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from tests.cache.mutation import Wrong

_OPTIONS = ("-q", "-x", "-s", "--no-header", "--tb=no", "-W", "ignore")
_WITHOUT = ("cacheprovider", "faulthandler", "xdist")
_PACKAGES = ("jaxkv", "jaxkv_kernels", "tests")


@dataclasses.dataclass(frozen=True)
class Mistake:
  """One mistake.

  Attributes:
    place: "module:function" or "module:Class.method".
    wrong: makes the function with the mistake.
    test: the name of a test, down to its parameters.
  """

  place: str
  wrong: Wrong
  test: str

  @contextlib.contextmanager
  def planted(self) -> Iterator[None]:
    """The library with the mistake, and without what was compiled before."""
    name, function = self.place.split(":")
    *owners, attribute = function.split(".")
    owner: Any = importlib.import_module(name)
    for part in owners:
      owner = getattr(owner, part)
    right = getattr(owner, attribute)
    wrong = self.wrong(right)
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(owner, attribute, wrong)
      for module, alias in _places(right):
        patch.setattr(module, alias, wrong)
      jax.clear_caches()
      try:
        yield
      finally:
        jax.clear_caches()

  def is_noticed(self) -> bool:
    """Whether the test fails with the mistake."""
    # What a test module imports while a mistake is there, it would keep.
    home = self.test.partition("::")[0].removesuffix(".py").replace("/", ".")
    importlib.import_module(home)
    with self.planted():
      return _fails(self.test)


def _places(right: object) -> list[tuple[Any, str]]:
  """Modules in which a function is known, and its name there."""
  return [
    (module, alias)
    for module in list(sys.modules.values())
    if module.__name__.partition(".")[0] in _PACKAGES
    for alias, value in list(vars(module).items())
    if value is right
  ]


def _fails(test: str) -> bool:
  """Whether a test fails; one that does not run at all is an error."""
  without = [word for name in _WITHOUT for word in ("-p", f"no:{name}")]
  code = pytest.main([*_OPTIONS, *without, test])
  known = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
  if code not in known:
    raise ValueError(f"`test` must be the name of a test, got {test!r}: {code}")
  return code == pytest.ExitCode.TESTS_FAILED
