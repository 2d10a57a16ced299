"""free, recycle, truncate: return pages to the pool."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays.indexing import SlotRows
from jaxkv._src.cache.pool import page_table
from jaxkv._src.cache.pool import recurrent
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import Copies
from jaxkv._src.cache.state import Outcome
from jaxkv._src.cache.state import Status
from jaxkv._src.cache.state import first_code
from jaxkv._src.cache.state import is_empty
from jaxkv._src.cache.state import rows_of
from jaxkv._src.cache.state import verb
from jaxkv._src.cache.steps import publish
from jaxkv._src.cache.steps import reserve


@verb
def free(
  state: CacheState, *, slots: Array | None = None, mask: Array | None = None
) -> tuple[CacheState, Outcome]:
  """Releases sequences; their slots become empty.

  Every page of a sequence loses one reference: group by group, the last page
  first. Pages without references go to the free queue and stay cached until
  they are popped. So the prefix of a sequence stays cached longer than its end.

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
  # A repeated slot was released by an earlier row, so its code is SLOT_EMPTY
  # and not BAD_SLOT.
  repeated = rows.bad & (rows.slots >= 0) & (rows.slots < config.num_slots)
  code = first_code(
    (rows.skipped, Status.SKIPPED),
    (rows.bad & ~repeated, Status.BAD_SLOT),
    (is_empty(state, rows.slots) | repeated, Status.SLOT_EMPTY),
  )
  served = code == Status.OK
  place = rows.where(served)
  # Rows that are not served get empty ranges.
  first, held = (
    jnp.where(served[:, None], rows.read(columns), 0)
    for columns in (state.num_skipped_pages, state.num_pages)
  )
  pool, table = page_table.shrink(
    state.pool,
    state.page_table,
    page_table.ranges(place, first, held),
    replacement=config.no_page,
  )
  # Null pages have no references to drop, so these columns are only cleared.
  if config.skips_pages:
    table = page_table.fill_before(table, place, first, config.no_page)
  zeros = jnp.zeros_like(held)
  state = dataclasses.replace(
    state,
    page_table=table,
    num_pages=rows.write(state.num_pages, served, zeros),
    num_skipped_pages=rows.write(state.num_skipped_pages, served, zeros),
    length=rows.write(state.length, served, zeros[:, 0]),
    pool=pool,
  )
  return state, Outcome(code=code)


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
  """Releases pages to which no later token of their sequence attends.

  These are the pages before a sliding window or a chunk. The null page replaces
  them in the page table. The last of these pages is released first. Published
  pages stay cached until they are popped. If a loop calls this verb before
  `allocate`, a sequence with a window of w tokens has at most
  `ceil((w - 1) / S) + 1` pages, plus the pages for new tokens. If there is
  nothing to release, the cost is negligible.

  Args:
    state: the cache.
    lengths: int32[R], at most `state.length` of the slot: the number of tokens
      whose forward pass has finished. Pages that a token after these attends to
      stay. A negative number releases nothing. None for `state.length`.
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
  out = Recycled(code=code, num_recycled_pages=num_pages)
  return state, out


def drop_behind(
  state: CacheState, rows: SlotRows, lengths: Array, served: Array
) -> tuple[CacheState, Array]:
  """Releases the pages that served rows do not need after `lengths` tokens.

  Returns:
    The cache, and int32[R]: the number of released pages.
  """
  config = state.config
  if not config.skips_pages:
    return state, jnp.zeros_like(lengths)
  held, first = rows.read(state.num_pages), rows.read(state.num_skipped_pages)
  # `quotient` needs numbers of at least 0. Refused rows may have other numbers.
  lengths = jnp.clip(lengths, 0, config.slot_tokens)
  stop = jnp.minimum(config.sizes.skipped_pages(lengths), held)
  stop = config.sizes.keep_last_page(stop, rows.read(state.length))
  # Skipped pages do not come back if `lengths` is less than in an earlier call.
  stop = jnp.where(served[:, None], jnp.maximum(first, stop), first)
  slots = rows.where(served)
  num_pages = recurrent.num_pages(config, state.page_table, slots, first, stop)
  pool, table = page_table.shrink(
    state.pool,
    state.page_table,
    page_table.ranges(slots, first, stop),
    replacement=0,
  )
  skipped = rows.write(state.num_skipped_pages, served, stop)
  state = dataclasses.replace(
    state, page_table=table, num_skipped_pages=skipped, pool=pool
  )
  return state, num_pages


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Truncated(Outcome):
  """The result of `truncate`; a row is OK if its slot has the new length.

  Attributes:
    code: a `Status` for each slot.  # int32[R]
    copies: R * G copies of page contents that the caller must make.
  """

  copies: Copies


@verb
def truncate(
  state: CacheState,
  lengths: Array,
  *,
  slots: Array | None = None,
  mask: Array | None = None,
) -> tuple[CacheState, Truncated]:
  """Rolls sequences back to fewer tokens.

  Whole pages past the new end are released, the last page first, including
  pages allocated ahead. Truncating to 0 empties the slot, as `free` does.

  The new last page may have been full, and therefore cached or shared. Later
  tokens will be written to it, so:

  | the page is           | action                                           |
  |-----------------------|--------------------------------------------------|
  | referenced only here  | it is removed from the prefix index              |
  | shared or pinned      | a fresh page replaces it, with a copy to make    |

  Does not copy contents: apply `copies` (`jaxkv.kv.copy`) before writing.

  Pages of an encoder stay until the slot is empty. With a recurrent group, the
  new length must be the old one, to release only pages allocated ahead, or end
  at a page whose state is still held. Scratch pages move to the new end.

  Pages released by `recycle` do not come back, so a slot is refused if a window
  or a state needs one of them. (With speculation, call `recycle` only after
  tokens were accepted, or keep the old state.)

  All-or-nothing per slot. A batch differs from one call for each row in turn:
  it counts references and free pages before any row is served. First all rows
  release pages, and then all rows pop fresh pages, each time in row order.

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
  length, held = rows.read(state.length), rows.read(state.num_pages)
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
  keep = config.sizes.keep_encoder(full + partial.astype(jnp.int32), held)
  keep = jnp.where((lengths > 0)[:, None], keep, 0)
  # A shared last page is released and replaced by a fresh page.
  plan = reserve.reservation(
    state,
    hit=keep - shared.astype(jnp.int32),
    stop=keep,
    # True, so that the plan moves no scratch pages. `_release_columns` does.
    begins=jnp.ones_like(rows.skipped),
  )
  code = reserve.grant(state, plan, code)
  served = code == Status.OK
  state = publish.roll_back(
    state, rows, lengths, served, last_page, reopened & ~shared
  )
  state, scratch = _release_columns(state, rows, plan, served)
  state = reserve.take(state, rows, plan, served)
  replaced = shared & served[:, None]
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
    num_pages=rows.write(state.num_pages, served, keep + scratch),
    num_skipped_pages=rows.write(state.num_skipped_pages, served, skipped),
    length=rows.write(state.length, served, lengths),
  )
  return state, Truncated(code=code, copies=copies)


