"""Loops over items, which update arrays in place."""

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
"""W, the items of one iteration of `for_each`. Most calls have fewer items."""

Carry = TypeVar("Carry")


def read_before(read: Array, index: Array) -> Array:
  """Makes the index of an update depend on an earlier read of the same array.

  XLA updates an array in place only if the update must follow all earlier reads
  of the array. If the indices of the update do not depend on a read, XLA copies
  the whole array, in every iteration of a loop.

  Args:
    read: int32[], computed from the values that were read, never negative.
    index: int32[...], the index of the update.

  Returns:
    The unchanged index.
  """
  # XLA cannot prove that the comparison always holds, so the data dependency
  # stays. `lax.optimization_barrier` does not prevent the copy.
  return jnp.where(read >= 0, index, jnp.int32(indexing.NOWHERE))


def at_most_once(
  condition: Array, body: Callable[[Carry], Carry], carry: Carry
) -> Carry:
  """Returns `body(carry)` if `condition`, else `carry`, updated in place.

  Args:
    condition: bool[].
    body: a function from a carry to a carry.
    carry: any pytree of arrays.
  """

  # XLA copies the operands of a `lax.cond`, but updates the carry of a loop in
  # place. So this is a loop with at most one iteration.
  def trip(loop: tuple[Array, Carry]) -> tuple[Array, Carry]:
    active, carry = loop
    return sharding.zeros_like(active), body(carry)

  start = sharding.match_varying_axes((condition, carry))
  return lax.while_loop(lambda loop: loop[0], trip, start)[1]


class Items(NamedTuple):
  """A window of consecutive items; see `locate`.

  Attributes:
    row: int32[W], the index of the range that contains the item.
    offset: int32[W], the item's 0-based position in that range.
    valid: bool[W], False past the last item.
  """

  row: Array
  offset: Array
  valid: Array


def locate(counts: Array, item: Array) -> Items:
  """Finds the range that contains each item, and the item's offset in it.

  Args:
    counts: int32[X], the number of items in each range.
    item: int32[W], 0-based positions among all items.
  """
  ends = jnp.cumsum(counts, dtype=jnp.int32)
  # On a CPU the search is a loop, because XLA would repeat an unrolled search
  # for each use of `row`. On an accelerator it is unrolled, because each
  # iteration of a loop would cost a kernel launch.
  row = lax.platform_dependent(
    ends,
    item,
    cpu=functools.partial(_num_ended, unroll=False),
    default=functools.partial(_num_ended, unroll=True),
  )
  begin = indexing.take(ends, row - 1)  # Row 0 reads 0.
  return Items(row, item - begin, (item >= 0) & (item < ends[-1]))


def _num_ended(ends: Array, item: Array, *, unroll: bool) -> Array:
  """Counts by binary search the `ends` that are at most each item: int32[W]."""
  size = ends.shape[0]
  steps = size.bit_length()

  def halve(step: Array, count: Array) -> Array:
    larger = count + (jnp.int32(1 << (steps - 1)) >> step)
    end = ends.at[larger - 1].get(mode="clip")
    return jnp.where((larger <= size) & (end <= item), larger, count)

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
  """Folds `body` over all items of ranges, in order, a window at a time.

  Args:
    counts: int32[X], the number of items in each range, not negative.
    body: a function from a carry and a window of items to a carry.
    carry: any pytree of arrays.
    window: W, the items of one iteration; None for WINDOW.
  """
  width = window or WINDOW
  total = jnp.sum(counts, dtype=jnp.int32)
  lanes = jnp.arange(width, dtype=jnp.int32)

  # The number of iterations depends on the total number of items, not on the
  # number of ranges. A call without items costs one comparison.
  def trip(loop):
    begin, carry = loop
    return begin + width, body(carry, locate(counts, begin + lanes))

  _, carry = lax.while_loop(
    lambda loop: loop[0] < total, trip, (sharding.zeros_like(total), carry)
  )
  return carry
