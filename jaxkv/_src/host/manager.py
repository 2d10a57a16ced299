"""A cache manager for schedulers in Python, over a state on the device."""

from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

from jaxkv._src.cache.groups.kinds import GroupKind
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.telemetry.events import Drained
from jaxkv._src.cache.verbs import inspect as looking
from jaxkv._src.host import checks
from jaxkv._src.host import demand
from jaxkv._src.host import options
from jaxkv._src.host.driver import Driver
from jaxkv._src.host.driver import PoppedPages
from jaxkv._src.host.pages import CachePages
from jaxkv._src.host.pages import new_pages
from jaxkv._src.host.requests import skips_lookup
from jaxkv._src.host.requests import tokens_of
from jaxkv._src.host.statistics import PrefixCacheStats
from jaxkv._src.host.views import PagePool


class CacheManager:
  """Which pages requests hold, and which can be found; one pool for all.

  The methods are those that schedulers written for vLLM's `KVCacheManager` or
  eSurge's `CacheManager` call, and give the same page ids, hits and order. The
  state is a `jaxkv.CacheState`; a call is a jitted transition of it.

  The first request of each width (64, 4,096 or 65,536 tokens, or the longest)
  is compiled for: some 9 s on a CPU. To warm up, send one of each through all
  calls that will be made, free it, and then call `reset_prefix_cache`.

  Args:
    num_pages: pages of the pool, the null page 0 counted; ids begin at 1.
    groups: kinds of layers, each with its `page_size`.
    max_model_len: tokens of the longest sequence.
    enable_caching: whether pages are published and found.
    use_eagle: whether a draft model needs the last page found computed again.
    policy: "current" for the order of vLLM since 0.25, where pages without a
      key are used first; "classic" for earlier ones and eSurge.
    retention: which prefixes a window keeps; see `CacheConfig.retention`.
    watermark: part of the pages that newcomers leave free while others run.
    max_in_flight: tokens that can be scheduled at once, for the check whether
      a whole sequence fits; None for `max_model_len`.
    max_encoder_tokens: tokens of the longest encoder input, where a group is
      `CrossAttention`; None for `max_model_len`.
    max_requests: requests that hold pages at once.
    num_events: events kept until `take_events`; 0 for none.
    track_new_pages: whether `take_new_page_ids` is used.
    track_residency: whether statistics tell how old evicted pages were.
    seed: the secret of the page keys; see `CacheConfig.seed`.

  Attributes:
    config: sizes of the state.
    page_pool: a look at its pages.

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
    retention: int | None = None,
    watermark: float = 0.0,
    max_in_flight: int | None = None,
    max_encoder_tokens: int | None = None,
    max_requests: int = 256,
    num_events: int = 0,
    track_new_pages: bool = False,
    track_residency: bool = False,
    seed: int = 0,
  ):
    self.config = options.make_config(
      groups,
      max_model_len,
      max_encoder_tokens,
      num_pages=num_pages,
      max_requests=max_requests,
      policy=policy,
      retention=retention,
      options=options.Options(
        prefix_caching=enable_caching,
        draft_model=use_eagle,
        event_log=num_events,
        track_new_pages=track_new_pages,
        track_residency=track_residency,
        seed=seed,
      ),
    )
    self._limits = options.make_limits(
      self.config, max_model_len, watermark, max_in_flight, max_encoder_tokens
    )
    self._driver = Driver(self.config, self._limits.most_pages, max_requests)
    self._statistics = PrefixCacheStats()
    self.page_pool = PagePool(self)

  @property
  def state(self) -> CacheState:
    """The cache itself. The next call takes its arrays: copy what you keep."""
    return self._driver.state

  def get_computed_pages(self, request: Any) -> tuple[CachePages, int]:
    """The longest cached prefix that leaves a token to compute.

    Sets `request.shared_prefix_boundary`.

    Args:
      request: any object with the attributes of `Request`.

    Returns:
      Its pages by group, null pages where a window needs none, and its tokens.
    """
    request.shared_prefix_boundary = 0
    if not self.config.prefix_caching or skips_lookup(request):
      return self.create_empty_page_list(), 0
    length = len(tokens_of(request))
    checks.check_length(request, length, self._limits.max_model_len)
    found = self._driver.look_up(request)
    if not self.config.classic:
      request.shared_prefix_boundary = int(found.junction)
    pages = tuple(
      row[:stop].tolist()
      for row, stop in zip(found.pages, found.stop, strict=True)
    )
    return CachePages(pages), int(found.num_tokens)

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

    Gives back what fell behind a window first, also if there is no room then.

    Args:
      request: any object with the attributes of `Request`.
      num_new_tokens: tokens that will be computed, drafts included.
      num_new_computed_tokens: tokens that a lookup found.
      new_computed_pages: the pages that it found.
      num_lookahead_tokens: room behind them.
      num_external_computed_tokens: tokens behind those found whose K/V comes
        from elsewhere.
      delay_cache_pages: whether publishing waits for `cache_pages`, because
        their K/V is not there yet.
      full_sequence_must_fit: refuses a request of which not all known tokens
        have room, though only some are asked for.
      reserved_pages: pages promised to others.
      has_scheduled_requests: whether the watermark holds.
      num_encoder_tokens: tokens of the encoder that groups of `CrossAttention`
        have pages for, if they have fewer.
      skip_zeroing_group_ids: groups whose new pages `take_new_page_ids` leaves
        out.
      dp_shard_hint: None or 0.
      data_parallel_size: None or 1: every shard has a manager of its own.

    Returns:
      The new pages behind those found and those for external tokens; None,
      with no page taken, if there are too few.

    Raises:
      ValueError: nothing is asked for, a number is negative, the sequence is
        too long, or pages were found for a request that holds some.
      RuntimeError: there are `max_requests` already.
    """
    demand.check_shard(dp_shard_hint, data_parallel_size)
    skipped = demand.unzeroed_groups(self.config, skip_zeroing_group_ids)
    fields = demand.fields_of(
      request,
      self._limits,
      new=num_new_tokens,
      found=num_new_computed_tokens,
      external=num_external_computed_tokens,
      lookahead=num_lookahead_tokens,
      encoder=num_encoder_tokens,
      reserved=reserved_pages,
      delayed=delay_cache_pages,
      whole=full_sequence_must_fit,
      others_run=has_scheduled_requests,
    )
    slot = self._driver.slots.by_name.get(request.request_id)
    found, hit = num_new_computed_tokens, new_computed_pages
    checks.check_hit(self.config, request, slot, found, hit)
    out = self._driver.advance(request, slot, hit, **fields)
    if out is None or not out.ok[0]:
      return None
    if slot is None and self.config.prefix_caching:
      self._statistics.record(request, len(tokens_of(request)), found)
    pages = out.pages[:, 0].tolist()
    begin, stop = out.begin[0].tolist(), out.stop[0].tolist()
    # Behind what was found, which another request may have got as new.
    for group in skipped:
      known = hit.pages[group] if hit and hit.pages else ()
      first = len(known) if slot is None else begin[group]
      self._driver.forget_new(pages[group][first : stop[group]])
    return new_pages(pages, begin, stop)

  def step(
    self,
    running: Sequence[Any],
    num_new_tokens: Sequence[int] | int = 1,
    num_lookahead_tokens: int = 0,
  ) -> list[CachePages | None]:
    """One scheduling step of many running requests in one call.

    As `allocate_slots` for each of them in order, except that all requests
    give back what fell behind their windows before any takes a page, and are
    published when all have theirs.

    Args:
      running: different requests that hold pages.
      num_new_tokens: tokens of each, at least 1, or one number for all.
      num_lookahead_tokens: room behind them.

    Returns:
      New pages of each request. None where there were too few; later requests
      that need less may still be served.

    Raises:
      KeyError: a request holds no page.
      TypeError: a number is no int.
      ValueError: a number is too small, a sequence too long, or a request
        named twice.
    """
    if not running:
      return []
    return self._driver.advance_all(
      running, num_new_tokens, num_lookahead_tokens, self._limits.max_model_len
    )

  def cache_pages(self, request: Any, num_computed_tokens: int) -> None:
    """Publishes the full pages of a request's first tokens.

    For tokens from elsewhere that have arrived, and drafts that were accepted.

    Args:
      request: one that holds pages.
      num_computed_tokens: tokens whose K/V is there.

    Raises:
      KeyError: the request holds no page.
      ValueError: the number is negative.
    """
    slot = self._driver.slots.place_of(request.request_id)
    checks.check_counts(num_computed_tokens=num_computed_tokens)
    publish = min(num_computed_tokens, len(tokens_of(request)))
    self._driver.advance(request, slot, publish=publish)

  def remove_skipped_pages(
    self, request_id: str, num_computed_tokens: int
  ) -> None:
    """Gives back what nothing behind so many tokens looks at.

    Args:
      request_id: a request; nothing is done for one that holds no page.
      num_computed_tokens: tokens whose K/V no write in flight still needs.
    """
    slot = self._driver.slots.by_name.get(request_id)
    if slot is not None and num_computed_tokens > 0:
      behind = min(num_computed_tokens, self.config.slot_tokens)
      self._driver.advance(None, slot, behind=behind)

  def free(self, request: Any) -> None:
    """Gives all pages of a request back, the last one first.

    They stay cached until they are handed out again. Nothing is done for a
    request that holds none.
    """
    self._driver.free(request.request_id)

  def pop_pages_for_free(self, request: Any) -> PoppedPages | None:
    """Forgets a request, whose pages `free_pages` gives back later.

    For a step in flight that may still write them.

    Returns:
      What to give to `free_pages`; None for a request that holds nothing.
    """
    return self._driver.pop(request.request_id)

  def free_pages(self, popped: PoppedPages | None) -> None:
    """Gives pages back, in the order in which `free` would have."""
    if popped is not None:
      self._driver.free_popped(popped)

  def free_page_hashes(self, request: Any) -> None:
    """Forgets the page keys of a request; `free` does so already."""

  def evict_pages(self, page_ids: Iterable[int]) -> None:
    """Takes pages out of the cache; who holds them keeps them.

    Args:
      page_ids: pages, cached or not.

    Raises:
      TypeError: an id is no int.
      ValueError: there is no such page.
    """
    self._driver.evict(page_ids)

  def reset_prefix_cache(self) -> bool:
    """Takes every page out of the cache, unless some request holds one.

    Returns:
      Whether it was done.
    """
    done = self._driver.reset()
    self._statistics.reset |= done
    return done

  def new_step_starts(self) -> None:
    """A new step begins: what was published before is written now."""
    self._driver.new_step()

  def get_page_ids(self, request_id: str) -> tuple[list[int], ...]:
    """Pages of a request by group; empty lists for one that holds none."""
    return self._driver.pages_of(request_id)

  def create_empty_page_list(self) -> CachePages:
    """No pages, for every group."""
    return CachePages(tuple([] for _ in self.config.groups))

  def get_num_common_prefix_pages(self, request_id: str) -> list[int]:
    """Leading pages of a request that all requests hold; 0 for windows."""
    return self._driver.num_common(request_id)

  def make_prefix_cache_stats(self) -> PrefixCacheStats:
    """What was looked up, found and evicted since the last call."""
    taken, self._statistics = self._statistics, PrefixCacheStats()
    taken.lifetime, taken.idle = self._driver.take_ages()
    return taken

  def take_events(self) -> Drained:
    """Pages published and taken out of the cache since the last call.

    Raises:
      ValueError: the manager was made without `num_events`.
    """
    return self._driver.drain_events()

  def take_new_page_ids(self) -> list[int]:
    """Pages handed out since the last call, in ascending order, to be zeroed.

    Raises:
      ValueError: the manager was made without `track_new_pages`.
    """
    return self._driver.take_new_pages()

  def free_queue(self) -> list[int]:
    """Free pages in the order in which they will be handed out."""
    return looking.free_pages(self.state)

  def cached_page_ids(self) -> set[int]:
    """Pages that a lookup can find."""
    return set(looking.cached_pages(self.state))

  @property
  def num_free_pages(self) -> int:
    """How many pages are free."""
    return int(self.state.pool.queue.num_free)

  @property
  def usage(self) -> float:
    """The part of the pages that is held; the null page does not count."""
    return 1 - self.num_free_pages / (self.config.num_pages - 1)