def _release_columns(
  state: CacheState,
  rows: SlotRows,
  plan: reserve.Reservation,
  served: Array,
) -> tuple[CacheState, Array]:
  """Releases the columns past `plan.hit` of served rows, except scratch pages.

  Returns:
    The cache, and int32[R, G]: the number of scratch pages that remain.
  """
  config, held = state.config, rows.read(state.num_pages)
  keep = jnp.where(served[:, None], plan.stop, held)
  start = jnp.where(served[:, None], plan.hit, held)
  scratch = recurrent.num_scratch(config, held, keep)
  # A slot that becomes empty releases its scratch pages too.
  scratch = jnp.where(keep > 0, scratch, 0)
  slots = rows.where(served)
  pool, table = page_table.shrink(
    state.pool,
    state.page_table,
    page_table.ranges(slots, start, held - scratch),
    replacement=config.no_page,
  )
  table = recurrent.retract_scratch(config, table, slots, held, keep, scratch)
  state = dataclasses.replace(state, pool=pool, page_table=table)
  return state, scratch


def _needs_recycled(state: CacheState, rows: SlotRows, lengths: Array) -> Array:
  """Returns bool[R]: rows that need a released page at the new length."""
  config = state.config
  if not config.skips_pages:
    return lengths < 0
  length, num_skipped = (
    rows.read(state.length),
    rows.read(state.num_skipped_pages),
  )
  # Rows with a bad length get another code, but the arithmetic must be valid.
  lengths = jnp.clip(lengths, 0, length)
  is_needed = jnp.any(config.sizes.skipped_pages(lengths) < num_skipped, axis=1)
  is_needed &= lengths > 0
  is_needed |= ~recurrent.can_continue(
    config, state.page_table, rows.slots, length, lengths
  )
  return is_needed | (
    (lengths > 0) & publish.needs_skipped_page(state, rows, lengths)
  )
