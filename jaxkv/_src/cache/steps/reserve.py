"""Reserves pages for the rows of a call, in all verbs that allocate pages.

A verb plans a `Reservation`: the columns that its rows will have. `reserve`
then counts the pages that each row needs, and refuses the rows that do not fit.
For the other rows, it attaches shared pages, pops fresh pages and writes the
page table. A verb that must act between counting and popping calls `grant`,
then `take`.
"""

import dataclasses
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import loops
from jaxkv._src.arrays import sharding
from jaxkv._src.arrays.indexing import SlotRows
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.pool import page_pool
from jaxkv._src.cache.pool import page_table
from jaxkv._src.cache.pool import recurrent
from jaxkv._src.cache.pool.page_pool import PoolState
from jaxkv._src.cache.pool.page_table import ReadPages
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import Status
from jaxkv._src.cache.stats import counted


class Reservation(NamedTuple):
  """The planned columns of page-table rows, as bounds in ascending order.

  Attributes:
    first: int32[R, G], the first column to attach, after leading null pages.
    hit: int32[R, G], one past the last column that is attached or held already.
    fresh: int32[R, G], the first column of the fresh pages. Recurrent groups
      may have null pages between `hit` and this column.
    stop: int32[R, G], one past the last column.
    moves: bool[R, G], True if the page in column `hit` - 1 moves to column
      `stop` - 1, see `recurrent.moves`.
    begins: bool[R], True if the sequence is new in this call.
  """

  first: Array
  hit: Array
  fresh: Array
  stop: Array
  moves: Array
  begins: Array

  @property
  def num_fresh(self) -> Array:
    """int32[R, G]: the number of pages to pop."""
    return self.stop - self.fresh

  def of(self, valid: Array) -> "Reservation":
    """Keeps the columns of valid rows; other rows get empty ranges."""
    first, hit, fresh, stop = (
      jnp.where(valid[:, None], columns, 0) for columns in self[:-2]
    )
    return Reservation(
      first,
      hit,
      fresh,
      stop,
      self.moves & valid[:, None],
      self.begins & valid,
    )


def reservation(
  state: CacheState,
  *,
  hit: Array,
  stop: Array,
  begins: Array,
  first: Array | None = None,
  length: Array | None = None,
) -> Reservation:
  """Plans rows that end before column `stop`, or `hit` if `hit` is larger.

  `length`, int32[R], is the length of sequences that hold `hit` columns; None
  if these columns are full.
  """
  first = sharding.zeros_like(hit) if first is None else first
  chex.assert_equal_shape([first, hit, stop])
  chex.assert_shape(begins, hit.shape[:1])
  # If the hits fill all columns, no fresh page is needed.
  stop = jnp.maximum(stop, hit)
  if length is None:
    length = jnp.full_like(begins, indexing.NOWHERE, dtype=jnp.int32)
  fresh = recurrent.first_fresh(state.config, hit, stop, length)
  moves = recurrent.moves(state.config, hit, stop, length)
  return Reservation(first, hit, fresh, stop, moves, begins)


def reserve(
  state: CacheState,
  rows: SlotRows,
  plan: Reservation,
  code: Array,
  *,
  hits: Array | None = None,
  keep_free: Array | None = None,
  pops: bool = True,
  suffices: bool = False,
) -> tuple[CacheState, Array]:
  """Serves rows in order, each completely or not at all.

  A row that does not fit changes nothing, and a later row that needs fewer
  pages can still be served.

  Args:
    state: the cache.
    rows: the slots.
    plan: the columns of the rows.
    code: int32[R], the statuses so far; only rows with OK are served.
    hits: int32[R, G, P], the cached page of each column; new sequences attach
      the columns from `first` to `hit - 1`. None for no hits.
    keep_free: int32[R, P], pages of each pool that must stay free after a row
      is served; None for 0.
    pops: False to attach the hits only; a later `reserve` pops the fresh pages.
    suffices: True if the free pages are known to be enough for all rows.

  Returns:
    The cache, and `code` with OUT_OF_PAGES for the refused rows.
  """
  if not suffices:
    code = grant(state, plan, code, hits=hits, keep_free=keep_free)
  is_served = code == Status.OK
  # All hits are attached before any page is popped. Otherwise the fresh pages
  # of one row could evict the hit of another row.
  if hits is not None and hits.shape[-1] > 0:
    pages = hits
    if state.pool.offload is not None:
      inside = _attached(plan, hits)
      state, pages = hold_hits(state, hits, inside & is_served[:, None, None])
    state = attach(
      state,
      rows,
      plan,
      is_served,
      lambda _, row, group, column: indexing.take(pages, row, group, column),
      holds=state.pool.offload is None,
    )
  if pops:
    return take(state, rows, plan, is_served), code
  num_pages = rows.write(state.num_pages, is_served, plan.hit)
  return dataclasses.replace(state, num_pages=num_pages), code


