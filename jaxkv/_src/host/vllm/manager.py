"""vLLM's `KVCacheManager`, implemented with `jaxkv.host.CacheManager`."""

import dataclasses
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

from jaxkv._src.host.atomic import atomic
from jaxkv._src.host.cache_pages import CachePages
from jaxkv._src.host.demand import PLAIN
from jaxkv._src.host.groups import CrossAttention
from jaxkv._src.host.manager import CacheManager
from jaxkv._src.host.telemetry import PrefixCacheStats
from jaxkv._src.host.vllm import config
from jaxkv._src.host.vllm.block_hashes import BlockHashes
from jaxkv._src.host.vllm.block_pool import BlockPool
from jaxkv._src.host.vllm.block_pool import KVCacheBlock
from jaxkv._src.host.vllm.block_pool import KVCacheBlocks
from jaxkv._src.host.vllm.coordinator import KVCacheCoordinator
from jaxkv._src.host.vllm.events import KVCacheEvent


class KVCacheManager:
  """Manages the KV-cache blocks of requests; see `jaxkv.host.vllm`.

  Args:
    kv_cache_config: vLLM's `KVCacheConfig`, or an object with `num_blocks` and
      `kv_cache_groups`, each with a `kv_cache_spec`.
    max_model_len: tokens of the longest sequence.
    scheduler_block_size: the least common multiple of all block sizes.
    hash_block_size: tokens per hash in the `block_hashes` of requests.
    max_in_flight_tokens: the most tokens of one request scheduled at once, for
      `full_sequence_must_fit`; None for `max_model_len`.
    enable_caching: True to cache full blocks and to find them again.
    use_eagle: True to compute the last block of a hit again, for a draft model.
    num_hash_lookahead_tokens: must be 0.
    num_prefill_lookahead: must be 0 or 1.
    log_stats: True to count hits.
    enable_kv_cache_events: True to record events for `take_events`.
    dcp_world_size, pcp_world_size: must be 1.
    metrics_collector: an object with the methods of vLLM's
      `KVCacheMetricsCollector`, or None.
    watermark: fraction of the blocks to keep free when a waiting request is
      admitted while others run.
    enable_mamba_shared_prefix_checkpoint: has no effect, because no hit ends
      inside a block.
    max_requests: the most requests that hold blocks at once.

  Attributes:
    block_pool: the pool of blocks.
    coordinator: the layer groups.
    empty_kv_cache_blocks: a `KVCacheBlocks` without blocks.
    prefix_cache_stats: hits since the last `make_prefix_cache_stats`; None
      without `log_stats`.
    undo_log: the changes of the current call.

  Raises:
    ValueError: an option is unsupported or out of range.
  """

  mamba_shared_prefix_checkpoint = False

  def __init__(
    self,
    kv_cache_config: Any,
    max_model_len: int,
    scheduler_block_size: int,
    hash_block_size: int,
    max_in_flight_tokens: int | None = None,
    enable_caching: bool = True,
    use_eagle: bool = False,
    num_hash_lookahead_tokens: int = 0,
    num_prefill_lookahead: int = 0,
    log_stats: bool = False,
    enable_kv_cache_events: bool = False,
    dcp_world_size: int = 1,
    pcp_world_size: int = 1,
    metrics_collector: Any = None,
    watermark: float = 0.0,
    enable_mamba_shared_prefix_checkpoint: bool = False,
    *,
    max_requests: int = 1024,
  ):
    config.require("num_hash_lookahead_tokens", num_hash_lookahead_tokens, 0)
    config.require("num_prefill_lookahead", num_prefill_lookahead, 1)
    config.require("dcp_world_size", dcp_world_size, 1)
    config.require("pcp_world_size", pcp_world_size, 1)
    groups = kv_cache_config.kv_cache_groups
    kinds = config.group_kinds(
      groups, max_model_len, enable_caching=enable_caching, use_eagle=use_eagle
    )
    if enable_caching and kinds:
      config.check_sizes(kinds, scheduler_block_size, hash_block_size)
    self._manager = CacheManager(
      kv_cache_config.num_blocks,
      kinds,
      max_model_len,
      enable_caching,
      use_eagle and enable_caching,
      prefix_retention_interval=config.retention(
        kv_cache_config, kinds, scheduler_block_size, enable_caching
      ),
      watermark=watermark,
      max_in_flight=max_in_flight_tokens,
      max_requests=max_requests,
    )
    self.undo_log = self._manager.undo_log
    specs = [group.kv_cache_spec for group in groups]
    self._hashes = BlockHashes(
      self._manager,
      config.event_groups(specs, hash_block_size),
      has_events=enable_kv_cache_events,
    )
    self.block_pool = BlockPool(
      self._manager, self._hashes, hash_block_size, metrics_collector
    )
    self.coordinator = KVCacheCoordinator(self._manager, self.block_pool, specs)
    self.kv_cache_config = kv_cache_config
    self.max_model_len = max_model_len
    self.enable_caching = enable_caching
    self.enable_kv_cache_events = enable_kv_cache_events
    self.use_eagle = use_eagle
    self.log_stats = log_stats
    self.metrics_collector = metrics_collector
    self.num_kv_cache_groups = len(kinds)
    self.prefix_cache_stats = PrefixCacheStats() if log_stats else None
    self.empty_kv_cache_blocks = KVCacheBlocks(tuple(() for _ in kinds))
    self._is_attention = [config.is_attention(spec) for spec in specs]
    # By group, the result of the next `take_new_block_ids`.
    self._new_ids: list[list[int]] = [[] for _ in kinds]
    self._zeroes = getattr(kv_cache_config, "needs_kv_cache_zeroing", False)
    self._records_new = self._zeroes or metrics_collector is not None
    # The id and the hashed tokens of the request that was looked up last.
    self._lookup: tuple[str, Any] = "", None

  @property
  def usage(self) -> float:
    """The fraction of blocks in use, not counting the null block."""
    return self.block_pool.get_usage()

  def prefix_cache_lookup_enabled(self, request: Any) -> bool:
    """True if `get_computed_blocks` searches for a hit of the request."""
    skips = getattr(request, "skip_reading_prefix_cache", False)
    return self.enable_caching and not skips

  @atomic
  def record_prefix_cache_stats(self, request: Any, num_hits: int) -> None:
    """Adds the lookup of an admitted request to the statistics."""
    stats = self.prefix_cache_stats
    if stats is None or not self.prefix_cache_lookup_enabled(request):
      return
    is_preempted = getattr(request, "num_preemptions", 0) > 0
    stats = stats.counting(
      request.num_tokens, num_hits, is_preempted=is_preempted
    )
    self.undo_log.replace(self, prefix_cache_stats=stats)

  @atomic
  def make_prefix_cache_stats(self) -> PrefixCacheStats | None:
    """Returns the statistics since the last call; None without `log_stats`."""
    stats = self.prefix_cache_stats
    if stats is not None:
      self.undo_log.replace(self, prefix_cache_stats=PrefixCacheStats())
    return stats

  def get_computed_blocks(
    self, request: Any, max_cache_hit_length: int | None = None
  ) -> tuple[KVCacheBlocks, int, int]:
    """Finds the longest cached prefix that leaves a token to compute.

    Args:
      request: any object with the attributes of vLLM's requests.
      max_cache_hit_length: the most tokens of the prefix; None for all but one.

    Returns:
      The blocks of the prefix, its number of tokens, and the length of a longer
      prefix that some groups, but not all, have cached; 0 for none.
    """
    if not self.prefix_cache_lookup_enabled(request):
      return self.empty_kv_cache_blocks, 0, 0
    pages, num_tokens = self._manager.get_computed_pages(
      request, max_cache_hit_length
    )
    # After a miss too, `allocate_slots` needs the hashes of the tokens.
    self._lookup = request.request_id, pages.lookup
    mode = getattr(request, "kv_cache_report_mode", "incremental")
    if num_tokens and mode == "full":
      self._hashes.report_hit(request, pages.pages)
    blocks = self._blocks_of(pages.pages)
    return blocks, num_tokens, pages.shared_prefix_boundary

  def get_computed_blocks_for_connector(
    self, request: Any, max_cache_hit_length: int | None = None
  ) -> tuple[KVCacheBlocks, int, int, bool]:
    """Returns `(*get_computed_blocks(), False)`: all groups have this hit."""
    return *self.get_computed_blocks(request, max_cache_hit_length), False

  def allocate_slots(
    self,
    request: Any,
    num_new_tokens: int,
    num_new_computed_tokens: int = 0,
    new_computed_blocks: KVCacheBlocks | None = None,
    num_lookahead_tokens: int = 0,
    num_external_computed_tokens: int = 0,
    delay_cache_blocks: bool = False,
    num_encoder_tokens: int = 0,
    full_sequence_must_fit: bool = False,
    reserved_blocks: int = 0,
    has_scheduled_reqs: bool = True,
    skip_zeroing_group_ids: Sequence[int] = (),
  ) -> KVCacheBlocks | None:
    """Allocates blocks for a request's tokens and caches its full blocks.

    See `jaxkv.host.CacheManager.allocate_slots` for arguments and errors. In
    contrast to it, external and new tokens beyond `max_model_len` are cut off.
    `skip_zeroing_group_ids` lists the groups whose blocks for external tokens
    `take_new_block_ids` omits.

    Returns:
      The new blocks, without those of the hit and of external tokens. None,
      with no block allocated, if too few are free, if the hit ends with a Mamba
      state of this step, or if `max_requests` other requests have blocks.
    """
    manager = self._manager
    begins = not manager.holds_pages(request.request_id)
    remaining = self.max_model_len - request.num_computed_tokens
    remaining -= num_new_computed_tokens
    if remaining <= 0 and not begins and num_new_tokens > 0:
      return self.empty_kv_cache_blocks
    external = min(num_external_computed_tokens, remaining)
    num_new_tokens = min(num_new_tokens, remaining - external)
    arguments = (
      num_new_computed_tokens,
      new_computed_blocks,
      external,
      num_encoder_tokens,
      reserved_blocks,
      delay_cache_blocks,
      full_sequence_must_fit,
    )
    is_plain = arguments == PLAIN and has_scheduled_reqs
    if is_plain and not begins and not self._records_new:
      pages = manager.allocate_slots(
        request, num_new_tokens, 0, None, num_lookahead_tokens
      )
    else:
      pages = self._allocate(
        request,
        new_computed_blocks or self.empty_kv_cache_blocks,
        skip_zeroing_group_ids,
        begins=begins,
        num_new_tokens=num_new_tokens,
        num_new_computed_tokens=num_new_computed_tokens,
        num_lookahead_tokens=num_lookahead_tokens,
        num_external_computed_tokens=external,
        delay_cache_pages=delay_cache_blocks,
        full_sequence_must_fit=full_sequence_must_fit,
        reserved_pages=reserved_blocks,
        has_scheduled_requests=has_scheduled_reqs,
        num_encoder_tokens=num_encoder_tokens,
      )
    return None if pages is None else self._blocks_of(pages.pages)

  @atomic
  def _allocate(
    self,
    request: Any,
    blocks: KVCacheBlocks,
    skipped_groups: Sequence[int],
    *,
    begins: bool,
    **options: Any,
  ) -> CachePages | None:
    """Allocates blocks; updates events, zeroing and metrics accordingly."""
    if begins and self._manager.is_full:
      return None
    hit = None
    if begins or any(blocks.blocks):
      name, lookup = self._lookup
      lookup = lookup if name == request.request_id else None
      hit = CachePages(blocks.get_block_ids(), lookup=lookup)
    pages = self._manager.allocate_slots(
      request, new_computed_pages=hit, **options
    )
    if pages is None:
      return None
    if begins and options["num_external_computed_tokens"]:
      self._hashes.begin(request.request_id)
    if self._records_new:
      first = [set(blocks) for blocks in hit.pages] if hit is not None else None
      self._record_new(request.request_id, pages.pages, first, skipped_groups)
    return pages

  def _record_new(
    self,
    request_id: str,
    new: Sequence[list[int]],
    hit: Sequence[set[int]] | None,
    skipped_groups: Sequence[int],
  ) -> None:
    """Records new blocks, by group, for zeroing and metrics.

    `new` lacks the blocks for external tokens, which are not zeroed in
    `skipped_groups`. `hit` is None for a running request.
    """
    new_ids = new
    if hit is not None:
      tables = self._manager.get_page_ids(request_id)
      self.block_pool.count_accessed(
        page
        for table, hit_pages in zip(tables, hit, strict=True)
        for page in table
        if page and page in hit_pages
      )
      new_ids = [
        [page for page in table if page and page not in hit_pages]
        for table, hit_pages in zip(tables, hit, strict=True)
      ]
    for group, blocks in enumerate(new_ids):
      # In groups with states, new columns before the last can be null.
      self.block_pool.count_allocated([block for block in blocks if block])
      self._zero(group, new[group] if group in skipped_groups else blocks)

  def _zero(self, group: int, block_ids: Sequence[int]) -> None:
    """Adds blocks to the next `take_new_block_ids` if vLLM zeroes the group."""
    if self._zeroes and self._is_attention[group]:
      self.undo_log.save_length(self._new_ids[group])
      self._new_ids[group] += block_ids

  @atomic
  def free(self, request: Any) -> None:
    """Frees all blocks of a request, the last block first."""
    self._hashes.forget(request.request_id)
    self._manager.free(request)

  @atomic
  def pop_blocks_for_free(self, request: Any) -> list[KVCacheBlock]:
    """Removes a request but keeps its blocks until `block_pool.free_blocks`.

    Use it while a step in flight may still write to the blocks. The blocks are
    returned group by group; pass them to `free_blocks` in reverse order.
    """
    self._hashes.forget(request.request_id)
    return self.block_pool.blocks_of(self._manager.pop_pages_for_free(request))

  def remove_skipped_blocks(
    self,
    request_id: str,
    processed_computed_tokens: int,
    num_prompt_tokens: int | None = None,
  ) -> None:
    """Frees the blocks that have left the attention windows of a request.

    Args:
      request_id: a request; ignored if it has no blocks.
      processed_computed_tokens: computed tokens, without those in flight.
      num_prompt_tokens: not used.
    """
    self._manager.remove_skipped_pages(request_id, processed_computed_tokens)

  def evict_blocks(self, block_ids: Iterable[int]) -> None:
    """Calls `block_pool.evict_blocks`."""
    self.block_pool.evict_blocks(block_ids)

  @atomic
  def reset_prefix_cache(self) -> bool:
    """Calls `block_pool.reset_prefix_cache`; records success in statistics."""
    done = self.block_pool.reset_prefix_cache()
    if done and self.prefix_cache_stats is not None:
      stats = dataclasses.replace(self.prefix_cache_stats, reset=True)
      self.undo_log.replace(self, prefix_cache_stats=stats)
    return done

  def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
    """Returns 0 for each group, as vLLM 0.33 does."""
    return [0] * self.num_kv_cache_groups

  def take_events(self) -> list[KVCacheEvent]:
    """Returns the events since the last call; none unless they are enabled."""
    return self.block_pool.take_events()

  def get_blocks(self, request_id: str) -> KVCacheBlocks:
    """Returns the blocks of a request."""
    return self._blocks_of(self._manager.get_page_ids(request_id))

  def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
    """Returns the ids of a request's blocks."""
    return self._manager.get_page_ids(request_id)

  def get_block_ids_for_computed_tokens(
    self, request_id: str, num_computed_tokens: int
  ) -> tuple[list[int], ...]:
    """Returns the ids of the blocks for a request's first tokens.

    All blocks of groups with states or an encoder are included.
    """
    tables = list(self.get_block_ids(request_id))
    for group, kind in enumerate(self._manager.config.groups):
      is_encoder = isinstance(kind, CrossAttention)
      if self._is_attention[group] and not is_encoder:
        num_blocks = -(-num_computed_tokens // (kind.page_size or 1))
        tables[group] = tables[group][:num_blocks]
    return tuple(tables)

  def estimate_cached_tokens(self, request: Any) -> int:
    """Estimates the cached tokens of a request: the minimum over all groups."""
    if not self.enable_caching:
      return 0
    ends = []
    for column in self._manager.get_page_ids(request.request_id):
      hashed = [self._hashes.num_tokens(number) or 0 for number in column]
      ends.append(max(hashed, default=0))
    return min(ends)

  def cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
    """Caches the full blocks of a request's first tokens.

    Call it when external tokens have arrived, or drafts are accepted.

    Raises:
      KeyError: the request holds no block.
    """
    if self.enable_caching:
      self._manager.cache_pages(request, num_computed_tokens)

  def create_kv_cache_blocks(
    self, blocks: tuple[Sequence[KVCacheBlock], ...]
  ) -> KVCacheBlocks:
    """Wraps blocks; returns `empty_kv_cache_blocks` if there are none."""
    return KVCacheBlocks(blocks) if any(blocks) else self.empty_kv_cache_blocks

  def truncate_computed_blocks(
    self, blocks: KVCacheBlocks, num_computed_tokens: int
  ) -> KVCacheBlocks:
    """Returns the blocks that the first tokens of a hit fill."""
    sizes = self._manager.config.page_sizes
    return self.create_kv_cache_blocks(
      tuple(
        list(column[: num_computed_tokens // size])
        for column, size in zip(blocks.blocks, sizes, strict=True)
      )
    )

  @atomic
  def take_new_block_ids(self) -> list[int]:
    """Returns the new attention blocks since the last call, to be zeroed.

    The order is by group, then by allocation. The list is empty unless
    `kv_cache_config.needs_kv_cache_zeroing` is True.
    """
    self.undo_log.save_attribute(self, "_new_ids")
    new_ids, self._new_ids = self._new_ids, [[] for _ in self._new_ids]
    return [number for ids in new_ids for number in ids]

  @atomic
  def record_blocks_for_zeroing(
    self, request_id: str, start_token: int
  ) -> None:
    """Lets `take_new_block_ids` return a request's blocks from a token on."""
    sizes = self._manager.config.page_sizes
    for group, table in enumerate(self.get_block_ids(request_id)):
      self._zero(group, table[start_token // sizes[group] :])

  def take_kv_cache_block_copies(self) -> tuple[list[Any], list[KVCacheBlock]]:
    """Returns empty lists, because no hit ends inside a block."""
    return [], []

  def take_boundary_state_offloads(
    self,
  ) -> dict[str, list[tuple[int, int, int]]]:
    """Returns states for a connector to copy; see `BlockHashes.take_states`."""
    return self._hashes.take_states()

  def finalize_partial_tail_offloads(
    self, request: Any
  ) -> list[tuple[int, int, int]]:
    """Returns an empty list, because no partial block is cached."""
    return []

  def new_step_starts(self) -> None:
    """Starts a step; hits may now end with Mamba states of earlier steps."""
    self._manager.new_step_starts()

  def _blocks_of(self, ids: Sequence[Sequence[int]]) -> KVCacheBlocks:
    """Returns the blocks with these ids, or `empty_kv_cache_blocks`."""
    if not any(ids):
      return self.empty_kv_cache_blocks
    return KVCacheBlocks(tuple(map(self.block_pool.blocks_of, ids)))
