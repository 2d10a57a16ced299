"""Loops over the items of ranges, which update arrays in place.

On a GPU, the host reads the predicate of a loop before every iteration while
the device waits. So on a GPU the first items are processed without a loop.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import sharding

WINDOW = 128
"""W, the default number of items in one iteration of a loop.

Most calls have at most W items, so they need only one iteration.
"""

GPU_WINDOW = 1024
"""The number of items that a GPU processes first, without a loop.

A kernel over this many items takes about as long as one over `WINDOW` items.
"""

Carry = TypeVar("Carry")


def read_before(read: Array, index: Array) -> Array:
  """Makes the index of an update depend on an earlier read of the same array.

  XLA updates an array in place only if the update must follow all earlier reads
  of the array. If the indices of the update do not depend on a read, XLA copies
  the whole array, in every iteration of a loop. `read`, int32[], is at least 0
  and computed from the values that were read. Returns `index` unchanged.
  """
  # XLA cannot prove that the comparison always holds, so the data dependency
  # stays. `lax.optimization_barrier` does not prevent the copy.
  return jnp.where(read >= 0, index, jnp.int32(indexing.NOWHERE))


def at_most_once(
  condition: Array, body: Callable[[Carry], Carry], carry: Carry
) -> Carry:
  """Updates the carry in place: `body(carry)` if `condition`, else `carry`.

  `condition` is bool[], and the carry is any pytree of arrays.
  """

  # XLA copies the operands of a `lax.cond`, but updates the carry of a loop in
  # place. So this is a loop with at most one iteration.
  def trip(loop: tuple[Array, Carry]) -> tuple[Array, Carry]:
    active, carry = loop
    return sharding.zeros_like(active), body(carry)

  start = sharding.match_varying_axes((condition, carry))
  return lax.while_loop(lambda loop: loop[0], trip, start)[1]


def if_needed(
  condition: Array, body: Callable[[Carry], Carry], carry: Carry
) -> Carry:
  """Computes `body(carry)` if `condition`, else `carry`, updated in place.

  On a GPU, `body` always runs, because the host would wait for the condition.
  So `body` must return the carry unchanged if the condition does not hold.
  """
  return on_gpu(body, functools.partial(at_most_once, condition, body), carry)


class Items(NamedTuple):
  """A window of items; see `locate`.

  Attributes:
    row: int32[W], the index of the range that contains the item.
    offset: int32[W], the item's 0-based position in that range.
    valid: bool[W], False for entries of the window that are not items.
  """

  row: Array
  offset: Array
  valid: Array


def locate(counts: Array, item: Array) -> Items:
  """Finds the range of each item, and the item's offset in it.

  The ranges have `counts`, int32[X], items. `item`, int32[W], are 0-based
  positions among all items.
  """
  ends = cumulative_sum(counts)
  # An accelerator compares all pairs in one kernel. A binary search would need
  # one kernel for each of its steps.
  row = lax.platform_dependent(
    ends, item, cpu=_num_ended_by_search, default=_num_ended_by_comparison
  )
  first_item = indexing.take(ends, row - 1)  # Index -1 reads 0.
  return Items(row, item - first_item, (item >= 0) & (item < ends[-1]))


def _num_ended_by_search(ends: Array, item: Array) -> Array:
  """Returns int32[W]: for each item, the number of `ends` <= item."""
  num_ends = ends.shape[0]
  steps = num_ends.bit_length()

  # The search is not unrolled, because XLA:CPU would then repeat it for each
  # use of the result.
  def halve(step: Array, count: Array) -> Array:
    larger = count + (jnp.int32(1 << (steps - 1)) >> step)
    range_end = ends.at[larger - 1].get(mode="clip")
    return jnp.where((larger <= num_ends) & (range_end <= item), larger, count)

  return lax.fori_loop(0, steps, halve, sharding.zeros_like(item))


def _num_ended_by_comparison(ends: Array, item: Array) -> Array:
  """Computes the result of `_num_ended_by_search` by comparing all pairs."""
  return jnp.sum(ends[None, :] <= item[:, None], axis=1, dtype=jnp.int32)


def cumulative_sum(values: Array) -> Array:
  """Returns the inclusive cumulative sum of int32[X] or bool[X] as int32[X]."""

  def by_comparison(values: Array) -> Array:
    lanes = jnp.arange(values.shape[0], dtype=jnp.int32)
    is_summed = lanes[None, :] <= lanes[:, None]
    summed = jnp.where(is_summed, values[None, :].astype(jnp.int32), 0)
    return jnp.sum(summed, axis=1, dtype=jnp.int32)

  def by_cumsum(values: Array) -> Array:
    return jnp.cumsum(values, dtype=jnp.int32)

  if values.shape[0] > GPU_WINDOW:
    return by_cumsum(values)
  # XLA:GPU computes `jnp.cumsum` in three kernels, and these sums in one.
  return on_gpu(by_comparison, by_cumsum, values)


def cumulative_sums(values: Array) -> Array:
  """Returns `cumulative_sum` of each row of an array [Y, X]."""
  # Separate sums, because XLA:GPU fuses them into one kernel, and its registers
  # would not suffice for a sum over the rows of a 3-D array.
  return jnp.stack([cumulative_sum(row) for row in values])


def on_gpu(
  gpu: Callable[[Carry], Carry], default: Callable[[Carry], Carry], carry: Carry
) -> Carry:
  """Returns `gpu(carry)` in programs for GPUs, else `default(carry)`."""
  return lax.platform_dependent(carry, cuda=gpu, rocm=gpu, default=default)


def while_loop(
  condition: Callable[[Carry], Array],
  body: Callable[[Carry], Carry],
  carry: Carry,
) -> Carry:
  """Computes a `lax.while_loop`; on a GPU the first iteration needs no loop.

  On a GPU, `body` runs once before the condition is checked. So `body` must
  return the carry unchanged if the condition does not hold.
  """
  carry = on_gpu(body, lambda carry: carry, carry)
  with jax.named_scope("rare/rest"):
    return lax.while_loop(condition, body, carry)


def for_each(
  counts: Array,
  body: Callable[[Carry, Items], Carry],
  carry: Carry,
  *,
  window: int | None = None,
  longest: int = indexing.NOWHERE,
) -> Carry:
  """Folds `body` over all items of ranges, in order, a window at a time.

  Range x has `counts[x]` items, not negative. `body` maps a carry, any pytree
  of arrays, and a window of at most `window` items to a carry; None for WINDOW.
  `longest` is an upper bound on every count, if the caller has one. If X *
  longest is at most 4 * GPU_WINDOW, a GPU calls `body` once with all items,
  without a loop and without a search for their ranges.
  """
  num_items = jnp.sum(counts, dtype=jnp.int32)
  width = window or WINDOW
  lanes = jnp.arange(width, dtype=jnp.int32)

  # The number of iterations depends on the total number of items, not on the
  # number of ranges. Without items, this loop has no iterations.
  def trip(loop: tuple[Array, Carry]) -> tuple[Array, Carry]:
    first_item, carry = loop
    return first_item + width, body(carry, locate(counts, first_item + lanes))

  def in_windows(loop: tuple[Array, Carry]) -> tuple[Array, Carry]:
    return lax.while_loop(lambda loop: loop[0] < num_items, trip, loop)

  def first_window(loop: tuple[Array, Carry]) -> tuple[Array, Carry]:
    return loop[0] + GPU_WINDOW, body(loop[1], first_items(counts))

  def all_at_once(loop: tuple[Array, Carry]) -> tuple[Array, Carry]:
    return loop[0], body(loop[1], _all_items(counts, longest))

  start = sharding.zeros_like(num_items), carry
  # The search for ranges is the expensive part of a window. Without the search,
  # a window on a GPU can have four times as many items.
  if longest * counts.shape[0] <= 4 * GPU_WINDOW:
    return on_gpu(all_at_once, in_windows, start)[1]
  start = on_gpu(first_window, lambda loop: loop, start)
  with jax.named_scope("rare/rest"):
    return in_windows(start)[1]


def first_items(counts: Array) -> Items:
  """Returns the first GPU_WINDOW items of ranges."""
  zero = sharding.zeros_like(jnp.sum(counts, dtype=jnp.int32))
  return locate(counts, zero + jnp.arange(GPU_WINDOW, dtype=jnp.int32))


def _all_items(counts: Array, longest: int) -> Items:
  """Returns `longest` items for each range; items past its end are invalid.

  The order is that of `locate`, but invalid items lie between valid items.
  """
  row = jnp.arange(counts.shape[0], dtype=jnp.int32)[:, None]
  offset = jnp.arange(longest, dtype=jnp.int32)[None, :]
  items = jnp.broadcast_arrays(row, offset, offset < counts[:, None])
  return Items(*(part.reshape(-1) for part in items))
