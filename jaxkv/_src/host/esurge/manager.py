"""eSurge's cache manager, over `jaxkv.host.CacheManager`."""

from collections.abc import Sequence
from typing import Any

import jax

from jaxkv._src.cache.group_kinds import FullAttention
from jaxkv._src.host.esurge import groups
from jaxkv._src.host.esurge.coordinator import CacheCoordinator
from jaxkv._src.host.esurge.coordinator import RequestHashes
from jaxkv._src.host.esurge.keys import ChainKeys
from jaxkv._src.host.esurge.pages import EsurgeCachePages
from jaxkv._src.host.esurge.pool import PagePool
from jaxkv._src.host.esurge.pool import refuse_shards
from jaxkv._src.host.manager import CacheManager
from jaxkv._src.host.types import CachePages


class EsurgeCacheManager:
  """Manages the pages of requests for eSurge's schedulers.

  Each width of request compiles when it first occurs, see
  `jaxkv.host.CacheManager`.

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
    key: jax.Array | None = None,
  ):
    enable_caching = enable_caching and len(kv_cache_groups) > 0
    # A hit needs a page in every group, and states are not published.
    publishes = enable_caching and not any(
      map(groups.has_states, kv_cache_groups)
    )
    kinds = groups.kinds_of(kv_cache_groups, max_model_len, caching=publishes)
    several = publishes and len(kinds) > 1
    self._cache = CacheManager(
      num_pages,
      kinds or (FullAttention(page_size=1),),
      max_model_len,
      publishes,
      use_eagle,
      policy="classic",
      max_requests=max_requests,
      num_events=int(several),  # So that the state knows a page's group.
      key=key,
    )
    self.num_pages = num_pages
    self.kv_cache_groups = kv_cache_groups
    self.max_model_len = max_model_len
    self.enable_caching = enable_caching
    self.use_eagle = use_eagle
    self.num_kv_cache_groups = len(kv_cache_groups)
    self.page_size: int | None = None
    if enable_caching:
      self.page_size = groups.page_size_of(kv_cache_groups[0])
    self.page_pool = PagePool.of_manager(self._cache)
    self.coordinator = CacheCoordinator(
      self._cache,
      self.page_pool,
      kv_cache_groups=kv_cache_groups,
      max_model_len=max_model_len,
      enable_caching=enable_caching,
      use_eagle=use_eagle,
    )
    keys = self.page_pool.keys
    keys = keys if isinstance(keys, ChainKeys) else None
    self.req_to_page_hashes = RequestHashes(keys, self.page_size)

  @property
  def usage(self) -> float:
    """The fraction of the pages that are not free, with the null page."""
    return self.page_pool.get_usage()

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
      and
      its number of tokens.
    """
    refuse_shards(self.num_pages, dp_shard_hint, data_parallel_size)
    found, num_tokens = self._cache.get_computed_pages(request)
    if self.enable_caching and found.lookup is not None:
      self.req_to_page_hashes.look_up(request)
    return self._viewed(found), num_tokens

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
    refuse_shards(self.num_pages, dp_shard_hint, data_parallel_size)
    if num_new_tokens == 0:
      raise ValueError("`num_new_tokens` must be at least 1, got 0.")
    if not self.kv_cache_groups:
      return EsurgeCachePages(())
    computed = request.num_computed_tokens
    lost = 0 if self._cache.holds_pages(request.request_id) else computed
    new = self._cache.allocate_slots(
      _FromTheStart(request) if lost else request,
      num_new_tokens + lost,
      num_new_computed_tokens,
      _found_pages(new_computed_pages),
      num_lookahead_tokens,
      delay_cache_pages=delay_cache_pages,
    )
    if new is None:
      return None
    if self.enable_caching and not delay_cache_pages:
      behind = computed + num_new_computed_tokens
      self.req_to_page_hashes.publish(request, behind + num_new_tokens)
    return self._viewed(new)

  def free(self, request: Any) -> None:
    """Frees all pages of a request, the last page first."""
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

    A page counts if it has `num_scheduled_requests` references, whoever holds
    them. 0 for windows, chunks and states, and without caching.

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
    if not self.enable_caching:
      return
    self._cache.cache_pages(request, num_computed_tokens)
    self.req_to_page_hashes.publish(request, num_computed_tokens)

  def create_empty_page_list(self) -> EsurgeCachePages:
    """Returns empty pages, with a list for each group."""
    return EsurgeCachePages(tuple([] for _ in self.kv_cache_groups))

  def _viewed(self, pages: CachePages) -> EsurgeCachePages:
    views, held = self.page_pool.pages, pages.pages[: self.num_kv_cache_groups]
    lists = tuple([views[page] for page in group] for group in held)
    return EsurgeCachePages(lists, found=pages)


class _FromTheStart:
  """A request without pages, whose computed tokens count as new.

  eSurge's scheduler keeps counting a request that it preempts in the step that
  scheduled it. All pages of such a request are new.
  """

  num_computed_tokens = 0

  def __init__(self, request: Any):
    self._request = request

  def __getattr__(self, name: str) -> Any:
    return getattr(self._request, name)


def _found_pages(pages: EsurgeCachePages | None) -> CachePages | None:
  """Returns the result of a lookup, with its hashes if the pages match."""
  if pages is None:
    return None
  ids = pages.get_page_ids()
  if pages.found is not None and pages.found.pages == ids:
    return pages.found
  return CachePages(ids)
