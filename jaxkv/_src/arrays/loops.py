"""Loops whose cost follows the number of items, and updates in place.

`for_each` walks over ranges of different lengths in windows of a fixed width.
For no items it is one comparison.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple
from typing import TypeVar

import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import sharding

WINDOW = 128
"""Items of one trip of `for_each`, W: one trip is the common case."""

Carry = TypeVar("Carry")


def read_before(read: Array, index: Array) -> Array:
  """The index of an update, made to depend on what was read before it.

  XLA updates an array in place only if every earlier read of it is known to be
  done. A read whose result does not lead to the indices of the update is not
  known to be, and then XLA copies the whole array, at every step of a loop.
  `lax.optimization_barrier` does not help; a true dependency does.

  Args:
    read: int32[], computed from what was read, never negative.
    index: int32[...], where the update writes.

  Returns:
    The index. XLA cannot tell that the comparison always holds.
  """
  return jnp.where(read >= 0, index, jnp.int32(indexing.NOWHERE))


def at_most_once(
  condition: Array, body: Callable[[Carry], Carry], carry: Carry
) -> Carry:
  """`lax.cond(condition, body, identity, carry)` that updates in place.

  XLA copies the operands of a conditional and runs the body of a loop in
  place, so this is a loop of at most one trip.

  Args:
    condition: bool[].
    body: takes and returns the carry.
    carry: any pytree of arrays.
  """

  def trip(loop: tuple[Array, Carry]) -> tuple[Array, Carry]:
    going, carry = loop
    return sharding.zeros_like(going), body(carry)

  start = sharding.match_varying_axes((condition, carry))
  return lax.while_loop(lambda loop: loop[0], trip, start)[1]


class Items(NamedTuple):
  """A window of items.

  Attributes:
    row: int32[W], the range that the item belongs to.
    offset: int32[W], its 0-based position in that range.
    valid: bool[W], False past the last item.
  """

  row: Array
  offset: Array
  valid: Array


def locate(counts: Array, item: Array) -> Items:
  """The ranges and offsets of items.

  Args:
    counts: int32[X], the items in each range.
    item: int32[W], 0-based positions among all items.
  """
  ends = jnp.cumsum(counts, dtype=jnp.int32)
  # XLA:CPU would repeat an unrolled search for each use of `row`. On an
  # accelerator a loop would be one launch for each step.
  row = lax.platform_dependent(
    ends,
    item,
    cpu=functools.partial(_num_ended, unroll=False),
    default=functools.partial(_num_ended, unroll=True),
  )
  begin = indexing.take(ends, row - 1)  # 0 for the first.
  return Items(row, item - begin, (item >= 0) & (item < ends[-1]))


def _num_ended(ends: Array, item: Array, *, unroll: bool) -> Array:
  """int32[W]: how many of the ascending ends are at most each item."""
  size = ends.shape[0]
  steps = size.bit_length()

  def halve(step: Array, count: Array) -> Array:
    more = count + (jnp.int32(1 << (steps - 1)) >> step)
    end = ends.at[more - 1].get(mode="clip")
    return jnp.where((more <= size) & (end <= item), more, count)

  return lax.fori_loop(
    0, steps, halve, sharding.zeros_like(item), unroll=unroll
  )


def for_each(
  counts: Array,
  body: Callable[[Carry, Items], Carry],
  carry: Carry,
  *,
  window: int | None = None,
) -> Carry:
  """Folds `body` over windows of all items, in order.

  Args:
    counts: int32[X], the items in each range, none negative.
    body: takes the carry and a window of items, returns the carry.
    carry: any pytree of arrays.
    window: W, the items of one trip; None for WINDOW.
  """
  width = window or WINDOW
  total = jnp.sum(counts, dtype=jnp.int32)
  lanes = jnp.arange(width, dtype=jnp.int32)

  def trip(loop):
    begin, carry = loop
    return begin + width, body(carry, locate(counts, begin + lanes))

  _, carry = lax.while_loop(
    lambda loop: loop[0] < total, trip, (sharding.zeros_like(total), carry)
  )
  return carry
