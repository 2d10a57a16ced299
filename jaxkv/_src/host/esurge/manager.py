"""eSurge's cache manager, over `jaxkv.host.CacheManager`."""

from collections.abc import Sequence
from typing import Any

from jaxkv._src.cache.group_kinds import FullAttention
from jaxkv._src.host.atomic import atomic
from jaxkv._src.host.esurge import groups
from jaxkv._src.host.esurge.coordinator import CacheCoordinator
from jaxkv._src.host.esurge.coordinator import RequestHashes
from jaxkv._src.host.esurge.pages import EsurgeCachePages
from jaxkv._src.host.esurge.pool import PagePool
from jaxkv._src.host.esurge.pool import refuse_shards
from jaxkv._src.host.manager import CacheManager
from jaxkv._src.host.types import CachePages


class EsurgeCacheManager:
  """Manages the pages of requests for eSurge's schedulers.

  Args:
    num_pages: pages of the pool, including the null page 0.
    kv_cache_groups: the layer groups: eSurge's `CacheGroupSpec`, or kinds such
      as `jaxkv.FullAttention(page_size=16)`. Without groups nothing is cached
      and no request needs a page.
    max_model_len: tokens of the longest sequence.
    enable_caching: publishes pages and looks them up.
    use_eagle: computes the last page of a hit again, for a draft model.
    max_requests: the most requests that hold pages at once.
    key: the secret of the page hashes, see `jaxkv.init`; None for a random one.

  Attributes:
    num_pages, kv_cache_groups, max_model_len, use_eagle: the arguments.
    enable_caching: the argument, but False without groups.
    page_size: tokens a page of the first group; None without caching.
    num_kv_cache_groups: the number of groups.
    coordinator: access to requests by their ids.
    page_pool: the pages.
    req_to_page_hashes: request id -> `PageHash` of its pages; a view.
    undo_log: that of `jaxkv.host.CacheManager`.

  Raises:
    TypeError: an argument has the wrong type.
    ValueError: an argument is out of range, or two arguments conflict.

  Examples:
    >>> from jaxkv import FullAttention
    >>> from jaxkv.host import Request
    >>> from jaxkv.host.esurge import CacheManager
    >>> manager = CacheManager(10, [FullAttention(page_size=4)], 32)
    >>> request = Request("a", list(range(9)))
    >>> pages, num_tokens = manager.get_computed_pages(request)
    >>> new = manager.allocate_slots(request, 9, num_tokens, pages)
    >>> new.get_page_ids(), new.get_unhashed_page_ids()
    (([1, 2, 3],), [3])
    >>> manager.free(request)
    >>> pages, num_tokens = manager.get_computed_pages(request)
    >>> pages.get_page_ids(), num_tokens
    (([1, 2],), 8)
  """

  def __init__(
    self,
    num_pages: int,
    kv_cache_groups: Sequence[Any],
    max_model_len: int,
    enable_caching: bool = True,
    use_eagle: bool = False,
    *,
    max_requests: int = 256,
    key: Any = None,
  ):
    enable_caching = enable_caching and len(kv_cache_groups) > 0
    # A hit needs a page in every group, and eSurge does not publish states. So
    # with states no lookup can hit, and publishing would only cost time.
    specs = [groups.spec_of(group) for group in kv_cache_groups]
    have_states = [groups.has_states(spec) for spec in specs]
    publishes = enable_caching and not any(have_states)
    kinds = groups.kinds_of(specs, max_model_len, caching=publishes)
    self._cache = CacheManager(
      num_pages,
      # A manager has at least one group; without groups it is never called.
      kinds or (FullAttention(page_size=1),),
      max_model_len,
      publishes,
      use_eagle,
      policy="classic",
      max_requests=max_requests,
      key=key,
    )
    self.undo_log = self._cache.undo_log
    self.num_pages = num_pages
    self.kv_cache_groups = kv_cache_groups
    self.max_model_len = max_model_len
    self.enable_caching = enable_caching
    self.use_eagle = use_eagle
    self.num_kv_cache_groups = len(kv_cache_groups)
    self.page_size = specs[0].page_size if enable_caching else None
    self.page_pool = PagePool.of_manager(self._cache)
    self.coordinator = CacheCoordinator(
      self._cache,
      self.page_pool,
      num_pages,
      kv_cache_groups,
      max_model_len,
      enable_caching,
      use_eagle,
      [
        enable_caching and isinstance(kind, FullAttention) and not states
        for kind, states in zip(kinds, have_states, strict=True)
      ],
    )
    self.req_to_page_hashes = RequestHashes(
      self._cache, self.page_pool, self.page_size
    )

  @property
  def usage(self) -> float:
    """The fraction of the pages that are not free, with the null page."""
    return self.page_pool.get_usage()

  @atomic
  def get_computed_pages(
    self,
    request: Any,
    *,
    dp_shard_hint: int | None = None,
    data_parallel_size: int | None = None,
  ) -> tuple[EsurgeCachePages, int]:
    """Finds the longest cached prefix that leaves a token to compute.

    Args:
      request: eSurge's `EngineRequest`, or any object with the attributes of
        `jaxkv.host.Request`.
      dp_shard_hint: None or 0.
      data_parallel_size: None or 1, or a number that does not divide the pages.

    Returns:
      The prefix's pages by group, with null pages where a window needs none,
      and its number of tokens.
    """
    refuse_shards(self.num_pages, dp_shard_hint, data_parallel_size)
    if not self.enable_caching:
      return self.create_empty_page_list(), 0
    hit, num_tokens = self._cache.get_computed_pages(request)
    if hit.lookup is not None:
      self.req_to_page_hashes.look_up(request)
    return self._viewed(hit), num_tokens

  def allocate_slots(
    self,
    request: Any,
    num_new_tokens: int,
    num_new_computed_tokens: int = 0,
    new_computed_pages: EsurgeCachePages | None = None,
    num_lookahead_tokens: int = 0,
    delay_cache_pages: bool = False,
    dp_shard_hint: int | None = None,
    data_parallel_size: int | None = None,
  ) -> EsurgeCachePages | None:
    """Allocates pages for a request's tokens and publishes its full pages.

    Arguments and errors are those of `jaxkv.host.CacheManager.allocate_slots`
    and of `get_computed_pages`; `num_new_tokens` must be at least 1.

    Returns:
      The new pages; None, with no page taken, if too few are free.
    """
    # Nearly every call is for a running request without shards. So the checks
    # for other calls are kept to a few comparisons.
    if dp_shard_hint or data_parallel_size not in (None, 1):
      refuse_shards(self.num_pages, dp_shard_hint, data_parallel_size)
    if num_new_tokens == 0:
      raise ValueError("`num_new_tokens` must be at least 1, got 0.")
    if not self.kv_cache_groups:
      return EsurgeCachePages(())
    is_running = self._cache.holds_pages(request.request_id)
    allocate = self._cache.allocate_slots if is_running else self._admit
    pages = allocate(
      request,
      num_new_tokens,
      num_new_computed_tokens,
      None if new_computed_pages is None else new_computed_pages.to_host(),
      num_lookahead_tokens,
      delay_cache_pages=delay_cache_pages,
    )
    return None if pages is None else self._viewed(pages)

  @atomic
  def _admit(
    self, request: Any, num_new_tokens: int, *args: Any, **kwargs: Any
  ) -> CachePages | None:
    """Allocates for a request without pages, and records its hashes."""
    # If eSurge's scheduler preempts a request in the step that scheduled it, it
    # still adds the step's tokens to those computed. Their pages are freed, so
    # the tokens are allocated again.
    num_lost = request.num_computed_tokens
    pages = self._cache.allocate_slots(
      _FromTheStart(request) if num_lost else request,
      num_new_tokens + num_lost,
      *args,
      **kwargs,
    )
    if pages is not None and self.enable_caching:
      self.req_to_page_hashes.record(request)
    return pages

  @atomic
  def free(self, request: Any) -> None:
    """Frees all pages of a request, the last page first."""
    if request.request_id in self.req_to_page_hashes:
      # The manager forgets how many pages of a freed request are published.
      self.req_to_page_hashes.record(request)
    self._cache.free(request)

  def free_page_hashes(self, request: Any) -> None:
    """Forgets the page hashes of a finished request."""
    self.req_to_page_hashes.forget(request.request_id)

  def reset_prefix_cache(self) -> bool:
    """Resets the prefix cache and returns True, if all pages are free."""
    return self._cache.reset_prefix_cache()

  def get_num_common_prefix_pages(
    self, request: Any, num_scheduled_requests: int
  ) -> list[int]:
    """Counts leading pages with enough references, by group.

    A page counts if it has at least `num_scheduled_requests` references, of any
    holders. The count is 0 for windows, chunks and states, and without caching.

    Raises:
      ValueError: the request is not running.
    """
    status = getattr(request, "status", "running")
    status = getattr(status, "name", status)
    if str(status).lower() != "running":
      raise ValueError(
        f"`status` of {request.request_id!r} must be RUNNING, got {status}."
      )
    return self.coordinator.get_num_common_prefix_pages(
      request.request_id, num_scheduled_requests
    )

  def get_page_ids(self, request_id: str) -> tuple[list[int], ...]:
    """Returns a request's pages by group; empty lists if it holds none."""
    return self.coordinator.get_page_ids(request_id)

  def cache_pages(self, request: Any, num_computed_tokens: int) -> None:
    """Publishes the full pages of a request's first tokens.

    Raises:
      KeyError: the request holds no page.
      ValueError: the number is negative.
    """
    if self.enable_caching:
      self._cache.cache_pages(request, num_computed_tokens)

  def create_empty_page_list(self) -> EsurgeCachePages:
    """Returns empty pages, with a list for each group."""
    return EsurgeCachePages(tuple([] for _ in self.kv_cache_groups))

  def _viewed(self, pages: CachePages) -> EsurgeCachePages:
    return EsurgeCachePages.of_manager(pages, self.page_pool.pages)


class _FromTheStart:
  """A view of a request, without computed tokens."""

  num_computed_tokens = 0

  def __init__(self, request: Any):
    self._request = request

  def __getattr__(self, name: str) -> Any:
    return getattr(self._request, name)
