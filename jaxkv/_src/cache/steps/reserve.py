"""Who gets which pages: the one algorithm behind every verb that takes some.

A verb computes a `Reservation`: the columns that its rows end up with. Then
`reserve` prices the rows, serves them in order while pages last, attaches the
pages that they share, pops the others, and writes their page-table rows.

`grant` and `take` are its two halves, for a verb that does something between.
"""

import dataclasses
from typing import NamedTuple

import chex
import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import sharding
from jaxkv._src.arrays.indexing import SlotRows
from jaxkv._src.cache.pool import page_pool
from jaxkv._src.cache.pool import page_table
from jaxkv._src.cache.pool import recurrent
from jaxkv._src.cache.pool.page_table import ReadPages
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import Status
from jaxkv._src.cache.state import counted


class Reservation(NamedTuple):
  """Columns of page-table rows; each is at most the next one.

  Attributes:
    first: int32[R, G], one past the null pages at the start.
    hit: int32[R, G], one past the pages that are attached, or held already.
    external: int32[R, G], one past the fresh pages for tokens whose K/V comes
      from elsewhere; `hit` where there are none.
    fresh: int32[R, G], the first column of the other fresh pages. Null and
      scratch pages of recurrent groups may stand before it.
    stop: int32[R, G], one past all.
    begins: bool[R], whether the sequence starts with this call.
  """

  first: Array
  hit: Array
  external: Array
  fresh: Array
  stop: Array
  begins: Array

  @property
  def num_fresh(self) -> Array:
    """int32[R, G]: pages to be popped."""
    return self.external - self.hit + self.stop - self.fresh

  def of(self, valid: Array) -> "Reservation":
    """The columns of valid rows, and none for the others."""
    first, hit, external, fresh, stop = (
      jnp.where(valid[:, None], columns, 0) for columns in self[:-1]
    )
    begins = self.begins & valid
    return Reservation(first, hit, external, fresh, stop, begins)


def reservation(
  state: CacheState,
  *,
  hit: Array,
  stop: Array,
  begins: Array,
  first: Array | None = None,
  external: Array | None = None,
) -> Reservation:
  """The columns of rows that end at `stop`, or at `hit` where that is more."""
  first = sharding.zeros_like(hit) if first is None else first
  external = hit if external is None else external
  chex.assert_equal_shape([first, hit, external, stop])
  chex.assert_shape(begins, hit.shape[:1])
  stop = jnp.maximum(stop, external)
  fresh = recurrent.first_fresh(state.config, external, stop, begins)
  return Reservation(first, hit, external, fresh, stop, begins)


def reserve(
  state: CacheState,
  rows: SlotRows,
  plan: Reservation,
  code: Array,
  *,
  hits: Array | None = None,
  keep_free: Array | None = None,
  pops: bool = True,
) -> tuple[CacheState, Array]:
  """Serves rows in order, all-or-nothing for each.

  A row that does not fit changes nothing, and a later one that needs fewer
  pages may still be served. The hits of all rows that are served are attached
  before any page is popped, so no row evicts what another one hits.

  Args:
    state: the cache.
    rows: the slots.
    plan: the columns that they want.
    code: int32[R]; the rows that are OK ask.
    hits: int32[R, G, P], the pages that rows begin with, of which the columns
      `first .. hit` are attached; None for none.
    keep_free: int32[R], pages that must still be free when a row has its own.
    pops: whether the fresh pages are popped now. If not, rows hold their hits,
      and a later call of `reserve` finds fresh pages for them.

  Returns:
    The cache, and `code` with OUT_OF_PAGES for the rows refused.
  """
  code = grant(state, plan, code, hits=hits, keep_free=keep_free)
  served = code == Status.OK
  if hits is not None and hits.shape[-1] > 0:
    state = attach(
      state,
      rows,
      plan,
      served,
      lambda _, row, group, column: indexing.take(hits, row, group, column),
    )
  if pops:
    return take(state, rows, plan, served), code
  num_pages = rows.write(state.num_pages, served, plan.hit)
  return dataclasses.replace(state, num_pages=num_pages), code


def attach(
  state: CacheState,
  rows: SlotRows,
  plan: Reservation,
  served: Array,
  read: ReadPages,
) -> CacheState:
  """Attaches shared pages in the columns `first .. hit`.

  Only sequences that begin are attached to; others hold those columns already.
  """
  served &= plan.begins
  plan, slots = plan.of(served), rows.where(served)
  pool, table = page_table.attach(
    state.pool, state.page_table, slots, plan.first, plan.hit, read
  )
  skipped = state.num_skipped_pages
  if state.config.skips_pages:
    table = page_table.fill_before(table, slots, plan.first, 0)
    skipped = rows.write(skipped, served, plan.first)
  return dataclasses.replace(
    state, pool=pool, page_table=table, num_skipped_pages=skipped
  )


