"""Bounds-safe gather and scatter, and arithmetic on indices.

JAX wraps negative indices to the end of an array and clamps large ones to its
edge; either turns a sentinel into another sequence's page. Here an index out of
range, on either side, reads as `fill` and writes nothing.
"""

from typing import NamedTuple

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


class SlotRows(NamedTuple):
  """The slots that the rows of a call are for.

  Attributes:
    slots: int32[R], any numbers.
    every: whether the rows are all slots in order, R = B. Reads and writes are
      whole arrays then, without a gather or a scatter.
    skipped: bool[R], masked out.
    bad: bool[R], out of range, or named by an earlier row that counts.
  """

  slots: Array
  every: bool
  skipped: Array
  bad: Array

  def read(self, array: Array) -> Array:
    """Each row's entry of an array by slots; zeros for bad rows."""
    return array if self.every else take(array, self.slots)

  def write(self, array: Array, valid: Array, values: Array) -> Array:
    """The array by slots, with the entries of valid rows replaced.

    Args:
      array: [B, ...].
      valid: bool[R].
      values: [R, ...], or one value for all rows.
    """
    values = jnp.broadcast_to(values, (*valid.shape, *array.shape[1:]))
    if self.every:
      valid = valid.reshape(-1, *(1,) * (array.ndim - 1))
      return jnp.where(valid, values, array)
    return put(array, self.where(valid), values=values)

  def where(self, valid: Array) -> Array:
    """int32[R]: the slots of valid rows, NOWHERE for the others."""
    return where_valid(valid, self.slots)


def between(start: Array, stop: Array, size: int) -> Array:
  """bool[..., size]: the positions `start .. stop`, int32[...] both."""
  position = jnp.arange(size, dtype=jnp.int32)
  position = position.reshape(*(1,) * start.ndim, size)
  return (position >= start[..., None]) & (position < stop[..., None])


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


def quotient(number: Array, divisor: int) -> Array:
  """`number // divisor` for numbers that are not negative.

  One operation; `//` rounds down, for which XLA computes signs and remainders.
  """
  if divisor & (divisor - 1) == 0:
    return number >> (divisor.bit_length() - 1)
  return lax.div(number, lax.full_like(number, divisor))


def remainder(number: Array, divisor: int) -> Array:
  """`number % divisor` for numbers that are not negative; see `quotient`."""
  if divisor & (divisor - 1) == 0:
    return number & (divisor - 1)
  return lax.rem(number, lax.full_like(number, divisor))
