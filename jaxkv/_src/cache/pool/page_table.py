"""Page-table rows that grow and shrink.

Both directions take the columns of many rows at once and walk over them in
windows (`ragged.py`), in row order.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv._src.cache import masked
from jaxkv._src.cache import work_items as ragged
from jaxkv._src.cache.pool import page_pool
from jaxkv._src.cache.pool.page_pool import PagePool
from jaxkv._src.cache.work_items import Items


class Rows(NamedTuple):
  """Ranges of columns in rows of a page table.

  Attributes:
    group: int32[X].
    slot: int32[X], out of range for a row that is not there.
    start: int32[X], the first column.
    stop: int32[X], one past the last column; `start` for an empty row.
  """

  group: Array
  slot: Array
  start: Array
  stop: Array


def rows_of(slots: Array, start: Array, stop: Array) -> Rows:
  """Rows of sequences, group by group within each sequence.

  Args:
    slots: int32[R].
    start: int32[R, G].
    stop: int32[R, G], raised to `start` where it is less.
  """
  num_rows, num_groups = start.shape
  group = jnp.tile(jnp.arange(num_groups, dtype=jnp.int32), num_rows)
  return Rows(
    group=group,
    slot=jnp.repeat(slots, num_groups),
    start=start.reshape(-1),
    stop=jnp.maximum(start, stop).reshape(-1),
  )


def attach(
  pool: PagePool,
  table: Array,
  slots: Array,
  start: Array,
  stop: Array,
  pages: Array,
) -> tuple[PagePool, Array]:
  """Writes pages into rows of sequences, one more reference each.

  Args:
    pool: the pool.
    table: int32[G, B, M].
    slots: int32[R].
    start: int32[R, G], the first column to fill; none of them holds a page.
    stop: int32[R, G], one past the last.
    pages: int32[G, R, P], what to put into the same columns.

  Returns:
    The pool and the table.
  """
  rows, num_groups = rows_of(slots, start, stop), start.shape[1]

  def step(carry, items: Items):
    pool, table = carry
    where = place_of(rows, items)
    held = masked.take(pages, where[0], items.row // num_groups, where[2])
    table = masked.put(table, *where, values=held)
    return page_pool.hold(pool, held, items.valid), table

  return ragged.for_each(rows.stop - rows.start, step, (pool, table))


def grow(
  pool: PagePool, table: Array, rows: Rows
) -> tuple[PagePool, Array, Array]:
  """Pops a fresh page for every column of every row.

  Args:
    pool: the pool; it has as many free pages as there are columns.
    table: int32[G, B, M].
    rows: the columns to fill, which hold no page.

  Returns:
    The pool, the table, and int32[]: how many of the pages were cached.
  """
  counts = rows.stop - rows.start
  total = jnp.sum(counts, dtype=jnp.int32)

  def step(loop):
    done, evicted, pool, table = loop
    pool, popped = page_pool.pop(pool, total - done, window=ragged.WINDOW)
    items = ragged.locate(counts, done + popped.rank)
    table = masked.put(
      table,
      *place_of(rows, items._replace(valid=popped.valid)),
      values=popped.pages,
    )
    done = done + jnp.sum(popped.valid, dtype=jnp.int32)
    return done, evicted + popped.num_evicted, pool, table

  zero = total - total
  _, evicted, pool, table = lax.while_loop(
    lambda loop: loop[0] < total, step, (zero, zero, pool, table)
  )
  return pool, table, evicted


def shrink(
  pool: PagePool,
  table: Array,
  rows: Rows,
  *,
  unhashed_first: bool,
  cleared: int,
) -> tuple[PagePool, Array]:
  """Drops the pages of every column of every row and clears the columns.

  A row gives back its last column first, so that a sequence's tail is evicted
  before its prefix. With `unhashed_first`, the pages that go to the front of
  the queue are found on this first way and pushed on a second one, in the
  opposite order, which visits a row only from its first such page on.

  Args:
    pool: the pool.
    table: int32[G, B, M]; null pages and NO_PAGE in it are passed over.
    rows: the columns to clear, no column named twice.
    unhashed_first: `CacheConfig.unhashed_first`.
    cleared: what the columns hold afterwards.

  Returns:
    The pool and the table.
  """
  counts = rows.stop - rows.start

  def give_back(loop, items: Items):
    pool, first_left = loop
    where = place_of(rows, items, descending=True)
    pages = masked.take(table, *where)
    pool, left = page_pool.drop(
      pool,
      pages,
      items.row,
      _is_page(pool, pages),
      unhashed_first=unhashed_first,
    )
    first_left = masked.put_min(
      first_left, masked.where_valid(left, items.row), values=where[2]
    )
    return pool, first_left

  def push_front(pool: PagePool, items: Items) -> PagePool:
    pages = masked.take(table, *place_of(rest, items))
    return page_pool.to_front(pool, pages, items.row, _is_page(pool, pages))

  pool = page_pool.reserve(pool, jnp.sum(counts, dtype=jnp.int32))
  pool, first_left = ragged.for_each(counts, give_back, (pool, rows.stop))
  rest = rows._replace(start=first_left)
  if unhashed_first:
    pool = ragged.for_each(rest.stop - rest.start, push_front, pool)
  # The table is read by whole loops and written by one that waits for them.
  counts = jnp.where(pool.queue.num_free >= 0, counts, 0)
  rows = rows._replace(stop=rows.start + counts)
  return pool, fill(table, rows, cleared)


def fill(table: Array, rows: Rows, page: int) -> Array:
  """The table with one page number in every column of every row."""

  def write(table: Array, items: Items) -> Array:
    return masked.put(table, *place_of(rows, items), values=page)

  return ragged.for_each(rows.stop - rows.start, write, table)


def fill_before(table: Array, slots: Array, first: Array, page: int) -> Array:
  """The table with one page number before columns int32[R, G] of slots."""
  return fill(table, rows_of(slots, jnp.zeros_like(first), first), page)


def place_of(
  rows: Rows, items: Items, *, descending: bool = False
) -> tuple[Array, Array, Array]:
  """Group, slot and column of items, NOWHERE for those not valid."""
  if descending:
    column = masked.take(rows.stop, items.row) - 1 - items.offset
  else:
    column = masked.take(rows.start, items.row) + items.offset
  return (
    masked.take(rows.group, items.row),
    masked.take(rows.slot, items.row, fill=masked.NOWHERE),
    masked.where_valid(items.valid, column),
  )


def _is_page(pool: PagePool, pages: Array) -> Array:
  return (pages > 0) & (pages < pool.ref_count.shape[0])
