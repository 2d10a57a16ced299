"""vLLM's `KVCacheManager` over the one manager of `jaxkv.host`."""

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
    hash_block_size: tokens of which the requests' `block_hashes` are made.
    max_in_flight_tokens: the most tokens scheduled at once, for the check
      whether a whole sequence fits; None for `max_model_len`.
    enable_caching: whether blocks are cached and found.
    use_eagle: whether a draft model needs the last block found computed again.
    num_hash_lookahead_tokens: must be 0.
    num_prefill_lookahead: at most 1.
    log_stats: whether hits are counted.
    enable_kv_cache_events: whether `take_events` has any.
    dcp_world_size, pcp_world_size: must be 1.
    metrics_collector: must be None.
    watermark: fraction of the blocks kept free when waiting requests are
      admitted.
    enable_mamba_shared_prefix_checkpoint: without effect, as in vLLM where no
      hit ends inside a block.
    policy: "current" for the order of vLLM since 0.25; "classic" for that of
      0.19.
    max_requests: the most requests that hold blocks at once; None for 1,024, or
      fewer where the table of their blocks would have more than 2**26 entries.
    key: the secret of the page keys; None for a random one.

  Attributes:
    block_pool: the pool of blocks.
    coordinator: the groups.
    empty_kv_cache_blocks: no blocks, for every group.
    prefix_cache_stats: hits since the last `make_prefix_cache_stats`; None
      without `log_stats`.
    watermark_blocks: blocks kept free when waiting requests are admitted.

  Raises:
    ValueError: an option is not supported, or out of range.
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
    """The fraction of the blocks that is held, the null block not counted."""
    return self.block_pool.get_usage()

  def prefix_cache_lookup_enabled(self, request: Any) -> bool:
    """Whether cached blocks are looked for."""
    skips = getattr(request, "skip_reading_prefix_cache", False)
    return self.enable_caching and not skips

  def record_prefix_cache_stats(self, request: Any, num_hits: int) -> None:
    """Counts a lookup whose request was admitted."""
    stats = self.prefix_cache_stats
    if stats is None or not self.prefix_cache_lookup_enabled(request):
      return
    preempted = getattr(request, "num_preemptions", 0) > 0
    prefix = "preempted_" if preempted else ""
    added = {"requests": 1, "queries": request.num_tokens, "hits": num_hits}
    for name, amount in added.items():
      setattr(stats, prefix + name, getattr(stats, prefix + name) + amount)

  def make_prefix_cache_stats(self) -> PrefixCacheStats | None:
    """Hits since the last call; None without `log_stats`."""
    stats = self.prefix_cache_stats
    if stats is not None:
      self.prefix_cache_stats = PrefixCacheStats()
    return stats

  def get_computed_blocks(
    self, request: Any, max_cache_hit_length: int | None = None
  ) -> tuple[KVCacheBlocks, int, int]:
    """The longest cached prefix that leaves a token to compute.

    Args:
      request: any object with vLLM's attributes of a request.
      max_cache_hit_length: tokens of the longest hit; None for all but one.

    Returns:
      Its blocks, its tokens, and where an earlier prompt had diverged: tokens
      that some groups have cached when not all have, or 0.
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
    """As `get_computed_blocks`, and False: all groups have the whole hit."""
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
    """Makes room for tokens of a request, and caches what is known of them.

    First gives back what fell behind a window, even if there is no room.

    Args:
      request: any object with vLLM's attributes of a request.
      num_new_tokens: tokens that will be computed, drafts included.
      num_new_computed_tokens: tokens that a lookup found.
      new_computed_blocks: the blocks that it found.
      num_lookahead_tokens: tokens behind the new ones that must have room too.
      num_external_computed_tokens: tokens behind those found whose K/V comes
        from elsewhere.
      delay_cache_blocks: whether caching waits for `cache_blocks`.
      num_encoder_tokens: tokens of the encoder.
      full_sequence_must_fit: whether all known tokens must have room.
      reserved_blocks: blocks promised to others.
      has_scheduled_reqs: whether the watermark applies.
      skip_zeroing_group_ids: groups whose blocks for external tokens
        `take_new_block_ids` leaves out.

    Returns:
      The new blocks behind those found and those for external tokens; None,
      with no block taken, if there are too few.

    Raises:
      ValueError: nothing is asked for, or a hit is given that no lookup found.
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
    """Gives all blocks of a request back, the last one first."""
    self._log.forget(request)
    self._cache.free(request)

  def pop_blocks_for_free(self, request: Any) -> list[KVCacheBlock]:
    """Forgets a request, whose blocks `free_blocks` gives back later.

    For a step in flight that may still write them.

    Returns:
      Its blocks in order. They go back reversed, the last one first.
    """
    self._log.forget(request)
    return [self.block_pool.blocks[n] for n in self._cache.hand_over(request)]

  def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
    """As `BlockPool.free_blocks`."""
    self.block_pool.free_blocks(ordered_blocks)

  def remove_skipped_blocks(
    self,
    request_id: str,
    processed_computed_tokens: int,
    num_prompt_tokens: int | None = None,
  ) -> None:
    """Frees blocks outside every window once these tokens are computed.

    Args:
      request_id: a request; nothing is done for one that holds no block.
      processed_computed_tokens: tokens whose K/V no step in flight writes.
      num_prompt_tokens: not used.
    """
    self._cache.remove_skipped_pages(request_id, processed_computed_tokens)

  def evict_blocks(self, block_ids: Iterable[int]) -> None:
    """As `BlockPool.evict_blocks`."""
    self.block_pool.evict_blocks(block_ids)

  def reset_prefix_cache(self) -> bool:
    """Takes every block out of the prefix cache, unless a request holds one.

    Returns:
      Whether it was done.
    """
    done = self.block_pool.reset_prefix_cache()
    if done and self.prefix_cache_stats is not None:
      self.prefix_cache_stats.reset = True
    return done

  def can_fit_full_sequence(
    self, request: Any, num_encoder_tokens: int = 0
  ) -> bool:
    """Whether all known tokens of a request would have room now.

    vLLM 0.19 asks this before `allocate_slots`, which does it since then.
    """
    tokens = min(request.num_tokens, self.max_model_len)
    need = self._cache.num_needed_pages(
      request.request_id, tokens, tokens, num_encoder_tokens, capped=True
    )
    return need <= self.block_pool.get_num_free_blocks()

  def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
    """Leading blocks of a request that all requests hold, by group.

    As in vLLM since 0.33, always 0, unless `policy` is "classic".
    """
    if self._cache.config.prefix_rules == "current":
      return [0] * self.num_kv_cache_groups
    return self._cache.get_num_common_prefix_pages(running_request_id)

  def take_events(self) -> list[KVCacheEvent]:
    """Blocks stored and removed since the last call; [] unless enabled."""
    return self.block_pool.take_events()

  def get_blocks(self, request_id: str) -> KVCacheBlocks:
    """The blocks of a request."""
    return self._blocks_of(self._cache.get_page_ids(request_id))

  def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
    """The ids of a request's blocks."""
    return self._cache.get_page_ids(request_id)

  def get_block_ids_for_computed_tokens(
    self, request_id: str, num_computed_tokens: int
  ) -> tuple[list[int], ...]:
    """The ids of a request's blocks, of attention only so many tokens."""
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
    """Tokens of a request up to which blocks of every group are cached."""
    if not self.enable_caching:
      return 0
    ends = []
    for column in self._cache.get_page_ids(request.request_id):
      hashed = self.block_pool.num_hashed_tokens(column)
      ends.append(max((end for end in hashed if end), default=0))
    return min(ends)

  def cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
    """Caches the full blocks of a request's first tokens.

    For external tokens that have arrived, and for accepted drafts.

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
    """The blocks, or `empty_kv_cache_blocks` if there are none."""
    return KVCacheBlocks(blocks) if any(blocks) else self.empty_kv_cache_blocks

  def truncate_computed_blocks(
    self, blocks: KVCacheBlocks, num_computed_tokens: int
  ) -> KVCacheBlocks:
    """The first blocks of a lookup, for so many tokens."""
    sizes = self._cache.config.page_sizes
    return self.create_kv_cache_blocks(
      tuple(
        list(column[: num_computed_tokens // size])
        for column, size in zip(blocks.blocks, sizes, strict=True)
      )
    )

  def take_new_block_ids(self) -> list[int]:
    """Ids of new attention blocks since the last call, to be zeroed.

    Group by group, as handed out; none unless
    `kv_cache_config.needs_kv_cache_zeroing`.
    """
    return self._zeroing.take()

  def record_blocks_for_zeroing(
    self, request_id: str, start_token: int
  ) -> None:
    """Has `take_new_block_ids` tell a request's blocks from a token on."""
    ids = self._cache.get_page_ids(request_id)
    sizes = self._cache.config.page_sizes
    self._zeroing.add_from(ids, [start_token // size for size in sizes])

  def take_kv_cache_block_copies(
    self,
  ) -> tuple[list[Any], list[KVCacheBlock]]:
    """Nothing: no hit ends inside a block, so none is copied."""
    return [], []

  def take_boundary_state_offloads(
    self,
  ) -> dict[str, list[tuple[int, int, int]]]:
    """States cached since the last call, for a connector to copy.

    By request: a group, a block, and the tokens up to the block's end.
    """
    return self._log.take_states()

  def finalize_partial_tail_offloads(
    self, request: Any
  ) -> list[tuple[int, int, int]]:
    """Nothing: no block is cached with a part of its tokens."""
    return []

  def new_step_starts(self) -> None:
    """Starts a scheduling step: states cached before are written now."""
    self._cache.new_step_starts()

  def _found(self, pages: CachePages) -> KVCacheBlocks:
    """The blocks of a lookup."""
    blocks = self._blocks_of(pages.pages)
    if blocks is self.empty_kv_cache_blocks:
      return blocks
    return KVCacheBlocks(blocks.blocks, pages)

  def _blocks_of(self, ids: Sequence[Sequence[int]]) -> KVCacheBlocks:
    blocks = self.block_pool.blocks
    return self.create_kv_cache_blocks(
      tuple([blocks[number] for number in column] for column in ids)
    )
