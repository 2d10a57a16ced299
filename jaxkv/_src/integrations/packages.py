"""Imports optional packages when they are first needed."""

from typing import Any

from jaxkv._src.extras import extra_package


def nnx() -> Any:
  """Imports `flax.nnx`, or raises ImportError if flax is not installed."""
  return extra_package(
    "flax.nnx", install="flax", task="To serve models of flax.nnx"
  )


def of_tunix(name: str) -> Any:
  """Imports a module of tunix by its full name, or raises ImportError."""
  return extra_package(
    name, install="jaxkv[clients]", task="To serve trainers of tunix"
  )
