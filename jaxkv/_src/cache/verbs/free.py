"""free: releases sequences."""

import dataclasses

import jax.numpy as jnp
from jax import Array

from jaxkv._src.cache.pool import page_table
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import Outcome
from jaxkv._src.cache.state import Status
from jaxkv._src.cache.state import first_code
from jaxkv._src.cache.state import is_empty
from jaxkv._src.cache.state import rows_of
from jaxkv._src.cache.state import verb
from jaxkv._src.cache.verbs.recycle import drop_behind


@verb
def free(
  state: CacheState, *, slots: Array | None = None, mask: Array | None = None
) -> tuple[CacheState, Outcome]:
  """Releases sequences; their slots become empty.

  Every page of a sequence loses one reference: group by group, the last page
  first, so that the end of a sequence is evicted first. Pages without
  references go to the free queue. Published pages stay cached there. With a
  `StateRetention`, `recycle` is applied to all slots first.

  Args:
    state: the cache.
    slots: int32[R], slots in the order in which to release them; None for all
      B slots in order.
    mask: bool[R], the rows to process; None for all.

  Returns:
    The cache, and per row OK, SKIPPED, BAD_SLOT or SLOT_EMPTY (also for a
    repeated slot).

  Examples:
    >>> import jaxkv
    >>> state = jaxkv.init(jaxkv.CacheConfig(
    ...   num_pages=8, page_size=2, num_slots=2, pages_per_slot=4))
    >>> state, _ = jaxkv.allocate(state, [3, 0])
    >>> state, out = jaxkv.free(state, mask=[True, False])
    >>> out.ok.tolist(), jaxkv.free_pages(state)
    ([True, False], [2, 1, 3, 4, 5, 6, 7])
  """
  config = state.config
  rows = rows_of(state, slots, mask)
  # An earlier row released a repeated slot, so the code of the later row is
  # SLOT_EMPTY and not BAD_SLOT.
  repeated = rows.bad & (rows.slots >= 0) & (rows.slots < config.num_slots)
  code = first_code(
    (rows.skipped, Status.SKIPPED),
    (rows.bad & ~repeated, Status.BAD_SLOT),
    (is_empty(state, rows.slots) | repeated, Status.SLOT_EMPTY),
  )
  is_served = code == Status.OK
  if config.state_retention is not None:
    # Gives up states that only the next steps of the sequences would pass.
    state, _ = drop_behind(state, rows, rows.read(state.length), is_served)
  freed_slots = rows.where(is_served)
  # Rows that are not served get empty ranges.
  start, num_pages = (
    jnp.where(is_served[:, None], rows.read(columns), 0)
    for columns in (state.num_skipped_pages, state.num_pages)
  )
  pool, table = page_table.shrink(
    state.pool,
    state.page_table,
    page_table.ranges(freed_slots, start, num_pages),
    replacement=config.no_page,
  )
  # Null pages have no references, so their columns are only overwritten.
  if config.skips_pages:
    table = page_table.fill_before(table, freed_slots, start, config.no_page)
  zeros = jnp.zeros_like(num_pages)
  state = dataclasses.replace(
    state,
    page_table=table,
    num_pages=rows.write(state.num_pages, is_served, zeros),
    num_skipped_pages=rows.write(state.num_skipped_pages, is_served, zeros),
    length=rows.write(state.length, is_served, zeros[:, 0]),
    pool=pool,
  )
  return state, Outcome(code=code)
