"""free and truncate: pages go back."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxkv._src.cache import masked
from jaxkv._src.cache.checks import check_array
from jaxkv._src.cache.checks import mask_or_all
from jaxkv._src.cache.duplicates import num_earlier
from jaxkv._src.cache.groups import recurrent
from jaxkv._src.cache.groups.sizes import full_pages
from jaxkv._src.cache.groups.sizes import open_pages
from jaxkv._src.cache.groups.sizes import or_encoder
from jaxkv._src.cache.groups.sizes import skipped_pages
from jaxkv._src.cache.pool import page_pool
from jaxkv._src.cache.pool import page_table
from jaxkv._src.cache.pool import reserve as grants
from jaxkv._src.cache.prefix import hashing
from jaxkv._src.cache.prefix import prefix_index
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
from jaxkv._src.cache.verbs.fork import Copies


class Freed(NamedTuple):
  """What `free` did.

  Attributes:
    code: int32[R] (or int32[B] for a mask), a `Code` a row.
  """

  code: Array

  @property
  def ok(self) -> Array:
    """bool[R]: whether the row's sequence was released."""
    return self.code == Code.OK


class Truncated(NamedTuple):
  """What `truncate` did.

  Attributes:
    code: int32[B], a `Code` a slot.
    copies: B * G copies of page contents that the caller owes.
  """

  code: Array
  copies: Copies

  @property
  def ok(self) -> Array:
    """bool[B]: whether the slot has the length asked for."""
    return self.code == Code.OK


@verb
def free(state: CacheState, slots: Array) -> tuple[CacheState, Freed]:
  """Releases sequences; their slots become empty.

  Every page loses one reference, the last page of a sequence first, group by
  group; pages that nothing references go to the free queue and stay cached
  until they are taken from it. So a prefix outlives its tail.

  Args:
    state: the cache.
    slots: int32[R], slots in the order in which to release them, or bool[B],
      True for the slots to release.

  Returns:
    The cache, and per row OK, SKIPPED (masked out), BAD_SLOT or SLOT_EMPTY
    (also for a slot named twice).

  Examples:
    >>> import jax.numpy as jnp, jaxkv
    >>> state = jaxkv.init(jaxkv.CacheConfig(
    ...   num_pages=8, page_size=2, num_slots=2, pages_per_slot=4))
    >>> state, _ = jaxkv.allocate(state, jnp.asarray([3, 0], jnp.int32))
    >>> state, out = jaxkv.free(state, jnp.asarray([True, False]))
    >>> out.ok.tolist(), int(state.pool.queue.num_free)
    ([True, False], 7)
  """
  config = state.config
  if getattr(slots, "dtype", None) == jnp.bool_:
    check_array("slots", slots, (config.num_slots,), bool)
    numbers, mask = jnp.arange(config.num_slots, dtype=jnp.int32), slots
    again = jnp.zeros_like(mask)
  else:
    check_array("slots", slots, ("R",), jnp.int32)
    numbers, mask = slots, jnp.ones(slots.shape, bool)
    again = num_earlier(slots) > 0
  code = first_code(
    (~mask, Code.SKIPPED),
    (~in_range(state, numbers), Code.BAD_SLOT),
    (is_empty(state, numbers) | again, Code.SLOT_EMPTY),
  )
  place = masked.where_valid(code == Code.OK, numbers)
  first, held = (
    columns.at[:, place].get(mode="fill", fill_value=0).T
    for columns in (state.first_page, state.num_pages)
  )
  pool, table = page_table.shrink(
    state.pool,
    state.page_table,
    page_table.rows_of(place, first, held),
    unhashed_first=config.unhashed_first,
    cleared=config.no_page,
  )
  if config.recycles:
    table = page_table.fill_before(table, place, first, config.no_page)
  state = dataclasses.replace(
    state,
    page_table=table,
    num_pages=state.num_pages.at[:, place].set(0, mode="drop"),
    first_page=state.first_page.at[:, place].set(0, mode="drop"),
    length=masked.put(state.length, place, values=0),
    pool=pool,
    stats=counted(state.stats, failed=is_failure(code)),
    error=sticky(state.error, code),
  )
  return state, Freed(code)


