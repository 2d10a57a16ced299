"""Blocks and their pool, for vLLM's schedulers and connectors."""

import dataclasses
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

from jaxkv._src.host.atomic import atomic
from jaxkv._src.host.manager import CacheManager
from jaxkv._src.host.vllm.block_hashes import GROUP_BYTES
from jaxkv._src.host.vllm.block_hashes import BlockHashes
from jaxkv._src.host.vllm.events import KVCacheEvent


class KVCacheBlock:
  """A block of a pool. Its properties read the pool's current state.

  Attributes:
    block_id: the block's id.
    pool: the `BlockPool`.
    is_null: True for the null block, which replaces blocks that a request no
      longer needs.
  """

  __slots__ = ("block_id", "is_null", "pool")

  def __init__(self, block_id: int, pool: "BlockPool"):
    self.block_id = block_id
    self.pool = pool
    self.is_null = block_id == 0

  @property
  def ref_cnt(self) -> int:
    """The number of references to the block; 0 for the null block."""
    return self.pool.ref_count(self.block_id)

  @property
  def block_hash(self) -> bytes | None:
    """The block's hash, then its group in 4 bytes; None if it is not cached."""
    return self.pool.hashes.hash_of(self.block_id)

  @property
  def block_hash_num_tokens(self) -> int | None:
    """The number of tokens up to the block's end; None if it is not cached."""
    return self.pool.hashes.num_tokens(self.block_id)

  def __repr__(self) -> str:
    return f"KVCacheBlock(block_id={self.block_id}, ref_cnt={self.ref_cnt})"


@dataclasses.dataclass
class KVCacheBlocks:
  """Blocks by group.

  Attributes:
    blocks: the blocks of each group, including null blocks.
  """

  blocks: tuple[Sequence[KVCacheBlock], ...]

  def __add__(self, other: "KVCacheBlocks") -> "KVCacheBlocks":
    """Concatenates the blocks of each group."""
    pairs = zip(self.blocks, other.blocks, strict=True)
    return KVCacheBlocks(tuple([*first, *second] for first, second in pairs))

  def get_block_ids(
    self, allow_none: bool = False, *, group_ids: Sequence[int] | None = None
  ) -> Any:
    """Returns block ids by group.

    Args:
      allow_none: True to return None if no group has blocks.
      group_ids: the groups to return; None for all.
    """
    groups = self.blocks
    if group_ids is not None:
      groups = tuple(groups[number] for number in group_ids)
    if allow_none and not any(groups):
      return None
    return tuple([block.block_id for block in group] for group in groups)

  def get_unhashed_block_ids(self) -> list[int]:
    """Returns the ids of blocks that are neither cached nor null.

    Raises:
      ValueError: the number of groups is not 1.
    """
    (unhashed,) = self.get_unhashed_block_ids_all_groups()
    return unhashed

  def get_unhashed_block_ids_all_groups(self) -> list[list[int]]:
    """Returns `get_unhashed_block_ids` of each group."""
    return [
      [
        block.block_id
        for block in group
        if block.block_hash is None and not block.is_null
      ]
      for group in self.blocks
    ]

  def new_empty(self) -> "KVCacheBlocks":
    """Returns a `KVCacheBlocks` with the same number of groups, all empty."""
    return KVCacheBlocks(tuple(() for _ in self.blocks))


