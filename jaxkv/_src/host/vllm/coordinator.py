"""The groups of a manager, for vLLM's schedulers and connectors."""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from jaxkv._src.host.manager import CacheManager
from jaxkv._src.host.vllm.block_pool import BlockPool


class RequestView(Mapping[str, Any]):
  """Maps the id of each request that has blocks to `value(id)`."""

  def __init__(self, manager: CacheManager, value: Callable[[str], Any]):
    self._manager = manager
    self._value = value

  def __getitem__(self, request_id: str) -> Any:
    if not self._manager.holds_pages(request_id):
      raise KeyError(request_id)
    return self._value(request_id)

  def __iter__(self) -> Iterator[str]:
    return iter(self._manager.request_ids())

  def __len__(self) -> int:
    return len(self._manager.request_ids())


class SingleTypeKVCacheManager:
  """The blocks of one layer group.

  Attributes:
    kv_cache_spec: vLLM's spec of the group.
    kv_cache_group_id: the index of the group.
    block_size: tokens per block.
    block_pool: the pool of all groups.
    req_to_blocks: the blocks of each request.
    num_cached_block: for each request, the number of blocks that its committed
      tokens fill, cached or not.
  """

  def __init__(
    self, spec: Any, group: int, manager: CacheManager, pool: BlockPool
  ):
    self.kv_cache_spec = spec
    self.kv_cache_group_id = group
    self.block_size = spec.block_size
    self.block_pool = pool
    self.req_to_blocks = RequestView(
      manager, lambda name: pool.blocks_of(manager.get_page_ids(name)[group])
    )
    self.num_cached_block = RequestView(
      manager,
      lambda name: manager.num_published_tokens(name) // spec.block_size,
    )


class KVCacheCoordinator:
  """The layer groups of a manager.

  Attributes:
    single_type_managers: a `SingleTypeKVCacheManager` for each group.
    block_pool: the pool of all groups.
    enable_partial_hash_hits: False, because no hit ends inside a block.
    retention_interval: see `CacheConfig.prefix_retention_interval`.
  """

  enable_partial_hash_hits = False

  def __init__(
    self, manager: CacheManager, pool: BlockPool, specs: Sequence[Any]
  ):
    self._manager = manager
    self.block_pool = pool
    self.retention_interval = manager.config.prefix_retention_interval
    self.single_type_managers = tuple(
      SingleTypeKVCacheManager(spec, group, manager, pool)
      for group, spec in enumerate(specs)
    )

  def get_num_blocks_to_allocate(
    self,
    request_id: str,
    num_tokens: int,
    new_computed_blocks: Sequence[Sequence[Any]],
    num_encoder_tokens: int,
    total_computed_tokens: int,
    num_local_computed_tokens: int,
    num_tokens_main_model: int,
    apply_admission_cap: bool = False,
    prefill_end: int = 0,
  ) -> int:
    """Counts the new blocks that a request without a new hit needs.

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
