"""The prefix index of the device, as numpy arrays that follow the host."""

from collections.abc import Sequence

import numpy as np

from jaxkv._src.arrays.indexing import NOWHERE
from jaxkv._src.cache.prefix import prefix_index
from jaxkv._src.cache.prefix.hashing import KEY_WORDS
from jaxkv._src.cache.prefix.prefix_index import BUCKET_PAGES

# The columns of an entry: the words of the key, then these two.
_STAMP, _POSITION = KEY_WORDS, KEY_WORDS + 1


class DeviceMirror:
  """The arrays of `PrefixIndex`, changed page by page.

  A state for the device is built from them, and they are replaced by those of a
  state that comes back. So Python handles only the pages that changed.

  Attributes:
    buckets, overflow, entry, tokens: as in `PrefixIndex`.
  """

  def __init__(self, num_pages: int, page_size: int):
    num_buckets = prefix_index.num_buckets(num_pages)
    self.buckets = np.zeros((num_buckets, BUCKET_PAGES), np.int32)
    self.overflow = np.zeros((num_buckets,), np.int32)
    self.entry = np.zeros((num_pages, _POSITION + 1), np.uint32)
    self.entry[:, _POSITION] = NOWHERE
    self.tokens = np.zeros((num_pages, page_size), np.int32)

  def is_cached(self) -> np.ndarray:
    """Returns bool[N], the pages in the buckets."""
    return are_cached(self.entry)

  def replace(
    self,
    buckets: np.ndarray,
    overflow: np.ndarray,
    entry: np.ndarray,
    tokens: np.ndarray,
  ) -> None:
    """Replaces all arrays by copies of those of a device."""
    self.buckets, self.overflow = buckets.copy(), overflow.copy()
    self.entry, self.tokens = entry.copy(), tokens.copy()

  def remove(self, pages: np.ndarray) -> None:
    """Removes pages int32[X] that are in the buckets."""
    keys, position = self.entry[pages, :KEY_WORDS], self.entry[pages, _POSITION]
    bucket, place = np.divmod(position.astype(np.int64), BUCKET_PAGES)
    self.buckets[bucket, place] = 0
    self.entry[pages, _POSITION] = NOWHERE
    visited = self._first_bucket(keys)
    # A full bucket counts in `overflow` the pages that went on to the next one.
    # So every bucket before that of the page has counted it.
    while (passed := visited != bucket).any():
      keys, visited, bucket = keys[passed], visited[passed], bucket[passed]
      np.add.at(self.overflow, visited, -1)
      visited = self._next_bucket(keys, visited)

  def insert(self, pages: np.ndarray) -> None:
    """Inserts pages int32[X], whose keys are in `entry`, into the buckets."""
    keys = self.entry[pages, :KEY_WORDS]
    bucket = self._first_bucket(keys)
    while pages.size:
      # The pages of one bucket take its empty places in order: `turn` is the
      # rank of a page in its bucket, and also that of its empty place.
      order = np.argsort(bucket, kind="stable")
      pages, keys, bucket = pages[order], keys[order], bucket[order]
      begins = np.r_[True, bucket[1:] != bucket[:-1]]
      run = np.maximum.accumulate(np.where(begins, np.arange(len(bucket)), 0))
      turn = np.arange(len(bucket)) - run
      is_empty = self.buckets[bucket] == 0
      is_chosen = is_empty & (np.cumsum(is_empty, axis=1) - 1 == turn[:, None])
      fits = is_chosen.any(axis=1)
      place = is_chosen.argmax(axis=1)
      self.buckets[bucket[fits], place[fits]] = pages[fits]
      position = bucket[fits] * BUCKET_PAGES + place[fits]
      self.entry[pages[fits], _POSITION] = position
      # The other pages go on to their next buckets.
      np.add.at(self.overflow, bucket[~fits], 1)
      pages, keys = pages[~fits], keys[~fits]
      bucket = self._next_bucket(keys, bucket[~fits])

  def write(
    self,
    pages: np.ndarray,
    keys: Sequence[tuple[int, ...]],
    stamps: Sequence[int],
    tokens: Sequence[bytes],
  ) -> None:
    """Writes the contents of full pages int32[X], which are in no bucket."""
    if not pages.size:
      return
    self.entry[pages, :KEY_WORDS] = keys
    self.entry[pages, _STAMP] = np.array(stamps, np.int64) & 0xFFFFFFFF
    # A row has the tokens of the largest page, and zeros after a smaller one.
    longest = 4 * self.tokens.shape[1]
    padded = b"".join(part.ljust(longest, b"\0") for part in tokens)
    rows = np.frombuffer(padded, "<i4")
    self.tokens[pages] = rows.reshape(len(pages), self.tokens.shape[1])

  def _first_bucket(self, keys: np.ndarray) -> np.ndarray:
    return (keys[:, 0] & np.uint32(len(self.buckets) - 1)).astype(np.int64)

  def _next_bucket(self, keys: np.ndarray, bucket: np.ndarray) -> np.ndarray:
    # The number of buckets is a power of two, so an odd stride visits all.
    stride = (keys[:, 1] | np.uint32(1)).astype(np.int64)
    return (bucket + stride) & (len(self.buckets) - 1)


def are_cached(entry: np.ndarray) -> np.ndarray:
  """Returns bool[N] of uint32[N, 6]: the pages in the buckets."""
  return entry[:, _POSITION] < NOWHERE