@verb
def truncate(
  state: CacheState, lengths: Array, mask: Array | None = None
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

  Does not copy contents; apply `copies` (`jaxkv.kv.copy`) before writing.

  Pages of an encoder stay until the slot is empty. Groups that hold states go
  back to the end of a page whose state they still hold, or stay where they are
  and give back what was allocated ahead; their scratch pages move along.

  Pages that `recycle` gave back do not return: where a window or a state would
  be needed from one of them, the slot is refused. (To try tokens out, recycle
  after they were accepted, or keep the cache as it was.)

  All-or-nothing per slot. The batch differs from one call after the other:
  whether a page is shared, and whether a fresh page is there, is judged by the
  cache as it was before the call, and all pages are given back, in slot
  order, before the fresh ones are taken, in slot order.

  Args:
    state: the cache.
    lengths: int32[B], 0 .. `state.length[b]`.
    mask: bool[B], the slots that count; None for all.

  Returns:
    The cache, and per slot OK, SKIPPED, SLOT_EMPTY, BAD_LENGTH (negative or
    more than there is: truncate never grows), RECYCLED or OUT_OF_PAGES.

  Examples:
    >>> import jax.numpy as jnp, jaxkv
    >>> state = jaxkv.init(jaxkv.CacheConfig(
    ...   num_pages=8, page_size=2, num_slots=1, pages_per_slot=4))
    >>> five = jnp.asarray([5], jnp.int32)
    >>> state, _ = jaxkv.allocate(state, five)
    >>> state, _ = jaxkv.commit(state, jnp.zeros((1, 5), jnp.int32), five)
    >>> state, out = jaxkv.truncate(state, jnp.asarray([3], jnp.int32))
    >>> int(state.length[0]), int(state.num_pages[0, 0])
    (3, 2)
  """
  config = state.config
  check_array("lengths", lengths, (config.num_slots,), jnp.int32)
  mask = mask_or_all(mask, config.num_slots, "slot")
  slots = jnp.arange(config.num_slots, dtype=jnp.int32)
  code = first_code(
    (~mask, Code.SKIPPED),
    (is_empty(state, slots), Code.SLOT_EMPTY),
    ((lengths < 0) | (lengths > state.length), Code.BAD_LENGTH),
    (_needs_recycled(state, lengths), Code.RECYCLED),
  )
  held, full = state.num_pages.T, full_pages(config, lengths)
  partial = open_pages(config, lengths)
  reopens = partial & (full < full_pages(config, state.length))
  groups = jnp.arange(config.num_groups, dtype=jnp.int32)[None, :]
  pages = masked.take(state.page_table, groups, slots[:, None], full)
  shared = masked.take(state.pool.ref_count, pages) > 1
  shared &= reopens
  granted = grants.in_order(
    jnp.sum(shared, axis=1, dtype=jnp.int32),
    code == Code.OK,
    state.pool.queue.num_free,
  )
  code = jnp.where(
    (code == Code.OK) & ~granted, jnp.int32(Code.OUT_OF_PAGES), code
  )
  shared &= granted[:, None]
  reopens &= granted[:, None]
  keep = or_encoder(config, full + partial.astype(jnp.int32), held)
  keep = jnp.where((lengths > 0)[:, None], keep, 0)
  keep = jnp.where(granted[:, None], keep, held)
  scratch = recurrent.num_scratch(config, held, keep)
  scratch = jnp.where((lengths > 0)[:, None], scratch, 0)
  hashes, read = _rolled_back(state, lengths, granted)
  pages = masked.after(read, pages)
  state, copies = _shortened(
    state, keep, scratch, shared, pages, reopens & ~shared
  )
  state = dataclasses.replace(
    state,
    num_pages=(keep + scratch).T,
    first_page=jnp.minimum(state.first_page, keep.T),
    length=jnp.where(granted, lengths, state.length),
    hashes=hashes,
    stats=counted(state.stats, failed=is_failure(code)),
    error=sticky(state.error, code),
  )
  return state, Truncated(code, copies)


def _shortened(
  state: CacheState,
  keep: Array,
  scratch: Array,
  shared: Array,
  pages: Array,
  reopened: Array,
) -> tuple[CacheState, Copies]:
  """Gives pages past `keep` back and replaces shared last pages.

  Args:
    state: the cache.
    keep: int32[B, G], columns that remain.
    scratch: int32[B, G], columns at the end that remain behind them.
    shared: bool[B, G], where the last of them gets a fresh page.
    pages: int32[B, G], the pages in that column.
    reopened: bool[B, G], where it loses its key.
  """
  config = state.config
  slots = jnp.arange(config.num_slots, dtype=jnp.int32)
  held = state.num_pages.T
  fresh = shared.astype(jnp.int32)
  start = keep - fresh
  pool, _ = page_pool.unpublish(
    state.pool, pages.reshape(-1), reopened.reshape(-1)
  )
  pool, table = page_table.shrink(
    pool,
    state.page_table,
    page_table.rows_of(slots, start, held - scratch),
    unhashed_first=config.unhashed_first,
    cleared=config.no_page,
  )
  table = recurrent.drawn_back(config, table, held, keep, scratch)
  pool, table, evicted = page_table.grow(
    pool, table, page_table.rows_of(slots, start, start + fresh)
  )
  groups = jnp.arange(config.num_groups, dtype=jnp.int32)[None, :]
  taken = masked.take(table, groups, slots[:, None], start)
  no_page = jnp.int32(config.no_page)
  copies = Copies(
    src=jnp.where(shared, pages, no_page).reshape(-1),
    dst=jnp.where(shared, taken, no_page).reshape(-1),
  )
  stats = counted(state.stats, popped=shared, evicted=evicted)
  state = dataclasses.replace(state, pool=pool, page_table=table, stats=stats)
  return state, copies


def _needs_recycled(state: CacheState, lengths: Array) -> Array:
  """bool[B]: whether a shorter sequence would need a page that is gone."""
  config = state.config
  if not config.recycles:
    return lengths < 0
  lengths = jnp.clip(lengths, 0, state.length)
  gone = state.first_page.T
  needed = skipped_pages(config, lengths) < gone
  needed = (lengths > 0) & jnp.any(needed, axis=1)
  slots = jnp.arange(config.num_slots, dtype=jnp.int32)
  needed |= ~recurrent.can_go_on(
    config, state.page_table, slots, state.length, lengths
  )
  if state.hashes is None:
    return needed
  # Its last tokens are read back from the pages of one group.
  aligned = lengths // config.alignment * config.alignment
  group = config.text_group
  begin = jnp.maximum(aligned - 1, 0) // config.page_sizes[group]
  moved = aligned < state.length // config.alignment * config.alignment
  lost = begin < gone[:, group]
  if config.groups[group].holds_states:
    # Between two states nothing was kept, and at one there is no more to read.
    lost = aligned < lengths
  return needed | ((lengths > 0) & moved & lost)


def _rolled_back(
  state: CacheState, lengths: Array, granted: Array
) -> tuple[SlotHashes | None, Array]:
  """The chain and the tail as they were at the shorter length.

  Returns:
    They, and int32[], not negative: made of the keys that were read.
  """
  config, hashes, index = state.config, state.hashes, state.pool.index
  if hashes is None or index is None:
    return None, jnp.int32(0)
  slots = jnp.arange(config.num_slots, dtype=jnp.int32)
  group, size = config.text_group, config.page_sizes[config.text_group]
  group = jnp.full_like(slots, group)
  aligned = lengths // config.alignment
  first = aligned * (config.alignment // size)
  last = masked.take(state.page_table, group, slots, first - 1)
  key = hashing.group_key(config, prefix_index.key_of(index, last), group)
  chain = jnp.where((aligned == 0)[:, None], hashes.root, key)
  columns = jnp.arange(config.alignment // size, dtype=jnp.int32)[None]
  pages = masked.take(
    state.page_table, group[:, None], slots[:, None], first[:, None] + columns
  )
  tail = masked.take(index.tokens, pages)[..., :size]
  moved = (granted & (aligned < state.length // config.alignment))[:, None]
  hashes = dataclasses.replace(
    hashes,
    chain=jnp.where(moved, chain, hashes.chain),
    tail=jnp.where(moved, tail.reshape(hashes.tail.shape), hashes.tail),
  )
  return hashes, jnp.max(key >> 1).astype(jnp.int32)
