"""The pool of blocks, for vLLM's schedulers and connectors."""

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxkv._src.host.vllm.blocks import KVCacheBlock
from jaxkv._src.host.vllm.call_log import CallLog
from jaxkv._src.host.vllm.events import EventReader
from jaxkv._src.host.vllm.events import KVCacheEvent
from jaxkv._src.host.vllm.events import with_group
from jaxkv._src.host.vllm.page_cache import PageCache


class BlockPool:
  """The blocks of a manager, read from its newest state.

  Attributes:
    num_gpu_blocks: the number of blocks, including the null block.
    enable_caching, hash_block_size, enable_kv_cache_events: the manager's
      options.
    blocks: all blocks by id.
    null_block: block 0, which is never allocated.
    free_block_queue: the free blocks.
    cached_block_hash_to_block: the cached blocks by hash.
    metrics_collector: None; see `jaxkv.host.vllm`.
  """

  metrics_collector = None

  def __init__(
    self,
    cache: PageCache,
    log: CallLog,
    reader: EventReader,
    hash_block_size: int,
    *,
    enable_kv_cache_events: bool,
  ):
    self._cache = cache
    self._log = log
    self._reader = reader
    self.num_gpu_blocks = cache.config.num_pages
    self.enable_caching = cache.config.prefix_caching
    self.enable_kv_cache_events = enable_kv_cache_events
    self.hash_block_size = hash_block_size
    self.blocks = [KVCacheBlock(n, self) for n in range(self.num_gpu_blocks)]
    self.null_block = self.blocks[0]
    self.free_block_queue = FreeKVCacheBlockQueue(self)
    self.cached_block_hash_to_block = BlockHashToBlockMap(self)

  @property
  def kv_event_queue(self) -> list[KVCacheEvent]:
    """The events that `take_events` would return."""
    return self._log.events()

  def take_events(self) -> list[KVCacheEvent]:
    """Returns the events since the last call; none unless they are enabled."""
    return self._log.take() if self.enable_kv_cache_events else []

  def get_num_free_blocks(self) -> int:
    """Returns the number of free blocks."""
    return self._cache.num_free_pages

  def get_usage(self) -> float:
    """Returns the fraction of blocks that are held, without the null block."""
    if self.num_gpu_blocks == 1:
      return 0.0
    return self._cache.usage

  def free_ids(self) -> list[int]:
    """Returns the ids of the free blocks in eviction order."""
    return self._cache.free_queue()

  def ref_counts(self) -> np.ndarray:
    """Returns int32[N], the reference counts of all blocks."""
    return self._cache.ref_counts()

  def hashes_of(self, block_ids: Sequence[int]) -> list[bytes | None]:
    """Returns hash and group of blocks; None for those that are not cached."""
    keys = self._cache.keys_of(block_ids)
    groups = self._cache.groups_of(block_ids)
    return [
      None if key is None else with_group(self._reader.name_of(key).hash, group)
      for key, group in zip(keys, groups, strict=True)
    ]

  def num_hashed_tokens(self, block_ids: Sequence[int]) -> list[int | None]:
    """Returns tokens up to the ends of blocks; None for uncached blocks."""
    keys = self._cache.keys_of(block_ids)
    return [
      None if key is None else self._reader.name_of(key).num_tokens
      for key in keys
    ]

  def get_cached_block(
    self, block_hash: bytes, kv_cache_group_ids: Sequence[int]
  ) -> list[KVCacheBlock] | None:
    """Returns the oldest block with a hash in each group, or None.

    None if a group has no such block.
    """
    found = [
      self.blocks_with(with_group(block_hash, group))
      for group in kv_cache_group_ids
    ]
    return [same[0] for same in found] if all(found) else None

  def blocks_with(self, name: bytes) -> list[KVCacheBlock]:
    """Returns the cached blocks with a hash and group, the oldest first."""
    key = self._reader.keys.get(name)
    if key is None:
      return []
    return [self.blocks[page] for page in self._cache.pages_of(key)]

  def cached_names(self) -> set[bytes]:
    """Returns the hashes and groups of all cached blocks."""
    names = self.hashes_of(range(self.num_gpu_blocks))
    return {name for name in names if name is not None}

  def is_block_writable(self, block: KVCacheBlock) -> bool:
    """True if a single request holds the block, and lookups cannot find it."""
    return not block.is_null and block.ref_cnt == 1 and block.block_hash is None

  def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
    """Takes blocks from the front of the free queue, until `free_blocks`.

    Raises:
      ValueError: too few are free.
    """
    return [self.blocks[n] for n in self._cache.take_pages(num_blocks)]

  def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
    """Adds a reference to blocks that are in use or cached.

    Raises:
      ValueError: a block is neither.
    """
    self._cache.hold_pages(_ids(blocks))

  def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
    """Drops references of `KVCacheManager.pop_blocks_for_free` and `touch`.

    The first block is evicted first.

    Raises:
      ValueError: a reference does not exist.
    """
    self._cache.release_pages(_ids(ordered_blocks))

  def evict_blocks(self, block_ids: Iterable[int]) -> None:
    """Removes blocks from the prefix cache; requests keep them.

    Raises:
      ValueError: an id is out of range.
    """
    self._cache.evict_pages(block_ids)

  def reset_prefix_cache(self) -> bool:
    """Removes all blocks from the prefix cache, unless a request holds one."""
    return self._cache.reset_prefix_cache()


