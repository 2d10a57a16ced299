"""Attaches, fills, grows and shrinks ranges of page-table columns.

The functions take ranges in many rows at once. They process the ranges in
order, in windows of W columns (see `loops.for_each`).
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv._src.arrays import elementwise
from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import loops
from jaxkv._src.arrays import sharding
from jaxkv._src.arrays.loops import Items
from jaxkv._src.cache.pool import page_pool
from jaxkv._src.cache.pool.page_pool import PoolState

ReadPages = Callable[[Array, Array, Array, Array], Array]
"""`(table, row, group, column) -> pages`, all int32[W] except the table."""


class Ranges(NamedTuple):
  """Ranges of columns in rows of the page table.

  Attributes:
    slot: int32[X], the slot of each range; arbitrary if the range is empty.
    group: int32[X], the group of each range.
    start: int32[X], the first column.
    stop: int32[X], one past the last column; `start` for an empty range.
  """

  slot: Array
  group: Array
  start: Array
  stop: Array

  @property
  def counts(self) -> Array:
    """int32[X]: the number of columns of each range."""
    return self.stop - self.start


def ranges(
  slots: Array,
  start: Array,
  stop: Array,
  groups: tuple[int, ...] | None = None,
) -> Ranges:
  """Builds one range for each row and group, ordered by row, then by group.

  Args:
    slots: int32[R].
    start: int32[R, G].
    stop: int32[R, G]; if `stop` is less than `start`, the range is empty.
    groups: the groups to include; None for all.
  """
  chex.assert_equal_shape([start, stop])
  chex.assert_shape(slots, start.shape[:1])
  if groups is None:
    groups = tuple(range(start.shape[1]))
  elif len(groups) < start.shape[1]:
    index = jnp.asarray(groups)
    start, stop = start[:, index], stop[:, index]
  num_rows, num_groups = start.shape
  group = jnp.tile(jnp.asarray(groups, jnp.int32), num_rows)
  return Ranges(
    slot=jnp.repeat(slots, num_groups),
    group=group,
    start=start.reshape(-1),
    stop=jnp.maximum(start, stop).reshape(-1),
  )


def attach(
  pool: PoolState,
  table: Array,
  slots: Array,
  start: Array,
  stop: Array,
  read: ReadPages,
  *,
  holds: bool = True,
) -> tuple[PoolState, Array]:
  """Writes existing pages into rows of the table and adds a reference for each.

  Args:
    pool: the pool.
    table: int32[B, G, M].
    slots: int32[R].
    start: int32[R, G], the first column to fill; the columns hold no page yet.
    stop: int32[R, G], one past the last column.
    read: returns the pages to write, given the current table; see `ReadPages`.
      Null pages get no reference.
    holds: False if the caller already added these references.

  Returns:
    The pool and the table.
  """
  filled_ranges = ranges(slots, start, stop)

  def step(carry, items: Items):
    pool, table = carry
    cell = place_of(filled_ranges, items)
    row = elementwise.quotient(items.row, start.shape[1])
    pages = read(table, row, *cell[1:])
    table = indexing.put(table, *cell, values=pages)
    if not holds:
      return pool, table
    return page_pool.hold(pool, pages, items.valid & (pages > 0)), table

  return loops.for_each(filled_ranges.counts, step, (pool, table))


def grow(
  pool: PoolState,
  table: Array,
  ranges_of_pools: list[Ranges],
) -> tuple[PoolState, Array, Array]:
  """Pops a fresh page for every column of every range.

  Args:
    pool: the pool, with a free page for every column.
    table: int32[B, G, M].
    ranges_of_pools: for each pool, the columns to fill with its pages. The
      columns hold no page yet.

  Returns:
    The pool, the table, and int32[]: the number of evicted pages.
  """
  # Ordered by pool, so that one call of `locate` finds the columns of all
  # pools.
  filled_ranges = Ranges(
    *(jnp.concatenate(parts) for parts in zip(*ranges_of_pools, strict=True))
  )
  num_columns = jnp.stack(
    [jnp.sum(part.counts, dtype=jnp.int32) for part in ranges_of_pools]
  )
  end_items = jnp.cumsum(num_columns, dtype=jnp.int32)

  # This loop cannot be a `for_each`, because an iteration can pop fewer pages
  # than its window has entries, for example if some entries are stale.
  def trip(loop, *, is_first: bool = False):
    num_left, evicted, pool, table = loop
    window = loops.GPU_WINDOW if is_first else loops.WINDOW
    pool, popped = page_pool.pop(
      pool, num_left, window=window, without_loops=is_first
    )
    # The columns are filled in order, so the last `num_left` ones of a pool are
    # still empty.
    item = popped.rank + pool.queue.numbers.value_of(
      end_items - num_left, popped.pages
    )
    items = loops.locate(filled_ranges.counts, item)
    cell = place_of(filled_ranges, items._replace(valid=popped.valid))
    table = indexing.put(table, *cell, values=popped.pages)
    num_left = num_left - popped.counts
    return num_left, evicted + popped.num_evicted, pool, table

  first_trip = functools.partial(trip, is_first=True)
  start = num_columns, sharding.zeros_like(num_columns[0]), pool, table
  start = loops.on_gpu(first_trip, lambda loop: loop, start)
  with jax.named_scope("rare/rest"):
    _, evicted, pool, table = lax.while_loop(
      lambda loop: jnp.any(loop[0] > 0), trip, start
    )
  return pool, table, evicted


def shrink(
  pool: PoolState,
  table: Array,
  cleared: Ranges,
  *,
  replacement: int,
  forgets: bool = False,
) -> tuple[PoolState, Array]:
  """Drops the pages in all columns of ranges, and overwrites the columns.

  Releases the last column of a range first, so that the end of a sequence is
  evicted before the start.

  Args:
    pool: the pool.
    table: int32[B, G, M]; null pages and NO_PAGE in it are ignored.
    cleared: the columns to clear, all distinct.
    replacement: the page number to write to the columns.
    forgets: see `page_pool.drop`.

  Returns:
    The pool and the table.
  """
  num_columns = jnp.sum(cleared.counts, dtype=jnp.int32)

  def looped(loop: tuple[PoolState, Array]) -> tuple[PoolState, Array]:
    pool, table = loop
    pool = page_pool.reserve(pool, num_columns)
    return _release(pool, table, cleared, replacement, forgets=forgets)

  # One predicate replaces all loops of `_release`, so a GPU waits only once.
  def straight(loop: tuple[PoolState, Array]) -> tuple[PoolState, Array]:
    pool, table = loop
    fits = page_pool.has_room(pool, num_columns)
    fits &= num_columns <= loops.GPU_WINDOW
    stop_column = jnp.where(fits, cleared.stop, cleared.start)
    fitting_ranges = cleared._replace(stop=stop_column)
    loop = _release_without_loops(
      pool, table, fitting_ranges, replacement, forgets=forgets
    )
    with jax.named_scope("rare/rest"):
      return loops.at_most_once(~fits, looped, loop)

  return loops.on_gpu(straight, looped, (pool, table))


def _release(
  pool: PoolState,
  table: Array,
  cleared: Ranges,
  replacement: int,
  *,
  forgets: bool,
) -> tuple[PoolState, Array]:
  """Implements `shrink` for any number of columns, with room reserved."""

  def give_back(loop, items: Items):
    pool, first_unqueued = loop
    cell = place_of(cleared, items, descending=True)
    pages = indexing.take(table, *cell)
    pool, outside = page_pool.drop(
      pool, pages, items.row, _is_page(pool, pages), forgets=forgets
    )
    first_unqueued = indexing.put_min(
      first_unqueued, indexing.where_valid(outside, items.row), values=cell[2]
    )
    return pool, first_unqueued

  def push_front(pool: PoolState, items: Items) -> PoolState:
    pages = indexing.take(table, *place_of(unqueued, items))
    return page_pool.to_front(pool, pages, items.row, _is_page(pool, pages))

  pool, first_unqueued = loops.for_each(
    cleared.counts, give_back, (pool, cleared.stop)
  )
  # The page pushed to the front last is popped first. To pop the last page of a
  # range first, this pass visits columns in ascending order. It starts at the
  # range's first page that is not cached, which is usually the last page.
  unqueued = cleared._replace(start=first_unqueued)
  if pool.unhashed_first:
    pool = loops.for_each(unqueued.counts, push_front, pool)
  # The loops above read the table, and `fill` writes to it. Without this
  # dependency of the write on the reads, XLA would copy the table.
  stop_column = loops.read_before(pool.queue.num_free[0], cleared.stop)
  return pool, fill(table, cleared._replace(stop=stop_column), replacement)


def _release_without_loops(
  pool: PoolState,
  table: Array,
  cleared: Ranges,
  replacement: int,
  *,
  forgets: bool,
) -> tuple[PoolState, Array]:
  """Implements `shrink` for at most GPU_WINDOW columns, with room reserved."""
  items = loops.first_items(cleared.counts)
  cell = place_of(cleared, items, descending=True)
  pages = indexing.take(table, *cell)
  pool = page_pool.drop_ranges(
    pool,
    pages,
    items,
    cleared.counts,
    _is_page(pool, pages),
    forgets=forgets,
  )
  # As in `_release`, the table must be read before it is written.
  column = loops.read_before(pool.queue.num_free[0], cell[2])
  table = indexing.put(table, *cell[:2], column, values=replacement)
  return pool, table


def fill(table: Array, filled_ranges: Ranges, page: int) -> Array:
  """Writes one page number into all columns of ranges; returns the table."""

  def write(table: Array, items: Items) -> Array:
    return indexing.put(table, *place_of(filled_ranges, items), values=page)

  return loops.for_each(filled_ranges.counts, write, table)


def fill_before(table: Array, slots: Array, column: Array, page: int) -> Array:
  """Writes one page number into the columns before `column`, int32[R, G]."""
  return fill(table, ranges(slots, sharding.zeros_like(column), column), page)


def place_of(
  column_ranges: Ranges, items: Items, *, descending: bool = False
) -> tuple[Array, Array, Array]:
  """Returns slot, group and column; the column of invalid items is NOWHERE."""
  # The three arrays are stacked, so that one gather reads all of them.
  edge = column_ranges.stop if descending else column_ranges.start
  bounds = jnp.stack([column_ranges.slot, column_ranges.group, edge], axis=-1)
  located = indexing.take(bounds, items.row, fill=indexing.NOWHERE)
  slot, group, column = (located[:, i] for i in range(3))
  column += -1 - items.offset if descending else items.offset
  return slot, group, indexing.where_valid(items.valid, column)


def _is_page(pool: PoolState, pages: Array) -> Array:
  return (pages > 0) & (pages < pool.ref_count.shape[0])
