"""commit: tokens become final, full pages are hashed and published."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxkv.cache import hashing
from jaxkv.cache import indexing
from jaxkv.cache import page_pool
from jaxkv.cache import prefix_index
from jaxkv.cache import ragged
from jaxkv.cache.arguments import check_array
from jaxkv.cache.codes import Code
from jaxkv.cache.codes import first_code
from jaxkv.cache.codes import is_failure
from jaxkv.cache.codes import sticky
from jaxkv.cache.config import CacheConfig
from jaxkv.cache.page_pool import PagePool
from jaxkv.cache.ragged import Items
from jaxkv.cache.state import CacheState
from jaxkv.cache.state import SlotHashes
from jaxkv.cache.state import counted
from jaxkv.cache.verbs import verb

_SLOT_WINDOW = 32


class Committed(NamedTuple):
  """What `commit` did.

  Attributes:
    code: int32[B], a `Code` a slot.
    num_published: int32[B], pages of the slot that became full and cached.
  """

  code: Array
  num_published: Array

  @property
  def ok(self) -> Array:
    """bool[B]: whether the slot's tokens were taken."""
    return self.code == Code.OK


class _Full(NamedTuple):
  """The pages that a commit fills: `num_pages[b]` from column `first[b]` on."""

  first: Array
  num_pages: Array


class _Index(NamedTuple):
  """What publishing changes."""

  pool: PagePool
  page_table: Array
  chain: Array
  merged: Array


