"""fork: sequences that go on from a common past."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv._src.cache import masked
from jaxkv._src.cache import work_items as ragged
from jaxkv._src.cache.checks import check_array
from jaxkv._src.cache.checks import mask_or_all
from jaxkv._src.cache.duplicates import named_before
from jaxkv._src.cache.groups import recurrent
from jaxkv._src.cache.groups.sizes import full_pages
from jaxkv._src.cache.groups.sizes import open_pages
from jaxkv._src.cache.groups.sizes import or_encoder
from jaxkv._src.cache.groups.sizes import pages_for
from jaxkv._src.cache.pool import page_pool
from jaxkv._src.cache.pool import page_table
from jaxkv._src.cache.pool import reserve as grants
from jaxkv._src.cache.pool.page_pool import PagePool
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import SlotHashes
from jaxkv._src.cache.state import counted
from jaxkv._src.cache.state import in_range
from jaxkv._src.cache.state import is_empty
from jaxkv._src.cache.status import Code
from jaxkv._src.cache.status import first_code
from jaxkv._src.cache.status import is_failure
from jaxkv._src.cache.status import sticky
from jaxkv._src.cache.verb import verb
from jaxkv._src.cache.work_items import Items


class Copies(NamedTuple):
  """Copies of page contents that the caller owes, before the next write.

  One copy's source may be another one's destination: read all sources before
  any destination is written, as `jaxkv.kv.copy` does.

  Attributes:
    src: int32[X], pages to read; NO_PAGE where nothing is owed.
    dst: int32[X], pages to write; NO_PAGE where nothing is owed.
  """

  src: Array
  dst: Array


class Forked(NamedTuple):
  """What `fork` did.

  Attributes:
    code: int32[R], a `Code` a row.
    copies: R * G copies of page contents that the caller owes.
  """

  code: Array
  copies: Copies

  @property
  def ok(self) -> Array:
    """bool[R]: whether the row's sequence was forked."""
    return self.code == Code.OK


@verb
def fork(
  state: CacheState, src: Array, dst: Array, mask: Array | None = None
) -> tuple[CacheState, Forked]:
  """Makes empty slots go on from other slots' sequences.

  `dst` shares the full pages of `src`. A page that is only partly full will be
  written by both, so `dst` gets a fresh one and a copy of its contents is
  owed. Pages that `src` was allocated ahead are not shared; those of an
  encoder are, all of them.

  Of a group that holds states, `dst` gets the state after the last token, which
  must stand in that token's page: shared where the page ends with it, else
  copied as a partial page is. Scratch pages are its own, with nothing in them.

  Does not copy contents; apply `copies` (`jaxkv.kv.copy`) before writing.

  All-or-nothing per row, in row order. The batch differs from one call after
  the other in two ways: sources are read as they were before the call, and a
  `dst` named twice is refused the second time even if the first row found no
  page.

  Args:
    state: the cache.
    src: int32[R], slots with at least one committed token; repeats allowed.
    dst: int32[R], empty slots.
    mask: bool[R], the rows that count; None for all.

  Returns:
    The cache, and per row OK, SKIPPED, BAD_SLOT, SLOT_EMPTY (`src`),
    SLOT_IN_USE (`dst`, also when named twice), RECYCLED (a state is not there)
    or OUT_OF_PAGES.

  Examples:
    >>> import jax.numpy as jnp, jaxkv
    >>> state = jaxkv.init(jaxkv.CacheConfig(
    ...   num_pages=8, page_size=2, num_slots=2, pages_per_slot=4))
    >>> three = jnp.asarray([3, 0], jnp.int32)
    >>> state, _ = jaxkv.allocate(state, three)
    >>> state, _ = jaxkv.commit(state, jnp.zeros((2, 3), jnp.int32), three)
    >>> zero, one = jnp.asarray([0], jnp.int32), jnp.asarray([1], jnp.int32)
    >>> state, out = jaxkv.fork(state, zero, one)
    >>> state.page_table[0].tolist(), out.copies.src.tolist()
    ([[1, 2, 8, 8], [1, 3, 8, 8]], [2])
  """
  config = state.config
  check_array("src", src, ("R",), jnp.int32)
  check_array("dst", dst, src.shape, jnp.int32)
  mask = mask_or_all(mask, src.shape[0], "row")
  length = masked.take(state.length, src)
  code = _static_code(state, src, dst, length, mask)
  held = masked.take(state.num_pages.T, src)
  full, total = (
    or_encoder(config, pages(config, length), held)
    for pages in (full_pages, pages_for)
  )
  need = jnp.sum(total - full, axis=1, dtype=jnp.int32)
  granted = grants.in_order(need, code == Code.OK, state.pool.queue.num_free)
  code = jnp.where(
    (code == Code.OK) & ~granted, jnp.int32(Code.OUT_OF_PAGES), code
  )
  full, total = (
    jnp.where(granted[:, None], columns, 0) for columns in (full, total)
  )
  first = state.first_page.at[:, src].get(mode="fill", fill_value=0).T
  first = jnp.minimum(first, full)
  state = _shared(state, src, dst, first, full)
  pool, table, evicted = page_table.grow(
    state.pool, state.page_table, page_table.rows_of(dst, full, total)
  )
  place = masked.where_valid(granted, dst)
  partial = open_pages(config, length) & granted[:, None]
  copies = _owed(config.no_page, table, src, dst, full, partial)
  state = dataclasses.replace(
    state,
    page_table=table,
    num_pages=state.num_pages.at[:, place].set(total.T, mode="drop"),
    first_page=state.first_page.at[:, place].set(first.T, mode="drop"),
    length=masked.put(state.length, place, values=length),
    hashes=_copied(state.hashes, src, place),
    pool=pool,
    stats=counted(
      state.stats,
      popped=total - full,
      evicted=evicted,
      failed=is_failure(code),
    ),
    error=sticky(state.error, code),
  )
  return state, Forked(code, copies)


