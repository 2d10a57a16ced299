"""Publication: full pages get their keys and enter the prefix index."""

import dataclasses
import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import elementwise
from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import loops
from jaxkv._src.arrays import sharding
from jaxkv._src.arrays.indexing import SlotRows
from jaxkv._src.arrays.loops import Items
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.pool import page_pool
from jaxkv._src.cache.pool import page_table
from jaxkv._src.cache.pool import recurrent
from jaxkv._src.cache.pool.page_pool import PoolState
from jaxkv._src.cache.prefix import hashing
from jaxkv._src.cache.prefix import prefix_index
from jaxkv._src.cache.prefix import prefix_rules
from jaxkv._src.cache.prefix.hashing import SlotHashes
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.stats import counted

ROWS_AT_ONCE = 32
"""An iteration hashes at least this many rows, or all rows of the call."""


class _Stream(NamedTuple):
  """For each row, the tokens that the chained hash of its slot does not cover.

  A is `CacheConfig.alignment`. The chained hash of a slot covers a multiple of
  A tokens. The slot's tail is the tokens after this multiple. A row's stream is
  the tail, then the new tokens. A page becomes final when it gets its key.

  Attributes:
    slots: int32[R], NOWHERE for a row without new tokens.
    tokens: int32[R, T], the new tokens.
    tail: int32[R, A], the tail of each row's slot.
    tail_length: int32[R], the number of valid tokens in the tail.
    first: int32[R, G], the first column of the pages that become final.
    stop: int32[R, G], one past the last such column.
    num_aligned: int32[R], the number of tokens before the stream, divided by A.
    num_completed: int32[R], the blocks of A tokens that new tokens complete.
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
  """The arrays that publishing changes.

  Attributes:
    pool: the pool.
    page_table: int32[B, G, M].
    chain: uint32[B, 4], see `SlotHashes`.
    num_published: int32[R], the number of pages published or merged.
    num_merged: int32[], the number of pages replaced by an equal cached page.
  """

  pool: PoolState
  page_table: Array
  chain: Array
  num_published: Array
  num_merged: Array


class _FinalPages(NamedTuple):
  """W pages that become final, with their data for the index.

  Attributes:
    place: slot, group and column in the page table, int32[W] each.
    keys: uint32[W, 4], the keys of the pages.
    tokens: int32[W, S], their tokens.
    published: bool[W], the pages to publish.
    reasons: int32[W], see `PrefixIndex.entry`; None if it has none.
  """

  place: tuple[Array, Array, Array]
  keys: Array
  tokens: Array
  published: Array
  reasons: Array | None


def publish(
  state: CacheState,
  rows: SlotRows,
  tokens: Array,
  num_tokens: Array,
  first: Array | None = None,
) -> tuple[CacheState, Array]:
  """Appends tokens to slots, and publishes the pages that become final.

  Args:
    state: the cache.
    rows: the slots; rows with new tokens must have distinct slots.
    tokens: int32[R, T].
    num_tokens: int32[R], 0 .. T, the number of new tokens of each row.
    first: int32[R, G], the first column without a key. None to compute it from
      the length. Required if a slot has length 0 but already holds the cached
      pages of the first new tokens.

  Returns:
    The cache, and int32[R]: the number of pages published or merged.
  """
  chex.assert_shape(tokens, (num_tokens.shape[0], None))
  chex.assert_equal_shape([num_tokens, rows.slots])
  config = state.config
  hashes = state.hashes
  secret = state.secret
  start = rows.read(state.length)
  counting = num_tokens > 0
  length = start + num_tokens
  lengths = rows.write(state.length, counting, length)
  state = dataclasses.replace(state, length=lengths)
  zeros = sharding.zeros_like(num_tokens)
  if hashes is None or secret is None:
    return state, zeros
  num_aligned = elementwise.quotient(start, config.alignment)
  stream = _Stream(
    slots=rows.where(counting),
    tokens=tokens,
    tail=rows.read(hashes.tail),
    tail_length=elementwise.remainder(start, config.alignment),
    first=prefix_rules.final_pages(config, start) if first is None else first,
    stop=prefix_rules.final_pages(config, length),
    num_aligned=num_aligned,
    num_completed=elementwise.quotient(length, config.alignment) - num_aligned,
  )
  # The loop visits only rows with a final page or a new multiple of A tokens.
  completes = jnp.any(stream.stop > stream.first, axis=1)
  completes |= stream.num_completed > 0
  done = loops.for_each(
    completes.astype(jnp.int32),
    functools.partial(_publish_rows, config, secret, hashes, stream),
    _Progress(
      pool=_reserve_queue_room(config, state.pool, stream),
      page_table=state.page_table,
      chain=hashes.chain,
      num_published=zeros,
      num_merged=zeros[0],
    ),
    window=_rows_at_once(config, *tokens.shape),
    longest=1,
  )
  tail = rows.write(
    hashes.tail, counting, _new_tail(config, stream, num_tokens)
  )
  state = dataclasses.replace(
    state,
    page_table=done.page_table,
    hashes=dataclasses.replace(hashes, chain=done.chain, tail=tail),
    pool=done.pool,
    counts=counted(
      state.counts,
      published_pages=done.num_published,
      merged_pages=done.num_merged,
    ),
  )
  return state, done.num_published


def _rows_at_once(config: CacheConfig, num_rows: int, num_tokens: int) -> int:
  """Returns the number of rows whose tokens are hashed in one iteration."""
  # Only rows that complete a page are hashed. If each row gets `num_tokens` new
  # tokens, the rows complete about `expected` pages in total.
  expected = num_rows * num_tokens // config.page_size
  return min(num_rows, max(ROWS_AT_ONCE, min(expected, loops.WINDOW)))


def needs_skipped_page(
  state: CacheState, rows: SlotRows, lengths: Array
) -> Array:
  """Returns bool[R]: rows for which `roll_back` would read a skipped page."""
  config = state.config
  if state.hashes is None:
    return lengths < 0
  aligned = lengths // config.alignment * config.alignment
  length = rows.read(state.length)
  num_skipped = rows.read(state.num_skipped_pages)
  moved = aligned < length // config.alignment * config.alignment
  group = config.token_group
  if config.groups[group].holds_states:
    # A recurrent group lacks most pages from which the tail would be read. So
    # the slot can only go back to a multiple of A, where the tail is empty.
    return moved & (aligned < lengths)
  first_page = jnp.maximum(aligned - 1, 0) // config.page_sizes[group]
  return moved & (first_page < num_skipped[:, group])


def roll_back(
  state: CacheState,
  rows: SlotRows,
  lengths: Array,
  is_served: Array,
  end_page: Array,
  reopened: Array,
) -> CacheState:
  """Rolls back `SlotHashes.chain` and `tail`, and unpublishes reopened pages.

  Args:
    state: the cache.
    rows: the slots.
    lengths: int32[R], the new lengths.
    is_served: bool[R], the rows to roll back.
    end_page: int32[R, G], the page in which each row ends at its new length, if
      the page was full before; else NO_PAGE.
    reopened: bool[R, G], True if the page in `end_page` must leave the index.
  """
  config = state.config
  hashes = state.hashes
  secret = state.secret
  index = state.pool.index
  if hashes is None or index is None or secret is None:
    return state
  # The index keeps the keys and tokens of full pages. So the chain and the tail
  # are read from the entries of one group's pages, and nothing is hashed again.
  page_size = config.page_sizes[config.token_group]
  slots = rows.slots
  group = jnp.full_like(slots, config.token_group)
  aligned = lengths // config.alignment
  steps = config.alignment // page_size
  first_column = aligned * steps
  parent = indexing.take(state.page_table, slots, group, first_column - 1)
  key = hashing.group_key(secret, prefix_index.key_of(index, parent), group)
  chain = jnp.where((aligned == 0)[:, None], rows.read(hashes.root), key)
  columns = first_column[:, None] + jnp.arange(steps, dtype=jnp.int32)[None]
  pages = indexing.take(
    state.page_table, slots[:, None], group[:, None], columns
  )
  tail = indexing.take(index.tokens, pages)[..., :page_size]
  tail = tail.reshape(slots.shape[0], config.alignment)
  # A row moves if it goes back past a multiple of A. Otherwise its chain and
  # tail stay the same, but fewer tokens of the tail are valid.
  moved = is_served & (aligned < rows.read(state.length) // config.alignment)
  hashes = dataclasses.replace(
    hashes,
    chain=rows.write(hashes.chain, moved, chain),
    tail=rows.write(hashes.tail, moved, tail),
  )
  reopened &= is_served[:, None]
  # The keys must be read before the index changes. Without this dependency, XLA
  # would copy the index.
  end_page = loops.read_before(jnp.max(key >> 1).astype(jnp.int32), end_page)
  if state.pool.offload is not None:
    # With offload pages, a later move writes to `index.tokens`. So the tokens
    # must also be read before the index changes.
    end_page = loops.read_before(jnp.max(tail & jnp.int32(2**31 - 1)), end_page)
  pool, _ = page_pool.unpublish(
    state.pool, end_page.reshape(-1), reopened.reshape(-1)
  )
  return dataclasses.replace(state, hashes=hashes, pool=pool)


def _publish_rows(
  config: CacheConfig,
  secret: Array,
  hashes: SlotHashes,
  stream: _Stream,
  done: _Progress,
  items: Items,
) -> _Progress:
  """Hashes the streams of a window of rows and publishes their final pages."""
  # The loop at the end visits the columns of these rows' final pages.
  row_window = indexing.where_valid(items.valid, items.row)
  slots = indexing.take(stream.slots, row_window, fill=indexing.NOWHERE)
  pages = _stream_pages(config, stream, row_window)
  keys = hashing.row_keys(secret, indexing.take(done.chain, slots), pages)
  steps = config.alignment // config.page_size
  num_completed = indexing.take(stream.num_completed, row_window)
  last_step = jnp.maximum(num_completed * steps - 1, 0)[:, None, None]
  # The chain advances to the last multiple of A. Later tokens go to the tail.
  chain = indexing.put(
    done.chain,
    indexing.where_valid(num_completed > 0, slots),
    values=jnp.take_along_axis(keys, last_step, axis=1)[:, 0],
  )
  final = page_table.ranges(
    slots,
    indexing.take(stream.first, row_window),
    indexing.take(stream.stop, row_window),
  )
  page_steps = jnp.asarray(config.page_sizes, jnp.int32) // config.page_size

  def publish_columns(done: _Progress, items: Items) -> _Progress:
    table_index = page_table.place_of(final, items)
    slot, group, column = table_index
    # `final` has G ranges for each row of `row_window`.
    position = elementwise.quotient(items.row, config.num_groups)
    row = indexing.take(row_window, position, fill=indexing.NOWHERE)
    step = indexing.take(page_steps, group)
    first_page = column * step - indexing.take(stream.num_aligned, row) * steps
    key = indexing.take(keys, position, first_page + step - 1)
    prompt_length, boundary = (
      None if values is None else indexing.take(values, slot)
      for values in (hashes.prompt_length, hashes.shared_prefix_boundary)
    )
    done, published = _insert(
      config,
      done,
      _FinalPages(
        place=table_index,
        keys=hashing.group_key(secret, key, group),
        tokens=_page_tokens(config, pages, position, first_page, step),
        published=prefix_rules.published(
          config, column, group, prompt_length, boundary
        ),
        reasons=_reasons(config, hashes, table_index),
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
    longest=pages.shape[1],
  )


def _reasons(
  config: CacheConfig, hashes: SlotHashes, place: tuple[Array, Array, Array]
) -> Array | None:
  """Returns int32[W]: the reasons to keep pages, see `prefix_rules`."""
  slot, group, column = place
  if hashes.shared_tokens is None:
    return None
  page_size = indexing.take(jnp.asarray(config.page_sizes, jnp.int32), group)
  # The column of an invalid item is too large for the product.
  end = (jnp.where(column < indexing.NOWHERE, column, 0) + 1) * page_size
  of_slots = jax.tree.map(lambda array: indexing.take(array, slot), hashes)
  reason = prefix_rules.reason_to_keep(config, end, of_slots)
  is_state = indexing.take(recurrent.holds_states(config)[0], group, fill=False)
  return jnp.where(is_state, reason, prefix_rules.SHARED)


def _stream_pages(config: CacheConfig, stream: _Stream, rows: Array) -> Array:
  """Returns int32[W, P, S]: the streams of rows, int32[W], cut into pages."""
  tokens = stream.tokens
  num_pages = (config.alignment - 1 + tokens.shape[1]) // config.page_size
  column = jnp.arange(num_pages * config.page_size, dtype=jnp.int32)[None, :]
  new = column - indexing.take(stream.tail_length, rows)[:, None]
  tail_tokens = indexing.take(stream.tail, rows[:, None], column)
  new_tokens = indexing.take(tokens, rows[:, None], new)
  pages = jnp.where(new < 0, tail_tokens, new_tokens)
  return pages.reshape(rows.shape[0], num_pages, config.page_size)


def _page_tokens(
  config: CacheConfig, pages: Array, row: Array, start: Array, step: Array
) -> Array:
  """Returns int32[W, S]: the tokens of `step` stream pages from `start` on."""
  max_step = max(config.page_sizes) // config.page_size
  if max_step == 1:
    return indexing.take(pages, row, start)
  offset = jnp.arange(max_step, dtype=jnp.int32)[None]
  column = indexing.where_valid(offset < step[:, None], start[:, None] + offset)
  return indexing.take(pages, row[:, None], column).reshape(row.shape[0], -1)


def _new_tail(config: CacheConfig, stream: _Stream, num_tokens: Array) -> Array:
  """Returns int32[R, A]: the tokens after the last multiple of A tokens."""
  column = jnp.arange(config.alignment, dtype=jnp.int32)[None, :]
  completed = stream.num_completed * config.alignment - stream.tail_length
  # Negative columns exist only if the new tokens complete no multiple of A.
  # These columns keep the tokens of the old tail.
  new = column + completed[:, None]
  rows = jnp.arange(num_tokens.shape[0], dtype=jnp.int32)[:, None]
  is_new = (new >= 0) & (new < num_tokens[:, None])
  return jnp.where(is_new, indexing.take(stream.tokens, rows, new), stream.tail)


def _reserve_queue_room(
  config: CacheConfig, pool: PoolState, stream: _Stream
) -> PoolState:
  """Makes room in the free queue for the pages that merging can free."""
  if not config.merge_duplicates:
    return pool
  final = jnp.maximum(stream.stop - stream.first, 0)
  return page_pool.reserve(pool, jnp.sum(final, dtype=jnp.int32))


def _insert(
  config: CacheConfig, done: _Progress, final: _FinalPages
) -> tuple[_Progress, Array]:
  """Publishes pages; also returns bool[W], the pages published or merged."""
  pool = done.pool
  assert pool.index is not None
  pages = indexing.take(done.page_table, *final.place)
  # Columns outside of a window hold the null page, which gets no key.
  valid = pages > 0
  repeated = sharding.zeros_like(final.published)
  if config.alignment > min(config.page_sizes):
    # If A exceeds a page size, a page can be full before it gets a key. If
    # forks share this page, each of them publishes it, in one or more calls.
    valid &= ~page_pool.is_cached(pool, pages)
    repeated = valid & indexing.any_earlier(pages, valid)
  published = final.published & valid
  index = prefix_index.insert(
    pool.index,
    pages,
    final.keys,
    final.tokens,
    valid & ~repeated,
    published & ~repeated,
    final.reasons,
  )
  done = done._replace(pool=dataclasses.replace(pool, index=index))
  if config.merge_duplicates:
    return _merge(config, done, final, published, repeated)
  return done, published & ~repeated


def _merge(
  config: CacheConfig,
  done: _Progress,
  final: _FinalPages,
  published: Array,
  repeated: Array,
) -> tuple[_Progress, Array]:
  """Replaces pages by the earliest published device page that is equal."""
  pool = done.pool
  table = done.page_table
  assert pool.index is not None
  pages = indexing.take(table, *final.place)
  equal_pages = prefix_index.lookup(
    pool.index, final.keys, final.tokens, preferred=config.preferred_pages
  )
  merges = published & (equal_pages > 0) & (equal_pages != pages)
  owner = jnp.zeros_like(pages)
  # A duplicate leaves the index before it is dropped. So `drop` treats it as
  # not cached, and with `unhashed_first` it goes to the front of the queue.
  pool, _ = page_pool.unpublish(pool, pages, merges & ~repeated)
  pool = page_pool.hold(pool, equal_pages, merges)
  pool, outside = page_pool.drop(pool, pages, owner, merges)
  pool = page_pool.to_front(pool, pages, owner, outside)
  slot, group, column = final.place
  column = indexing.where_valid(merges, column)
  done = done._replace(
    pool=pool,
    page_table=indexing.put(table, slot, group, column, values=equal_pages),
    num_merged=done.num_merged + jnp.sum(merges, dtype=jnp.int32),
  )
  return done, published & (merges | ~repeated)
