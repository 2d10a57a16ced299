"""Bounds-safe gather and scatter.

An index that is out of range, on either side, reads `fill` and writes nothing.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax import lax

# Below the maximum of int32, so that adding an offset does not overflow.
NOWHERE = 2**30
"""The sentinel for "no index", which is out of range for all arrays here."""


def where_valid(valid: Array, index: Array) -> Array:
  """Returns the index where `valid`, and NOWHERE elsewhere."""
  return jnp.where(valid, index, jnp.int32(NOWHERE))


# By default JAX wraps a negative index, and a gather clamps an index past the
# end. Both would turn a sentinel into the index of some other element.
def take(array: Array, *index: Array, fill=0) -> Array:
  """Returns `array[index]`, and `fill` for an index outside of its axis."""
  return array.at[index].get(
    mode="fill", fill_value=fill, wrap_negative_indices=False
  )


def put(array: Array, *index: Array, values) -> Array:
  """Sets `array[index] = values`; an index outside of its axis is dropped.

  Indices within the axis must be distinct: XLA does not define which of two
  writes to one element wins.
  """
  return array.at[index].set(values, mode="drop", wrap_negative_indices=False)


def add(array: Array, *index: Array, values) -> Array:
  """Adds `values` to `array[index]`; repeated indices add up."""
  return array.at[index].add(values, mode="drop", wrap_negative_indices=False)


def put_max(array: Array, *index: Array, values) -> Array:
  """Sets `array[index] = max(array[index], values)`."""
  return array.at[index].max(values, mode="drop", wrap_negative_indices=False)


def put_min(array: Array, *index: Array, values) -> Array:
  """Sets `array[index] = min(array[index], values)`."""
  return array.at[index].min(values, mode="drop", wrap_negative_indices=False)


class SlotRows(NamedTuple):
  """The slot of each row of a call.

  Attributes:
    slots: int32[R], slot numbers, which can be out of range.
    all_slots: True if the rows are all slots in order, R = B.
    skipped: bool[R], rows that are masked out.
    bad: bool[R], rows whose slot is out of range, or repeats the slot of an
      earlier row that is not masked out.
  """

  slots: Array
  all_slots: bool
  skipped: Array
  bad: Array

  def read(self, array: Array) -> Array:
    """Reads the entry of each row's slot from [B, ...]; 0 if out of range."""
    # If the rows are all slots, `read` needs no gather and `write` no scatter.
    return array if self.all_slots else take(array, self.slots)

  def write(self, array: Array, valid: Array, values: Array) -> Array:
    """Replaces the entries, in [B, ...], of the slots of valid rows, bool[R].

    `values` are [R, ...], or one value for all rows.
    """
    values = jnp.broadcast_to(values, (*valid.shape, *array.shape[1:]))
    if self.all_slots:
      valid = valid.reshape(-1, *(1,) * (array.ndim - 1))
      return jnp.where(valid, values, array)
    return put(array, self.where(valid), values=values)

  def where(self, valid: Array) -> Array:
    """Returns int32[R]: the slots of valid rows, NOWHERE for the others."""
    return where_valid(valid, self.slots)


def between(low: Array, high: Array, num_positions: int) -> Array:
  """Returns bool[..., num_positions]: True from `low` to `high - 1`."""
  position = jnp.arange(num_positions, dtype=jnp.int32)
  position = position.reshape(*(1,) * low.ndim, num_positions)
  return (position >= low[..., None]) & (position < high[..., None])


def num_earlier(values: Array) -> Array:
  """Counts, for each element of int32[X], the earlier elements equal to it."""
  if values.shape[0] == 0:
    return values
  # The count is the distance of an element from the start of its run.
  order, lanes, run = _runs(values)
  return jnp.zeros_like(values).at[order].set(lanes - run)


def first_equal(values: Array) -> Array:
  """Finds the index of the first element equal to each element of int32[X]."""
  order, _, run = _runs(values)
  return jnp.zeros_like(values).at[order].set(order[run])


def _runs(values: Array) -> tuple[Array, Array, Array]:
  """Sorts elements, so that equal ones form a run in their original order.

  Returns:
    Three int32[X]: the original index of each sorted element, its position in
    sorted order, and the position at which its run starts.
  """
  order = jnp.argsort(values, stable=True).astype(jnp.int32)
  ordered = values[order]
  lanes = jnp.arange(values.shape[0], dtype=jnp.int32)
  is_new = jnp.concatenate([jnp.ones((1,), bool), ordered[1:] != ordered[:-1]])
  return order, lanes, lax.cummax(jnp.where(is_new, lanes, 0))


def any_earlier(values: Array, counts: Array) -> Array:
  """Returns bool[X]: elements of int32[X] that are equal to an earlier one.

  Only elements in `counts`, bool[X], are considered as earlier elements.
  """
  # Callers pass few elements, so comparing all pairs costs less than a sort.
  equal = values[:, None] == values[None, :]
  earlier = jnp.tril(jnp.ones(equal.shape, bool), k=-1)
  return jnp.any(equal & earlier & counts[None, :], axis=1)