def _static_code(
  state: CacheState, src: Array, dst: Array, length: Array, mask: Array
) -> Array:
  """Codes of the rows that can be refused without looking at the pool."""
  code = first_code(
    (~mask, Code.SKIPPED),
    (~in_range(state, src) | ~in_range(state, dst), Code.BAD_SLOT),
    (is_empty(state, src) | (length == 0), Code.SLOT_EMPTY),
    (~is_empty(state, dst), Code.SLOT_IN_USE),
  )
  taken = named_before(dst, code == Code.OK)
  kept = recurrent.can_go_on(
    state.config, state.page_table, src, length, length
  )
  return first_code(
    (code != Code.OK, code),
    (taken, Code.SLOT_IN_USE),
    (~kept, Code.RECYCLED),
  )


def _shared(
  state: CacheState, src: Array, dst: Array, first: Array, full: Array
) -> CacheState:
  """Attaches the pages `first .. full` of `src` to `dst`, group by group."""
  source = page_table.rows_of(src, first, full)
  target = page_table.rows_of(dst, first, full)
  counts = source.stop - source.start

  def read(table: Array, items: Items) -> Array:
    return masked.take(table, *page_table.place_of(source, items))

  def hold(pool: PagePool, items: Items) -> PagePool:
    pages = read(state.page_table, items)
    return page_pool.hold(pool, pages, items.valid & (pages > 0))

  def attach(table: Array, items: Items) -> Array:
    place = page_table.place_of(target, items)
    return masked.put(table, *place, values=read(table, items))

  pool = ragged.for_each(counts, hold, state.pool)
  # The table is read by one whole loop, and by the next one that writes it.
  counts = jnp.where(pool.queue.num_free >= 0, counts, 0)
  table = ragged.for_each(counts, attach, state.page_table)
  if state.config.recycles:
    table = page_table.fill_before(table, dst, first, 0)
  return dataclasses.replace(state, pool=pool, page_table=table)


def _owed(
  no_page: int,
  table: Array,
  src: Array,
  dst: Array,
  column: Array,
  partial: Array,
) -> Copies:
  """The partial pages in `column` of `src`, to be copied to those of `dst`."""
  groups = jnp.arange(table.shape[0], dtype=jnp.int32)[None, :]
  column = masked.where_valid(partial, column)
  return Copies(
    src=masked.take(table, groups, src[:, None], column, fill=no_page).reshape(
      -1
    ),
    dst=masked.take(table, groups, dst[:, None], column, fill=no_page).reshape(
      -1
    ),
  )


def _copied(
  hashes: SlotHashes | None, src: Array, place: Array
) -> SlotHashes | None:
  if hashes is None:
    return None
  return jax.tree.map(
    lambda rows: masked.put(rows, place, values=masked.take(rows, src)),
    hashes,
  )
