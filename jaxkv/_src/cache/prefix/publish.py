"""Keys and publication of the pages that tokens fill."""

import dataclasses
import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxkv._src.cache import masked
from jaxkv._src.cache import work_items as ragged
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.duplicates import named_before
from jaxkv._src.cache.groups.sizes import final_pages
from jaxkv._src.cache.groups.sizes import reusable
from jaxkv._src.cache.pool import page_pool
from jaxkv._src.cache.pool import page_table
from jaxkv._src.cache.pool.page_pool import PagePool
from jaxkv._src.cache.prefix import hashing
from jaxkv._src.cache.prefix import prefix_index
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import SlotHashes
from jaxkv._src.cache.state import counted
from jaxkv._src.cache.telemetry import event_log
from jaxkv._src.cache.work_items import Items

SLOT_WINDOW = 32
"""Slots whose streams are hashed at once."""


class _Settling(NamedTuple):
  """The pages whose keys are settled now, and the tokens in them.

  A is `CacheConfig.alignment`; the stream of a row begins at its slot's last
  multiple of A, with the tokens of its tail.

  Attributes:
    slots: int32[R], NOWHERE for a row that is none.
    tokens: int32[R, T], the new tokens.
    tail: int32[R, A], the tokens before them.
    fill: int32[R], how many of those count.
    first, stop: int32[R, G], columns of the page table.
    aligned: int32[R], multiples of A that were settled before.
    moved: int32[R], multiples of A that settle now.
  """

  slots: Array
  tokens: Array
  tail: Array
  fill: Array
  first: Array
  stop: Array
  aligned: Array
  moved: Array


class _Index(NamedTuple):
  """What publishing changes; `published` is int32[R], `merged` int32[]."""

  pool: PagePool
  page_table: Array
  chain: Array
  published: Array
  merged: Array


class _Pages(NamedTuple):
  """Pages whose keys are settled.

  Attributes:
    place: group, slot and column in the page table, int32[W] each.
    keys: uint32[W, 4].
    tokens: int32[W, S].
    listed: bool[W], those that a hit can use.
    parents: uint32[W, 4], keys before them.
    roots: uint32[W, 4], keys before their sequences.
  """

  place: tuple[Array, Array, Array]
  keys: Array
  tokens: Array
  listed: Array
  parents: Array
  roots: Array


def publish(
  state: CacheState,
  slots: Array | None,
  tokens: Array,
  counts: Array,
  known: Array | None = None,
) -> tuple[CacheState, Array]:
  """Advances slots by tokens: hashes them, publishes the pages they fill.

  Args:
    state: the cache.
    slots: int32[R], all different; None for all slots in order, R = B.
    tokens: int32[R, T].
    counts: int32[R], 0 .. T, how many of the tokens are new; 0 for a row that
      does not count.
    known: int32[R, G], columns that have their keys already, where that is not
      what the slot's length tells; such a row's tokens begin at token 0.

  Returns:
    The cache, and int32[R]: pages cached.
  """
  config, hashes = state.config, state.hashes
  before = state.length if slots is None else masked.take(state.length, slots)
  after = before + counts
  length = _written(state.length, slots, after)
  state = dataclasses.replace(state, length=length)
  if hashes is None:
    return state, jnp.zeros_like(counts)
  rows = jnp.arange(counts.shape[0], dtype=jnp.int32)
  aligned = before // config.alignment
  settling = _Settling(
    slots=rows if slots is None else slots,
    tokens=tokens,
    tail=hashes.tail if slots is None else masked.take(hashes.tail, slots),
    fill=before % config.alignment,
    first=final_pages(config, before) if known is None else known,
    stop=final_pages(config, after),
    aligned=aligned,
    moved=after // config.alignment - aligned,
  )
  settles = jnp.any(settling.stop > settling.first, axis=1)
  settles |= settling.moved > 0
  index = ragged.for_each(
    settles.astype(jnp.int32),
    functools.partial(_publish, config, hashes, settling),
    _Index(
      _with_room(config, state.pool, settling),
      state.page_table,
      hashes.chain,
      counts & 0,
      counts[0] & 0,
    ),
    window=min(counts.shape[0], SLOT_WINDOW),
  )
  tail = _written(hashes.tail, slots, _new_tail(config, settling, counts))
  state = dataclasses.replace(
    state,
    page_table=index.page_table,
    hashes=dataclasses.replace(hashes, chain=index.chain, tail=tail),
    pool=index.pool,
    stats=counted(state.stats, published=index.published, merged=index.merged),
  )
  return state, index.published