@verb
def commit(
  state: CacheState, tokens: Array, counts: Array
) -> tuple[CacheState, Committed]:
  """Declares tokens final: their K/V is written and will not change.

  Advances `length`. A page that becomes full is hashed, chained to the page
  before it, and published: from now on `match` and `admit` find it. With
  `merge_duplicates`, a page that equals a cached one is replaced by that one
  in the page table, and its own page goes back to the pool.

  All-or-nothing per slot. The pages must have been allocated.

  Args:
    state: the cache.
    tokens: int32[B, T]; of row b the first `counts[b]` are the slot's next
      tokens.
    counts: int32[B], 0 .. T; 0 leaves the slot as it is.

  Returns:
    The cache, and per slot OK, SLOT_EMPTY, BAD_LENGTH (negative or more than
    T) or NO_ROOM (beyond the slot's pages).

  Examples:
    >>> import jax.numpy as jnp, jaxkv
    >>> state = jaxkv.init(jaxkv.CacheConfig(
    ...   num_pages=8, page_size=2, num_slots=1, pages_per_slot=4))
    >>> state, _ = jaxkv.allocate(state, jnp.asarray([3], jnp.int32))
    >>> tokens = jnp.asarray([[7, 8, 9]], jnp.int32)
    >>> state, out = jaxkv.commit(state, tokens, jnp.asarray([3], jnp.int32))
    >>> int(state.length[0]), int(out.num_published[0])
    (3, 1)
  """
  config = state.config
  check_array("tokens", tokens, (config.num_slots, "T"), jnp.int32)
  check_array("counts", counts, (config.num_slots,), jnp.int32)
  held = jnp.min(state.num_pages, axis=0)
  code = first_code(
    ((counts != 0) & (held == 0), Code.SLOT_EMPTY),
    ((counts < 0) | (counts > tokens.shape[1]), Code.BAD_LENGTH),
    (counts > held * config.page_size - state.length, Code.NO_ROOM),
  )
  counts = jnp.where(code == Code.OK, counts, 0)
  length = state.length + counts
  first = state.length // config.page_size
  full = _Full(first, length // config.page_size - first)
  state = _published(state, tokens, counts, full)
  cached = full.num_pages * (config.num_groups if config.prefix_caching else 0)
  state = dataclasses.replace(
    state,
    length=length,
    stats=counted(state.stats, published=cached, failed=is_failure(code)),
    error=sticky(state.error, code),
  )
  return state, Committed(code, cached)


def _published(
  state: CacheState, tokens: Array, counts: Array, full: _Full
) -> CacheState:
  """Hashes and publishes full pages, slots that have any in windows."""
  config, hashes = state.config, state.hashes
  if hashes is None:
    return state
  fill = state.length % config.page_size
  most = (tokens.shape[1] + config.page_size - 1) // config.page_size
  window = min(config.num_slots, _SLOT_WINDOW)

  def publish_slots(carry: _Index, items: Items) -> _Index:
    slots = indexing.where_valid(items.valid, items.row)
    pages = _page_tokens(config, hashes, tokens, slots, fill, most)
    keys = hashing.chain_keys(
      indexing.take(carry.chain, slots), hashing.page_digests(config, pages)
    )
    num_full = indexing.take(full.num_pages, slots)
    last = jnp.maximum(num_full - 1, 0)[:, None, None]
    chain = indexing.put(
      carry.chain, slots, values=jnp.take_along_axis(keys, last, axis=1)[:, 0]
    )

    def publish(carry: _Index, items: Items) -> _Index:
      slot = indexing.take(slots, items.row, fill=indexing.NOWHERE)
      page, group = items.offset // config.num_groups, items.offset
      group = indexing.where_valid(items.valid, group % config.num_groups)
      place = (group, slot, indexing.take(full.first, slot) + page)
      key = indexing.take(keys, items.row, page)
      key = hashing.group_key(config, key, group)
      return _insert(
        config, carry, place, key, indexing.take(pages, items.row, page)
      )

    return ragged.for_each(
      num_full * config.num_groups,
      publish,
      carry._replace(chain=chain),
      window=prefix_index.INSERT_WINDOW,
    )

  index = ragged.for_each(
    (full.num_pages > 0).astype(jnp.int32),
    publish_slots,
    _Index(
      _with_room(config, state.pool, full),
      state.page_table,
      hashes.chain,
      full.num_pages[0] & 0,
    ),
    window=window,
  )
  tail = _new_tail(config, hashes.tail, tokens, counts, fill, full)
  return dataclasses.replace(
    state,
    page_table=index.page_table,
    hashes=dataclasses.replace(hashes, chain=index.chain, tail=tail),
    pool=index.pool,
    stats=counted(state.stats, merged=index.merged),
  )


def _page_tokens(
  config: CacheConfig,
  hashes: SlotHashes,
  tokens: Array,
  slots: Array,
  fill: Array,
  most: int,
) -> Array:
  """int32[W, P, S]: each slot's pending tokens, then its new ones, as pages."""
  column = jnp.arange(most * config.page_size, dtype=jnp.int32)[None, :]
  new = column - indexing.take(fill, slots)[:, None]
  pending = indexing.take(hashes.tail, slots[:, None], column)
  stream = jnp.where(
    new < 0, pending, indexing.take(tokens, slots[:, None], new)
  )
  return stream.reshape(slots.shape[0], most, config.page_size)


def _new_tail(
  config: CacheConfig,
  tail: Array,
  tokens: Array,
  counts: Array,
  fill: Array,
  full: _Full,
) -> Array:
  """int32[B, S]: the tokens after the last full page."""
  column = jnp.arange(config.page_size, dtype=jnp.int32)[None, :]
  new = column + (full.num_pages * config.page_size - fill)[:, None]
  slots = jnp.arange(config.num_slots, dtype=jnp.int32)[:, None]
  arrived = (new >= 0) & (new < counts[:, None])
  return jnp.where(arrived, indexing.take(tokens, slots, new), tail)


def _with_room(config: CacheConfig, pool: PagePool, full: _Full) -> PagePool:
  """Room in the free queue for every page that merging may give back."""
  if not config.merge_duplicates:
    return pool
  return page_pool.reserve(
    pool, jnp.sum(full.num_pages, dtype=jnp.int32) * config.num_groups
  )


def _insert(
  config: CacheConfig,
  carry: _Index,
  place: tuple[Array, Array, Array],
  keys: Array,
  tokens: Array,
) -> _Index:
  """Publishes the pages at places (group, slot, column) of the page table."""
  pool, table = carry.pool, carry.page_table
  assert pool.index is not None
  pages = indexing.take(table, *place)
  valid = pages > 0
  index = prefix_index.insert(pool.index, pages, keys, tokens, valid)
  pool = dataclasses.replace(pool, index=index)
  if not config.merge_duplicates:
    return carry._replace(pool=pool)
  first = prefix_index.lookup(index, keys, tokens)
  merges = valid & (first > 0) & (first != pages)
  owner = jnp.zeros_like(pages)
  pool, _ = page_pool.unpublish(pool, pages, merges)
  pool = page_pool.hold(pool, first, merges)
  pool, left = page_pool.drop(
    pool, pages, owner, merges, unhashed_first=config.unhashed_first
  )
  pool = page_pool.to_front(pool, pages, owner, left)
  column = indexing.where_valid(merges, place[2])
  return carry._replace(
    pool=pool,
    page_table=indexing.put(table, place[0], place[1], column, values=first),
    merged=carry.merged + jnp.sum(merges, dtype=jnp.int32),
  )
