"""A cache manager for schedulers in Python, over a state on the device."""

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
  """Manages the pages of requests, as vLLM's and eSurge's managers do.

  The methods are those that schedulers written for vLLM's `KVCacheManager` or
  eSurge's `CacheManager` call, with the same page ids, hits and order. The
  state is a `jaxkv.CacheState`; a call is a jitted transition of it.

  The first request of each width (64, 4,096 or 65,536 tokens, or the longest)
  is compiled for, which takes some 10 s on a CPU. To warm up, send one of each
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
    """The longest cached prefix that leaves a token to compute.

    Args:
      request: any object with the attributes of `Request`.

    Returns:
      Its pages by group, null pages where a window needs none, and its tokens.
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
    """Makes room for tokens of a request, and publishes those that are known.

    First gives back what fell behind a window, even if there is no room.

    Args:
      request: any object with the attributes of `Request`.
      num_new_tokens: tokens that will be computed, drafts included.
      num_new_computed_tokens: tokens that a lookup found.
      new_computed_pages: what the lookup returned; it spares hashing the
        tokens again.
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

    Returns:
      The new pages behind those found and those for external tokens; None,
      with no page taken, if there are too few.

    Raises:
      TypeError: a number is not an int.
      ValueError: nothing is asked for, a number is negative, the sequence is
        too long, or a hit is given that no lookup found.
      RuntimeError: there are `max_requests` already.
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
    out = self._advance(slots, call, num_rows=self.config.num_slots)
    return calls.answers(slots, out, self._newest)

  @atomic
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
    self._advance_one(known, slot, publish=publish)

  @atomic
  def remove_skipped_pages(
    self, request_id: str, num_computed_tokens: int
  ) -> None:
    """Frees pages outside every window once these tokens are computed.

    Args:
      request_id: a request; nothing is done for one that holds no page.
      num_computed_tokens: tokens whose K/V no write in flight still needs.
    """
    calls.at_least("num_computed_tokens", num_computed_tokens, 0)
    slot = self._slots.by_name.get(request_id)
    if slot is not None and num_computed_tokens > 0:
      behind = min(num_computed_tokens, self.config.slot_tokens)
      nothing = read_request(Request(request_id, []))
      self._advance_one(nothing, slot, behind=behind)

  @atomic
  def free(self, request: Any) -> None:
    """Gives all pages of a request back, the last one first.

    They stay cached until they are handed out again. Nothing is done for a
    request that holds none.
    """
    slot = self._slots.by_name.get(request.request_id)
    if slot is not None:
      self._release(slot, request.request_id)

  @atomic
  def pop_pages_for_free(self, request: Any) -> PoppedPages | None:
    """Forgets a request; `free_pages` gives its pages back later.

    For a step in flight that may still write them.

    Returns:
      The argument for `free_pages`; None for a request that holds nothing. The
      same again until they are given back or the request has new ones.
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
    """Gives pages back, in the order of `free`.

    Raises:
      ValueError: they were given back before.
    """
    if popped is None:
      return
    if self._popped.get(popped.slot) is not popped:
      raise ValueError(f"`popped` must be given back once, got {popped} again.")
    self._release(popped.slot)

  def free_page_hashes(self, request: Any) -> None:
    """Forgets the page keys of a request; `free` does so already."""

  @atomic
  def evict_pages(self, page_ids: Iterable[int]) -> None:
    """Takes pages out of the prefix cache; requests that hold them keep them.

    Args:
      page_ids: pages, cached or not.

    Raises:
      TypeError: an id is not an int.
      ValueError: there is no such page.
    """
    pages = sorted({calls.at_least("page_ids", one, 0) for one in page_ids})
    most = self.config.num_pages
    if pages and pages[-1] >= most:
      raise ValueError(f"`page_ids` must be 0 to {most - 1}, got {pages}.")
    if pages:
      self.run(step.evict, calls.pad_pages(pages))

  @atomic
  def reset_prefix_cache(self) -> bool:
    """Takes every page out of the prefix cache, unless a request holds one.

    Returns:
      Whether it was done.
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
    """Starts a scheduling step: states published before are written now."""
    if self.config.prefix_caching and recurrent.has_states(self.config):
      clock = self.read(lambda state: state.pool.index.clock)
      self._step_clock = int(clock.view(np.int32))

  @atomic
  def get_page_ids(self, request_id: str) -> tuple[list[int], ...]:
    """Pages of a request by group; empty lists for one that holds none."""
    slot = self._slots.by_name.get(request_id)
    if slot is None:
      return self.create_empty_page_list().pages
    table = self.read(lambda state: state.page_table)[slot].tolist()
    counts = self.read(lambda state: state.num_pages)[slot].tolist()
    return tuple(row[:count] for row, count in zip(table, counts, strict=True))

  def create_empty_page_list(self) -> CachePages:
    """No pages, for every group."""
    return CachePages(tuple([] for _ in self.config.groups))

  @atomic
  def get_num_common_prefix_pages(self, request_id: str) -> list[int]:
    """Leading pages of a request that all requests hold; 0 for windows."""
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
    """Prefix-cache hits and evictions since the last call."""
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
    """Pages published and removed since the last call.

    Raises:
      ValueError: the manager was made without `num_events`.
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
    """Pages handed out since the last call, in ascending order, to be zeroed.

    Raises:
      ValueError: the manager was made without `track_new_pages`.
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
    """The free pages in eviction order."""
    return inspect.free_pages(self.state)

  def cached_page_ids(self) -> set[int]:
    """Pages that a lookup can find."""
    return set(inspect.cached_pages(self.state))

  @property
  def num_free_pages(self) -> int:
    """The number of free pages."""
    return int(self.read(lambda state: state.pool.queue.num_free))

  @property
  def usage(self) -> float:
    """The fraction of the pages that is held, the null page not counted."""
    return 1 - self.num_free_pages / (self.config.num_pages - 1)
