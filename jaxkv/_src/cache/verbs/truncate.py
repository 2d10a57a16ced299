"""truncate: sequences roll back to fewer tokens."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv._src.cache import ops
from jaxkv._src.cache.checks import check_shape
from jaxkv._src.cache.groups import recurrent
from jaxkv._src.cache.groups import sizes
from jaxkv._src.cache.pool import page_pool
from jaxkv._src.cache.pool import page_table
from jaxkv._src.cache.pool import reserve
from jaxkv._src.cache.prefix import hashing
from jaxkv._src.cache.prefix import prefix_index
from jaxkv._src.cache.prefix.slot_hashes import SlotHashes
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import Rows
from jaxkv._src.cache.state import is_empty
from jaxkv._src.cache.state import recorded
from jaxkv._src.cache.state import rows_of
from jaxkv._src.cache.state import verb
from jaxkv._src.cache.status import Outcome
from jaxkv._src.cache.status import Status
from jaxkv._src.cache.status import first_code
from jaxkv._src.cache.verbs.fork import Copies
from jaxkv._src.cache.verbs.fork import pages_in


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
  check_shape("lengths", lengths, rows.slots.shape, ", one for each slot")
  length, held = rows.read(state.length), rows.read(state.num_pages)
  code = first_code(
    (rows.skipped, Status.SKIPPED),
    (rows.bad, Status.BAD_SLOT),
    (is_empty(state, rows.slots), Status.SLOT_EMPTY),
    ((lengths < 0) | (lengths > length), Status.BAD_LENGTH),
    (_needs_recycled(state, rows, lengths), Status.RECYCLED),
  )
  full = sizes.full_pages(config, lengths)
  partial = sizes.open_pages(config, lengths)
  reopened = partial & (full < sizes.full_pages(config, length))
  last = pages_in(state, rows.slots, full, reopened)
  shared = reopened & (ops.take(state.pool.ref_count, last) > 1)
  keep = sizes.keep_encoder(config, full + partial.astype(jnp.int32), held)
  keep = jnp.where((lengths > 0)[:, None], keep, 0)
  # A shared last page is given back and replaced by a fresh one.
  plan = reserve.reservation(
    config,
    hit=keep - shared.astype(jnp.int32),
    stop=keep,
    begins=jnp.ones_like(rows.skipped),
  )
  code = reserve.grant(state, plan, code)
  served = code == Status.OK
  hashes, read = _roll_back_hashes(state, rows, lengths, served)
  last = ops.read_before(read, last)
  state = _give_back(state, rows, plan, served, last, reopened & ~shared)
  scratch = recurrent.num_scratch(config, held, keep)
  scratch = jnp.where((lengths > 0)[:, None], scratch, 0)
  state = reserve.take(state, rows, plan, served)
  replaced = shared & served[:, None]
  no_page = jnp.int32(config.no_page)
  copies = Copies(
    src=jnp.where(replaced, last, no_page).reshape(-1),
    dst=pages_in(state, rows.slots, plan.hit, replaced).reshape(-1),
  )
  skipped = jnp.minimum(rows.read(state.num_skipped_pages), keep)
  state = dataclasses.replace(
    state,
    num_pages=rows.write(state.num_pages, served, keep + scratch),
    num_skipped_pages=rows.write(state.num_skipped_pages, served, skipped),
    length=rows.write(state.length, served, lengths),
    hashes=hashes,
  )
  return recorded(state, code), Truncated(code=code, copies=copies)


def _give_back(
  state: CacheState,
  rows: Rows,
  plan: reserve.Reservation,
  served: Array,
  last: Array,
  reopened: Array,
) -> CacheState:
  """Gives back the columns behind `plan.hit`.

  Args:
    state: the cache.
    rows: the slots.
    plan: the columns that they keep, or get anew.
    served: bool[R], the rows that count.
    last: int32[R, G], the page in column `plan.stop - 1`.
    reopened: bool[R, G], where that page is kept and loses its key.
  """
  config, held = state.config, rows.read(state.num_pages)
  keep = jnp.where(served[:, None], plan.stop, held)
  start = jnp.where(served[:, None], plan.hit, held)
  scratch = recurrent.num_scratch(config, held, keep)
  scratch = jnp.where(keep > 0, scratch, 0)
  pool, _ = page_pool.unpublish(
    state.pool, last.reshape(-1), (reopened & served[:, None]).reshape(-1)
  )
  slots = rows.where(served)
  pool, table = page_table.shrink(
    pool,
    state.page_table,
    page_table.ranges(slots, start, held - scratch),
    left=config.no_page,
  )
  table = recurrent.draw_back(config, table, slots, held, keep, scratch)
  return dataclasses.replace(state, pool=pool, page_table=table)


def _needs_recycled(state: CacheState, rows: Rows, lengths: Array) -> Array:
  """bool[R]: whether a shorter sequence would need a page that is gone."""
  config = state.config
  if not config.skips_pages:
    return lengths < 0
  length, gone = rows.read(state.length), rows.read(state.num_skipped_pages)
  lengths = jnp.clip(lengths, 0, length)
  needed = jnp.any(sizes.skipped_pages(config, lengths) < gone, axis=1)
  needed &= lengths > 0
  needed |= ~recurrent.can_continue(
    config, state.page_table, rows.slots, length, lengths
  )
  if state.hashes is None:
    return needed
  # The tokens behind the last aligned position are read back from the pages
  # of one group.
  aligned = lengths // config.alignment * config.alignment
  moved = aligned < length // config.alignment * config.alignment
  group = config.token_group
  if config.groups[group].holds_states:
    # Only the ends of pages have a state, and there no token is read back.
    lost = aligned < lengths
  else:
    begin = jnp.maximum(aligned - 1, 0) // config.page_sizes[group]
    lost = begin < gone[:, group]
  return needed | ((lengths > 0) & moved & lost)


def _roll_back_hashes(
  state: CacheState, rows: Rows, lengths: Array, served: Array
) -> tuple[SlotHashes | None, Array]:
  """The chain and the tail as they were at the shorter length.

  Returns:
    They, and int32[] for `ops.read_before`: computed from the keys read.
  """
  config, hashes, index = state.config, state.hashes, state.pool.index
  if hashes is None or index is None:
    return None, jnp.int32(0)
  size, slots = config.page_sizes[config.token_group], rows.slots
  group = jnp.full_like(slots, config.token_group)
  aligned = lengths // config.alignment
  steps = config.alignment // size
  first = aligned * steps
  before = ops.take(state.page_table, slots, group, first - 1)
  key = hashing.group_key(config, prefix_index.key_of(index, before), group)
  root = rows.read(hashes.root)
  chain = jnp.where((aligned == 0)[:, None], root, key)
  columns = first[:, None] + jnp.arange(steps, dtype=jnp.int32)[None]
  pages = ops.take(state.page_table, slots[:, None], group[:, None], columns)
  tail = ops.take(index.tokens, pages)[..., :size]
  moved = served & (aligned < rows.read(state.length) // config.alignment)
  hashes = dataclasses.replace(
    hashes,
    chain=rows.write(hashes.chain, moved, chain),
    tail=rows.write(
      hashes.tail, moved, tail.reshape(slots.shape[0], config.alignment)
    ),
  )
  return hashes, jnp.max(key >> 1).astype(jnp.int32)
