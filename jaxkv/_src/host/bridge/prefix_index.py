"""Converts the prefix index of a manager to a `PrefixIndex`."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxkv._src.arrays.indexing import NOWHERE
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.prefix import prefix_index
from jaxkv._src.cache.prefix.hashing import KEY_WORDS
from jaxkv._src.cache.prefix.prefix_index import BUCKET_PAGES
from jaxkv._src.cache.prefix.prefix_index import PrefixIndex
from jaxkv._src.host.groups import LayerGroup
from jaxkv._src.host.page_pool import HostPool
from jaxkv._src.host.prefix_nodes import TOKEN_BYTES
from jaxkv._src.host.prefix_nodes import DeviceKeys

# Columns of `PrefixIndex.entry`. Those before `_STAMP` have the key.
_STAMP = KEY_WORDS
_POSITION = KEY_WORDS + 1


class IndexArrays:
  """The prefix index as of the last conversion to or from a `CacheState`.

  `update` copies the arrays and writes only the pages that changed. It changes
  no array in place, because an undo may restore the old arrays, and JAX arrays
  may share memory with them.

  Attributes:
    index: a `PrefixIndex` of NumPy arrays.
    clock: the pool's clock at the last conversion.
  """

  def __init__(
    self,
    config: CacheConfig,
    pool: HostPool,
    keys: DeviceKeys,
    groups: Sequence[LayerGroup],
  ):
    self._pool, self._keys, self._groups = pool, keys, groups
    num_numbers = config.num_numbers
    num_buckets = prefix_index.num_buckets(num_numbers)
    # `Any`, because the fields of `PrefixIndex` are annotated as JAX arrays.
    make: Any = PrefixIndex
    self.index = make(
      buckets=np.zeros((num_buckets, BUCKET_PAGES), np.int32),
      overflow=np.zeros((num_buckets,), np.int32),
      entry=np.zeros((num_numbers, _POSITION + 1), np.uint32),
      tokens=np.zeros((num_numbers, max(config.page_sizes)), np.int32),
      clock=np.zeros((), np.uint32),
    )
    self.index.entry[:, _POSITION] = NOWHERE
    self.clock = 0

  def update(self) -> PrefixIndex:
    """Brings the arrays up to date and returns them."""
    pool = self._pool
    index = jax.tree.map(np.copy, self.index)
    was_cached = are_cached(index.entry)
    is_fresh = self.are_fresh()
    is_cached = np.array(pool.is_cached, bool)
    # Pages are removed before `_write`, because old keys lead to old buckets.
    _remove(index, np.flatnonzero(was_cached & (is_fresh | ~is_cached)))
    if is_fresh.any():
      self._write(index, np.flatnonzero(is_fresh).tolist())
    _insert(index, np.flatnonzero(is_cached & (is_fresh | ~was_cached)))
    index.clock[...] = pool.clock % 2**32
    self.replace(index, pool.clock)
    return index

  def replace(self, index: PrefixIndex, clock: int) -> None:
    """Replaces the arrays and the clock."""
    self._pool.undo_log.replace(self, index=index, clock=clock)

  def are_fresh(self) -> np.ndarray:
    """Returns bool[num_numbers]: True for pages whose content `index` lacks."""
    # Moved content keeps its stamp. Stamps are unique, so they identify it.
    stamp = np.array(self._pool.stamp, np.int64)
    has_moved = stamp % 2**32 != self.index.entry[:, _STAMP]
    return (stamp >= self.clock) | ((stamp >= 0) & has_moved)

  def _write(self, index: Any, pages: list[int]) -> None:
    """Writes the keys, stamps and tokens of one or more pages."""
    pool = self._pool
    width = index.tokens.shape[1]
    contents = [pool.content[page] for page in pages]
    groups = [pool.group[page] for page in pages]
    # Zeros pad the tokens of pages that are smaller than the largest pages.
    rows = [
      content.last_tokens(self._groups[group].step).ljust(
        TOKEN_BYTES * width, b"\0"
      )
      for content, group in zip(contents, groups, strict=True)
    ]
    self._keys.compute(contents)
    index.entry[pages, :KEY_WORDS] = [
      self._keys.group_key(content, group)
      for content, group in zip(contents, groups, strict=True)
    ]
    index.entry[pages, _STAMP] = [pool.stamp[page] % 2**32 for page in pages]
    tokens = np.frombuffer(b"".join(rows), "<i4")
    index.tokens[pages] = tokens.reshape(-1, width)


def are_cached(entry: np.ndarray) -> np.ndarray:
  """Returns bool[X]: True for the rows of `entry` whose pages are cached."""
  return entry[:, _POSITION] < NOWHERE


def _remove(index: Any, pages: np.ndarray) -> None:
  """Removes pages, int32[X], from their buckets."""
  keys = index.entry[pages, :KEY_WORDS]
  position = index.entry[pages, _POSITION]
  bucket, way = np.divmod(position.astype(np.int64), BUCKET_PAGES)
  index.buckets[bucket, way] = 0
  index.entry[pages, _POSITION] = NOWHERE
  visited = _first_bucket(index, keys)
  # `overflow` counts the pages that passed a full bucket. A page has passed all
  # buckets of its probe sequence before the one that it is in.
  while (passed := visited != bucket).any():
    keys, visited, bucket = keys[passed], visited[passed], bucket[passed]
    np.add.at(index.overflow, visited, -1)
    visited = _next_bucket(index, keys, visited)


def _insert(index: Any, pages: np.ndarray) -> None:
  """Inserts pages, int32[X], into the buckets by their keys in `entry`."""
  keys = index.entry[pages, :KEY_WORDS]
  bucket = _first_bucket(index, keys)
  while pages.size:
    # `turn` is the rank of a page among the pages for the same bucket. The page
    # takes the empty place of the same rank.
    order = np.argsort(bucket, kind="stable")
    pages, keys, bucket = pages[order], keys[order], bucket[order]
    is_first = np.r_[True, bucket[1:] != bucket[:-1]]
    run = np.maximum.accumulate(np.where(is_first, np.arange(len(bucket)), 0))
    turn = np.arange(len(bucket)) - run
    is_empty = index.buckets[bucket] == 0
    is_chosen = is_empty & (np.cumsum(is_empty, axis=1) - 1 == turn[:, None])
    fits = is_chosen.any(axis=1)
    way = is_chosen.argmax(axis=1)
    index.buckets[bucket[fits], way[fits]] = pages[fits]
    index.entry[pages[fits], _POSITION] = (
      bucket[fits] * BUCKET_PAGES + way[fits]
    )
    # The other pages go on to their next buckets.
    np.add.at(index.overflow, bucket[~fits], 1)
    pages, keys = pages[~fits], keys[~fits]
    bucket = _next_bucket(index, keys, bucket[~fits])


def _first_bucket(index: Any, keys: np.ndarray) -> np.ndarray:
  mask = np.uint32(len(index.buckets) - 1)
  return (keys[:, 0] & mask).astype(np.int64)


def _next_bucket(
  index: Any, keys: np.ndarray, bucket: np.ndarray
) -> np.ndarray:
  # The number of buckets is a power of two, so an odd stride visits all.
  stride = (keys[:, 1] | np.uint32(1)).astype(np.int64)
  return (bucket + stride) & (len(index.buckets) - 1)
