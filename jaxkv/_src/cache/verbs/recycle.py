"""recycle: releases pages behind windows and chunks."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays.indexing import SlotRows
from jaxkv._src.cache.pool import page_table
from jaxkv._src.cache.pool import recurrent
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import Outcome
from jaxkv._src.cache.state import Status
from jaxkv._src.cache.state import first_code
from jaxkv._src.cache.state import rows_of
from jaxkv._src.cache.state import verb


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Recycled(Outcome):
  """The result of `recycle`.

  Attributes:
    code: a `Status` for each slot.  # int32[R]
    num_recycled_pages: pages that the slot released, over all groups.
      # int32[R]
  """

  num_recycled_pages: Array


@verb
def recycle(
  state: CacheState,
  *,
  lengths: Array | None = None,
  slots: Array | None = None,
  mask: Array | None = None,
) -> tuple[CacheState, Recycled]:
  """Releases pages that no later token of their sequence needs.

  These are the pages before a sliding window or a chunk, and all states of a
  recurrent group except the last, with a `StateRetention` also except the last
  one at a page end. The null page replaces them in the page table. Of these
  pages, the last one is released first. Published pages stay cached until they
  are evicted, or given up by a `StateRetention`. If a loop calls this verb
  before `allocate`, a sequence with a window of w tokens has at most
  `ceil((w - 1) / S) + 1` pages, plus the pages for new tokens.

  Args:
    state: the cache.
    lengths: int32[R], at most `state.length` of the slot: the number of tokens
      whose forward pass has finished. Pages to which later tokens attend stay.
      A negative number releases nothing. None for `state.length`.
    slots: int32[R], the slots of the rows; None for all B slots in order.
    mask: bool[R], the rows to process; None for all.

  Returns:
    The cache, and per row OK, SKIPPED, BAD_SLOT (out of range, or repeated) or
    BAD_LENGTH (more than the slot's length).

  Examples:
    >>> import jaxkv
    >>> state = jaxkv.init(jaxkv.CacheConfig(
    ...   num_pages=8, page_size=2, num_slots=1, pages_per_slot=4,
    ...   groups=(jaxkv.SlidingWindow(3),)))
    >>> state, _ = jaxkv.allocate(state, [7])
    >>> state, _ = jaxkv.commit(state, [[1, 2, 3, 4, 5, 6, 7]], [7])
    >>> state, out = jaxkv.recycle(state)
    >>> out.num_recycled_pages.tolist(), state.page_table[0].tolist()
    ([2], [[0, 0, 3, 4]])
  """
  rows = rows_of(state, slots, mask)
  length = rows.read(state.length)
  lengths = length if lengths is None else lengths
  code = first_code(
    (rows.skipped, Status.SKIPPED),
    (rows.bad, Status.BAD_SLOT),
    (lengths > length, Status.BAD_LENGTH),
  )
  state, num_pages = drop_behind(state, rows, lengths, code == Status.OK)
  return state, Recycled(code=code, num_recycled_pages=num_pages)


def drop_behind(
  state: CacheState, rows: SlotRows, lengths: Array, is_served: Array
) -> tuple[CacheState, Array]:
  """Releases the pages that served rows do not need after `lengths` tokens.

  Returns:
    The cache, and int32[R]: the number of released pages.
  """
  config = state.config
  if not config.skips_pages:
    return state, jnp.zeros_like(lengths)
  # Skipped pages stay skipped, even if an earlier call had a larger length.
  start = rows.read(state.num_skipped_pages)
  # `quotient` needs numbers of at least 0, but a length may be negative.
  lengths = jnp.clip(lengths, 0, config.slot_tokens)
  columns = config.sizes.skipped_pages(lengths)
  columns = jnp.minimum(columns, rows.read(state.num_pages))
  columns = config.sizes.keep_last_page(columns, rows.read(state.length))
  slots = rows.where(is_served)
  if config.state_retention is not None:
    # The last state at a page end stays until the next one is written.
    last_end = recurrent.last_end(config, state.page_table, slots, lengths)
    columns = jnp.where(last_end >= 0, jnp.minimum(columns, last_end), columns)
  columns = jnp.where(is_served[:, None], jnp.maximum(start, columns), start)
  num_pages = recurrent.num_pages(
    config, state.page_table, slots, start, columns
  )
  pool, table = page_table.shrink(
    state.pool,
    state.page_table,
    page_table.ranges(slots, start, columns),
    replacement=0,
    forgets=config.state_retention is not None,
  )
  skipped = rows.write(state.num_skipped_pages, is_served, columns)
  state = dataclasses.replace(
    state, page_table=table, num_skipped_pages=skipped, pool=pool
  )
  return state, num_pages
