"""free, recycle, truncate: pages go back to the pool."""

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

  Every page loses one reference, the last page of a sequence first, group by
  group. Pages without references go to the free queue and stay cached until
  they are taken from it, so a prefix outlives its tail.

  Args:
    state: the cache.
    slots: int32[R], slots in the order in which to release them; None for all
      B slots in order.
    mask: bool[R], the rows that count; None for all.

  Returns:
    The cache, and per row OK, SKIPPED, BAD_SLOT or SLOT_EMPTY (also for a slot
    named twice).

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
  again = rows.bad & (rows.slots >= 0) & (rows.slots < config.num_slots)
  code = first_code(
    (rows.skipped, Status.SKIPPED),
    (rows.bad & ~again, Status.BAD_SLOT),
    (is_empty(state, rows.slots) | again, Status.SLOT_EMPTY),
  )
  served = code == Status.OK
  place = rows.where(served)
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
  if config.skips_pages:
    table = page_table.fill_before(table, place, first, config.no_page)
  none = jnp.zeros_like(held)
  state = dataclasses.replace(
    state,
    page_table=table,
    num_pages=rows.write(state.num_pages, served, none),
    num_skipped_pages=rows.write(state.num_skipped_pages, served, none),
    length=rows.write(state.length, served, none[:, 0]),
    pool=pool,
  )
  return state, Outcome(code=code)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Recycled(Outcome):
  """What `recycle` did.

  Attributes:
    code: a `Status` for each slot.  # int32[R]
    num_recycled_pages: pages that the slot gave back, all groups together.
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
  """Gives back pages that no later token of their sequence attends to.

  A sliding window or a chunk leaves pages behind. The null page replaces them
  in the page table. The last page goes back first. Published pages stay cached
  until they are taken from the free queue. Costs next to nothing where nothing
  fell behind. Called before `allocate` in a loop, it bounds what a sequence
  holds: for a window of w tokens, at most `ceil((w - 1) / S) + 1` pages and
  those for new tokens.

  Args:
    state: the cache.
    lengths: int32[R], tokens whose K/V no write in flight still needs, at most
      `state.length` of the slot; None for `state.length`. Negative for none.
    slots: int32[R], the slots of the rows; None for all B slots in order.
    mask: bool[R], the rows that count; None for all.

  Returns:
    The cache, and per row OK, SKIPPED, BAD_SLOT (out of range, or named by an
    earlier row) or BAD_LENGTH (more than the slot's length: later tokens still
    need those pages).

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
  """Gives back what int32[R] tokens of the rows served have left behind.

  Returns:
    The cache, and int32[R]: pages given back.
  """
  config = state.config
  if not config.skips_pages:
    return state, jnp.zeros_like(lengths)
  held, first = rows.read(state.num_pages), rows.read(state.num_skipped_pages)
  lengths = jnp.clip(lengths, 0, config.slot_tokens)
  behind = jnp.minimum(config.sizes.skipped_pages(lengths), held)
  behind = config.sizes.without_kept(behind, rows.read(state.length))
  behind = jnp.where(served[:, None], jnp.maximum(first, behind), first)
  slots = rows.where(served)
  num_pages = recurrent.num_pages(
    config, state.page_table, slots, first, behind
  )
  pool, table = page_table.shrink(
    state.pool,
    state.page_table,
    page_table.ranges(slots, first, behind),
    replacement=0,
  )
  skipped = rows.write(state.num_skipped_pages, served, behind)
  state = dataclasses.replace(
    state, page_table=table, num_skipped_pages=skipped, pool=pool
  )
  return state, num_pages


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Truncated(Outcome):
  """What `truncate` did; a row is OK if its slot has the length asked for.

  Attributes:
    code: a `Status` for each slot.  # int32[R]
    copies: R * G copies of page contents that the caller owes.
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

  Whole pages past the end go back, tail first, also those that were allocated
  ahead. Truncating to 0 empties the slot, as `free` does.

  The new last page may have been full, and so be cached or shared. It will be
  written again, therefore:

  | the page is           | what happens                                     |
  |-----------------------|--------------------------------------------------|
  | referenced only here  | it is taken out of the prefix index              |
  | shared or pinned      | a fresh page replaces it, and a copy is owed     |

  Does not copy contents: apply `copies` (`jaxkv.kv.copy`) before writing.

  Pages of an encoder stay until the slot is empty. Recurrent groups go back to
  the end of a page whose state they still hold; or they stay where they are and
  give back what was allocated ahead. Their scratch pages move along.

  Pages that `recycle` gave back do not return: the slot is refused where a
  window or a state would be needed from one of them. (To try tokens out,
  recycle after they were accepted, or keep the cache as it was.)

  All-or-nothing per slot. A batch differs from one call after the other:
  whether a page is shared, and whether a fresh page is there, is judged by the
  cache as it was before the call, and all pages are given back, in row order,
  before fresh pages are taken, in row order.

  Args:
    state: the cache.
    lengths: int32[R], 0 .. `state.length` of the slot.
    slots: int32[R], the slots of the rows; None for all B slots in order.
    mask: bool[R], the rows that count; None for all.

  Returns:
    The cache, and per row OK, SKIPPED, BAD_SLOT (out of range, or named by an
    earlier row), SLOT_EMPTY, BAD_LENGTH (negative or more than there is:
    truncate never grows), RECYCLED or OUT_OF_PAGES.

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
  last = reserve.pages_in_column(state, rows.slots, full, reopened)
  shared = reopened & (indexing.take(state.pool.ref_count, last) > 1)
  keep = config.sizes.keep_encoder(full + partial.astype(jnp.int32), held)
  keep = jnp.where((lengths > 0)[:, None], keep, 0)
  # A shared last page is given back and replaced by a fresh one.
  plan = reserve.reservation(
    state,
    hit=keep - shared.astype(jnp.int32),
    stop=keep,
    begins=jnp.ones_like(rows.skipped),
  )
  code = reserve.grant(state, plan, code)
  served = code == Status.OK
  state = publish.roll_back(
    state, rows, lengths, served, last, reopened & ~shared
  )
  state, scratch = _give_back(state, rows, plan, served)
  state = reserve.take(state, rows, plan, served)
  replaced = shared & served[:, None]
  no_page = jnp.int32(config.no_page)
  copies = Copies(
    src=jnp.where(replaced, last, no_page).reshape(-1),
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


def _give_back(
  state: CacheState,
  rows: SlotRows,
  plan: reserve.Reservation,
  served: Array,
) -> tuple[CacheState, Array]:
  """Gives back the columns behind `plan.hit`.

  Args:
    state: the cache.
    rows: the slots.
    plan: the columns that they keep, or get anew.
    served: bool[R], the rows that count.

  Returns:
    The cache, and int32[R, G]: the scratch pages that remain.
  """
  config, held = state.config, rows.read(state.num_pages)
  keep = jnp.where(served[:, None], plan.stop, held)
  start = jnp.where(served[:, None], plan.hit, held)
  scratch = recurrent.num_scratch(config, held, keep)
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
  """bool[R]: whether a shorter sequence would need a page that is gone."""
  config = state.config
  if not config.skips_pages:
    return lengths < 0
  length, gone = rows.read(state.length), rows.read(state.num_skipped_pages)
  lengths = jnp.clip(lengths, 0, length)
  needed = jnp.any(config.sizes.skipped_pages(lengths) < gone, axis=1)
  needed &= lengths > 0
  needed |= ~recurrent.can_continue(
    config, state.page_table, rows.slots, length, lengths
  )
  return needed | (
    (lengths > 0) & publish.needs_skipped_page(state, rows, lengths)
  )