def attach(
  state: CacheState,
  rows: SlotRows,
  plan: Reservation,
  is_served: Array,
  read: ReadPages,
  *,
  holds: bool = True,
) -> CacheState:
  """Attaches shared pages from column `first` to `hit - 1` of new sequences.

  New sequences are the rows with `begins`. Other rows hold these pages already.
  `holds` is False if the caller has already added the references to the pages.
  """
  is_served &= plan.begins
  plan = plan.of(is_served)
  slots = rows.where(is_served)
  pool, table = page_table.attach(
    state.pool, state.page_table, slots, plan.first, plan.hit, read, holds=holds
  )
  skipped = state.num_skipped_pages
  if state.config.skips_pages:
    table = page_table.fill_before(table, slots, plan.first, 0)
    skipped = rows.write(skipped, is_served, plan.first)
  return dataclasses.replace(
    state, pool=pool, page_table=table, num_skipped_pages=skipped
  )


def take(
  state: CacheState, rows: SlotRows, plan: Reservation, is_served: Array
) -> CacheState:
  """Pops the fresh pages of served rows and writes their columns."""
  slots = rows.where(is_served)
  table = state.page_table
  num_pages = rows.write(state.num_pages, is_served, plan.stop)
  plan = plan.of(is_served)
  if recurrent.has_states(state.config):
    # Columns between two states hold the null page.
    skipped = page_table.ranges(slots, plan.hit, plan.fresh)
    table = _move_states(state, slots, plan, page_table.fill(table, skipped, 0))
  fresh_ranges = [
    page_table.ranges(slots, plan.fresh, plan.stop, groups)
    for groups in state.config.groups_of_pools
  ]
  pool, table, evicted = page_table.grow(state.pool, table, fresh_ranges)
  return dataclasses.replace(
    state,
    page_table=table,
    num_pages=num_pages,
    pool=pool,
    counts=counted(
      state.counts, popped_pages=plan.num_fresh, evicted_pages=evicted
    ),
  )


def _move_states(
  state: CacheState, slots: Array, plan: Reservation, table: Array
) -> Array:
  """Moves running states to their last columns; returns the page table."""
  if state.config.state_retention is None:
    return table
  old_column = indexing.where_valid(plan.moves, plan.hit - 1)
  new_column = indexing.where_valid(plan.moves, plan.stop - 1)
  slot = slots[:, None]
  group = jnp.arange(plan.hit.shape[1], dtype=jnp.int32)[None]
  pages = indexing.take(table, slot, group, old_column)
  # The pages must be read before the table is written.
  old_column = loops.read_before(jnp.max(pages, initial=0), old_column)
  table = indexing.put(table, slot, group, old_column, values=0)
  return indexing.put(table, slot, group, new_column, values=pages)


def grant(
  state: CacheState,
  plan: Reservation,
  code: Array,
  *,
  hits: Array | None = None,
  keep_free: Array | None = None,
) -> Array:
  """Returns `code` with OUT_OF_PAGES for the rows that do not fit in all pools.

  A row costs one free page for each page that it pops, each hit that it removes
  from the free queue, and each hit in offload memory. A hit costs nothing if an
  earlier row of the call also attaches it.
  """
  chex.assert_equal_shape([code, plan.begins])
  asked = code == Status.OK
  need = sum_by_pool(state.config, plan.num_fresh)
  keep_free = sharding.zeros_like(need) if keep_free is None else keep_free
  if hits is None or hits.shape[-1] == 0:
    granted = in_order(need, asked, state.pool.queue.num_free, keep_free)
  else:
    granted = _grant_with_hits(state, plan, hits, need, asked, keep_free)
  return jnp.where(asked & ~granted, jnp.int32(Status.OUT_OF_PAGES), code)


def in_order(
  need: Array, asked: Array, available: Array, keep_free: Array
) -> Array:
  """Serves the rows of `asked`, bool[R], in order; skips those that do not fit.

  A row fits if `need` + `keep_free`, int32[R, P], pages of each pool are free
  at its turn. `available`, int32[P], are free at the first one. No number is
  negative. Returns bool[R], the rows served.
  """
  # Rows that do not fit even alone are refused before the loop. If all other
  # rows fit, the loop does not run. Each iteration finds the first row that
  # does not fit, and counts the pages that the rows before it leave free. It
  # refuses this row, and each later row that does not fit in these free pages.
  # The limits are computed where they are used, because as a value from outside
  # of the loop they would be an array of their own, written in each call.
  hopeless = asked & jnp.any(need > available[None] - keep_free, axis=1)

  def overdrawn(granted: Array) -> Array:
    num_pages = jnp.where(granted[:, None], need, 0)
    num_taken = loops.cumulative_sums(num_pages.T).T
    return granted & jnp.any(num_taken > available[None] - keep_free, axis=1)

  def refuse(granted: Array) -> Array:
    rows = jnp.arange(need.shape[0], dtype=jnp.int32)
    exceeds = overdrawn(granted)
    is_before = rows < jnp.min(jnp.where(exceeds, rows, need.shape[0]))
    num_taken = jnp.where((granted & is_before)[:, None], need, 0)
    num_left = available - jnp.sum(num_taken, axis=0, dtype=jnp.int32)
    fits = jnp.all(need <= num_left[None] - keep_free, axis=1)
    return granted & (is_before | fits)

  with jax.named_scope("rare/refuse"):
    return lax.while_loop(
      lambda granted: jnp.any(overdrawn(granted)), refuse, asked & ~hopeless
    )


