"""The groups of a manager, for vLLM's schedulers and connectors."""

from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

from jaxkv._src.cache.group_kinds import GroupKind
from jaxkv._src.host.vllm.block_pool import BlockPool
from jaxkv._src.host.vllm.blocks import KVCacheBlock
from jaxkv._src.host.vllm.page_cache import PageCache


class RequestBlocks:
  """A view of the blocks of requests in one group, by request."""

  def __init__(self, cache: PageCache, pool: BlockPool, group: int):
    self._cache = cache
    self._pool = pool
    self._group = group

  def __contains__(self, request_id: str) -> bool:
    return self._cache.holds_pages(request_id)

  def __getitem__(self, request_id: str) -> list[KVCacheBlock]:
    ids = self._cache.get_page_ids(request_id)[self._group]
    return [self._pool.blocks[number] for number in ids]

  def get(
    self, request_id: str, default: Sequence[KVCacheBlock] = ()
  ) -> Sequence[KVCacheBlock]:
    """Returns the blocks of a request; `default` if it holds none."""
    return self[request_id] if request_id in self else default

  def __iter__(self) -> Iterator[str]:
    return iter(self._cache.request_ids())

  def __len__(self) -> int:
    return len(self._cache.request_ids())


class CachedCounts:
  """A view of the number of cached leading blocks, by request."""

  def __init__(self, cache: PageCache, block_size: int):
    self._cache = cache
    self._block_size = block_size

  def __contains__(self, request_id: str) -> bool:
    return self._cache.holds_pages(request_id)

  def __getitem__(self, request_id: str) -> int:
    return self._cache.num_published_tokens(request_id) // self._block_size

  def __iter__(self) -> Iterator[str]:
    return iter(self._cache.request_ids())

  def __len__(self) -> int:
    return len(self._cache.request_ids())


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
    kind: GroupKind,
    spec: Any,
    group: int,
    cache: PageCache,
    pool: BlockPool,
    *,
    use_eagle: bool,
  ):
    self.kv_cache_spec = spec
    self.kv_cache_group_id = group
    self.block_size = spec.block_size
    self.block_pool = pool
    self.enable_caching = cache.config.prefix_caching
    self.use_eagle = use_eagle
    self.req_to_blocks = RequestBlocks(cache, pool, group)
    self.num_cached_block = CachedCounts(cache, spec.block_size)
    self._null_block = pool.null_block
    self.max_admission_blocks_per_request = None
    if kind.skips_pages and not kind.holds_states:
      self.max_admission_blocks_per_request = cache.most_pages[group]


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
    cache: PageCache,
    pool: BlockPool,
    specs: Sequence[Any],
    scheduler_block_size: int,
    eagle_group_ids: set[int],
  ):
    self._cache = cache
    self.block_pool = pool
    self.scheduler_block_size = scheduler_block_size
    self.eagle_group_ids = eagle_group_ids
    self.retention_interval = cache.config.prefix_retention_interval
    drops = cache.config.use_eagle
    self.single_type_managers = tuple(
      SingleTypeKVCacheManager(
        kind,
        spec,
        group,
        cache,
        pool,
        use_eagle=drops and group in eagle_group_ids,
      )
      for group, (kind, spec) in enumerate(
        zip(cache.config.groups, specs, strict=True)
      )
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

    Args:
      request_id: the request.
      num_tokens: tokens that need blocks.
      new_computed_blocks: empty for each group.
      num_encoder_tokens: encoder tokens that need blocks.
      total_computed_tokens: not used.
      num_local_computed_tokens: not used.
      num_tokens_main_model: the part of `num_tokens` that states count.
      apply_admission_cap: counts for a window only the most blocks at once.
      prefill_end: not used.

    Raises:
      ValueError: `new_computed_blocks` has blocks; use `allocate_slots`.
    """
    if any(new_computed_blocks):
      raise ValueError(
        "`new_computed_blocks` must be empty, got "
        f"{[len(blocks) for blocks in new_computed_blocks]} blocks."
      )
    return self._cache.num_needed_pages(
      request_id,
      num_tokens,
      num_tokens_main_model,
      num_encoder_tokens,
      capped=apply_admission_cap,
    )