class BlockPool:
  """The blocks of a manager, in its current state.

  Attributes:
    num_gpu_blocks: the number of blocks, including the null block.
    enable_caching, enable_kv_cache_events, hash_block_size, metrics_collector:
      the manager's options.
    blocks: all blocks by id.
    null_block: block 0, which is never allocated.
    free_block_queue: the free blocks.
    cached_block_hash_to_block: the cached blocks by hash and group.
    cached_block_hashes_by_block: always empty, because a block has one hash.
    hashes: the hashes of cached blocks.
    undo_log: see `CacheManager.undo_log`.
  """

  def __init__(
    self,
    manager: CacheManager,
    hashes: BlockHashes,
    hash_block_size: int,
    metrics_collector: Any,
  ):
    self._manager = manager
    self.undo_log = manager.undo_log
    self.hashes = hashes
    self.num_gpu_blocks = manager.config.total_pages
    self.enable_caching = manager.config.prefix_caching
    self.enable_kv_cache_events = hashes.has_events
    self.hash_block_size = hash_block_size
    self.metrics_collector = metrics_collector
    self.blocks = [KVCacheBlock(n, self) for n in range(self.num_gpu_blocks)]
    self.null_block = self.blocks[0]
    self.free_block_queue = FreeKVCacheBlockQueue(manager, self.blocks)
    self.cached_block_hash_to_block = BlockHashToBlockMap(manager, self)
    self.cached_block_hashes_by_block: dict[int, set[bytes]] = {}

  @property
  def kv_event_queue(self) -> list[KVCacheEvent]:
    """The events that `take_events` would return."""
    return self.hashes.events

  def take_events(self) -> list[KVCacheEvent]:
    """Returns the events since the last call; none unless they are enabled."""
    return self.hashes.take_events()

  def get_num_free_blocks(self) -> int:
    """Returns the number of free blocks."""
    return self._manager.num_free_pages

  def get_usage(self) -> float:
    """Returns the fraction of blocks in use, not counting the null block."""
    return self._manager.usage

  def ref_count(self, block_id: int) -> int:
    """Returns the number of references to a block."""
    return self._manager.pages.ref_counts([block_id])[0]

  def blocks_of(self, block_ids: Iterable[int]) -> list[KVCacheBlock]:
    """Returns the blocks with the given ids."""
    return [self.blocks[number] for number in block_ids]

  def get_cached_block(
    self, block_hash: bytes, kv_cache_group_ids: Sequence[int]
  ) -> list[KVCacheBlock] | None:
    """Returns the oldest block with `block_hash` in each of the groups.

    Returns None if one of these groups has no such block.
    """
    find = self.cached_block_hash_to_block.get_one_block
    blocks = [
      find(block_hash + group.to_bytes(GROUP_BYTES, "big"))
      for group in kv_cache_group_ids
    ]
    cached = [block for block in blocks if block is not None]
    return cached if len(cached) == len(blocks) else None

  @atomic
  def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
    """Allocates free blocks in eviction order, with one reference each.

    Raises:
      ValueError: `num_blocks` is negative or exceeds the free blocks.
    """
    blocks = self._manager.pages.take(num_blocks)
    self.count_allocated(blocks)
    return self.blocks_of(blocks)

  @atomic
  def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
    """Adds a reference to each block; free blocks leave the free queue."""
    touched = _ids(blocks)
    self._manager.pages.hold(touched)
    self.count_accessed(touched)

  def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
    """Removes a reference from each block; the first block is evicted first.

    Raises:
      ValueError: a reference was not added by `get_new_blocks` or `touch`, and
        is not from `KVCacheManager.pop_blocks_for_free`.
    """
    self._manager.pages.release(_ids(ordered_blocks))

  @atomic
  def evict_blocks(self, block_ids: Iterable[int]) -> None:
    """Removes blocks from the prefix cache, but not from requests.

    Raises:
      ValueError: an id is out of range.
    """
    evicted = list(block_ids)
    self._manager.evict_pages(evicted)
    if self.metrics_collector is not None:
      for block in self.blocks_of(evicted):
        self.metrics_collector.on_block_evicted(block)

  @atomic
  def reset_prefix_cache(self) -> bool:
    """Empties the prefix cache if all blocks are free; returns True if so."""
    is_reset = self._manager.reset_prefix_cache()
    if is_reset and self.metrics_collector is not None:
      self.metrics_collector.reset()
    return is_reset

  def count_allocated(self, block_ids: Iterable[int]) -> None:
    """Reports allocated blocks to the metrics collector."""
    collector = self.metrics_collector
    if collector is not None:
      for block in self.blocks_of(block_ids):
        # vLLM reports an eviction for each block, even one without a hash.
        if self.enable_caching:
          collector.on_block_evicted(block)
        collector.on_block_allocated(block)

  def count_accessed(self, block_ids: Iterable[int]) -> None:
    """Reports to the metrics collector that blocks were used."""
    if self.metrics_collector is not None:
      for block in self.blocks_of(block_ids):
        self.metrics_collector.on_block_accessed(block)


class QueueEnd:
  """Sentinel at the head or the tail of the free queue."""

  def __init__(self, queue: "FreeKVCacheBlockQueue"):
    self._queue = queue

  @property
  def next_free_block(self) -> Any:
    """The first free block; the tail sentinel if no block is free."""
    blocks = self._queue.get_all_free_blocks()
    return blocks[0] if blocks else self._queue.fake_free_list_tail

  @property
  def prev_free_block(self) -> Any:
    """The last free block; the head sentinel if no block is free."""
    blocks = self._queue.get_all_free_blocks()
    return blocks[-1] if blocks else self._queue.fake_free_list_head


class FreeKVCacheBlockQueue:
  """The free blocks of a pool, in eviction order.

  Attributes:
    fake_free_list_head, fake_free_list_tail: a `QueueEnd` each.
  """

  def __init__(self, manager: CacheManager, blocks: Sequence[KVCacheBlock]):
    self._manager = manager
    self._blocks = blocks
    self.fake_free_list_head = QueueEnd(self)
    self.fake_free_list_tail = QueueEnd(self)

  @property
  def num_free_blocks(self) -> int:
    """The number of free blocks."""
    return self._manager.num_free_pages

  def get_all_free_blocks(self) -> list[KVCacheBlock]:
    """Returns the free blocks in eviction order."""
    return [self._blocks[number] for number in self._manager.free_queue()]

  def iter_blocks_after(
    self, cursor: KVCacheBlock | None
  ) -> Iterator[KVCacheBlock]:
    """Iterates over the free blocks after `cursor`; over all if it is None."""
    blocks = self.get_all_free_blocks()
    return iter(blocks[blocks.index(cursor) + 1 if cursor else 0 :])


class BlockHashToBlockMap:
  """The cached blocks of a pool by hash and group."""

  def __init__(self, manager: CacheManager, pool: BlockPool):
    self._pool = pool
    self.undo_log = manager.undo_log

  def get_one_block(self, key: bytes) -> KVCacheBlock | None:
    """Returns the oldest block whose `block_hash` is `key`, or None."""
    numbers = self._pool.hashes.index().get(key)
    return self._pool.blocks[numbers[0]] if numbers else None

  @atomic
  def pop(self, key: bytes, block_id: int) -> KVCacheBlock | None:
    """Evicts a block and returns it; None if its `block_hash` is not `key`."""
    if block_id not in self._pool.hashes.index().get(key, ()):
      return None
    self._pool.evict_blocks([block_id])
    return self._pool.blocks[block_id]

  def __len__(self) -> int:
    return len(self._pool.hashes.index())


def _ids(blocks: Iterable[KVCacheBlock]) -> list[int]:
  return [block.block_id for block in blocks if not block.is_null]
