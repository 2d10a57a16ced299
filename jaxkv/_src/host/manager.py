"""Cache manager for schedulers in Python."""

import dataclasses
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from jaxkv._src.arrays.arguments import as_count
from jaxkv._src.arrays.arguments import as_int
from jaxkv._src.cache.config import OffloadPolicy
from jaxkv._src.cache.group_kinds import GroupKind
from jaxkv._src.cache.state import CacheState
from jaxkv._src.host import allocate
from jaxkv._src.host import config
from jaxkv._src.host import prefix_lookup
from jaxkv._src.host import step
from jaxkv._src.host.atomic import atomic
from jaxkv._src.host.bridge.from_device import from_device
from jaxkv._src.host.bridge.to_device import to_device
from jaxkv._src.host.cache_pages import CachePages
from jaxkv._src.host.demand import PLAIN
from jaxkv._src.host.demand import check_length
from jaxkv._src.host.demand import demand_of
from jaxkv._src.host.inspect import Inspection
from jaxkv._src.host.page_pool import as_page_ids
from jaxkv._src.host.page_references import Pages
from jaxkv._src.host.publish import publish
from jaxkv._src.host.request import read_request
from jaxkv._src.host.request import tokens_of
from jaxkv._src.host.state import HostState


class CacheManager(Inspection):
  """Manages the pages of requests like the managers of vLLM and eSurge.

  It has the methods of eSurge's `CacheManager` and, with pages for blocks, of
  vLLM's `KVCacheManager`. Page ids, hits and eviction order are the same. It is
  plain Python. Without `key`, it initializes no device before `state` is read.

  Args:
    num_pages: pages of the pool, including the null page 0; ids begin at 1.
    groups: the kinds of the layer groups, each with a `page_size`: those of
      `jaxkv`, `CrossAttention` and `SpeculativeRecurrent`.
    max_model_len: tokens of the longest sequence.
    enable_caching: True to publish full pages and to find them again.
    use_eagle: True to shorten every hit by its last page, for a draft model.
    policy: "current" for the rules of vLLM since 0.25, which reuses uncached
      pages first; "classic" for those of earlier versions and of eSurge.
    prefix_retention_interval: selects the prefixes for which sliding-window and
      recurrent groups publish pages; see `CacheConfig`.
    watermark: fraction of the pages to keep free when a waiting request is
      admitted while others run.
    max_in_flight: the most tokens of one request scheduled at once, used by
      `full_sequence_must_fit`; None for `max_model_len`.
    max_encoder_tokens: tokens of the longest encoder input, for groups of
      `CrossAttention`; None for `max_model_len`.
    max_requests: the most requests that are admitted at once, even if one holds
      no page, as when a chunk has just ended.
    num_events: the capacity of the event log, in events; 0 for no log.
    track_new_pages: enables `take_new_page_ids`.
    track_residency: adds the ages of evicted pages to the statistics.
    offload_pages: offloaded pages, for cached pages that are evicted; call
      `take_moves` in each step.
    offload_policy: the pages that return from offload memory; see
      `CacheConfig`.
    page_bytes: bytes of a page, for an `OffloadPolicy`.
    key: the secret of the page keys, see `jaxkv.init`; None for a random one.

  Attributes:
    config: the sizes and options of the cache.
    pages: single pages, for engines that hold references to them.
    undo_log: the changes of the current call; see `Pages.add_listener`.

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
    offload_pages: int = 0,
    offload_policy: OffloadPolicy | str = "always",
    page_bytes: int = 0,
    key: Any = None,
  ):
    options = config.make(
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
      num_events=num_events,
      track_new_pages=track_new_pages,
      track_residency=track_residency,
      offload_pages=offload_pages,
      offload_policy=offload_policy,
      page_bytes=page_bytes,
    )
    super().__init__(HostState(options, key))
    self.pages = Pages(self._state)

  @property
  @atomic
  def state(self) -> CacheState:
    """A copy of the cache as a value for device loops.

    Read `take_new_page_ids` before a loop runs, which may write to its pages.

    Raises:
      ValueError: a group is `CrossAttention` or `SpeculativeRecurrent`; a
        request has fewer tokens than its slot, or a token that is not a 32-bit
        integer; or `take_moves` must be called first.
    """
    return to_device(self._state)

  @atomic
  def take(
    self, state: CacheState, requests: Mapping[int, Any] | None = None
  ) -> list[str]:
    """Continues from a state that a loop derived from `manager.state`.

    | in the state | rule |
    |---|---|
    | a slot has more tokens | its request must have them in `token_ids` |
    | a slot is empty | its request loses its pages, and its name is returned |
    | a slot was filled, again or for the first time | see `requests` |
    | a slot is a fork | it counts as filled; shared pages stay shared |
    | pages are pinned | the pins stay; `pages.release` removes them |

    Page tables, free pages and cached pages become those of `state`, whatever
    the manager did since `manager.state` was read. Free no request in between:
    without prefix caching, the slot's next request would get the old pages.

    Unread events are kept. The call adds an event for each page that the prefix
    cache has lost since the last event, and then for each page that it has
    gained. The order in which the loop made these changes is not known, nor
    pages that came and went in between. `Stored` has a group and a parent if a
    request holds the page. Pages that the loop allocates are not added to
    `take_new_page_ids`, and pages that it evicts not to the ages of evicted
    pages.

    A loop may append tokens to a page with tokens of an image or of
    `prompt_embeds` if the manager has published these, and at least the first
    four tokens of the page.

    Args:
      state: the state; not donated.
      requests: a dictionary from each slot that the loop filled to its request.
        Another request that had the slot before loses its pages. A fork must
        get no tokens in a page with tokens of an image or of `prompt_embeds`.

    Returns:
      The names of the requests that lost their pages.

    Raises:
      TypeError: `state` is not a CacheState, or `requests` not a dictionary.
      ValueError: `state` has another config, secret or epoch, or a recorded
        error; or `requests` does not fit the slots of `state`; or a request has
        another salt or other `token_ids` than its slot.
    """
    return from_device(self._state, state, requests or {})

  @atomic
  def get_computed_pages(
    self, request: Any, max_hit_tokens: int | None = None
  ) -> tuple[CachePages, int]:
    """Finds the longest cached prefix that omits at least the last token.

    Args:
      request: any object with the attributes of `Request`.
      max_hit_tokens: the most tokens of the prefix; None for no further limit.

    Returns:
      The prefix's pages by group, with null pages outside windows, and its
      number of tokens. Offloaded pages have numbers above `num_pages`.
      `allocate_slots` moves them to the device, and then `manager.get_page_ids`
      has their new numbers.

    Raises:
      TypeError: `max_hit_tokens` is not an int.
      ValueError: the request has more than `max_model_len` tokens, or a token
        that is not a 32-bit integer.
    """
    if max_hit_tokens is not None:
      max_hit_tokens = as_int("max_hit_tokens", max_hit_tokens)
    fields = read_request(request)
    if not self.config.prefix_caching or fields.skips_lookup:
      return self.create_empty_page_list(), 0
    check_length(self._state.options, fields.request_id, fields.num_tokens)
    # All tokens are hashed, also those after the hit, because the allocation
    # that follows publishes their pages.
    hashed = prefix_lookup.hash_tokens(self._state, fields, fields.num_tokens)
    return prefix_lookup.find_prefix(self._state, hashed, max_hit_tokens)

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
  ) -> CachePages | None:
    """Allocates pages for a request's tokens and publishes its full pages.

    Without `full_sequence_must_fit`, the call frees pages outside windows even
    if it returns None.

    Args:
      request: any object with the attributes of `Request`.
      num_new_tokens: tokens to compute, drafts included.
      num_new_computed_tokens: tokens of the hit that a lookup found.
      new_computed_pages: the hit, as `get_computed_pages` returned it.
      num_lookahead_tokens: tokens after the new ones that need pages too.
      num_external_computed_tokens: tokens after the hit whose K/V is loaded
        from elsewhere.
      delay_cache_pages: True to publish no new page before `cache_pages`,
        because the K/V has not arrived yet.
      full_sequence_must_fit: True to change nothing and return None unless the
        free pages suffice for the whole sequence.
      reserved_pages: free pages that are promised to other requests.
      has_scheduled_requests: True to apply the watermark to waiting requests.
      num_encoder_tokens: encoder tokens that need pages in `CrossAttention`
        groups.

    Returns:
      The new pages, without those of the hit and of external tokens. None if
      too few pages are free, or if the hit ends with the state of a recurrent
      group that is not written yet.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: all token counts are 0, a number is out of range, the sequence
        is too long, a token is not a 32-bit integer, or the hit is not current.
      RuntimeError: `max_requests` requests are admitted already.
    """
    state = self._state
    options = state.options
    held = state.held.get(request.request_id)
    if held is not None:
      state.set_request(held, request)
      arguments = (
        num_new_computed_tokens,
        new_computed_pages,
        num_external_computed_tokens,
        num_encoder_tokens,
        reserved_pages,
        delay_cache_pages,
        full_sequence_must_fit,
      )
      # These arguments, a watermark and invalid numbers need the checks below.
      is_special = (
        arguments != PLAIN
        or options.keep_free
        or num_new_tokens.__class__ is not int
        or num_lookahead_tokens.__class__ is not int
        or num_new_tokens < 1
        or num_lookahead_tokens < 0
      )
      if not is_special:
        demand = step.advance_quietly(
          state, held, request, num_new_tokens, num_lookahead_tokens
        )
        if demand is not None and demand.room > held.room:
          return allocate.allocate(state, held, demand)
        # Without new pages, `allocate` would only free and publish pages.
        if demand is not None:
          allocate.drop_behind(state, held, demand.num_computed)
          publish(state, held, demand.publish)
        return self.create_empty_page_list()
    fields = read_request(request)
    demand = demand_of(
      options,
      fields,
      new_computed_pages,
      holds_pages=held is not None,
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
    if held is not None:
      return allocate.allocate(state, held, demand)
    hit = new_computed_pages or self.create_empty_page_list()
    return allocate.admit(
      state, request, fields, hit, num_new_computed_tokens, demand
    )

  @atomic
  def step(
    self,
    running: Sequence[Any],
    num_new_tokens: Sequence[int] | int = 1,
    num_lookahead_tokens: int = 0,
  ) -> list[CachePages | None]:
    """Allocates for many running requests in one call.

    Equals `allocate_slots` for each request in order, except that all requests
    free pages outside windows before any of them allocates, and all allocate
    before any of them publishes.

    Args:
      running: requests that hold pages, each listed once.
      num_new_tokens: new tokens by request, or one number for all; at least 1.
      num_lookahead_tokens: further tokens of each request that need pages.

    Returns:
      The new pages of each request; None for a request for which too few are
      free. Later requests that need fewer pages may still succeed.

    Raises:
      KeyError: a request holds no page.
      TypeError: `running` is not a sequence, or a number is not an int.
      ValueError: a number is too small, a sequence is too long, a request is
        repeated, or a token is not a 32-bit integer.
    """
    return step.step(self._state, running, num_new_tokens, num_lookahead_tokens)

  @atomic
  def cache_pages(self, request: Any, num_computed_tokens: int) -> None:
    """Publishes the full pages of a request's first tokens.

    Call it when the K/V of external tokens has arrived, or drafts are accepted.

    Raises:
      KeyError: the request holds no page.
      TypeError: the number is not an int.
      ValueError: the number is negative, or a token is not a 32-bit integer.
    """
    state = self._state
    held = state.held.get(request.request_id)
    if held is None:
      raise step.not_held(request.request_id)
    num_tokens = as_count("num_computed_tokens", num_computed_tokens, 0)
    state.set_request(held, request)
    publish(state, held, min(num_tokens, len(tokens_of(request))))

  @atomic
  def remove_skipped_pages(
    self, request_id: str, num_computed_tokens: int
  ) -> None:
    """Frees a request's pages that are outside windows after some tokens.

    `num_computed_tokens` must not include tokens of steps in flight. A request
    without pages is ignored.
    """
    num_tokens = as_count("num_computed_tokens", num_computed_tokens, 0)
    held = self._state.held.get(request_id)
    if held is not None and num_tokens > 0:
      tokens = min(num_tokens, self.config.slot_tokens)
      allocate.drop_behind(self._state, held, tokens)

  @atomic
  def free(self, request: Any) -> None:
    """Frees all pages of a request, if any, the last page first.

    Cached pages stay cached until they are allocated again.
    """
    state = self._state
    held = state.held.get(request.request_id)
    if held is not None:
      state.remove(held)
      for table in held.tables:
        # In vLLM's order of groups. If uncached pages go to the front of the
        # queue, the pages of the last group are popped first.
        state.pool.release(reversed(table))

  @atomic
  def pop_pages_for_free(self, request: Any) -> list[int]:
    """Removes a request, whose references then belong to the caller.

    Use it while a step in flight may still write to the pages, and call
    `pages.release` with the pages in reverse order after the step.

    Returns:
      The request's pages, group by group, without null pages.
    """
    state = self._state
    held = state.held.get(request.request_id)
    if held is None:
      return []
    pages = [page for table in held.tables for page in table if page]
    # The references stay, and become pins, which `release` can remove.
    state.pool.pin(pages, 1)
    state.remove(held)
    return pages

  def free_page_hashes(self, request: Any) -> None:
    """Does nothing, because `free` also forgets a request's hashes."""

  @atomic
  def evict_pages(self, page_ids: Iterable[int]) -> None:
    """Removes pages from the prefix cache; requests keep them.

    Raises:
      TypeError: an id is not an int.
      ValueError: an id is out of range.
    """
    pages = as_page_ids(page_ids, 0, self.config.num_numbers - 1)
    self._state.pool.unpublish(sorted(pages))

  @atomic
  def reset_prefix_cache(self) -> bool:
    """Empties the prefix cache if all pages are free; else returns False."""
    state = self._state
    if state.pool.num_free < self.config.total_pages - 1:
      return False
    state.pool.clear()
    statistics = dataclasses.replace(state.statistics, reset=True)
    state.undo_log.replace(state, statistics=statistics)
    return True

  @atomic
  def new_step_starts(self) -> None:
    """Starts a step; recurrent states published earlier count as written."""
    state = self._state
    state.undo_log.replace(state, step_clock=state.pool.clock)
