"""Bounds-safe gather and scatter: out-of-range reads fill, writes drop.

JAX wraps negative indices to the end of an array and clamps large ones to its
edge. Either turns a sentinel into another sequence's page. In these functions
an index outside of its axis, on either side, reads as `fill` and writes
nothing.
"""

import jax.numpy as jnp
from jax import Array
from jax import lax

NOWHERE = 2**30
"""An index outside of every array of the cache."""


def where_valid(valid: Array, index: Array) -> Array:
  """The index where `valid`, NOWHERE elsewhere."""
  return jnp.where(valid, index, jnp.int32(NOWHERE))


def take(array: Array, *index: Array, fill=0) -> Array:
  """`array[index]`, and `fill` for an index outside of its axis."""
  return array.at[index].get(
    mode="fill", fill_value=fill, wrap_negative_indices=False
  )


def put(array: Array, *index: Array, values) -> Array:
  """`array[index] = values`; an index outside of its axis writes nothing.

  Indices inside must differ from each other: two writes to one element have
  no defined winner.
  """
  return array.at[index].set(values, mode="drop", wrap_negative_indices=False)


def add(array: Array, *index: Array, values) -> Array:
  """`array[index] += values`, duplicates added up."""
  return array.at[index].add(values, mode="drop", wrap_negative_indices=False)


def put_max(array: Array, *index: Array, values) -> Array:
  """`array[index] = max(array[index], values)`."""
  return array.at[index].max(values, mode="drop", wrap_negative_indices=False)


def put_min(array: Array, *index: Array, values) -> Array:
  """`array[index] = min(array[index], values)`."""
  return array.at[index].min(values, mode="drop", wrap_negative_indices=False)


def num_earlier(values: Array) -> Array:
  """The number of earlier elements that are equal to each element.

  Args:
    values: int32[X].

  Returns:
    int32[X].
  """
  size = values.shape[0]
  if size == 0:
    return values
  order = jnp.argsort(values, stable=True).astype(jnp.int32)
  ordered = values[order]
  lanes = jnp.arange(size, dtype=jnp.int32)
  begins = jnp.concatenate([jnp.ones((1,), bool), ordered[1:] != ordered[:-1]])
  run = lax.cummax(jnp.where(begins, lanes, 0))
  return jnp.zeros_like(values).at[order].set(lanes - run)


def any_earlier(values: Array, counts: Array) -> Array:
  """bool[X]: whether an equal element with `counts` stands before each one.

  Compares all pairs; `num_earlier` sorts.

  Args:
    values: int32[X].
    counts: bool[X], the elements that later ones are compared with.
  """
  same = values[:, None] == values[None, :]
  earlier = jnp.tril(jnp.ones(same.shape, bool), k=-1)
  return jnp.any(same & earlier & counts[None, :], axis=1)
