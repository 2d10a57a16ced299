"""Publication: pages that tokens fill get their keys and enter the index."""

import dataclasses
import functools
from typing import NamedTuple

import chex
import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import loops
from jaxkv._src.arrays import sharding
from jaxkv._src.arrays.indexing import SlotRows
from jaxkv._src.arrays.loops import Items
from jaxkv._src.cache import telemetry
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.pool import page_pool
from jaxkv._src.cache.pool import page_table
from jaxkv._src.cache.pool.page_pool import PoolState
from jaxkv._src.cache.prefix import hashing
from jaxkv._src.cache.prefix import prefix_index
from jaxkv._src.cache.prefix import rules
from jaxkv._src.cache.prefix.hashing import SlotHashes
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import counted

ROWS_AT_ONCE = 32
"""Rows whose tokens are hashed in one trip."""


class _Stream(NamedTuple):
  """The tokens of rows from their last aligned position on.

  A is `CacheConfig.alignment`, and a position is aligned if A divides it. The
  stream of a row is its slot's tail, then its new tokens.

  Attributes:
    slots: int32[R], NOWHERE for a row that does not count.
    tokens: int32[R, T], the new tokens.
    tail: int32[R, A], the tokens before them.
    tail_length: int32[R], how many of the tail count.
    first: int32[R, G], the first column of the pages that become final.
    stop: int32[R, G], one past the last.
    num_aligned: int32[R], multiples of A before the stream.
    num_completed: int32[R], multiples of A that the stream completes.
  """

  slots: Array
  tokens: Array
  tail: Array
  tail_length: Array
  first: Array
  stop: Array
  num_aligned: Array
  num_completed: Array


class _Progress(NamedTuple):
  """What publishing changes.

  Attributes:
    pool: the pool.
    page_table: int32[B, G, M].
    chain: uint32[B, 4], see `SlotHashes`.
    num_published: int32[R], pages.
    num_merged: int32[], pages.
  """

  pool: PoolState
  page_table: Array
  chain: Array
  num_published: Array
  num_merged: Array


class _FinalPages(NamedTuple):
  """Pages that become final, and what the index and the log record of each.

  Attributes:
    place: slot, group and column in the page table, int32[W] each.
    keys: uint32[W, 4].
    tokens: int32[W, S].
    published: bool[W], those that can be part of a hit.
    parents: uint32[W, 4], the keys before them.
    roots: uint32[W, 4], the keys before their sequences.
  """

  place: tuple[Array, Array, Array]
  keys: Array
  tokens: Array
  published: Array
  parents: Array
  roots: Array


def publish(
  state: CacheState,
  rows: SlotRows,
  tokens: Array,
  counts: Array,
  known: Array | None = None,
  keys: Array | None = None,
) -> tuple[CacheState, Array]:
  """Advances slots by tokens, and hashes and publishes the pages they fill.

  Args:
    state: the cache.
    rows: the slots; those of rows that count are all different.
    tokens: int32[R, T].
    counts: int32[R], 0 .. T, how many of the tokens are new; 0 for a row that
      does not count.
    known: int32[R, G], the leading columns that have their keys already, where
      the slot's length does not tell it. The stream of such a row begins at
      its slot's first token.
    keys: uint32[R, P, 4], the chain's key after each page of the tokens, where
      they are hashed already. All rows begin at their slots' first tokens.

  Returns:
    The cache, and int32[R]: pages published.
  """
  chex.assert_shape(tokens, (counts.shape[0], None))
  chex.assert_equal_shape([counts, rows.slots])
  config, hashes, secret = state.config, state.hashes, state.secret
  before, counting = rows.read(state.length), counts > 0
  after = before + counts
  length = rows.write(state.length, counting, after)
  state = dataclasses.replace(state, length=length)
  zeros = sharding.zeros_like(counts)
  if hashes is None or secret is None:
    return state, zeros
  num_aligned = indexing.quotient(before, config.alignment)
  stream = _Stream(
    slots=rows.where(counting),
    tokens=tokens,
    tail=rows.read(hashes.tail),
    tail_length=indexing.remainder(before, config.alignment),
    first=rules.final_pages(config, before) if known is None else known,
    stop=rules.final_pages(config, after),
    num_aligned=num_aligned,
    num_completed=indexing.quotient(after, config.alignment) - num_aligned,
  )
  completes = jnp.any(stream.stop > stream.first, axis=1)
  completes |= stream.num_completed > 0
  done = loops.for_each(
    completes.astype(jnp.int32),
    functools.partial(_publish_rows, config, secret, hashes, stream, keys),
    _Progress(
      pool=_with_room(config, state.pool, stream),
      page_table=state.page_table,
      chain=hashes.chain,
      num_published=zeros,
      num_merged=zeros[0],
    ),
    window=min(counts.shape[0], ROWS_AT_ONCE),
  )
  tail = rows.write(hashes.tail, counting, _new_tail(config, stream, counts))
  state = dataclasses.replace(
    state,
    page_table=done.page_table,
    hashes=dataclasses.replace(hashes, chain=done.chain, tail=tail),
    pool=done.pool,
    stats=counted(
      state.stats,
      published_pages=done.num_published,
      merged_pages=done.num_merged,
    ),
  )
  return state, done.num_published


