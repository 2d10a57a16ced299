"""The prefix index of a manager in the form that it has on a device."""

from typing import Any

import numpy as np

from jaxkv._src.arrays.indexing import NOWHERE
from jaxkv._src.cache.prefix import prefix_index
from jaxkv._src.cache.prefix.hashing import KEY_WORDS
from jaxkv._src.cache.prefix.prefix_index import BUCKET_PAGES
from jaxkv._src.cache.prefix.prefix_index import PrefixIndex
from jaxkv._src.host.prefix_nodes import TOKEN_BYTES
from jaxkv._src.host.prefix_nodes import DeviceKeys
from jaxkv._src.host.state import HostState

# The columns of an entry: the words of the key, then these two.
_STAMP, _POSITION = KEY_WORDS, KEY_WORDS + 1


def build_index(state: HostState, keys: DeviceKeys) -> PrefixIndex:
  """Returns the prefix index with arrays of numpy."""
  pool, config = state.pool, state.config
  width = max(config.page_sizes)
  num_buckets = prefix_index.num_buckets(config.num_pages)
  # Typed Any: the arrays are of numpy here, and of jax on a device.
  make: Any = PrefixIndex
  index = make(
    buckets=np.zeros((num_buckets, BUCKET_PAGES), np.int32),
    overflow=np.zeros((num_buckets,), np.int32),
    entry=np.zeros((config.num_pages, _POSITION + 1), np.uint32),
    tokens=np.zeros((config.num_pages, width), np.int32),
    clock=np.array(pool.clock, np.int64).astype(np.uint32),
  )
  index.entry[:, _POSITION] = NOWHERE
  filled = [page for page, node in enumerate(pool.content) if node is not None]
  if not filled:
    return index
  keys.compute(pool.content[page] for page in filled)
  words, rows = [], []
  for page in filled:
    group = pool.group[page]
    words.append(keys.group_key(pool.content[page], group))
    # A row has the tokens of the largest page, and zeros after a smaller one.
    tokens = pool.content[page].last_tokens(state.groups[group].step)
    rows.append(tokens.ljust(TOKEN_BYTES * width, b"\0"))
  index.entry[filled, :KEY_WORDS] = words
  stamps = np.array(pool.stamp, np.int64).astype(np.uint32)
  index.entry[filled, _STAMP] = stamps[filled]
  index.tokens[filled] = np.frombuffer(b"".join(rows), "<i4").reshape(-1, width)
  _insert(index, np.flatnonzero(pool.is_cached))
  return index


def are_cached(entry: np.ndarray) -> np.ndarray:
  """Returns bool[N] of uint32[N, 6]: the pages in the buckets."""
  return entry[:, _POSITION] < NOWHERE


def _insert(index: Any, pages: np.ndarray) -> None:
  """Inserts pages int32[X], whose keys are in `entry`, into the buckets."""
  keys = index.entry[pages, :KEY_WORDS]
  mask = len(index.buckets) - 1
  bucket = (keys[:, 0] & np.uint32(mask)).astype(np.int64)
  while pages.size:
    # The pages of one bucket take its empty places in order: `turn` is the rank
    # of a page in its bucket, and also that of its empty place.
    order = np.argsort(bucket, kind="stable")
    pages, keys, bucket = pages[order], keys[order], bucket[order]
    begins = np.r_[True, bucket[1:] != bucket[:-1]]
    run = np.maximum.accumulate(np.where(begins, np.arange(len(bucket)), 0))
    turn = np.arange(len(bucket)) - run
    is_empty = index.buckets[bucket] == 0
    is_chosen = is_empty & (np.cumsum(is_empty, axis=1) - 1 == turn[:, None])
    fits = is_chosen.any(axis=1)
    place = is_chosen.argmax(axis=1)
    index.buckets[bucket[fits], place[fits]] = pages[fits]
    index.entry[pages[fits], _POSITION] = (
      bucket[fits] * BUCKET_PAGES + place[fits]
    )
    # The other pages go on to their next buckets. The number of buckets is a
    # power of two, so an odd stride visits all.
    np.add.at(index.overflow, bucket[~fits], 1)
    pages, keys = pages[~fits], keys[~fits]
    stride = (keys[:, 1] | np.uint32(1)).astype(np.int64)
    bucket = (bucket[~fits] + stride) & mask