def sum_by_pool(config: CacheConfig, by_group: Array) -> Array:
  """Sums int32[R, G] over the groups of each pool, to int32[R, P]."""
  if config.num_pools == 1:
    return jnp.sum(by_group, axis=1, dtype=jnp.int32)[:, None]
  sums = [
    sum(by_group[:, group] for group in groups)
    for groups in config.groups_of_pools
  ]
  return jnp.stack(sums, axis=1)


def pages_in_column(
  state: CacheState, slots: Array, column: Array, valid: Array
) -> Array:
  """Reads the page in `column`, int32[R, G], of each slot's page-table rows.

  Returns int32[R, G], with NO_PAGE where `valid`, bool[R, G], is False.
  """
  group = jnp.arange(state.config.num_groups, dtype=jnp.int32)[None, :]
  column = indexing.where_valid(valid, column)
  return indexing.take(
    state.page_table, slots[:, None], group, column, fill=state.config.no_page
  )


def hold_hits(
  state: CacheState, hits: Array, mask: Array
) -> tuple[CacheState, Array]:
  """Adds a reference for each hit in `mask`; restores those in offload memory.

  Requires a free page for each hit in offload memory. `hits` and `mask` are
  [R, G, P].

  Returns:
    The cache, and `hits` with a device page in place of each restored page.
  """
  if hits.size == 0:
    return state, hits
  first_number = state.config.total_pages
  is_held = mask.reshape(-1)

  def hold(
    loop: tuple[PoolState, Array, Array],
  ) -> tuple[PoolState, Array, Array]:
    pool, pages, _ = loop
    is_offloaded = is_held & (pages > first_number)
    # Hits on the device are held first, so that restoring does not evict them.
    pool = page_pool.hold(pool, pages, is_held & ~is_offloaded)

    def restore(
      loop: tuple[PoolState, Array, Array],
    ) -> tuple[PoolState, Array, Array]:
      pool, pages, _ = loop
      pool, restored, evicted = page_pool.restore(
        pool, pages - first_number, is_offloaded
      )
      return pool, jnp.where(is_offloaded, restored, pages), evicted

    loop = pool, pages, sharding.zeros_like(pages[0])
    with jax.named_scope("rare/restore"):
      return loops.at_most_once(jnp.any(is_offloaded), restore, loop)

  pages = hits.reshape(-1)
  loop = state.pool, pages, sharding.zeros_like(pages[0])
  pool, pages, evicted = loops.at_most_once(jnp.any(mask), hold, loop)
  state = dataclasses.replace(
    state, pool=pool, counts=counted(state.counts, evicted_pages=evicted)
  )
  return state, pages.reshape(hits.shape)


def _attached(plan: Reservation, hits: Array) -> Array:
  """Returns bool[R, G, P]: True for the hits that new sequences attach."""
  inside = indexing.between(plan.first, plan.hit, hits.shape[2])
  return inside & plan.begins[:, None, None]


def _grant_with_hits(
  state: CacheState,
  plan: Reservation,
  hits: Array,
  need: Array,
  asked: Array,
  keep_free: Array,
) -> Array:
  """Serves rows like `in_order`, but counts a hit of several rows once."""
  config = state.config
  available = state.pool.queue.num_free
  # Attached hits in the free queue or in offload memory cost a free page.
  free = page_pool.is_free(state.pool, hits)
  if state.pool.offload is not None:
    free |= hits > config.total_pages
  free &= _attached(plan, hits) & asked[:, None, None]

  def cost_of(free: Array) -> Array:
    """Returns int32[R, P]: the free hits of each pool."""
    return sum_by_pool(config, jnp.sum(free, axis=2, dtype=jnp.int32))

  max_need = need + cost_of(free)

  def one_by_one() -> Array:
    def serve(carry, row):
      granted, budget = carry
      # A page has the same column in all sequences that hit it.
      equal = free & (hits == hits[row][None])
      touched = jnp.any(equal & granted[:, None, None], axis=0)
      cost = need[row] + cost_of((free[row] & ~touched)[None])[0]
      fits = asked[row] & jnp.all(cost <= budget - keep_free[row])
      granted = granted.at[row].set(fits)
      return (granted, budget - jnp.where(fits, cost, 0)), None

    row_numbers = jnp.arange(need.shape[0], dtype=jnp.int32)
    no_rows = sharding.zeros_like(asked)
    return lax.scan(serve, (no_rows, available), row_numbers)[0][0]

  # The largest number of any row, so that the test below holds for each row.
  max_keep_free = jnp.max(jnp.where(asked[:, None], keep_free, 0), axis=0)
  # If all rows fit even if no hit is shared, no sequential scan is needed.
  max_needed = jnp.where(asked[:, None], max_need, 0)
  max_needed = jnp.sum(max_needed, axis=0, dtype=jnp.int32)
  all_fit = jnp.all(max_needed <= available - max_keep_free)
  return lax.cond(all_fit, lambda: asked, one_by_one)