def take(
  state: CacheState, rows: SlotRows, plan: Reservation, served: Array
) -> CacheState:
  """Pops the fresh pages of rows that were served, and writes their columns."""
  config, slots = state.config, rows.where(served)
  num_pages = rows.write(state.num_pages, served, plan.stop)
  has_external = plan.external is not plan.hit
  plan = plan.of(served)
  table = recurrent.place_scratch(
    config, state.page_table, slots, plan.external, plan.stop, plan.begins
  )
  filled = page_table.ranges(slots, plan.fresh, plan.stop)
  if has_external:
    external = page_table.ranges(slots, plan.hit, plan.external)
    filled = page_table.concatenated(external, filled)
  pool, table, evicted = page_table.grow(state.pool, table, filled)
  return dataclasses.replace(
    state,
    page_table=table,
    num_pages=num_pages,
    pool=pool,
    stats=counted(
      state.stats, popped_pages=filled.counts, evicted_pages=evicted
    ),
  )


def grant(
  state: CacheState,
  plan: Reservation,
  code: Array,
  *,
  hits: Array | None = None,
  keep_free: Array | None = None,
) -> Array:
  """The statuses of the rows, with OUT_OF_PAGES for those refused.

  A row costs the pages that it pops and the hits that it takes out of the free
  queue. A hit that an earlier row already took out costs nothing.
  """
  chex.assert_equal_shape([code, plan.begins])
  asked, available = code == Status.OK, state.pool.queue.num_free
  need = jnp.sum(plan.num_fresh, axis=1, dtype=jnp.int32)
  keep_free = sharding.zeros_like(need) if keep_free is None else keep_free
  if hits is None or hits.shape[-1] == 0:
    granted = in_order(need, asked, available, keep_free)
  else:
    granted = _with_hits(state, plan, hits, need, asked, keep_free)
  refused = asked & ~granted
  return jnp.where(refused, jnp.int32(Status.OUT_OF_PAGES), code)


def in_order(
  need: Array, asked: Array, available: Array, keep_free: Array
) -> Array:
  """Serves rows one after the other, passing over those that do not fit.

  Every trip of the loop settles all rows up to the first that does not fit,
  and every later one that needs more than what is left at that point. One trip
  is enough when all fit, and two when no row needs more than one page.

  Args:
    need: int32[R], pages a row needs, none negative.
    asked: bool[R], rows that want to be served.
    available: int32[].
    keep_free: int32[R], pages that must be left when a row is served, none
      negative.

  Returns:
    bool[R].
  """
  # A sum of needs may not overflow; what can never fit needs no exact number.
  never = asked & (need > available - keep_free)
  need, keep_free = (jnp.minimum(n, available) for n in (need, keep_free))

  def overdrawn(granted: Array) -> Array:
    taken = jnp.cumsum(jnp.where(granted, need, 0), dtype=jnp.int32)
    return granted & (taken > available - keep_free)

  def refuse(granted: Array) -> Array:
    rows = jnp.arange(need.shape[0], dtype=jnp.int32)
    over = overdrawn(granted)
    before = rows < jnp.min(jnp.where(over, rows, need.shape[0]))
    left = available - jnp.sum(
      jnp.where(granted & before, need, 0), dtype=jnp.int32
    )
    return granted & (before | (need <= left - keep_free))

  return lax.while_loop(
    lambda granted: jnp.any(overdrawn(granted)), refuse, asked & ~never
  )


def pages_in(
  state: CacheState, slots: Array, column: Array, valid: Array
) -> Array:
  """int32[R, G]: the pages in one column of each row; NO_PAGE if not valid.

  Args:
    state: the cache.
    slots: int32[R].
    column: int32[R, G].
    valid: bool[R, G].
  """
  group = jnp.arange(state.config.num_groups, dtype=jnp.int32)[None, :]
  column = indexing.where_valid(valid, column)
  return indexing.take(
    state.page_table, slots[:, None], group, column, fill=state.config.no_page
  )


def woken(state: CacheState, plan: Reservation, hits: Array) -> Array:
  """bool[R, G, P]: hits in the free queue, of sequences that begin."""
  inside = indexing.between(plan.first, plan.hit, hits.shape[2])
  inside &= plan.begins[:, None, None]
  return inside & page_pool.is_free(state.pool, hits)


def _with_hits(
  state: CacheState,
  plan: Reservation,
  hits: Array,
  need: Array,
  asked: Array,
  keep_free: Array,
) -> Array:
  """bool[R]: the rows served, where they may share hits."""
  available = state.pool.queue.num_free
  free = woken(state, plan, hits) & asked[:, None, None]
  upper = need + jnp.sum(free, axis=(1, 2), dtype=jnp.int32)

  def one_by_one() -> Array:
    def serve(carry, row):
      granted, left = carry
      # A page is in the same column of every sequence that hits it.
      same = free & (hits == hits[row][None])
      touched = jnp.any(same & granted[:, None, None], axis=0)
      cost = need[row] + jnp.sum(free[row] & ~touched, dtype=jnp.int32)
      ok = asked[row] & (cost <= left - keep_free[row])
      return (granted.at[row].set(ok), left - jnp.where(ok, cost, 0)), None

    numbers = jnp.arange(need.shape[0], dtype=jnp.int32)
    nobody = sharding.zeros_like(asked)
    return lax.scan(serve, (nobody, available), numbers)[0][0]

  most = jnp.max(jnp.where(asked, keep_free, 0))
  total = jnp.sum(jnp.where(asked, upper, 0), dtype=jnp.int32)
  return lax.cond(total <= available - most, lambda: asked, one_by_one)
