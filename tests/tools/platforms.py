"""Runs the programs for one platform on another."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from jax import lax


@contextlib.contextmanager
def programs_for(platform: str) -> Iterator[None]:
  """Traces the branches of `lax.platform_dependent` for a platform.

  Programs that were traced before keep their branches, so callers need
  functions or configs that no other test uses.
  """

  def branch(*arguments: Any, default: Any = None, **branches: Any) -> Any:
    return branches.get(platform, default)(*arguments)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(lax, "platform_dependent", branch)
    yield