def _written(array: Array, slots: Array | None, rows: Array) -> Array:
  return rows if slots is None else masked.put(array, slots, values=rows)


def _publish(
  config: CacheConfig,
  hashes: SlotHashes,
  settling: _Settling,
  carry: _Index,
  items: Items,
) -> _Index:
  """Hashes the streams of some rows and publishes their settled pages."""
  window = masked.where_valid(items.valid, items.row)
  slots = masked.take(settling.slots, window, fill=masked.NOWHERE)
  pages = _page_tokens(config, settling, window)
  before = masked.take(carry.chain, slots)
  keys = hashing.row_keys(config, before, pages)
  steps = config.alignment // config.page_size
  moved = masked.take(settling.moved, window)
  last = jnp.maximum(moved * steps - 1, 0)[:, None, None]
  chain = masked.put(
    carry.chain,
    masked.where_valid(moved > 0, slots),
    values=jnp.take_along_axis(keys, last, axis=1)[:, 0],
  )
  rows = page_table.rows_of(
    slots,
    masked.take(settling.first, window),
    masked.take(settling.stop, window),
  )
  sizes = jnp.asarray(config.page_sizes, jnp.int32) // config.page_size

  def insert(carry: _Index, items: Items) -> _Index:
    place = page_table.place_of(rows, items)
    group, slot, column = place
    own, step = items.row // config.num_groups, masked.take(sizes, group)
    row = masked.take(window, own, fill=masked.NOWHERE)
    begin = column * step - masked.take(settling.aligned, row) * steps
    key = masked.take(keys, own, begin + step - 1)
    key = hashing.group_key(config, key, group)
    parent = masked.take(keys, own, begin - 1)
    first = masked.take(before, own)
    parent = jnp.where((begin == 0)[:, None], first, parent)
    settled = _Pages(
      place=place,
      keys=key,
      tokens=_held(config, pages, own, begin, step),
      listed=_listed(config, hashes, place),
      parents=hashing.group_key(config, parent, group),
      roots=masked.take(hashes.root, slot),
    )
    carry, listed = _insert(config, carry, settled)
    added = listed.astype(jnp.int32)
    return carry._replace(
      published=masked.add(carry.published, row, values=added)
    )

  return ragged.for_each(
    rows.stop - rows.start,
    insert,
    carry._replace(chain=chain),
    window=prefix_index.INSERT_WINDOW,
  )


def _listed(
  config: CacheConfig, hashes: SlotHashes, place: tuple[Array, Array, Array]
) -> Array:
  """bool[W]: whether hits can use the pages in these places."""
  group, slot, column = place
  prompt, junction = (
    None if values is None else masked.take(values, slot)
    for values in (hashes.prompt, hashes.junction)
  )
  return reusable(config, column, group, prompt, junction)


def _page_tokens(
  config: CacheConfig, settling: _Settling, rows: Array
) -> Array:
  """int32[W, P, S]: each row's pending tokens, then its new ones, as pages."""
  tokens = settling.tokens
  most = (config.alignment - 1 + tokens.shape[1]) // config.page_size
  column = jnp.arange(most * config.page_size, dtype=jnp.int32)[None, :]
  new = column - masked.take(settling.fill, rows)[:, None]
  pending = masked.take(settling.tail, rows[:, None], column)
  stream = jnp.where(new < 0, pending, masked.take(tokens, rows[:, None], new))
  return stream.reshape(rows.shape[0], most, config.page_size)


