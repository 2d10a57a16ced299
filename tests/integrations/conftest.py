"""Runs tests of integrations with jax's defaults, which clients expect."""

import jax
import pytest


@pytest.fixture(autouse=True)
def _defaults_of_jax():
  """Sets the global config: a context would apply to one thread only."""
  names = ("jax_numpy_dtype_promotion", "jax_numpy_rank_promotion")
  old_values = [getattr(jax.config, name) for name in names]
  for name, value in zip(names, ("standard", "allow"), strict=True):
    jax.config.update(name, value)
  yield
  for name, value in zip(names, old_values, strict=True):
    jax.config.update(name, value)
