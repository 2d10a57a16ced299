"""Work on rows of different lengths, a fixed number of items at a time.

A call names rows (a range of columns each); its items are the columns of all
rows, one row after the other. Windows of a fixed width walk over them, so that
the cost follows the work that is really there and not the largest work that a
shape would allow. Nothing to do costs one comparison.
"""

from collections.abc import Callable
from typing import NamedTuple
from typing import TypeVar

import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv._src.cache import masked

WINDOW = 128
"""Items handled at once: enough that one window is the common case."""

Carry = TypeVar("Carry")


class Items(NamedTuple):
  """A window of items.

  Attributes:
    row: int32[W], the row an item belongs to.
    offset: int32[W], its place in that row.
    valid: bool[W], False past the last item.
  """

  row: Array
  offset: Array
  valid: Array


def locate(counts: Array, item: Array) -> Items:
  """Finds rows and offsets of items given by their running number.

  Args:
    counts: int32[X], items in each row.
    item: int32[W], running numbers.
  """
  ends = jnp.cumsum(counts, dtype=jnp.int32)
  row = lax.platform_dependent(
    ends, item, cpu=_row_in_loop, default=_row_in_one_kernel
  )
  begin = masked.take(ends, row) - masked.take(counts, row)
  return Items(row, item - begin, (item >= 0) & (item < ends[-1]))


def _row_in_loop(ends: Array, item: Array) -> Array:
  """int32[W]: the row of each item; each user of a row reads it."""
  return jnp.searchsorted(ends, item, side="right").astype(jnp.int32)


def _row_in_one_kernel(ends: Array, item: Array) -> Array:
  """The same; XLA:CPU would search again for each user of a row."""
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
    counts: int32[X], items in each row, none negative.
    body: takes the carry and a window of items, returns the carry.
    carry: any pytree of arrays.
    window: items in a window; None for WINDOW.
  """
  width = window or WINDOW
  total = jnp.sum(counts, dtype=jnp.int32)
  lanes = jnp.arange(width, dtype=jnp.int32)

  def step(loop):
    begin, carry = loop
    return begin + width, body(carry, locate(counts, begin + lanes))

  _, carry = lax.while_loop(
    lambda loop: loop[0] < total, step, (total - total, carry)
  )
  return carry