def _held(
  config: CacheConfig, pages: Array, row: Array, begin: Array, step: Array
) -> Array:
  """int32[W, A]: tokens of pages that span `step` pages of the stream."""
  most = max(config.page_sizes) // config.page_size
  if most == 1:
    return masked.take(pages, row, begin)
  offset = jnp.arange(most, dtype=jnp.int32)[None]
  column = masked.where_valid(offset < step[:, None], begin[:, None] + offset)
  held = masked.take(pages, row[:, None], column)
  return held.reshape(row.shape[0], -1)


def _new_tail(config: CacheConfig, settling: _Settling, counts: Array) -> Array:
  """int32[R, A]: the tokens after the last aligned place."""
  column = jnp.arange(config.alignment, dtype=jnp.int32)[None, :]
  moved = settling.moved * config.alignment - settling.fill
  new = column + moved[:, None]
  rows = jnp.arange(counts.shape[0], dtype=jnp.int32)[:, None]
  arrived = (new >= 0) & (new < counts[:, None])
  taken = masked.take(settling.tokens, rows, new)
  return jnp.where(arrived, taken, settling.tail)


def _with_room(
  config: CacheConfig, pool: PagePool, settling: _Settling
) -> PagePool:
  """Room in the free queue for every page that merging may give back."""
  if not config.merge_duplicates:
    return pool
  settled = jnp.maximum(settling.stop - settling.first, 0)
  return page_pool.reserve(pool, jnp.sum(settled, dtype=jnp.int32))


def _insert(
  config: CacheConfig, carry: _Index, settled: _Pages
) -> tuple[_Index, Array]:
  """Publishes pages; bool[W]: those that are cached now."""
  pool, table = carry.pool, carry.page_table
  assert pool.index is not None
  pages = masked.take(table, *settled.place)
  valid, again = pages > 0, jnp.zeros_like(settled.listed)
  if config.alignment > min(config.page_sizes):
    # A full page that waited for its key may have been shared meanwhile.
    valid &= ~page_pool.is_cached(pool, pages)
    again = valid & named_before(pages, valid)
  listed = settled.listed & valid
  index = prefix_index.insert(
    pool.index,
    pages,
    settled.keys,
    settled.tokens,
    valid & ~again,
    listed & ~again,
  )
  events = pool.events
  if events is not None:
    group, _, column = settled.place
    events = event_log.stored(
      events,
      listed & ~again,
      pages,
      group,
      column=column,
      key=settled.keys,
      parent=settled.parents,
      root=settled.roots,
      tokens=settled.tokens,
    )
  pool = dataclasses.replace(pool, index=index, events=events)
  carry = carry._replace(pool=pool)
  if config.merge_duplicates:
    return _merged(config, carry, settled, listed, again)
  return carry, listed & ~again


def _merged(
  config: CacheConfig,
  carry: _Index,
  settled: _Pages,
  listed: Array,
  again: Array,
) -> tuple[_Index, Array]:
  """Puts the first page of each key where a later one was published."""
  pool, table = carry.pool, carry.page_table
  assert pool.index is not None
  pages = masked.take(table, *settled.place)
  first = prefix_index.lookup(pool.index, settled.keys, settled.tokens)
  merges = listed & (first > 0) & (first != pages)
  owner = jnp.zeros_like(pages)
  pool, _ = page_pool.unpublish(pool, pages, merges & ~again)
  pool = page_pool.hold(pool, first, merges)
  pool, left = page_pool.drop(
    pool, pages, owner, merges, unhashed_first=config.unhashed_first
  )
  pool = page_pool.to_front(pool, pages, owner, left)
  group, slot, column = settled.place
  column = masked.where_valid(merges, column)
  carry = carry._replace(
    pool=pool,
    page_table=masked.put(table, group, slot, column, values=first),
    merged=carry.merged + jnp.sum(merges, dtype=jnp.int32),
  )
  return carry, listed & (merges | ~again)
