"""The groups of a manager, for vLLM's schedulers and connectors."""

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from jaxkv._src.host.manager import CacheManager
from jaxkv._src.host.vllm.block_pool import BlockPool
from jaxkv._src.host.vllm.blocks import KVCacheBlock


class _ByRequest(Mapping[str, Any]):
  """A view of the requests that hold blocks of a group."""

  def __init__(self, group: "SingleTypeKVCacheManager", manager: CacheManager):
    self._group = group
    self._manager = manager

  def __contains__(self, request_id: object) -> bool:
    return isinstance(request_id, str) and self._manager.holds_pages(request_id)

  def __iter__(self) -> Iterator[str]:
    return iter(self._manager.request_ids())

  def __len__(self) -> int:
    return len(self._manager.request_ids())


class RequestBlocks(_ByRequest):
  """A view of the blocks of requests in one group; empty for others."""

  def __getitem__(self, request_id: str) -> list[KVCacheBlock]:
    ids = self._manager.get_page_ids(request_id)
    blocks = self._group.block_pool.blocks
    return [blocks[number] for number in ids[self._group.kv_cache_group_id]]

  def get(self, request_id: str, default: Any = ()) -> Sequence[KVCacheBlock]:
    """Returns the blocks of a request; `default` if it holds none."""
    return self[request_id] if request_id in self else default


class CachedCounts(_ByRequest):
  """A view of the number of cached leading blocks, by request."""

  def __getitem__(self, request_id: str) -> int:
    tokens = self._manager.num_published_tokens(request_id)
    return tokens // self._group.block_size


class SingleTypeKVCacheManager:
  """A group of layers.

  Attributes:
    kv_cache_spec: vLLM's spec.
    kv_cache_group_id: its index.
    block_size: tokens a block.
    block_pool: the pool of all groups.
    req_to_blocks: the blocks of requests.
    num_cached_block: the number of their cached leading blocks.
    enable_caching: True if blocks are cached.
    use_eagle: True if hits drop a block for a draft model.
    max_admission_blocks_per_request: the most blocks of one request if windows
      free blocks; else None.
  """

  def __init__(
    self,
    spec: Any,
    group: int,
    manager: CacheManager,
    pool: BlockPool,
    *,
    use_eagle: bool,
  ):
    kind = manager.config.groups[group]
    self.kv_cache_spec = spec
    self.kv_cache_group_id = group
    self.block_size = spec.block_size
    self.block_pool = pool
    self.enable_caching = manager.config.prefix_caching
    self.use_eagle = use_eagle
    self.req_to_blocks = RequestBlocks(self, manager)
    self.num_cached_block = CachedCounts(self, manager)
    self._null_block = pool.null_block
    self.max_admission_blocks_per_request = None
    if kind.skips_pages and not kind.holds_states:
      self.max_admission_blocks_per_request = manager.most_pages[group]


class KVCacheCoordinator:
  """The groups of a manager.

  Attributes:
    single_type_managers: one for each group.
    block_pool: the pool.
    eagle_group_ids: groups of a draft model.
    enable_partial_hash_hits: False; hits end at ends of blocks.
    num_reprefillable_tokens: 0.
    retention_interval: see `CacheConfig.prefix_retention_interval`.
    scheduler_block_size: a divisor of every hit.
  """

  enable_partial_hash_hits = False
  num_reprefillable_tokens = 0

  def __init__(
    self,
    manager: CacheManager,
    pool: BlockPool,
    specs: Sequence[Any],
    scheduler_block_size: int,
    eagle_group_ids: set[int],
  ):
    self._manager = manager
    self.block_pool = pool
    self.scheduler_block_size = scheduler_block_size
    self.eagle_group_ids = eagle_group_ids
    self.retention_interval = manager.config.prefix_retention_interval
    drops = eagle_group_ids if manager.config.use_eagle else ()
    self.single_type_managers = tuple(
      SingleTypeKVCacheManager(
        spec, group, manager, pool, use_eagle=group in drops
      )
      for group, spec in enumerate(specs)
    )

  def get_num_blocks_to_allocate(
    self,
    request_id: str,
    num_tokens: int,
    new_computed_blocks: Sequence[Sequence[KVCacheBlock]],
    num_encoder_tokens: int,
    total_computed_tokens: int,
    num_local_computed_tokens: int,
    num_tokens_main_model: int,
    apply_admission_cap: bool = False,
    prefill_end: int = 0,
  ) -> int:
    """Counts the further blocks that a request with blocks needs.

    The arguments are those of vLLM; `total_computed_tokens`,
    `num_local_computed_tokens` and `prefill_end` are not used.

    Raises:
      ValueError: `new_computed_blocks` has blocks; use `allocate_slots`.
    """
    if any(new_computed_blocks):
      raise ValueError(
        "`new_computed_blocks` must be empty, got "
        f"{[len(blocks) for blocks in new_computed_blocks]} blocks."
      )
    return self._manager.num_needed_pages(
      request_id,
      num_tokens,
      num_tokens_main_model,
      num_encoder_tokens,
      capped=apply_admission_cap,
    )
