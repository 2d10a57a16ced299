"""Gathers and scatters that know what is nowhere.

JAX wraps negative indices to the end of an array and clamps large ones to its
edge; either turns a sentinel into somebody else's page. With these functions
an index outside of an axis, on either side, reads as `fill` and writes nothing.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array

NOWHERE = 2**30
"""An index outside of every array of the cache."""


def after(count: Array, index: Array) -> Array:
  """The index, which now depends on a count that is never negative.

  XLA updates an array in place only when all that read it before are known to
  be done. A reader whose result does not lead to the update's indices is not,
  and the array is copied whole, at every step of a loop. This makes it lead
  there; XLA cannot tell that the comparison always holds.

  Args:
    count: int32[], made by the reader, at least 0.
    index: int32[...], where the update writes.
  """
  return jnp.where(count >= 0, index, jnp.int32(NOWHERE))


def where_valid(valid: Array, index: Array) -> Array:
  """The index where `valid`, NOWHERE elsewhere."""
  return jnp.where(valid, index, jnp.int32(NOWHERE))


def take(array: Array, *index: Array, fill=0) -> Array:
  """`array[index]`, `fill` where an index is outside of its axis."""
  return array.at[_forward(index)].get(
    mode="fill", fill_value=fill, wrap_negative_indices=False
  )


def put(array: Array, *index: Array, values) -> Array:
  """`array[index] = values`; an index outside of its axis writes nothing.

  Indices that are inside must differ from each other: two writes to one place
  have no defined winner.
  """
  return array.at[_forward(index)].set(
    values, mode="drop", wrap_negative_indices=False
  )


def add(array: Array, *index: Array, values) -> Array:
  """`array[index] += values`, duplicates added up, outside nothing."""
  return array.at[_forward(index)].add(
    values, mode="drop", wrap_negative_indices=False
  )


def put_max(array: Array, *index: Array, values) -> Array:
  """`array[index] = max(array[index], values)`, outside nothing."""
  return array.at[_forward(index)].max(
    values, mode="drop", wrap_negative_indices=False
  )


def put_min(array: Array, *index: Array, values) -> Array:
  """`array[index] = min(array[index], values)`, outside nothing."""
  return array.at[_forward(index)].min(
    values, mode="drop", wrap_negative_indices=False
  )


def _forward(index: Sequence[Array]) -> tuple[Array, ...] | Array:
  return tuple(index) if len(index) > 1 else index[0]