class QueueEnd:
  """Sentinel before the first or after the last free block."""

  def __init__(self, queue: "FreeKVCacheBlockQueue"):
    self._queue = queue

  @property
  def next_free_block(self) -> Any:
    """The first free block, or the other end of an empty queue."""
    blocks = self._queue.get_all_free_blocks()
    return blocks[0] if blocks else self._queue.fake_free_list_tail

  @property
  def prev_free_block(self) -> Any:
    """The last free block, or the other end of an empty queue."""
    blocks = self._queue.get_all_free_blocks()
    return blocks[-1] if blocks else self._queue.fake_free_list_head


class FreeKVCacheBlockQueue:
  """The free blocks of a pool, in eviction order.

  Attributes:
    fake_free_list_head, fake_free_list_tail: its ends.
  """

  def __init__(self, pool: BlockPool):
    self._pool = pool
    self.fake_free_list_head = QueueEnd(self)
    self.fake_free_list_tail = QueueEnd(self)

  @property
  def num_free_blocks(self) -> int:
    """The number of free blocks."""
    return self._pool.get_num_free_blocks()

  def get_all_free_blocks(self) -> list[KVCacheBlock]:
    """Returns the free blocks in eviction order."""
    return [self._pool.blocks[number] for number in self._pool.free_ids()]


class BlockHashToBlockMap:
  """The cached blocks of a pool by hash and group."""

  def __init__(self, pool: BlockPool):
    self._pool = pool

  def get_one_block(self, key: bytes) -> KVCacheBlock | None:
    """Returns the oldest block with a hash and group, or None."""
    return next(iter(self._pool.blocks_with(key)), None)

  def contain(self, key: bytes, block_id: int) -> bool:
    """True if a block is cached under a hash and group."""
    return self._pool.hashes_of([block_id]) == [key]

  def pop(self, key: bytes, block_id: int) -> KVCacheBlock | None:
    """Removes a block from the prefix cache; None if it is not cached there."""
    if not self.contain(key, block_id):
      return None
    self._pool.evict_blocks([block_id])
    return self._pool.blocks[block_id]

  def __len__(self) -> int:
    return len(self._pool.cached_names())

  def __iter__(self) -> Iterator[bytes]:
    return iter(self._pool.cached_names())


def _ids(blocks: Iterable[KVCacheBlock]) -> list[int]:
  return [block.block_id for block in blocks if not block.is_null]
