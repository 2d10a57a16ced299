"""vLLM's `KVCacheManager`, over the manager of `jaxkv.host`."""

from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import jax

from jaxkv._src.host.types import CachePages
from jaxkv._src.host.types import PrefixCacheStats
from jaxkv._src.host.vllm import config
from jaxkv._src.host.vllm.block_pool import BlockPool
from jaxkv._src.host.vllm.blocks import KVCacheBlock
from jaxkv._src.host.vllm.blocks import KVCacheBlocks
from jaxkv._src.host.vllm.call_log import CallLog
from jaxkv._src.host.vllm.coordinator import KVCacheCoordinator
from jaxkv._src.host.vllm.events import EventGroup
from jaxkv._src.host.vllm.events import EventReader
from jaxkv._src.host.vllm.events import KVCacheEvent
from jaxkv._src.host.vllm.page_cache import PageCache
from jaxkv._src.host.vllm.zeroing import ZeroingList

_MOST_REQUESTS = 1024
_MOST_ENTRIES = 2**26  # Of the page table: 256 MiB.


class KVCacheManager:
  """Manages the KV-cache blocks of requests; see `jaxkv.host.vllm`.

  Args:
    kv_cache_config: an object with `num_blocks` and `kv_cache_groups`, each
      with a `kv_cache_spec`, as vLLM's.
    max_model_len: tokens of the longest sequence.
    scheduler_block_size: the least common multiple of all block sizes.
    hash_block_size: tokens of each of a request's `block_hashes`.
    max_in_flight_tokens: the most tokens scheduled at once, used by
      `full_sequence_must_fit`; None for `max_model_len`.
    enable_caching: caches blocks and looks them up.
    use_eagle: computes the last block of a hit again, for a draft model.
    num_hash_lookahead_tokens: must be 0.
    num_prefill_lookahead: at most 1.
    log_stats: counts hits.
    enable_kv_cache_events: records events for `take_events`.
    dcp_world_size, pcp_world_size: must be 1.
    metrics_collector: must be None.
    watermark: fraction of the blocks kept free when a waiting request is
      admitted.
    enable_mamba_shared_prefix_checkpoint: no effect, as in vLLM if no hit ends
      inside a block.
    policy: "current" for the order of vLLM since 0.25; "classic" for that of
      0.19.
    max_requests: the most requests that hold blocks at once. None for 1,024, or
      fewer if their block table would exceed 2**26 entries.
    key: the secret of the page keys; None for a random one.

  Attributes:
    block_pool: the pool of blocks.
    coordinator: the groups.
    empty_kv_cache_blocks: no blocks, for every group.
    prefix_cache_stats: hits since the last `make_prefix_cache_stats`; None
      without `log_stats`.
    watermark_blocks: blocks kept free when a waiting request is admitted.

  Raises:
    ValueError: an option is unsupported or out of range.
  """

  mamba_shared_prefix_checkpoint = False
  metrics_collector = None
  retained_hit_group_ids: tuple[int, ...] = ()

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
    metrics_collector: None = None,
    watermark: float = 0.0,
    enable_mamba_shared_prefix_checkpoint: bool = False,
    *,
    policy: str = "current",
    max_requests: int | None = None,
    key: jax.Array | None = None,
  ):
    config.check_options(
      num_hash_lookahead_tokens=(num_hash_lookahead_tokens, 0),
      num_prefill_lookahead=(num_prefill_lookahead, 1),
      dcp_world_size=(dcp_world_size, 1),
      pcp_world_size=(pcp_world_size, 1),
      metrics_collector=(int(metrics_collector is not None), 0),
    )
    groups = kv_cache_config.kv_cache_groups
    kinds = config.group_kinds(
      groups, max_model_len, enable_caching=enable_caching
    )
    config.check_sizes(
      kinds,
      scheduler_block_size=scheduler_block_size,
      hash_block_size=hash_block_size,
      enable_caching=enable_caching,
    )
    drafts = config.draft_groups(groups, kinds, use_eagle)
    if max_requests is None:
      columns = max_model_len // min(kind.page_size or 1 for kind in kinds) + 1
      entries = len(kinds) * columns
      max_requests = max(1, min(_MOST_REQUESTS, _MOST_ENTRIES // entries))
    num_blocks = kv_cache_config.num_blocks
    self._cache = PageCache(
      num_blocks,
      kinds,
      max_model_len,
      enable_caching,
      use_eagle and enable_caching,
      policy=policy,
      prefix_retention_interval=config.retention(
        kv_cache_config, kinds, scheduler_block_size, enable_caching
      ),
      watermark=watermark,
      max_in_flight=max_in_flight_tokens,
      max_requests=max_requests,
      # Room for what one call stores, and for what it removes before.
      num_events=4 * num_blocks + 1 if enable_caching else 0,
      key=key,
    )
    specs = [group.kv_cache_spec for group in groups]
    self._reader = EventReader(
      [
        EventGroup(
          spec.block_size, config.kind_name(spec), config.window_of(spec)
        )
        for spec in specs
      ],
      hash_block_size,
      enabled=enable_kv_cache_events,
    )
    self._log = CallLog(self._cache, self._reader)
    self.block_pool = BlockPool(
      self._cache,
      self._log,
      self._reader,
      hash_block_size,
      enable_kv_cache_events=enable_kv_cache_events,
    )
    self.coordinator = KVCacheCoordinator(
      self._cache, self.block_pool, specs, scheduler_block_size, drafts
    )
    self.kv_cache_config = kv_cache_config
    self.max_model_len = max_model_len
    self.enable_caching = enable_caching
    self.enable_kv_cache_events = enable_kv_cache_events
    self.use_eagle = use_eagle
    self.log_stats = log_stats
    self.num_kv_cache_groups = len(kinds)
    self.watermark_blocks = int(watermark * num_blocks)
    self.prefix_cache_stats = PrefixCacheStats() if log_stats else None
    self.empty_kv_cache_blocks = KVCacheBlocks(tuple(() for _ in kinds))
    zeroes = getattr(kv_cache_config, "needs_kv_cache_zeroing", False)
    self._zeroing = ZeroingList(
      [zeroes and config.is_attention(spec) for spec in specs]
    )

  @property
  def usage(self) -> float:
    """The fraction of the blocks that are held, without the null block."""
    return self.block_pool.get_usage()

  def prefix_cache_lookup_enabled(self, request: Any) -> bool:
    """True if a lookup would search for cached blocks."""
    skips = getattr(request, "skip_reading_prefix_cache", False)
    return self.enable_caching and not skips

  def record_prefix_cache_stats(self, request: Any, num_hits: int) -> None:
    """Counts the lookup of an admitted request."""
    stats = self.prefix_cache_stats
    if stats is None or not self.prefix_cache_lookup_enabled(request):
      return
    preempted = getattr(request, "num_preemptions", 0) > 0
    prefix = "preempted_" if preempted else ""
    added = {"requests": 1, "queries": request.num_tokens, "hits": num_hits}
    for name, amount in added.items():
      setattr(stats, prefix + name, getattr(stats, prefix + name) + amount)

  def make_prefix_cache_stats(self) -> PrefixCacheStats | None:
    """Returns the hits since the last call; None without `log_stats`."""
    stats = self.prefix_cache_stats
    if stats is not None:
      self.prefix_cache_stats = PrefixCacheStats()
    return stats

  def get_computed_blocks(
    self, request: Any, max_cache_hit_length: int | None = None
  ) -> tuple[KVCacheBlocks, int, int]:
    """Finds the longest cached prefix that leaves a token to compute.

    Args:
      request: any object with the attributes of vLLM's requests.
      max_cache_hit_length: tokens of the longest hit; None for all but one.

    Returns:
      The prefix's blocks, its tokens, and the shared-prefix boundary: tokens
      that
      some groups have cached but not all, or 0.
    """
    if not self.prefix_cache_lookup_enabled(request):
      return self.empty_kv_cache_blocks, 0, 0
    pages, num_tokens = self._cache.find_pages(request, max_cache_hit_length)
    report = getattr(request, "kv_cache_report_mode", "incremental")
    if num_tokens and report == "full":
      for group, ids in enumerate(pages.pages):
        self._reader.repeat(request, group, len(ids))
    return self._found(pages), num_tokens, pages.shared_prefix_boundary

  def get_computed_blocks_for_connector(
    self, request: Any, max_cache_hit_length: int | None = None
  ) -> tuple[KVCacheBlocks, int, int, bool]:
    """Calls `get_computed_blocks`; adds False, as all groups share the hit."""
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

    Arguments and errors are those of `jaxkv.host.CacheManager.allocate_slots`,
    with blocks for pages, except for two points. New tokens beyond
    `max_model_len` are cut off, and `skip_zeroing_group_ids` concerns only
    blocks for external tokens.

    Returns:
      The new blocks, after those of the hit and of external tokens; None, with
      no
      block taken, if too few are free or `max_requests` requests hold blocks.
    """
    self._log.read()
    name = request.request_id
    begins = not self._cache.holds_pages(name)
    if begins and self._cache.is_full:
      return None
    hit = None if new_computed_blocks is None else new_computed_blocks.pages
    behind = request.num_computed_tokens + num_new_computed_tokens
    external = min(num_external_computed_tokens, self.max_model_len - behind)
    behind += external
    self._log.expect(request)
    pages = self._cache.allocate_slots(
      request,
      min(num_new_tokens, self.max_model_len - behind),
      num_new_computed_tokens,
      hit,
      num_lookahead_tokens,
      num_external_computed_tokens=external,
      delay_cache_pages=delay_cache_blocks,
      full_sequence_must_fit=full_sequence_must_fit,
      reserved_pages=reserved_blocks,
      has_scheduled_requests=has_scheduled_reqs,
      num_encoder_tokens=num_encoder_tokens,
    )
    if pages is None:
      self._log.read()
      return None
    self._log.read(hit, behind if begins else 0)
    if begins and external and self._zeroing.groups:
      ids = self._cache.get_page_ids(name)
      self._zeroing.add_loaded(ids, pages, hit, skip_zeroing_group_ids)
    self._zeroing.add(pages)
    return self._blocks_of(pages.pages)

  def free(self, request: Any) -> None:
    """Frees all blocks of a request, the last block first."""
    self._log.forget(request)
    self._cache.free(request)

  def pop_blocks_for_free(self, request: Any) -> list[KVCacheBlock]:
    """Removes a request but keeps its blocks until `free_blocks`.

    Use it while a step in flight may still write to them. Returns the blocks in
    order; pass them to `free_blocks` in reverse.
    """
    self._log.forget(request)
    return [self.block_pool.blocks[n] for n in self._cache.hand_over(request)]

  def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
    """Calls `BlockPool.free_blocks`."""
    self.block_pool.free_blocks(ordered_blocks)

  def remove_skipped_blocks(
    self,
    request_id: str,
    processed_computed_tokens: int,
    num_prompt_tokens: int | None = None,
  ) -> None:
    """Frees the blocks that the given number of tokens leaves behind windows.

    Args:
      request_id: a request; one without blocks is ignored.
      processed_computed_tokens: tokens whose K/V no step in flight writes.
      num_prompt_tokens: not used.
    """
    self._cache.remove_skipped_pages(request_id, processed_computed_tokens)

  def evict_blocks(self, block_ids: Iterable[int]) -> None:
    """Calls `BlockPool.evict_blocks`."""
    self.block_pool.evict_blocks(block_ids)

  def reset_prefix_cache(self) -> bool:
    """Resets the prefix cache; returns False if a request holds a block."""
    done = self.block_pool.reset_prefix_cache()
    if done and self.prefix_cache_stats is not None:
      self.prefix_cache_stats.reset = True
    return done

  def can_fit_full_sequence(
    self, request: Any, num_encoder_tokens: int = 0
  ) -> bool:
    """True if all tokens of a request would fit now; for vLLM 0.19."""
    tokens = min(request.num_tokens, self.max_model_len)
    need = self._cache.num_needed_pages(
      request.request_id, tokens, tokens, num_encoder_tokens, capped=True
    )
    return need <= self.block_pool.get_num_free_blocks()

  def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
    """Counts a request's leading blocks that all requests hold, by group.

    Always 0 unless `policy` is "classic", as in vLLM since 0.33.
    """
    if self._cache.config.prefix_rules == "current":
      return [0] * self.num_kv_cache_groups
    return self._cache.get_num_common_prefix_pages(running_request_id)

  def take_events(self) -> list[KVCacheEvent]:
    """Returns events since the last call; none unless they are enabled."""
    return self.block_pool.take_events()

  def get_blocks(self, request_id: str) -> KVCacheBlocks:
    """Returns the blocks of a request."""
    return self._blocks_of(self._cache.get_page_ids(request_id))

  def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
    """Returns the ids of a request's blocks."""
    return self._cache.get_page_ids(request_id)

  def get_block_ids_for_computed_tokens(
    self, request_id: str, num_computed_tokens: int
  ) -> tuple[list[int], ...]:
    """Returns a request's block ids, in attention only up to these tokens."""
    ids = self.get_block_ids(request_id)
    return tuple(
      column[: -(-num_computed_tokens // size)]
      if config.holds_tokens(kind)
      else column
      for kind, size, column in zip(
        self._cache.config.groups,
        self._cache.config.page_sizes,
        ids,
        strict=True,
      )
    )

  def estimate_cached_tokens(self, request: Any) -> int:
    """Returns the tokens up to which all groups have a cached block."""
    if not self.enable_caching:
      return 0
    ends = []
    for column in self._cache.get_page_ids(request.request_id):
      hashed = self.block_pool.num_hashed_tokens(column)
      ends.append(max((end for end in hashed if end), default=0))
    return min(ends)

  def cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
    """Caches the full blocks of a request's first tokens.

    Call it when external tokens have arrived, or drafts are accepted.

    Raises:
      KeyError: the request holds no block.
    """
    if self.enable_caching:
      self._log.read()
      self._log.expect(request)
      self._cache.cache_pages(request, num_computed_tokens)
      self._log.read()

  def create_kv_cache_blocks(
    self, blocks: tuple[Sequence[KVCacheBlock], ...]
  ) -> KVCacheBlocks:
    """Wraps blocks; returns `empty_kv_cache_blocks` if there are none."""
    return KVCacheBlocks(blocks) if any(blocks) else self.empty_kv_cache_blocks

  def truncate_computed_blocks(
    self, blocks: KVCacheBlocks, num_computed_tokens: int
  ) -> KVCacheBlocks:
    """Returns the blocks of a lookup that the first tokens fill."""
    sizes = self._cache.config.page_sizes
    return self.create_kv_cache_blocks(
      tuple(
        list(column[: num_computed_tokens // size])
        for column, size in zip(blocks.blocks, sizes, strict=True)
      )
    )

  def take_new_block_ids(self) -> list[int]:
    """Returns the new attention blocks since the last call, for zeroing.

    In order of groups and allocation; empty unless
    `kv_cache_config.needs_kv_cache_zeroing`.
    """
    return self._zeroing.take()

  def record_blocks_for_zeroing(
    self, request_id: str, start_token: int
  ) -> None:
    """Adds a request's blocks from a token on to `take_new_block_ids`."""
    ids = self._cache.get_page_ids(request_id)
    sizes = self._cache.config.page_sizes
    self._zeroing.add_from(ids, [start_token // size for size in sizes])

  def take_kv_cache_block_copies(
    self,
  ) -> tuple[list[Any], list[KVCacheBlock]]:
    """Returns empty lists: no hit ends inside a block."""
    return [], []

  def take_boundary_state_offloads(
    self,
  ) -> dict[str, list[tuple[int, int, int]]]:
    """Returns states cached since the last call, for a connector to copy.

    For each request: group, block, and tokens up to the block's end.
    """
    return self._log.take_states()

  def finalize_partial_tail_offloads(
    self, request: Any
  ) -> list[tuple[int, int, int]]:
    """Returns an empty list: no partial block is cached."""
    return []

  def new_step_starts(self) -> None:
    """Starts a scheduling step; states cached before it count as written."""
    self._cache.new_step_starts()

  def _found(self, pages: CachePages) -> KVCacheBlocks:
    """Returns the blocks of a lookup."""
    blocks = self._blocks_of(pages.pages)
    if blocks is self.empty_kv_cache_blocks:
      return blocks
    return KVCacheBlocks(blocks.blocks, pages)

  def _blocks_of(self, ids: Sequence[Sequence[int]]) -> KVCacheBlocks:
    blocks = self.block_pool.blocks
    return self.create_kv_cache_blocks(
      tuple([blocks[number] for number in column] for column in ids)
    )
