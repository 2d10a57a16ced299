"""truncate: rolls sequences back to fewer tokens."""

import dataclasses

import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays.indexing import SlotRows
from jaxkv._src.cache.pool import page_table
from jaxkv._src.cache.pool import recurrent
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import Copied
from jaxkv._src.cache.state import Copies
from jaxkv._src.cache.state import Status
from jaxkv._src.cache.state import first_code
from jaxkv._src.cache.state import is_empty
from jaxkv._src.cache.state import rows_of
from jaxkv._src.cache.state import verb
from jaxkv._src.cache.steps import publish
from jaxkv._src.cache.steps import reserve


@verb
def truncate(
  state: CacheState,
  lengths: Array,
  *,
  slots: Array | None = None,
  mask: Array | None = None,
) -> tuple[CacheState, Copied]:
  """Rolls sequences back to fewer tokens.

  Releases the pages past the new end, including pages allocated ahead, the last
  page first. Truncating to 0 empties the slot, as `free` does.

  If the new end is inside a page that was full, later tokens will be written to
  this page. So it must not stay cached or shared:

  | the page is           | action                                           |
  |-----------------------|--------------------------------------------------|
  | referenced only here  | it is removed from the prefix index              |
  | shared or pinned      | a fresh page replaces it, see `Copied.copies`    |

  Does not copy page contents. Apply `out.copies` with `jaxkv.kv.copy` before
  the next write.

  With a recurrent group, the new length must be 0, the old length (to release
  only pages allocated ahead), or the end of a page whose state is held. If
  every group skips pages, prefix caching can limit lengths to multiples of
  `CacheConfig.alignment`.

  A slot is refused if a window, a state or the hash of its tokens needs a page
  that `recycle` released or `admit` did not attach. With speculative decoding,
  call `recycle` only after draft tokens are accepted, or keep the old cache.

  A refused slot does not change. A batch differs from one call for each row in
  turn: references and free pages are counted before any row is served. Then the
  served rows release pages, and after that they pop fresh pages, in row order.

  Args:
    state: the cache.
    lengths: int32[R], 0 .. `state.length` of the slot.
    slots: int32[R], the slots of the rows; None for all B slots in order.
    mask: bool[R], the rows to process; None for all.

  Returns:
    The cache, and per row OK, SKIPPED, BAD_SLOT (out of range, or repeated),
    SLOT_EMPTY, BAD_LENGTH (negative or more than the slot's length), RECYCLED
    or OUT_OF_PAGES.

  Examples:
    >>> import jaxkv
    >>> state = jaxkv.init(jaxkv.CacheConfig(
    ...   num_pages=8, page_size=2, num_slots=1, pages_per_slot=4))
    >>> state, _ = jaxkv.allocate(state, [5])
    >>> state, _ = jaxkv.commit(state, [[7, 8, 9, 10, 11]], [5])
    >>> state, out = jaxkv.truncate(state, [3])
    >>> int(state.length[0]), state.num_pages.tolist()
    (3, [[2]])
  """
  config = state.config
  rows = rows_of(state, slots, mask)
  length = rows.read(state.length)
  code = first_code(
    (rows.skipped, Status.SKIPPED),
    (rows.bad, Status.BAD_SLOT),
    (is_empty(state, rows.slots), Status.SLOT_EMPTY),
    ((lengths < 0) | (lengths > length), Status.BAD_LENGTH),
    (_needs_recycled(state, rows, lengths), Status.RECYCLED),
  )
  full = config.sizes.full_pages(lengths)
  partial = config.sizes.open_pages(lengths)
  reopened = partial & (full < config.sizes.full_pages(length))
  last_page = reserve.pages_in_column(state, rows.slots, full, reopened)
  shared = reopened & (indexing.take(state.pool.ref_count, last_page) > 1)
  keep = full + partial.astype(jnp.int32)
  # A shared last page is released and replaced by a fresh page.
  plan = reserve.reservation(
    state,
    hit=keep - shared.astype(jnp.int32),
    stop=keep,
    begins=jnp.ones_like(rows.skipped),
  )
  code = reserve.grant(state, plan, code)
  is_served = code == Status.OK
  state = publish.roll_back(
    state, rows, lengths, is_served, last_page, reopened & ~shared
  )
  state = _release_columns(state, rows, plan, is_served)
  state = reserve.take(state, rows, plan, is_served)
  replaced = shared & is_served[:, None]
  no_page = jnp.int32(config.no_page)
  copies = Copies(
    src=jnp.where(replaced, last_page, no_page).reshape(-1),
    dst=reserve.pages_in_column(state, rows.slots, plan.hit, replaced).reshape(
      -1
    ),
  )
  skipped = jnp.minimum(rows.read(state.num_skipped_pages), keep)
  state = dataclasses.replace(
    state,
    num_pages=rows.write(state.num_pages, is_served, keep),
    num_skipped_pages=rows.write(state.num_skipped_pages, is_served, skipped),
    length=rows.write(state.length, is_served, lengths),
  )
  return state, Copied(code=code, copies=copies)


def _release_columns(
  state: CacheState, rows: SlotRows, plan: reserve.Reservation, is_served: Array
) -> CacheState:
  """Releases the columns of served rows from `plan.hit` on."""
  num_held_pages = rows.read(state.num_pages)
  start = jnp.where(is_served[:, None], plan.hit, num_held_pages)
  pool, table = page_table.shrink(
    state.pool,
    state.page_table,
    page_table.ranges(rows.where(is_served), start, num_held_pages),
    replacement=state.config.no_page,
  )
  return dataclasses.replace(state, pool=pool, page_table=table)


def _needs_recycled(state: CacheState, rows: SlotRows, lengths: Array) -> Array:
  """Returns bool[R]: rows that need a skipped page at the new length."""
  config = state.config
  if not config.skips_pages:
    return lengths < 0
  length = rows.read(state.length)
  num_skipped = rows.read(state.num_skipped_pages)
  # Rows with a bad length get BAD_LENGTH, whatever is computed for them here.
  lengths = jnp.clip(lengths, 0, length)
  is_needed = jnp.any(config.sizes.skipped_pages(lengths) < num_skipped, axis=1)
  is_needed &= lengths > 0
  is_needed |= ~recurrent.can_continue(
    config, state.page_table, rows.slots, length, lengths
  )
  return is_needed | (
    (lengths > 0) & publish.needs_skipped_page(state, rows, lengths)
  )
