"""The prefix index: from a page's key to the pages that carry it.

A hash table of buckets with eight page numbers each. A key starts at one
bucket. Where that is full, the page moves on to the next bucket of its key's
probe sequence, and the bucket it passed counts it in `overflow`. A lookup moves
past a bucket only while that count is not zero, and taking a page out counts
down again. So there are no tombstones, and any number of pages may carry one
key. (The scheme of F14: Bronson and Shi, "Open-sourcing F14 for faster, more
memory-efficient hash tables", 2019.)

The buckets have room for four times the pages of the pool, so less than one
bucket in a thousand ever overflows.
"""

import dataclasses
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import loops
from jaxkv._src.arrays import sharding
from jaxkv._src.arrays.indexing import NOWHERE
from jaxkv._src.cache.prefix.hashing import KEY_WORDS

BUCKET_PAGES = 8
INSERT_WINDOW = 32
_POSITION = KEY_WORDS + 1  # Column of an entry.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefixIndex:
  """Which pages are cached, and under which key.

  Z is the number of buckets, a power of two of at least N / 2.

  Attributes:
    buckets: page numbers, 0 for an empty place.  # int32[Z, 8]
    overflow: pages that found this bucket full.  # int32[Z]
    entry: a page's key, the value of `clock` when it was published, and its
      position in the flattened buckets, NOWHERE if it is not cached. One row,
      so that publishing writes them at once.  # uint32[N, 6]
    tokens: the tokens of a full page, then zeros where another group's pages
      are larger. Tokens and key of a page that left the index stay readable
      until the page is filled again.  # int32[N, S]
    clock: pages published so far, modulo 2**32.  # uint32[]
  """

  buckets: Array
  overflow: Array
  entry: Array
  tokens: Array
  clock: Array


class RemovedPages(NamedTuple):
  """Pages that `remove` took out.

  Attributes:
    valid: bool[X], the pages that were cached.
    keys: uint32[X, 4], their keys.
    stamps: uint32[X], values of the clock when they were published.
    total: int32[], how many they are.
  """

  valid: Array
  keys: Array
  stamps: Array
  total: Array


