"""The prefix index: a hash table from page keys to cached pages.

A bucket holds eight page numbers. `insert` follows the probe sequence of a
page's key to the first bucket with an empty place, and stores the page there.
`overflow` counts, for each bucket, the pages that passed the bucket because it
was full. A lookup continues past a bucket only if this count is not zero.
`remove` decrements the same counts, so tombstones are not needed. Any number of
pages can have the same key. (This is the scheme of F14: Bronson and Shi,
"Open-sourcing F14 for faster, more memory-efficient hash tables", 2019.)
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv._src.arrays import elementwise
from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import loops
from jaxkv._src.arrays import sharding
from jaxkv._src.arrays.indexing import NOWHERE
from jaxkv._src.cache.prefix.hashing import KEY_WORDS

BUCKET_PAGES = 8
# Small, because `insert` compares all pairs of its pages.
INSERT_WINDOW = 32
# Columns of `PrefixIndex.entry`.
_POSITION = KEY_WORDS + 1
_REASON = KEY_WORDS + 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefixIndex:
  """The cached pages and their keys.

  Z is the number of buckets, a power of two of at least N / 2. Here N is
  `CacheConfig.num_numbers`, and S is the largest page size of a group.

  Attributes:
    buckets: page numbers, 0 for an empty place.  # int32[Z, 8]
    overflow: the number of cached pages that passed the bucket.  # int32[Z]
    entry: for each page, its key, its stamp (the value of `clock` when the key
      was stored), and its position in the flattened buckets, NOWHERE if the
      page is not cached. With a `StateRetention`, also the reason to keep the
      page, see `prefix_rules`.  # uint32[N, 6 or 7]
    tokens: the tokens of each full page, padded with zeros. When a page leaves
      the index, its tokens and key stay readable until the page is filled
      again.  # int32[N, S]
    clock: the number of keys that `insert` stored, modulo 2**32.  # uint32[]
  """

  buckets: Array
  overflow: Array
  entry: Array  # One array for all values, so publishing needs one scatter.
  tokens: Array
  clock: Array


class Moving(NamedTuple):
  """The entries of pages whose contents move to other pages.

  Attributes:
    entry: uint32[X, 6 or 7], see `PrefixIndex.entry`.
    tokens: int32[X, S].
    valid: bool[X], the pages that were cached.
  """

  entry: Array
  tokens: Array
  valid: Array


class CachedPages(NamedTuple):
  """The cached pages among X pages.

  Attributes:
    valid: bool[X], True for cached pages.
    stamps: uint32[X], their stamps, see `PrefixIndex.entry`.
    total: int32[], the number of cached pages.
  """

  valid: Array
  stamps: Array
  total: Array


def init(
  num_pages: int, page_size: int, *, has_reasons: bool = False
) -> PrefixIndex:
  """Returns an empty index; `has_reasons` adds them to `entry`."""
  bucket_count = num_buckets(num_pages)
  columns = _REASON + int(has_reasons)
  return PrefixIndex(
    buckets=jnp.zeros((bucket_count, BUCKET_PAGES), jnp.int32),
    overflow=jnp.zeros((bucket_count,), jnp.int32),
    entry=_without_positions(jnp.zeros((num_pages, columns), jnp.uint32)),
    tokens=jnp.zeros((num_pages, page_size), jnp.int32),
    clock=jnp.uint32(0),
  )


def num_buckets(num_pages: int) -> int:
  """Returns the number of buckets of an index."""
  # There are at least 4 N places, so under one bucket in a thousand overflows.
  return 1 << (-(-num_pages // 2) - 1).bit_length()


def contains(index: PrefixIndex, pages: Array) -> Array:
  """Returns bool[...]: True for cached pages."""
  return position_of(index, pages) < NOWHERE


def position_of(index: PrefixIndex, pages: Array) -> Array:
  """Returns int32[...]: positions in the flattened buckets, or NOWHERE."""
  column = jnp.int32(_POSITION)
  return indexing.take(index.entry, pages, column, fill=NOWHERE).astype(
    jnp.int32
  )


def has_passed(index: PrefixIndex, pages: Array) -> Array:
  """Returns bool[...]: True for cached pages outside of their first bucket."""
  keys, _, position = _split(indexing.take(index.entry, pages, fill=NOWHERE))
  home = elementwise.quotient(position, BUCKET_PAGES)
  return (position < NOWHERE) & (home != _first_bucket(index, keys))


def key_of(index: PrefixIndex, pages: Array) -> Array:
  """Returns uint32[..., 4]: the keys of full pages."""
  return _split(indexing.take(index.entry, pages))[0]


def reason_of(index: PrefixIndex, pages: Array) -> Array:
  """Returns int32[...]: the reason to keep each cached page."""
  reason = indexing.take(index.entry, pages, jnp.int32(_REASON))
  return reason.astype(jnp.int32)


def lookup(
  index: PrefixIndex,
  keys: Array,
  tokens: Array,
  *,
  preferred: int | None = None,
  accepts: Callable[[Array], Array] | None = None,
) -> Array:
  """Finds cached pages by key and tokens.

  Args:
    index: the index.
    keys: uint32[X, 4].
    tokens: int32[X, S], the tokens of the pages. A page with the same key and
      other tokens (a collision) is not found.
    preferred: pages with numbers below this number are preferred; None for no
      preference.
    accepts: a function from pages, int32[X, 8], to bool[X, 8], False for pages
      that must not be found; None to find all pages.

  Returns:
    int32[X]: the page with the key and the tokens; 0 for none. Of several such
    pages, the page published first, but preferred pages before other pages.
  """
  chex.assert_shape(keys, (None, KEY_WORDS))
  chex.assert_shape(tokens, (keys.shape[0], index.tokens.shape[1]))

  def visit(loop):
    bucket, active, best, best_age, limit = loop
    candidates = indexing.take(
      index.buckets, indexing.where_valid(active, bucket)
    )
    key, stamp, _ = _split(indexing.take(index.entry, candidates))
    # Ages are compared instead of stamps, because the clock can wrap around.
    # `insert` advances the clock after it takes a stamp, so the age of a page
    # is never 0. Here an age of 0 means that the page does not match.
    age = index.clock - stamp
    if preferred is not None:
      # The highest bit makes preferred pages older than all other pages. Only
      # the lower bits hold the age, so ages of 2**31 or more count as equal.
      is_preferred = (candidates < preferred).astype(jnp.uint32)
      age = jnp.minimum(age, jnp.uint32(2**31 - 1)) | is_preferred << 31
    matches = jnp.all(key == keys[:, None, :], axis=-1) & (candidates > 0)
    if accepts is not None:
      matches &= accepts(candidates)
    age = jnp.where(matches & (age <= limit[:, None]), age, jnp.uint32(0))
    oldest = jnp.argmax(age, axis=-1).astype(jnp.int32)[:, None]
    page = jnp.take_along_axis(candidates, oldest, axis=-1)[:, 0]
    age = jnp.take_along_axis(age, oldest, axis=-1)[:, 0]
    best = jnp.where(age > best_age, page, best)
    best_age = jnp.maximum(age, best_age)
    following = _next_bucket(index, keys, bucket)
    probes = active & (indexing.take(index.overflow, bucket) > 0)
    probes &= following != first_bucket  # Ends after all buckets.
    # Rows of `index.tokens` are long, so only the row of the best page is read.
    # If the tokens differ (a collision), the search restarts for younger pages.
    has_tokens = jnp.all(indexing.take(index.tokens, best) == tokens, axis=-1)
    restarts = active & ~probes & (best > 0) & ~has_tokens
    return (
      jnp.where(restarts, first_bucket, following),
      probes | restarts,
      jnp.where(restarts, 0, best),
      jnp.where(restarts, jnp.uint32(0), best_age),
      jnp.where(restarts, best_age - 1, limit),
    )

  first_bucket = _first_bucket(index, keys)
  zero = sharding.zeros_like(first_bucket)
  age = sharding.zeros_like(keys[:, 0])
  start = (first_bucket, first_bucket >= 0, zero, age, ~age)
  return lax.while_loop(lambda loop: jnp.any(loop[1]), visit, start)[2]


def insert(
  index: PrefixIndex,
  pages: Array,
  keys: Array,
  tokens: Array,
  valid: Array,
  published: Array,
  reasons: Array | None = None,
) -> PrefixIndex:
  """Stores the keys and tokens of valid pages, and publishes some pages.

  Args:
    index: the index.
    pages: int32[X], distinct and not cached; they get stamps in this order. The
      cost grows with the square of X. Programs for CPUs pass INSERT_WINDOW
      pages in a call, and programs for GPUs pass more, see `loops.for_each`.
    keys: uint32[X, 4].
    tokens: int32[X, S].
    valid: bool[X].
    published: bool[X], the pages to publish. Other valid pages only get a key
      and tokens.
    reasons: int32[X], see `PrefixIndex.entry`; None if it has none.
  """
  chex.assert_shape(keys, (pages.size, KEY_WORDS))
  chex.assert_shape(tokens, (pages.size, index.tokens.shape[1]))
  chex.assert_shape([pages, valid, published], (pages.size,))
  published &= valid
  order = loops.cumulative_sum(valid).astype(jnp.uint32)
  valid_pages = indexing.where_valid(valid, pages)
  # Row i marks the items before item i.
  earlier = jnp.tril(jnp.ones((pages.size, pages.size), bool), k=-1)

  def place_in(buckets, bucket, position, pending):
    target = indexing.where_valid(pending, bucket)
    vacant = indexing.take(buckets, target) == 0
    # If several pages probe the same bucket, they take its empty places in the
    # order of `pages`, so that no place is written twice.
    rivals = earlier & (bucket[:, None] == bucket[None, :]) & pending[None, :]
    turn = jnp.sum(rivals, axis=1, dtype=jnp.int32)
    rank = jnp.cumsum(vacant, axis=1, dtype=jnp.int32) - 1
    chosen = vacant & (rank == turn[:, None])
    fits = pending & jnp.any(chosen, axis=1)
    ways = jnp.arange(BUCKET_PAGES, dtype=jnp.int32)[None]
    way = jnp.max(jnp.where(chosen, ways, 0), axis=1)
    buckets = indexing.put(
      buckets, indexing.where_valid(fits, bucket), way, values=pages
    )
    position = jnp.where(fits, bucket * BUCKET_PAGES + way, position)
    return buckets, position, pending & ~fits

  def pass_bucket(loop):
    overflow, buckets, bucket, position, pending = loop
    overflow = indexing.add(
      overflow, indexing.where_valid(pending, bucket), values=1
    )
    bucket = _next_bucket(index, keys, bucket)
    placed = place_in(buckets, bucket, position, pending)
    return overflow, placed[0], bucket, *placed[1:]

  # Nearly all pages find a place in their first bucket, without a loop.
  first_bucket = _first_bucket(index, keys)
  nowhere = jnp.full_like(valid_pages, NOWHERE)
  buckets, position, pending = place_in(
    index.buckets, first_bucket, nowhere, published
  )
  with jax.named_scope("rare/overflow"):
    overflow, buckets, _, position, _ = lax.while_loop(
      lambda loop: jnp.any(loop[4]),
      pass_bucket,
      (index.overflow, buckets, first_bucket, position, pending),
    )
  # The order counts from 1, and the first page gets the clock as its stamp.
  stamp = index.clock + order - 1
  columns = [keys, stamp[:, None], position.astype(jnp.uint32)[:, None]]
  if reasons is not None:
    columns.append(reasons.astype(jnp.uint32)[:, None])
  entry = jnp.concatenate(columns, axis=1)
  return dataclasses.replace(
    index,
    buckets=buckets,
    overflow=overflow,
    entry=indexing.put(index.entry, valid_pages, values=entry),
    tokens=indexing.put(index.tokens, valid_pages, values=tokens),
    clock=index.clock + order[-1],
  )


def remove(
  index: PrefixIndex, pages: Array, valid: Array, *, without_loops: bool = False
) -> tuple[PrefixIndex, Array]:
  """Removes valid pages, int32[X], all distinct, from the index.

  Their keys and tokens stay readable. Pages that are not cached do not change.
  Set `without_loops` only if `has_passed` is False for all valid pages.

  Returns:
    The index, and bool[X]: True for the valid pages that were cached.
  """
  # An invalid item reads NOWHERE as its position, so it counts as not cached.
  removed_pages = indexing.where_valid(valid, pages)
  entry = indexing.take(index.entry, removed_pages, fill=NOWHERE)
  # Without the barrier, a program for GPUs would read `index.entry` again after
  # the write below, and so would copy it.
  keys, _, position = _split(lax.optimization_barrier(entry))
  valid = position < NOWHERE
  count = jnp.sum(valid, dtype=jnp.int32)
  home = elementwise.quotient(position, BUCKET_PAGES)
  way = elementwise.remainder(position, BUCKET_PAGES)
  # Without this dependency on the read above, XLA would copy `index.entry`.
  removed_pages = loops.read_before(count, indexing.where_valid(valid, pages))
  overflow = index.overflow
  if not without_loops:
    overflow = _count_passed(index, keys, position, valid, -1)
  index = dataclasses.replace(
    index,
    buckets=indexing.put(
      index.buckets, indexing.where_valid(valid, home), way, values=0
    ),
    overflow=overflow,
    entry=_unplaced(index.entry, removed_pages),
  )
  return index, valid


def cached_among(index: PrefixIndex, pages: Array, valid: Array) -> CachedPages:
  """Returns the cached pages among valid pages, int32[X]."""
  # As in `remove`, an invalid item reads NOWHERE as its position.
  rows = indexing.where_valid(valid, pages)
  _, stamps, position = _split(indexing.take(index.entry, rows, fill=NOWHERE))
  cached = position < NOWHERE
  return CachedPages(cached, stamps, jnp.sum(cached, dtype=jnp.int32))


def lift(
  index: PrefixIndex, pages: Array, valid: Array
) -> tuple[PrefixIndex, Moving]:
  """Takes the entries of valid pages, int32[X], all distinct, out of the index.

  The buckets still hold the page numbers. So the caller must call `settle`,
  which gives the entries to other pages, before the next lookup.
  """
  lifted_pages = indexing.where_valid(valid, pages)
  entry = lax.optimization_barrier(
    indexing.take(index.entry, lifted_pages, fill=NOWHERE)
  )
  tokens = indexing.take(index.tokens, lifted_pages)
  valid = _split(entry)[2] < NOWHERE
  # As in `remove`, the entries must be read before they are written.
  count = jnp.sum(valid, dtype=jnp.int32)
  lifted_pages = loops.read_before(count, indexing.where_valid(valid, pages))
  index = dataclasses.replace(index, entry=_unplaced(index.entry, lifted_pages))
  return index, Moving(entry, tokens, valid)


def settle(index: PrefixIndex, pages: Array, moving: Moving) -> PrefixIndex:
  """Gives the lifted entries to pages, int32[X], that are not cached yet.

  An entry keeps its key, its stamp and its place in the buckets. So no search
  is needed, and pages with equal keys keep their order.
  """
  position = _split(moving.entry)[2]
  home = elementwise.quotient(position, BUCKET_PAGES)
  way = elementwise.remainder(position, BUCKET_PAGES)
  valid_pages = indexing.where_valid(moving.valid, pages)
  return dataclasses.replace(
    index,
    buckets=indexing.put(
      index.buckets, indexing.where_valid(moving.valid, home), way, values=pages
    ),
    entry=indexing.put(index.entry, valid_pages, values=moving.entry),
    tokens=indexing.put(index.tokens, valid_pages, values=moving.tokens),
  )


def clear(index: PrefixIndex) -> PrefixIndex:
  """Removes all pages, at a cost that grows with the pool."""
  return dataclasses.replace(
    index,
    buckets=jnp.zeros_like(index.buckets),
    overflow=jnp.zeros_like(index.overflow),
    entry=_without_positions(index.entry),
  )


def recount(index: PrefixIndex, cached: Array) -> Array:
  """Recomputes the overflow counts, int32[Z], from the positions of pages."""
  zero = dataclasses.replace(
    index, overflow=sharding.zeros_like(index.overflow)
  )
  key, _, position = _split(index.entry)
  return _count_passed(zero, key, position, cached, 1)


def _count_passed(
  index: PrefixIndex, keys: Array, position: Array, valid: Array, amount: int
) -> Array:
  """Adds `amount` to the overflow count of each bucket that pages passed.

  Args:
    index: the index.
    keys: uint32[X, 4], the keys of the pages.
    position: int32[X], their positions in the flattened buckets.
    valid: bool[X].
    amount: 1 for inserted pages, -1 for removed pages.

  Returns:
    int32[Z].
  """
  home = elementwise.quotient(position, BUCKET_PAGES)
  start = _first_bucket(index, keys)

  def walk(loop):
    overflow, bucket, active = loop
    overflow = indexing.add(
      overflow, indexing.where_valid(active, bucket), values=amount
    )
    bucket = _next_bucket(index, keys, bucket)
    # The last test ends the loop after all buckets. It matters only in a broken
    # state, where a position is not in any bucket.
    return overflow, bucket, active & (bucket != home) & (bucket != start)

  with jax.named_scope("rare/overflow"):
    return lax.while_loop(
      lambda loop: jnp.any(loop[2]),
      walk,
      (index.overflow, start, valid & (start != home)),
    )[0]


def _split(entry: Array) -> tuple[Array, Array, Array]:
  """Splits entries into key, stamp and position."""
  position = entry[..., _POSITION].astype(jnp.int32)
  return entry[..., :KEY_WORDS], entry[..., KEY_WORDS], position


def _unplaced(entry: Array, pages: Array) -> Array:
  """Marks pages, int32[X], as not cached."""
  return indexing.put(
    entry, pages, jnp.int32(_POSITION), values=jnp.uint32(NOWHERE)
  )


def _without_positions(entry: Array) -> Array:
  return entry.at[:, _POSITION].set(jnp.uint32(NOWHERE))


def _first_bucket(index: PrefixIndex, keys: Array) -> Array:
  return _bucket(index, keys[:, 0])


def _next_bucket(index: PrefixIndex, keys: Array, bucket: Array) -> Array:
  """Returns the next bucket of the probe sequence of each key."""
  # An odd stride visits each of the 2**k buckets. The stride comes from another
  # word of the key, so keys with the same first bucket rarely collide again.
  stride = keys[:, 1] | jnp.uint32(1)
  return _bucket(index, bucket.astype(jnp.uint32) + stride)


def _bucket(index: PrefixIndex, hash_word: Array) -> Array:
  mask = jnp.uint32(index.buckets.shape[0] - 1)
  return (hash_word & mask).astype(jnp.int32)
