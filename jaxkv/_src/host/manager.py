"""A cache manager for schedulers in Python, over a state on the device."""

from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxkv._src.cache import state as cache_state
from jaxkv._src.cache.group_kinds import FullAttention
from jaxkv._src.cache.group_kinds import GroupKind
from jaxkv._src.cache.pool import recurrent
from jaxkv._src.cache.prefix import rules
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.telemetry import NUM_BINS
from jaxkv._src.cache.telemetry import Drained
from jaxkv._src.cache.verbs import inspect
from jaxkv._src.host import calls
from jaxkv._src.host import options
from jaxkv._src.host import step
from jaxkv._src.host.request import Request
from jaxkv._src.host.request import read_request
from jaxkv._src.host.slots import RequestSlots
from jaxkv._src.host.step import Advanced
from jaxkv._src.host.types import CachePages
from jaxkv._src.host.types import PagePool
from jaxkv._src.host.types import PoppedPages
from jaxkv._src.host.types import PrefixCacheStats

_PAGES_AT_ONCE = 64


class CacheManager:
  """Manages the pages of requests, as vLLM's and eSurge's managers do.

  The methods are those that schedulers written for vLLM's `KVCacheManager` or
  eSurge's `CacheManager` call, with the same page ids, hits and order. The
  state is a `jaxkv.CacheState`; a call is a jitted transition of it.

  The first request of each width (64, 4,096 or 65,536 tokens, or the longest)
  is compiled for, which takes some 9 s on a CPU. To warm up, send one of each
  width through all calls that will be made, free it, and call
  `reset_prefix_cache`.

  Args:
    num_pages: pages of the pool, the null page 0 included; ids begin at 1.
    groups: the layer groups, each with its `page_size`.
    max_model_len: tokens of the longest sequence.
    enable_caching: whether pages are published and found.
    use_eagle: whether a draft model needs the last page found computed again.
    policy: "current" for the order of vLLM since 0.25, where pages without a
      key are used first; "classic" for earlier versions and eSurge.
    prefix_retention_interval: which prefixes a window keeps; see `CacheConfig`.
    watermark: fraction of the pages kept free when waiting requests are
      admitted.
    max_in_flight: the most tokens scheduled at once, for the check whether a
      whole sequence fits; None for `max_model_len`.
    max_encoder_tokens: tokens of the longest encoder input, for groups of
      `CrossAttention`; None for `max_model_len`.
    max_requests: the most requests that hold pages at once.
    num_events: events kept until `take_events`; 0 for none.
    track_new_pages: whether `take_new_page_ids` is used.
    track_residency: whether statistics tell how old evicted pages were.
    key: the secret of the page keys, see `jaxkv.init`; None for a random one.

  Attributes:
    config: sizes of the state.
    state: the cache. The next call takes its arrays: copy what you keep.
    page_pool: a read-only view of its pages.

  Raises:
    TypeError: an argument is of the wrong type.
    ValueError: an argument is out of range, or two do not go together.

  Examples:
    >>> from jaxkv import FullAttention
    >>> from jaxkv.host import CacheManager, Request
    >>> manager = CacheManager(10, [FullAttention(page_size=4)], 32)
    >>> request = Request("a", list(range(9)))
    >>> manager.allocate_slots(request, 9).get_page_ids()
    ([1, 2, 3],)
    >>> manager.free(request)
    >>> manager.free_queue()
    [3, 4, 5, 6, 7, 8, 9, 2, 1]
    >>> manager.get_computed_pages(request)
    (CachePages(pages=([1, 2],)), 8)
  """

  def __init__(
    self,
    num_pages: int,
    groups: Sequence[GroupKind],
    max_model_len: int,
    enable_caching: bool = True,
    use_eagle: bool = False,
    *,
    policy: str = "current",
    prefix_retention_interval: int | None = None,
    watermark: float = 0.0,
    max_in_flight: int | None = None,
    max_encoder_tokens: int | None = None,
    max_requests: int = 256,
    num_events: int = 0,
    track_new_pages: bool = False,
    track_residency: bool = False,
    key: jax.Array | None = None,
  ):
    self._limits = options.make(
      groups,
      max_model_len=max_model_len,
      max_encoder_tokens=max_encoder_tokens,
      max_in_flight=max_in_flight,
      max_requests=max_requests,
      policy=policy,
      watermark=watermark,
      num_pages=num_pages,
      prefix_caching=enable_caching,
      use_eagle=use_eagle,
      prefix_retention_interval=prefix_retention_interval,
      event_log=num_events,
      track_new_pages=track_new_pages,
      track_residency=track_residency,
    )
    self.config = self._limits.config
    self.state: CacheState = cache_state.init(self.config, key)
    self.page_pool = PagePool(self)
    self._slots = RequestSlots(self.config, max_requests)
    self._statistics = PrefixCacheStats()
    self._popped: dict[int, PoppedPages] = {}
    self._step_clock = 0
    self._ages = np.zeros((2, NUM_BINS), np.uint32)

  def get_computed_pages(self, request: Any) -> tuple[CachePages, int]:
    """The longest cached prefix that leaves a token to compute.

    Sets `request.shared_prefix_boundary`.

    Args:
      request: any object with the attributes of `Request`.

    Returns:
      Its pages by group, null pages where a window needs none, and its tokens.
    """
    request.shared_prefix_boundary = 0
    known = read_request(request)
    if not self.config.prefix_caching or known.prompt_logprobs:
      return self.create_empty_page_list(), 0
    found = step.look_up(self.state, *calls.pack_lookup(self._limits, known))
    num_tokens, boundary, stop, pages = jax.device_get(found)
    if rules.tells_boundary(self.config):
      request.shared_prefix_boundary = int(boundary)
    columns = zip(pages, stop, strict=True)
    found = tuple([row[:last].tolist() for row, last in columns])
    return CachePages(found), int(num_tokens)

  def allocate_slots(
    self,
    request: Any,
    num_new_tokens: int,
    num_new_computed_tokens: int = 0,
    new_computed_pages: CachePages | None = None,
    num_lookahead_tokens: int = 0,
    num_external_computed_tokens: int = 0,
    delay_cache_pages: bool = False,
    full_sequence_must_fit: bool = False,
    reserved_pages: int = 0,
    has_scheduled_requests: bool = True,
    num_encoder_tokens: int = 0,
    skip_zeroing_group_ids: Sequence[int] = (),
    dp_shard_hint: int | None = None,
    data_parallel_size: int | None = None,
  ) -> CachePages | None:
    """Makes room for tokens of a request, and publishes those that are known.

    First gives back what fell behind a window, even if there is no room.

    Args:
      request: any object with the attributes of `Request`.
      num_new_tokens: tokens that will be computed, drafts included.
      num_new_computed_tokens: tokens that a lookup found.
      new_computed_pages: the pages that a lookup found.
      num_lookahead_tokens: tokens behind the new ones that must have room too.
      num_external_computed_tokens: tokens behind those found whose K/V comes
        from elsewhere.
      delay_cache_pages: whether publishing waits for `cache_pages`, because
        the K/V is not there yet.
      full_sequence_must_fit: whether all known tokens must have room, though
        only some are asked for.
      reserved_pages: pages promised to others.
      has_scheduled_requests: whether the watermark applies.
      num_encoder_tokens: tokens of the encoder for which groups of
        `CrossAttention` have pages.
      skip_zeroing_group_ids: groups whose new pages `take_new_page_ids` leaves
        out.
      dp_shard_hint: None or 0.
      data_parallel_size: None or 1: every shard has a manager of its own.

    Returns:
      The new pages behind those found and those for external tokens; None,
      with no page taken, if there are too few.

    Raises:
      TypeError: a number is not an int.
      ValueError: nothing is asked for, a number is negative, the sequence is
        too long, or a hit is given that no lookup found.
      RuntimeError: there are `max_requests` already.
    """
    calls.check_shard(
      self.config, skip_zeroing_group_ids, dp_shard_hint, data_parallel_size
    )
    known, hit = read_request(request), new_computed_pages
    slot = self._slots.by_name.get(known.request_id)
    fields = calls.allocation_fields(
      self._limits,
      known,
      slot,
      hit,
      delay_cache_pages=delay_cache_pages,
      full_sequence_must_fit=full_sequence_must_fit,
      has_scheduled_requests=has_scheduled_requests,
      num_new_tokens=num_new_tokens,
      num_new_computed_tokens=num_new_computed_tokens,
      num_lookahead_tokens=num_lookahead_tokens,
      num_external_computed_tokens=num_external_computed_tokens,
      num_encoder_tokens=num_encoder_tokens,
      reserved_pages=reserved_pages,
    )
    place = self._slots.vacant() if slot is None else slot
    if place is None:
      return None
    call = calls.pack_one(
      self._slots,
      known,
      place,
      hit,
      skip_zeroing_group_ids,
      since=self._step_clock,
      **fields,
    )
    out = self._advance([place], call)
    if not out.sound[0]:
      raise ValueError(
        "`new_computed_pages` must hold the tokens that "
        f"{known.request_id!r} begins with, got {hit}; look it up again."
      )
    (new,) = calls.answers(self.state, [place], out)
    if new is not None and slot is None:
      self._slots.hold(known, place)
      if self.config.prefix_caching:
        self._statistics.record(known, num_new_computed_tokens)
    return new

  def step(
    self,
    running: Sequence[Any],
    num_new_tokens: Sequence[int] | int = 1,
    num_lookahead_tokens: int = 0,
  ) -> list[CachePages | None]:
    """One scheduling step of many running requests in one call.

    As `allocate_slots` for each request in order, except that all requests give
    back what fell behind their windows before any takes a page, and all are
    published after all have taken theirs.

    Args:
      running: different requests that hold pages.
      num_new_tokens: tokens of each, at least 1, or one number for all.
      num_lookahead_tokens: tokens behind them that must have room too.

    Returns:
      New pages of each request; None where there were too few. Later requests
      that need fewer may still be served.

    Raises:
      KeyError: a request holds no page.
      TypeError: a number is not an int.
      ValueError: a number is too small, a sequence too long, or a request
        named twice.
    """
    if not running:
      return []
    slots, call = calls.pack_step(
      self._limits, self._slots, running, num_new_tokens, num_lookahead_tokens
    )
    out = self._advance(slots, call, begins=False)
    return calls.answers(self.state, slots, out)

  def cache_pages(self, request: Any, num_computed_tokens: int) -> None:
    """Publishes the full pages of a request's first tokens.

    For external tokens that have arrived, and for accepted drafts.

    Args:
      request: one that holds pages.
      num_computed_tokens: tokens whose K/V is there.

    Raises:
      KeyError: the request holds no page.
      ValueError: the number is negative.
    """
    slot, known = self._slots.slot_of(request.request_id), read_request(request)
    calls.at_least("num_computed_tokens", num_computed_tokens, 0)
    publish = min(num_computed_tokens, known.num_tokens)
    call = calls.pack_one(self._slots, known, slot, publish=publish)
    self._advance([slot], call)

  def remove_skipped_pages(
    self, request_id: str, num_computed_tokens: int
  ) -> None:
    """Frees pages outside every window once these tokens are computed.

    Args:
      request_id: a request; nothing is done for one that holds no page.
      num_computed_tokens: tokens whose K/V no write in flight still needs.
    """
    slot = self._slots.by_name.get(request_id)
    if slot is not None and num_computed_tokens > 0:
      behind = min(num_computed_tokens, self.config.slot_tokens)
      nothing = Request(request_id, [])
      call = calls.pack_one(self._slots, nothing, slot, behind=behind)
      self._advance([slot], call)

  def free(self, request: Any) -> None:
    """Gives all pages of a request back, the last one first.

    They stay cached until they are handed out again. Nothing is done for a
    request that holds none.
    """
    slot = self._slots.forget(request.request_id)
    if slot is not None:
      self._release(slot)

  def pop_pages_for_free(self, request: Any) -> PoppedPages | None:
    """Forgets a request; `free_pages` gives its pages back later.

    For a step in flight that may still write them.

    Returns:
      The argument for `free_pages`; None for a request that holds nothing.
    """
    pages = self.get_page_ids(request.request_id)
    slot = self._slots.forget(request.request_id)
    if slot is None:
      return None
    self._popped[slot] = PoppedPages(slot, pages)
    return self._popped[slot]

  def free_pages(self, popped: PoppedPages | None) -> None:
    """Gives pages back, in the order of `free`.

    Raises:
      ValueError: they were given back before.
    """
    if popped is None:
      return
    if self._popped.get(popped.slot) is not popped:
      raise ValueError(f"`popped` must be given back once, got {popped} again.")
    self._release(self._popped.pop(popped.slot).slot)

  def free_page_hashes(self, request: Any) -> None:
    """Forgets the page keys of a request; `free` does so already."""

  def evict_pages(self, page_ids: Iterable[int]) -> None:
    """Takes pages out of the prefix cache; requests that hold them keep them.

    Args:
      page_ids: pages, cached or not.

    Raises:
      TypeError: an id is not an int.
      ValueError: there is no such page.
    """
    pages = sorted({calls.at_least("page_ids", one, 0) for one in page_ids})
    if pages and pages[-1] >= self.config.num_pages:
      raise ValueError(
        f"`page_ids` must be 0 to {self.config.num_pages - 1}, got {pages}."
      )
    pages += [0] * (-len(pages) % _PAGES_AT_ONCE)
    for part in np.reshape(pages, (-1, _PAGES_AT_ONCE)):
      self.state = step.evict(self.state, part.astype(np.int32))

  def reset_prefix_cache(self) -> bool:
    """Takes every page out of the prefix cache, unless a request holds one.

    Returns:
      Whether it was done.
    """
    if self.num_free_pages < self.config.num_pages - 1:
      return False
    self.state = step.reset(self.state)
    self._statistics.reset = True
    return True

  def new_step_starts(self) -> None:
    """Starts a scheduling step: states published before are written now."""
    index = self.state.pool.index
    if index is not None and recurrent.has_states(self.config):
      self._step_clock = int(np.asarray(index.clock).view(np.int32))

  def get_page_ids(self, request_id: str) -> tuple[list[int], ...]:
    """Pages of a request by group; empty lists for one that holds none."""
    slot = self._slots.by_name.get(request_id)
    if slot is None:
      return self.create_empty_page_list().pages
    table = np.asarray(self.state.page_table)[slot].tolist()
    counts = np.asarray(self.state.num_pages)[slot].tolist()
    return tuple(row[:count] for row, count in zip(table, counts, strict=True))

  def create_empty_page_list(self) -> CachePages:
    """No pages, for every group."""
    return CachePages(tuple([] for _ in self.config.groups))

  def get_num_common_prefix_pages(self, request_id: str) -> list[int]:
    """Leading pages of a request that all requests hold; 0 for windows."""
    holders, held = len(self._slots.by_name), self.get_page_ids(request_id)
    refs = np.asarray(self.state.pool.ref_count)
    return [
      int(np.cumprod(refs[pages] == holders).sum())
      if isinstance(kind, FullAttention)
      else 0
      for kind, pages in zip(self.config.groups, held, strict=True)
    ]

  def make_prefix_cache_stats(self) -> PrefixCacheStats:
    """Prefix-cache hits and evictions since the last call."""
    taken, self._statistics = self._statistics, PrefixCacheStats()
    if self.config.track_residency:
      evicted = jax.device_get(inspect.residency(self.state))
      ages = np.stack([evicted.lifetime, evicted.idle])
      taken.lifetime, taken.idle = (ages - self._ages).tolist()
      self._ages = ages
    return taken

  def take_events(self) -> Drained:
    """Pages published and removed since the last call.

    Raises:
      ValueError: the manager was made without `num_events`.
    """
    if not self.config.event_log:
      raise ValueError(
        "`num_events` must be at least 1 for events; make the CacheManager "
        "with the number of events between two readings."
      )
    self.state, drained = inspect.drain_events(self.state)
    return drained

  def take_new_page_ids(self) -> list[int]:
    """Pages handed out since the last call, in ascending order, to be zeroed.

    Raises:
      ValueError: the manager was made without `track_new_pages`.
    """
    if not self.config.track_new_pages:
      raise ValueError(
        "`track_new_pages` must be True for new pages; make the CacheManager "
        "with it."
      )
    self.state, new = inspect.take_new_pages(self.state)
    return np.flatnonzero(np.asarray(new)).tolist()

  def free_queue(self) -> list[int]:
    """The free pages in eviction order."""
    return inspect.free_pages(self.state)

  def cached_page_ids(self) -> set[int]:
    """Pages that a lookup can find."""
    return set(inspect.cached_pages(self.state))

  @property
  def num_free_pages(self) -> int:
    """The number of free pages."""
    return int(self.state.pool.queue.num_free)

  @property
  def usage(self) -> float:
    """The fraction of the pages that is held, the null page not counted."""
    return 1 - self.num_free_pages / (self.config.num_pages - 1)

  def _advance(
    self,
    slots: Sequence[int] | np.ndarray,
    call: np.ndarray,
    begins: bool = True,
  ) -> Advanced:
    self.state, out = step.advance(
      self.state, call, caps=self._limits.most_pages, begins=begins
    )
    num_rows = 1 if begins else self.config.num_slots
    out = step.fetch(out, num_rows, self.config.num_groups)
    self._slots.sent[slots] = out.length[: len(slots)]
    return out

  def _release(self, slot: int) -> None:
    self._slots.release(slot)
    self.state = step.release(self.state, np.asarray([slot], np.int32))