def init(num_pages: int, page_size: int) -> PrefixIndex:
  """An index of nothing."""
  num_buckets = 1 << (-(-num_pages // 2) - 1).bit_length()
  return PrefixIndex(
    buckets=jnp.zeros((num_buckets, BUCKET_PAGES), jnp.int32),
    overflow=jnp.zeros((num_buckets,), jnp.int32),
    entry=_nowhere(jnp.zeros((num_pages, _POSITION + 1), jnp.uint32)),
    tokens=jnp.zeros((num_pages, page_size), jnp.int32),
    clock=jnp.uint32(0),
  )


def contains(index: PrefixIndex, pages: Array) -> Array:
  """bool[...]: whether pages are cached."""
  return position_of(index, pages) < NOWHERE


def position_of(index: PrefixIndex, pages: Array) -> Array:
  """int32[...]: positions in the flattened buckets; NOWHERE if not cached."""
  column = jnp.int32(_POSITION)
  return indexing.take(index.entry, pages, column, fill=NOWHERE).astype(
    jnp.int32
  )


def key_of(index: PrefixIndex, pages: Array) -> Array:
  """uint32[..., 4]: keys of full pages."""
  return _split(indexing.take(index.entry, pages))[0]


def stamp_of(index: PrefixIndex, pages: Array) -> Array:
  """uint32[...]: values of the clock when cached pages were published."""
  return _split(indexing.take(index.entry, pages))[1]


def lookup(
  index: PrefixIndex, keys: Array, tokens: Array, *, newest: bool = False
) -> Array:
  """Finds cached pages.

  Args:
    index: the index.
    keys: uint32[X, 4].
    tokens: int32[X, S], what the pages must hold. A page with the key and
      other tokens is a collision: it is passed over.
    newest: whether to find the page published last instead of first.

  Returns:
    int32[X]: the page published first of those with this key and these tokens,
    0 for none.
  """
  chex.assert_shape(keys, (None, KEY_WORDS))
  chex.assert_shape(tokens, (keys.shape[0], index.tokens.shape[1]))

  def visit(loop):
    bucket, going, best, best_age, limit = loop
    candidates = indexing.take(
      index.buckets, indexing.where_valid(going, bucket)
    )
    key, stamp, _ = _split(indexing.take(index.entry, candidates))
    # Ages, not stamps: the clock may have wrapped around. They are at least 1,
    # since publishing a page advances the clock.
    age = stamp - index.clock if newest else index.clock - stamp
    found = jnp.all(key == keys[:, None, :], axis=-1) & (candidates > 0)
    age = jnp.where(found & (age <= limit[:, None]), age, jnp.uint32(0))
    oldest = jnp.argmax(age, axis=-1).astype(jnp.int32)[:, None]
    page = jnp.take_along_axis(candidates, oldest, axis=-1)[:, 0]
    age = jnp.take_along_axis(age, oldest, axis=-1)[:, 0]
    best = jnp.where(age > best_age, page, best)
    best_age = jnp.maximum(age, best_age)
    following = _next_bucket(index, keys, bucket)
    more = going & (indexing.take(index.overflow, bucket) > 0)
    more &= following != first  # Else all buckets were visited.
    # A collision: once more, for the next page with this key.
    same = jnp.all(indexing.take(index.tokens, best) == tokens, axis=-1)
    again = going & ~more & (best > 0) & ~same
    return (
      jnp.where(again, first, following),
      more | again,
      jnp.where(again, 0, best),
      jnp.where(again, jnp.uint32(0), best_age),
      jnp.where(again, best_age - 1, limit),
    )

  first = _first_bucket(index, keys)
  zero, age = sharding.zeros_like(first), sharding.zeros_like(keys[:, 0])
  start = (first, first >= 0, zero, age, ~age)
  return lax.while_loop(lambda loop: jnp.any(loop[1]), visit, start)[2]


def insert(
  index: PrefixIndex,
  pages: Array,
  keys: Array,
  tokens: Array,
  valid: Array,
  published: Array,
) -> PrefixIndex:
  """Gives pages their keys and publishes them, in the order given.

  Args:
    index: the index.
    pages: int32[X], all different, none of them cached. The cost grows with
      the square of X; callers keep to INSERT_WINDOW.
    keys: uint32[X, 4].
    tokens: int32[X, S].
    valid: bool[X].
    published: bool[X]; the other valid pages get a key, but cannot be found.
  """
  chex.assert_shape(keys, (pages.size, KEY_WORDS))
  chex.assert_shape(tokens, (pages.size, index.tokens.shape[1]))
  chex.assert_shape([pages, valid, published], (pages.size,))
  published &= valid
  order = jnp.cumsum(valid.astype(jnp.uint32))
  place = indexing.where_valid(valid, pages)
  earlier = jnp.tril(jnp.ones((pages.size, pages.size), bool), k=-1)

  def settle(loop):
    buckets, position, bucket, pending = loop
    here = indexing.where_valid(pending, bucket)
    vacant = indexing.take(buckets, here) == 0
    # Pages that meet in one bucket take its empty places in their order.
    rivals = earlier & (bucket[:, None] == bucket[None, :]) & pending[None, :]
    turn = jnp.sum(rivals, axis=1, dtype=jnp.int32)
    nth = jnp.cumsum(vacant, axis=1, dtype=jnp.int32) - 1
    chosen = vacant & (nth == turn[:, None])
    fits = pending & jnp.any(chosen, axis=1)
    ways = jnp.arange(BUCKET_PAGES, dtype=jnp.int32)[None]
    way = jnp.max(jnp.where(chosen, ways, 0), axis=1)
    buckets = indexing.put(
      buckets, indexing.where_valid(fits, bucket), way, values=pages
    )
    position = jnp.where(fits, bucket * BUCKET_PAGES + way, position)
    return buckets, position, _next_bucket(index, keys, bucket), pending & ~fits

  buckets, position, _, _ = lax.while_loop(
    lambda loop: jnp.any(loop[3]),
    settle,
    (
      index.buckets,
      jnp.full_like(place, NOWHERE),
      _first_bucket(index, keys),
      published,
    ),
  )
  stamp = index.clock + order - 1
  entry = jnp.concatenate(
    [keys, stamp[:, None], position.astype(jnp.uint32)[:, None]], axis=1
  )
  return dataclasses.replace(
    index,
    buckets=buckets,
    overflow=_count_passed(index, keys, position, published, 1),
    entry=indexing.put(index.entry, place, values=entry),
    tokens=indexing.put(index.tokens, place, values=tokens),
    clock=index.clock + order[-1],
  )


def remove(
  index: PrefixIndex, pages: Array, valid: Array
) -> tuple[PrefixIndex, RemovedPages]:
  """Takes pages out; their keys and tokens stay readable.

  Args:
    index: the index.
    pages: int32[X], the valid ones all different.
    valid: bool[X]; a page that is not cached stays as it is.

  Returns:
    The index, and what was taken out of it.
  """
  keys, stamps, position = _split(
    indexing.take(index.entry, indexing.where_valid(valid, pages), fill=NOWHERE)
  )
  valid = position < NOWHERE
  count = jnp.sum(valid, dtype=jnp.int32)
  home = indexing.quotient(position, BUCKET_PAGES)
  way = indexing.remainder(position, BUCKET_PAGES)
  place = loops.read_before(count, indexing.where_valid(valid, pages))
  index = dataclasses.replace(
    index,
    buckets=indexing.put(
      index.buckets, indexing.where_valid(valid, home), way, values=0
    ),
    overflow=_count_passed(index, keys, position, valid, -1),
    entry=indexing.put(
      index.entry, place, jnp.int32(_POSITION), values=jnp.uint32(NOWHERE)
    ),
  )
  return index, RemovedPages(valid, keys, stamps, count)


def clear(index: PrefixIndex) -> PrefixIndex:
  """Takes every page out. Cost grows with the pool."""
  return dataclasses.replace(
    index,
    buckets=jnp.zeros_like(index.buckets),
    overflow=jnp.zeros_like(index.overflow),
    entry=_nowhere(index.entry),
  )


def recount(index: PrefixIndex, cached: Array) -> Array:
  """int32[Z]: the overflow counts that follow from the positions of pages."""
  zero = dataclasses.replace(
    index, overflow=sharding.zeros_like(index.overflow)
  )
  key, _, position = _split(index.entry)
  return _count_passed(zero, key, position, cached, 1)


def _count_passed(
  index: PrefixIndex, keys: Array, position: Array, valid: Array, amount: int
) -> Array:
  """The overflow counts, with an amount added for every bucket passed.

  Args:
    index: the index.
    keys: uint32[X, 4], of the pages.
    position: int32[X], in the flattened buckets.
    valid: bool[X].
    amount: 1 for pages that come, -1 for pages that go.

  Returns:
    int32[Z].
  """
  home = indexing.quotient(position, BUCKET_PAGES)
  first = _first_bucket(index, keys)

  def walk(loop):
    overflow, bucket, going = loop
    overflow = indexing.add(
      overflow, indexing.where_valid(going, bucket), values=amount
    )
    bucket = _next_bucket(index, keys, bucket)
    # A page that is not where its key leads ends after one round.
    return overflow, bucket, going & (bucket != home) & (bucket != first)

  return lax.while_loop(
    lambda loop: jnp.any(loop[2]),
    walk,
    (index.overflow, first, valid & (first != home)),
  )[0]


def _split(entry: Array) -> tuple[Array, Array, Array]:
  """Key uint32[..., 4], stamp uint32[...], position int32[...] of entries."""
  position = entry[..., _POSITION].astype(jnp.int32)
  return entry[..., :KEY_WORDS], entry[..., KEY_WORDS], position


def _nowhere(entry: Array) -> Array:
  return entry.at[:, _POSITION].set(jnp.uint32(NOWHERE))


def _first_bucket(index: PrefixIndex, keys: Array) -> Array:
  return _bucket(index, keys[:, 0])


def _next_bucket(index: PrefixIndex, keys: Array, bucket: Array) -> Array:
  """The probe sequence: an odd stride visits every one of 2**k buckets."""
  stride = keys[:, 1] | jnp.uint32(1)
  return _bucket(index, bucket.astype(jnp.uint32) + stride)


def _bucket(index: PrefixIndex, number: Array) -> Array:
  mask = jnp.uint32(index.buckets.shape[0] - 1)
  return (number & mask).astype(jnp.int32)
