"""Work on ranges of different lengths, a fixed number of items at a time.

A call gives ranges; its items are the elements of all ranges, one range after
the other. A window of a fixed width walks over the items, so the cost follows
the work that is there, not the largest work that the shapes allow. Without any
work the cost is one comparison.
"""

from collections.abc import Callable
from typing import NamedTuple
from typing import TypeVar

import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv._src.cache import masked
from jaxkv._src.cache import xla

WINDOW = 128
"""Items of one trip, W: enough that one trip is the common case."""

Carry = TypeVar("Carry")


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
  row = lax.platform_dependent(
    ends, item, cpu=_row_in_loop, default=_row_in_one_kernel
  )
  begin = masked.take(ends, row) - masked.take(counts, row)
  return Items(row, item - begin, (item >= 0) & (item < ends[-1]))


def _row_in_loop(ends: Array, item: Array) -> Array:
  """int32[W]. XLA:CPU would repeat an unrolled search for each use of `row`."""
  return jnp.searchsorted(ends, item, side="right").astype(jnp.int32)


def _row_in_one_kernel(ends: Array, item: Array) -> Array:
  """int32[W]. On an accelerator a loop would be one launch for each bit."""
  row = jnp.searchsorted(ends, item, side="right", method="scan_unrolled")
  return row.astype(jnp.int32)


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
    lambda loop: loop[0] < total, trip, (xla.zeros_like(total), carry)
  )
  return carry
