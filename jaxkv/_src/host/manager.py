"""Cache manager for schedulers in Python, over a cache on the device."""

import dataclasses
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxkv._src.cache.group_kinds import FullAttention
from jaxkv._src.cache.group_kinds import GroupKind
from jaxkv._src.cache.pool import recurrent
from jaxkv._src.cache.prefix import rules
from jaxkv._src.cache.telemetry import Drained
from jaxkv._src.cache.verbs import inspect
from jaxkv._src.host import calls
from jaxkv._src.host import lookup
from jaxkv._src.host import options
from jaxkv._src.host import step
from jaxkv._src.host.atomic import atomic
from jaxkv._src.host.device_cache import DeviceCache
from jaxkv._src.host.request import Request
from jaxkv._src.host.request import first_tokens
from jaxkv._src.host.request import read_request
from jaxkv._src.host.types import CachePages
from jaxkv._src.host.types import Lookup
from jaxkv._src.host.types import PoppedPages
from jaxkv._src.host.types import PrefixCacheStats


class CacheManager(DeviceCache):
  """Manages the pages of requests like the managers of vLLM and eSurge.

  It has the methods that schedulers call on vLLM's `KVCacheManager` or eSurge's
  `CacheManager`, and returns the same page ids, hits and order. A call is a
  jitted transition of a `jaxkv.CacheState`.

  Each width of request (64, 4,096 or 65,536 tokens, or the longest) compiles
  when it first occurs, which takes about 10 s on a CPU. To warm up, send one
  request of each width through all calls, free it, and call
  `reset_prefix_cache`.

  Args:
    num_pages: pages of the pool, including the null page 0; ids begin at 1.
    groups: the layer groups, each with its `page_size`.
    max_model_len: tokens of the longest sequence.
    enable_caching: publishes pages and looks them up.
    use_eagle: computes the last page of a hit again, for a draft model.
    policy: "current" for the order of vLLM since 0.25, where pages without a
      key are used first; "classic" for earlier versions and eSurge.
    prefix_retention_interval: the prefixes that a window keeps; see
      `CacheConfig`.
    watermark: fraction of the pages kept free when a waiting request is
      admitted.
    max_in_flight: the most tokens scheduled at once, used by
      `full_sequence_must_fit`; None for `max_model_len`.
    max_encoder_tokens: tokens of the longest encoder input, for groups of
      `CrossAttention`; None for `max_model_len`.
    max_requests: the most requests that hold pages at once.
    num_events: events kept until `take_events`; 0 for none.
    track_new_pages: enables `take_new_page_ids`.
    track_residency: adds the ages of evicted pages to the statistics.
    key: the secret of the page keys, see `jaxkv.init`; None for a random one.

  Attributes:
    config: sizes of the state.
    state: the cache. The next call donates its arrays: copy what you keep.

  Raises:
    TypeError: an argument has the wrong type.
    ValueError: an argument is out of range, or two arguments conflict.

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
    limits = options.make(
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
    super().__init__(limits, max_requests, key)
    self._step_clock = 0

  @atomic
  def get_computed_pages(self, request: Any) -> tuple[CachePages, int]:
    """Finds the longest cached prefix that leaves a token to compute.

    Args:
      request: any object with the attributes of `Request`.

    Returns:
      The prefix's pages by group, with null pages where a window needs none,
      and
      its number of tokens.
    """
    known = read_request(request)
    if not self.config.prefix_caching or known.skips_lookup:
      return self.create_empty_page_list(), 0
    name, num_tokens = known.request_id, known.num_tokens
    calls.check_length(self._limits, name, num_tokens)
    tokens = first_tokens(known, num_tokens)
    answer, prompt = self._look_up(known, num_tokens, finds=True)
    found, boundary, pages = lookup.found_in(answer, self.config.num_groups)
    boundary = boundary if rules.reports_boundary(self.config) else 0
    hashed = Lookup(tokens, known.salt, known.items, prompt)
    return CachePages(pages, (), boundary, hashed), found

  @atomic
  def allocate_slots(
    self,
    request: Any,
    num_new_tokens: int,
    num_new_computed_tokens: int = 0,
    new_computed_pages: CachePages | None = None,
    num_lookahead_tokens: int = 0,
    *,
    num_external_computed_tokens: int = 0,
    delay_cache_pages: bool = False,
    full_sequence_must_fit: bool = False,
    reserved_pages: int = 0,
    has_scheduled_requests: bool = True,
    num_encoder_tokens: int = 0,
    skip_zeroing_group_ids: Sequence[int] = (),
  ) -> CachePages | None:
    """Allocates pages for a request's tokens and publishes its full pages.

    Pages behind a window are freed first, even if the allocation then fails.

    Args:
      request: any object with the attributes of `Request`.
      num_new_tokens: tokens to compute, drafts included.
      num_new_computed_tokens: tokens that a lookup found.
      new_computed_pages: the result of the lookup, whose hashes are reused.
      num_lookahead_tokens: further tokens that need pages after the new ones.
      num_external_computed_tokens: tokens after the hit whose K/V is loaded
        from elsewhere.
      delay_cache_pages: leaves publishing to `cache_pages`, because the K/V has
        not arrived yet.
      full_sequence_must_fit: requires free pages for the whole sequence.
      reserved_pages: pages promised to other requests.
      has_scheduled_requests: applies the watermark.
      num_encoder_tokens: encoder tokens that need pages in `CrossAttention`
        groups.
      skip_zeroing_group_ids: groups whose new pages `take_new_page_ids` omits.

    Returns:
      The new pages, after those of the hit and of external tokens; None, with
      no
      page taken, if too few are free.

    Raises:
      TypeError: a number is not an int.
      ValueError: all token counts are 0, a number is negative, the sequence is
        too long, or no lookup returned this hit.
      RuntimeError: `max_requests` requests already hold pages.
    """
    calls.check_groups(self.config, skip_zeroing_group_ids)
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
    fields["since"] = self._step_clock
    if slot is not None:
      return self._advance_one(known, slot, skip_zeroing_group_ids, **fields)
    slot = self._slots.vacant()
    if slot is None:
      return None
    out = self._begin(known, slot, hit, skip_zeroing_group_ids, **fields)
    if not out.sound[0]:
      raise ValueError(
        "`new_computed_pages` must hold the tokens that "
        f"{known.request_id!r} begins with, got {hit}; look it up again."
      )
    return calls.answers([slot], out, self._newest)[0]

  @atomic
  def step(
    self,
    running: Sequence[Any],
    num_new_tokens: Sequence[int] | int = 1,
    num_lookahead_tokens: int = 0,
  ) -> list[CachePages | None]:
    """Allocates for many running requests in one call.

    Serves the requests in order, like `allocate_slots` for each. But all free
    their pages behind windows before any allocates, and all allocate before any
    publishes.

    Args:
      running: different requests that hold pages.
      num_new_tokens: tokens of each request, at least 1, or one number for all.
      num_lookahead_tokens: further tokens that need pages.

    Returns:
      The new pages of each request; None if too few are free. Later requests
      that
      need fewer may still succeed.

    Raises:
      KeyError: a request holds no page.
      TypeError: a number is not an int.
      ValueError: a number is too small, a sequence too long, or a request
        repeated.
    """
    if not running:
      return []
    slots, call = calls.pack_step(
      self._limits, self._slots, running, num_new_tokens, num_lookahead_tokens
    )
    out = self._advance(slots, call, num_rows=self.config.num_slots)
    return calls.answers(slots, out, self._newest)

  @atomic
  def cache_pages(self, request: Any, num_computed_tokens: int) -> None:
    """Publishes the full pages of a request's first tokens.

    Call it when external tokens have arrived, or drafts are accepted.

    Args:
      request: a request that holds pages.
      num_computed_tokens: tokens whose K/V is written.

    Raises:
      KeyError: the request holds no page.
      ValueError: the number is negative.
    """
    slot, known = self._slots.slot_of(request.request_id), read_request(request)
    calls.at_least("num_computed_tokens", num_computed_tokens, 0)
    publish = min(num_computed_tokens, known.num_tokens)
    self._advance_one(known, slot, publish=publish)

  @atomic
  def remove_skipped_pages(
    self, request_id: str, num_computed_tokens: int
  ) -> None:
    """Frees the pages that the given number of tokens leaves behind windows.

    Args:
      request_id: a request; one without pages is ignored.
      num_computed_tokens: tokens that no write in flight still needs.
    """
    calls.at_least("num_computed_tokens", num_computed_tokens, 0)
    slot = self._slots.by_name.get(request_id)
    if slot is not None and num_computed_tokens > 0:
      behind = min(num_computed_tokens, self.config.slot_tokens)
      nothing = read_request(Request(request_id, []))
      self._advance_one(nothing, slot, behind=behind)

  @atomic
  def free(self, request: Any) -> None:
    """Frees all pages of a request, the last page first.

    They stay cached until they are allocated again. A request without pages is
    ignored.
    """
    slot = self._slots.by_name.get(request.request_id)
    if slot is not None:
      self._release(slot, request.request_id)

  @atomic
  def pop_pages_for_free(self, request: Any) -> PoppedPages | None:
    """Removes a request but keeps its pages until `free_pages`.

    Use it while a step in flight may still write to them.

    Returns:
      The argument for `free_pages`, the same object at each call until then;
      None
      for a request without pages.
    """
    name = request.request_id
    slot = self._slots.by_name.get(name)
    if slot is None:
      popped = (one for one in self._popped.values() if one.request_id == name)
      return next(popped, None)
    popped = PoppedPages(slot, self.get_page_ids(name), name)

    def then(_: Any) -> PoppedPages:
      self._popped[slot] = popped
      self._slots.forget(name)
      return popped

    return self.run_on_host(then)

  @atomic
  def free_pages(self, popped: PoppedPages | None) -> None:
    """Frees popped pages in the order of `free`; does nothing for None.

    Raises:
      ValueError: they were freed before.
    """
    if popped is None:
      return
    if self._popped.get(popped.slot) is not popped:
      raise ValueError(f"`popped` must be given back once, got {popped} again.")
    self._release(popped.slot)

  def free_page_hashes(self, request: Any) -> None:
    """Does nothing: `free` already forgets the page keys of a request."""

  @atomic
  def evict_pages(self, page_ids: Iterable[int]) -> None:
    """Removes pages from the prefix cache; requests keep them.

    Args:
      page_ids: pages, cached or not.

    Raises:
      TypeError: an id is not an int.
      ValueError: an id is out of range.
    """
    pages = sorted({calls.at_least("page_ids", one, 0) for one in page_ids})
    most = self.config.num_pages
    if pages and pages[-1] >= most:
      raise ValueError(f"`page_ids` must be 0 to {most - 1}, got {pages}.")
    if pages:
      self.run(step.evict, calls.pad_pages(pages))

  @atomic
  def reset_prefix_cache(self) -> bool:
    """Removes all pages from the prefix cache, unless a request holds one.

    Returns:
      True if the cache was reset.
    """
    if self.num_free_pages < self.config.num_pages - 1:
      return False

    def then(_: None) -> bool:
      stats, ages = self._statistics
      self._statistics = dataclasses.replace(stats, reset=True), ages
      return True

    return self.run(step.reset, then=then)

  @atomic
  def new_step_starts(self) -> None:
    """Starts a scheduling step; states published before it count as written."""
    if self.config.prefix_caching and recurrent.has_states(self.config):
      clock = self.read(lambda state: state.pool.index.clock)
      self._step_clock = int(clock.view(np.int32))

  @atomic
  def get_page_ids(self, request_id: str) -> tuple[list[int], ...]:
    """Returns a request's pages by group; empty lists if it holds none."""
    slot = self._slots.by_name.get(request_id)
    if slot is None:
      return self.create_empty_page_list().pages
    table = self.read(lambda state: state.page_table)[slot].tolist()
    counts = self.read(lambda state: state.num_pages)[slot].tolist()
    return tuple(row[:count] for row, count in zip(table, counts, strict=True))

  def create_empty_page_list(self) -> CachePages:
    """Returns empty pages, with a list for each group."""
    return CachePages(tuple([] for _ in self.config.groups))

  @atomic
  def get_num_common_prefix_pages(self, request_id: str) -> list[int]:
    """Counts the leading pages that all requests hold; 0 for windows."""
    holders, held = len(self._slots.by_name), self.get_page_ids(request_id)
    refs = self.read(lambda state: state.pool.ref_count)
    return [
      int(np.cumprod(refs[pages] == holders).sum())
      if isinstance(kind, FullAttention)
      else 0
      for kind, pages in zip(self.config.groups, held, strict=True)
    ]

  @atomic
  def make_prefix_cache_stats(self) -> PrefixCacheStats:
    """Returns prefix-cache hits and evictions since the last call."""
    taken, ages = self._statistics
    if self.config.track_residency:
      evicted = jax.device_get(inspect.residency(self.state))
      before, ages = ages, np.stack([evicted.lifetime, evicted.idle])
      lifetime, idle = (ages - before).tolist()
      taken = dataclasses.replace(taken, lifetime=lifetime, idle=idle)
    self._statistics = PrefixCacheStats(), ages
    return taken

  @atomic
  def take_events(self) -> Drained:
    """Returns the pages published and removed since the last call.

    Raises:
      ValueError: `num_events` is 0.
    """
    if not self.config.event_log:
      raise ValueError(
        "`num_events` must be at least 1 for events; make the CacheManager "
        "with the number of events between two readings."
      )
    state, drained = inspect.drain_events(self.state)
    drained = self._slots.unmasked(drained)
    self.state = state
    self._slots.masked = {}
    return drained

  @atomic
  def take_new_page_ids(self) -> list[int]:
    """Returns the pages allocated since the last call, sorted, for zeroing.

    Raises:
      ValueError: `track_new_pages` is False.
    """
    if not self.config.track_new_pages:
      raise ValueError(
        "`track_new_pages` must be True for new pages; make the CacheManager "
        "with it."
      )
    state, new = inspect.take_new_pages(self.state)
    pages = np.flatnonzero(np.asarray(new)).tolist()
    self.state = state
    return pages

  def free_queue(self) -> list[int]:
    """Returns the free pages in eviction order."""
    return inspect.free_pages(self.state)

  def cached_page_ids(self) -> set[int]:
    """Returns the pages that a lookup can find."""
    return set(inspect.cached_pages(self.state))

  @property
  def num_free_pages(self) -> int:
    """The number of free pages."""
    return int(self.read(lambda state: state.pool.queue.num_free))

  @property
  def usage(self) -> float:
    """The fraction of the pages that are held, without the null page."""
    return 1 - self.num_free_pages / (self.config.num_pages - 1)
