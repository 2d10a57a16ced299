"""fork: copies a sequence to empty slots, which share its full pages."""

import dataclasses

import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays.indexing import SlotRows
from jaxkv._src.cache.pool import recurrent
from jaxkv._src.cache.prefix import hashing
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import Copied
from jaxkv._src.cache.state import Copies
from jaxkv._src.cache.state import Status
from jaxkv._src.cache.state import first_code
from jaxkv._src.cache.state import in_range
from jaxkv._src.cache.state import is_empty
from jaxkv._src.cache.state import mask_or_all
from jaxkv._src.cache.state import verb
from jaxkv._src.cache.steps import reserve


@verb
def fork(
  state: CacheState, src: Array, dst: Array, *, mask: Array | None = None
) -> tuple[CacheState, Copied]:
  """Makes empty slots continue the sequences of other slots.

  `dst` shares the full pages of `src`. If the last page is partly full, both
  sequences would write to it, so `dst` gets a fresh page and a copy of the
  contents. Pages allocated to `src` beyond its length are not shared.

  In a recurrent group, `dst` continues from the state after the last token. The
  page of this state is shared if it is full, and copied otherwise.

  Does not copy page contents. Apply `out.copies` with `jaxkv.kv.copy` before
  the next write.

  Rows are served in order, each completely or not at all. A batch equals one
  call for each row in turn, with two exceptions. Sources are read as they were
  before the call. The second row with the same `dst` is refused even if the
  first row is refused with RECYCLED or OUT_OF_PAGES.

  Args:
    state: the cache.
    src: int32[R], slots with at least one committed token; repeats are allowed.
    dst: int32[R], empty slots.
    mask: bool[R], the rows to process; None for all.

  Returns:
    The cache, and per row OK, SKIPPED, BAD_SLOT, SLOT_EMPTY (`src`),
    SLOT_IN_USE (`dst`, also if repeated), RECYCLED (a recurrent group does not
    hold the last token's state) or OUT_OF_PAGES.

  Examples:
    >>> import jaxkv
    >>> state = jaxkv.init(jaxkv.CacheConfig(
    ...   num_pages=8, page_size=2, num_slots=2, pages_per_slot=4))
    >>> state, _ = jaxkv.allocate(state, [3, 0])
    >>> state, _ = jaxkv.commit(state, [[7, 8, 9], [0, 0, 0]], [3, 0])
    >>> state, out = jaxkv.fork(state, [0], [1])
    >>> state.page_table[:, 0].tolist(), out.copies.src.tolist()
    ([[1, 2, 8, 8], [1, 3, 8, 8]], [2])
  """
  config = state.config
  skipped = ~mask_or_all(mask, src)
  length = indexing.take(state.length, src)
  code = _first_code(state, src, dst, length, skipped)
  full = config.sizes.full_pages(length)
  plan = reserve.reservation(
    state,
    first=jnp.minimum(indexing.take(state.num_skipped_pages, src), full),
    hit=full,
    stop=config.sizes.columns_for(length),
    begins=jnp.ones_like(skipped),
  )
  code = reserve.grant(state, plan, code)
  is_served = code == Status.OK
  rows = SlotRows(dst, False, skipped, skipped)
  state = _share(state, src, rows, plan, is_served)
  state = reserve.take(state, rows, plan, is_served)
  copies = owed_copies(state, src, dst, is_served)
  return state, Copied(code=code, copies=copies)


def share_prefix(
  state: CacheState, src: Array, dst: Array, is_served: Array
) -> CacheState:
  """Makes `dst` share the full pages of `src`.

  If the last page of `src` is partly full, `dst` lacks a page for its last
  tokens. Then the caller must call `allocate.make_room` for one more token,
  which pops the page, and make the copies that `owed_copies` returns. Slots in
  `src` have at least one token, and those in `dst` are empty and distinct.
  """
  full = state.config.sizes.full_pages(indexing.take(state.length, src))
  plan = reserve.reservation(
    state,
    first=jnp.minimum(indexing.take(state.num_skipped_pages, src), full),
    hit=full,
    stop=full,
    begins=jnp.ones_like(is_served),
  )
  rows = SlotRows(dst, False, ~is_served, ~is_served)
  state = _share(state, src, rows, plan, is_served)
  num_pages = rows.write(state.num_pages, is_served, full)
  return dataclasses.replace(state, num_pages=num_pages)


def owed_copies(
  state: CacheState, src: Array, dst: Array, is_served: Array
) -> Copies:
  """Returns the copies that the caller must make after forks to `dst`."""
  config = state.config
  length = indexing.take(state.length, dst)
  full = config.sizes.full_pages(length)
  partial = config.sizes.open_pages(length) & is_served[:, None]

  def pages_of(slots: Array) -> Array:
    column = full
    if config.state_retention is not None:
      # If a slot has room for more tokens, its running state has moved to the
      # last column.
      last_column = indexing.take(state.num_pages, slots) - 1
      column = jnp.where(recurrent.holds_states(config), last_column, full)
    return reserve.pages_in_column(state, slots, column, partial).reshape(-1)

  # Where no copy is needed, both page numbers are NO_PAGE.
  return Copies(src=pages_of(src), dst=pages_of(dst))


def _share(
  state: CacheState,
  src: Array,
  rows: SlotRows,
  plan: reserve.Reservation,
  is_served: Array,
) -> CacheState:
  """Attaches the full pages of `src`, and copies its length and hashes."""

  # `table` is the carry of a loop, which XLA updates in place. If this function
  # read `state.page_table` instead, XLA would copy that array.
  def read(table: Array, row: Array, group: Array, column: Array) -> Array:
    return indexing.take(table, indexing.take(src, row), group, column)

  dst_slots = rows.where(is_served)
  state = reserve.attach(state, rows, plan, is_served, read)
  return dataclasses.replace(
    state,
    length=indexing.put(
      state.length, dst_slots, values=indexing.take(state.length, src)
    ),
    hashes=hashing.copy_slots(state.hashes, src, dst_slots),
  )


def _first_code(
  state: CacheState, src: Array, dst: Array, length: Array, skipped: Array
) -> Array:
  """Returns the status of each row before free pages are counted."""
  code = first_code(
    (skipped, Status.SKIPPED),
    (~in_range(state, src) | ~in_range(state, dst), Status.BAD_SLOT),
    (is_empty(state, src) | (length == 0), Status.SLOT_EMPTY),
    (~is_empty(state, dst), Status.SLOT_IN_USE),
  )
  has_states = recurrent.can_continue(
    state.config, state.page_table, src, length, length
  )
  # A repeated `dst` is an error only if an earlier row for the same slot passed
  # the tests above.
  return first_code(
    (code != Status.OK, code),
    (indexing.any_earlier(dst, code == Status.OK), Status.SLOT_IN_USE),
    (~has_states, Status.RECYCLED),
  )