def lost_tokens(state: CacheState, rows: SlotRows, lengths: Array) -> Array:
  """bool[R]: whether `roll_back` would read tokens from a page that is gone."""
  config = state.config
  if state.hashes is None:
    return lengths < 0
  aligned = lengths // config.alignment * config.alignment
  length, gone = rows.read(state.length), rows.read(state.num_skipped_pages)
  moved = aligned < length // config.alignment * config.alignment
  group = config.token_group
  if config.groups[group].holds_states:
    # Only the ends of pages have a state, and there no token is read back.
    return moved & (aligned < lengths)
  begin = jnp.maximum(aligned - 1, 0) // config.page_sizes[group]
  return moved & (begin < gone[:, group])


def roll_back(
  state: CacheState,
  rows: SlotRows,
  lengths: Array,
  served: Array,
  last: Array,
  reopened: Array,
) -> CacheState:
  """Takes the chain and the tail of slots back to a shorter length.

  The tokens behind its last aligned position are read back from the pages of
  one group.

  Args:
    state: the cache.
    rows: the slots.
    lengths: int32[R].
    served: bool[R], the rows that count.
    last: int32[R, G], the last page of each row.
    reopened: bool[R, G], where that page leaves the index.
  """
  config, hashes, secret = state.config, state.hashes, state.secret
  index = state.pool.index
  if hashes is None or index is None or secret is None:
    return state
  size, slots = config.page_sizes[config.token_group], rows.slots
  group = jnp.full_like(slots, config.token_group)
  aligned = lengths // config.alignment
  steps = config.alignment // size
  first = aligned * steps
  before = indexing.take(state.page_table, slots, group, first - 1)
  key = hashing.group_key(secret, prefix_index.key_of(index, before), group)
  root = rows.read(hashes.root)
  chain = jnp.where((aligned == 0)[:, None], root, key)
  columns = first[:, None] + jnp.arange(steps, dtype=jnp.int32)[None]
  pages = indexing.take(
    state.page_table, slots[:, None], group[:, None], columns
  )
  tail = indexing.take(index.tokens, pages)[..., :size]
  tail = tail.reshape(slots.shape[0], config.alignment)
  moved = served & (aligned < rows.read(state.length) // config.alignment)
  hashes = dataclasses.replace(
    hashes,
    chain=rows.write(hashes.chain, moved, chain),
    tail=rows.write(hashes.tail, moved, tail),
  )
  # The keys are read before the index changes.
  last = loops.read_before(jnp.max(key >> 1).astype(jnp.int32), last)
  pool, _ = page_pool.unpublish(
    state.pool, last.reshape(-1), (reopened & served[:, None]).reshape(-1)
  )
  return dataclasses.replace(state, hashes=hashes, pool=pool)


def _publish_rows(
  config: CacheConfig,
  secret: Array,
  hashes: SlotHashes,
  stream: _Stream,
  known_keys: Array | None,
  done: _Progress,
  items: Items,
) -> _Progress:
  """Hashes the streams of some rows and publishes their final pages.

  Two windows are nested here: `window` are rows of the call, at most
  ROWS_AT_ONCE; inside, items are columns of those rows.
  """
  window = indexing.where_valid(items.valid, items.row)
  slots = indexing.take(stream.slots, window, fill=indexing.NOWHERE)
  pages = _stream_pages(config, stream, window)
  before = indexing.take(done.chain, slots)
  if known_keys is None:
    keys = hashing.row_keys(secret, before, pages)
  else:
    keys = indexing.take(known_keys, window)
  steps = config.alignment // config.page_size
  num_completed = indexing.take(stream.num_completed, window)
  last = jnp.maximum(num_completed * steps - 1, 0)[:, None, None]
  chain = indexing.put(
    done.chain,
    indexing.where_valid(num_completed > 0, slots),
    values=jnp.take_along_axis(keys, last, axis=1)[:, 0],
  )
  final = page_table.ranges(
    slots,
    indexing.take(stream.first, window),
    indexing.take(stream.stop, window),
  )
  page_steps = jnp.asarray(config.page_sizes, jnp.int32) // config.page_size

  def publish_columns(done: _Progress, items: Items) -> _Progress:
    place = page_table.place_of(final, items)
    slot, group, column = place
    own = indexing.quotient(
      items.row, config.num_groups
    )  # Position in `window`.
    row = indexing.take(window, own, fill=indexing.NOWHERE)
    step = indexing.take(page_steps, group)
    begin = column * step - indexing.take(stream.num_aligned, row) * steps
    key = indexing.take(keys, own, begin + step - 1)
    parent = indexing.take(keys, own, begin - 1)
    parent = jnp.where(
      (begin == 0)[:, None], indexing.take(before, own), parent
    )
    prompt_length, boundary = (
      None if values is None else indexing.take(values, slot)
      for values in (hashes.prompt_length, hashes.shared_prefix_boundary)
    )
    done, published = _insert(
      config,
      done,
      _FinalPages(
        place=place,
        keys=hashing.group_key(secret, key, group),
        tokens=_page_tokens(config, pages, own, begin, step),
        published=rules.published(
          config, column, group, prompt_length, boundary
        ),
        parents=hashing.group_key(secret, parent, group),
        roots=indexing.take(hashes.root, slot),
      ),
    )
    added = indexing.add(
      done.num_published, row, values=published.astype(jnp.int32)
    )
    return done._replace(num_published=added)

  return loops.for_each(
    final.counts,
    publish_columns,
    done._replace(chain=chain),
    window=prefix_index.INSERT_WINDOW,
  )


def _stream_pages(config: CacheConfig, stream: _Stream, rows: Array) -> Array:
  """int32[W, P, S]: the streams of rows int32[W], as pages."""
  tokens = stream.tokens
  most = (config.alignment - 1 + tokens.shape[1]) // config.page_size
  column = jnp.arange(most * config.page_size, dtype=jnp.int32)[None, :]
  new = column - indexing.take(stream.tail_length, rows)[:, None]
  before = indexing.take(stream.tail, rows[:, None], column)
  after = indexing.take(tokens, rows[:, None], new)
  pages = jnp.where(new < 0, before, after)
  return pages.reshape(rows.shape[0], most, config.page_size)


def _page_tokens(
  config: CacheConfig, pages: Array, row: Array, begin: Array, step: Array
) -> Array:
  """int32[W, S]: tokens of pages that span `step` pages of the stream."""
  most = max(config.page_sizes) // config.page_size
  if most == 1:
    return indexing.take(pages, row, begin)
  offset = jnp.arange(most, dtype=jnp.int32)[None]
  column = indexing.where_valid(offset < step[:, None], begin[:, None] + offset)
  held = indexing.take(pages, row[:, None], column)
  return held.reshape(row.shape[0], -1)


def _new_tail(config: CacheConfig, stream: _Stream, counts: Array) -> Array:
  """int32[R, A]: the tokens after the last aligned position."""
  column = jnp.arange(config.alignment, dtype=jnp.int32)[None, :]
  completed = stream.num_completed * config.alignment - stream.tail_length
  new = column + completed[:, None]
  rows = jnp.arange(counts.shape[0], dtype=jnp.int32)[:, None]
  arrived = (new >= 0) & (new < counts[:, None])
  return jnp.where(
    arrived, indexing.take(stream.tokens, rows, new), stream.tail
  )


def _with_room(
  config: CacheConfig, pool: PoolState, stream: _Stream
) -> PoolState:
  """Room in the free queue for every page that merging may give back."""
  if not config.merge_duplicates:
    return pool
  final = jnp.maximum(stream.stop - stream.first, 0)
  return page_pool.reserve(pool, jnp.sum(final, dtype=jnp.int32))


def _insert(
  config: CacheConfig, done: _Progress, final: _FinalPages
) -> tuple[_Progress, Array]:
  """Publishes pages; bool[W]: those that are cached now."""
  pool, table = done.pool, done.page_table
  assert pool.index is not None
  pages = indexing.take(table, *final.place)
  valid, again = pages > 0, sharding.zeros_like(final.published)
  if config.alignment > min(config.page_sizes):
    # A full page may have been shared while it waited for its key.
    valid &= ~page_pool.is_cached(pool, pages)
    again = valid & indexing.any_earlier(pages, valid)
  published = final.published & valid
  index = prefix_index.insert(
    pool.index,
    pages,
    final.keys,
    final.tokens,
    valid & ~again,
    published & ~again,
  )
  log = pool.events
  if log is not None:
    log = telemetry.log_stored(
      log,
      published & ~again,
      pages,
      final.place[1],
      column=final.place[2],
      key=final.keys,
      parent=final.parents,
      root=final.roots,
      tokens=final.tokens,
    )
  pool = dataclasses.replace(pool, index=index, events=log)
  done = done._replace(pool=pool)
  if config.merge_duplicates:
    return _merge(done, final, published, again)
  return done, published & ~again


def _merge(
  done: _Progress, final: _FinalPages, published: Array, again: Array
) -> tuple[_Progress, Array]:
  """Replaces pages by the page that was published first under their key."""
  pool, table = done.pool, done.page_table
  assert pool.index is not None
  pages = indexing.take(table, *final.place)
  first = prefix_index.lookup(pool.index, final.keys, final.tokens)
  merges = published & (first > 0) & (first != pages)
  owner = jnp.zeros_like(pages)
  pool, _ = page_pool.unpublish(pool, pages, merges & ~again)
  pool = page_pool.hold(pool, first, merges)
  pool, outside = page_pool.drop(pool, pages, owner, merges)
  pool = page_pool.to_front(pool, pages, owner, outside)
  slot, group, column = final.place
  column = indexing.where_valid(merges, column)
  done = done._replace(
    pool=pool,
    page_table=indexing.put(table, slot, group, column, values=first),
    num_merged=done.num_merged + jnp.sum(merges, dtype=jnp.int32),
  )
  return done, published & (merges | ~again)
