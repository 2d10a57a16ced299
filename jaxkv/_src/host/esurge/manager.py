"""eSurge's cache manager, implemented with `jaxkv.host.CacheManager`."""

from collections.abc import Sequence
from typing import Any

from jaxkv._src.arrays.arguments import as_count
from jaxkv._src.cache.group_kinds import FullAttention
from jaxkv._src.host.cache_pages import CachePages
from jaxkv._src.host.esurge import groups
from jaxkv._src.host.esurge.pool import PagePool
from jaxkv._src.host.esurge.pool import refuse_shards
from jaxkv._src.host.manager import CacheManager


class EsurgeCacheManager:
  """Manages the pages of requests for eSurge's schedulers.

  Args:
    num_pages: pages of the pool, including the null page 0.
    kv_cache_groups: for each layer group, eSurge's `CacheGroupSpec` or a kind
      such as `jaxkv.FullAttention(page_size=16)`. Without groups, no request
      needs a page.
    max_model_len: tokens of the longest sequence.
    enable_caching: True to publish full pages and to find them again.
    use_eagle: True to compute the last page of a hit again, for a draft model.
    max_requests: the most requests that hold pages at once.
    key: the secret of the page keys, see `jaxkv.init`; None for a random one.

  Attributes:
    num_pages, kv_cache_groups, max_model_len, use_eagle: the arguments.
    enable_caching: the argument, but False without groups.
    host: the `jaxkv.host.CacheManager` to which all calls are delegated.
    page_pool: the pages.

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
    self.host = CacheManager(
      num_pages,
      # `CacheManager` needs a group. This one is never used.
      kinds or (FullAttention(page_size=1),),
      max_model_len,
      publishes,
      use_eagle,
      policy="classic",
      max_requests=max_requests,
      key=key,
    )
    self.num_pages = num_pages
    self.kv_cache_groups = kv_cache_groups
    self.max_model_len = max_model_len
    self.enable_caching = enable_caching
    self.use_eagle = use_eagle
    self.page_pool = PagePool(self.host)
    # For each group, True if `get_num_common_prefix_pages` counts its pages.
    self._shares_prefixes = [
      enable_caching and isinstance(kind, FullAttention) and not has_states
      for kind, has_states in zip(kinds, have_states, strict=True)
    ]

  @property
  def usage(self) -> float:
    """The fraction of pages in use, the null page included."""
    return self.page_pool.get_usage()

  def get_computed_pages(
    self,
    request: Any,
    *,
    dp_shard_hint: int | None = None,
    data_parallel_size: int | None = None,
  ) -> tuple[CachePages, int]:
    """Finds the longest cached prefix that leaves a token to compute.

    Args:
      request: eSurge's `EngineRequest`, or any object with the attributes of
        `jaxkv.host.Request`.
      dp_shard_hint: None or 0.
      data_parallel_size: None or 1. If it does not divide `num_pages`, it and
        `dp_shard_hint` are ignored.

    Returns:
      The prefix's pages by group, with null pages where a window needs none,
      and its number of tokens.
    """
    refuse_shards(self.num_pages, dp_shard_hint, data_parallel_size)
    if not self.enable_caching:
      return self.create_empty_page_list(), 0
    return self.host.get_computed_pages(request)

  def allocate_slots(
    self,
    request: Any,
    num_new_tokens: int,
    num_new_computed_tokens: int = 0,
    new_computed_pages: CachePages | None = None,
    num_lookahead_tokens: int = 0,
    delay_cache_pages: bool = False,
    dp_shard_hint: int | None = None,
    data_parallel_size: int | None = None,
  ) -> CachePages | None:
    """Allocates pages for a request's tokens and publishes its full pages.

    For the last two arguments, see `get_computed_pages`; for all others and the
    errors, `jaxkv.host.CacheManager.allocate_slots`. `num_new_tokens` must be
    at least 1 here.

    Returns:
      The new pages; None, with no page allocated, if too few are free.
    """
    # Nearly every call passes None, 0 or 1, and needs no further check.
    if dp_shard_hint or data_parallel_size not in (1, None):
      refuse_shards(self.num_pages, dp_shard_hint, data_parallel_size)
    if num_new_tokens == 0:
      raise ValueError("`num_new_tokens` must be at least 1, got 0.")
    if not self.host.holds_pages(request.request_id):
      if not self.kv_cache_groups:
        return CachePages(())
      # eSurge's scheduler adds a step's tokens to `num_computed_tokens` even if
      # it preempts the request in that step. The preemption freed the pages, so
      # all these tokens are allocated again.
      if num_lost := request.num_computed_tokens:
        request = _FromTheStart(request)
        num_new_tokens += num_lost
    return self.host.allocate_slots(
      request,
      num_new_tokens,
      num_new_computed_tokens,
      new_computed_pages,
      num_lookahead_tokens,
      delay_cache_pages=delay_cache_pages,
    )

  def free(self, request: Any) -> None:
    """Frees all pages of a request, the last page first."""
    self.host.free(request)

  def free_page_hashes(self, request: Any) -> None:
    """Does nothing: `free` already forgets the page keys of a request."""

  def reset_prefix_cache(self) -> bool:
    """Empties the prefix cache if all pages are free; returns True if so."""
    return self.host.reset_prefix_cache()

  def get_num_common_prefix_pages(
    self, request: Any, num_scheduled_requests: int
  ) -> list[int]:
    """Counts a request's leading pages that many requests share, by group.

    A counted page has at least `num_scheduled_requests` references, from any
    holder. The count is 0 for windows, chunks and states, or without caching.

    Raises:
      TypeError: `num_scheduled_requests` is not an int.
      ValueError: this number is negative, or the request is not running.
    """
    status = getattr(request, "status", "running")
    status = getattr(status, "name", status)
    if str(status).lower() != "running":
      raise ValueError(
        f"`status` of {request.request_id!r} must be RUNNING, got {status}."
      )
    as_count("num_scheduled_requests", num_scheduled_requests, 0)
    counts = []
    tables = self.get_page_ids(request.request_id)
    for shares, table in zip(self._shares_prefixes, tables, strict=True):
      num_references = self.host.pages.ref_counts(table)
      has_too_few = [n < num_scheduled_requests for n in num_references]
      # The last element ends the count if every page has enough references.
      counts.append([*has_too_few, True].index(True) if shares else 0)
    return counts

  def get_page_ids(self, request_id: str) -> tuple[list[int], ...]:
    """Returns a request's pages by group; empty lists if it holds none."""
    # `host` has one group even if `kv_cache_groups` is empty.
    return self.host.get_page_ids(request_id)[: len(self.kv_cache_groups)]

  def cache_pages(self, request: Any, num_computed_tokens: int) -> None:
    """Publishes the full pages of a request's first tokens.

    Raises:
      KeyError: the request holds no page.
      TypeError: `num_computed_tokens` is not an int.
      ValueError: this number is negative, or a token is not a 32-bit integer.
    """
    if self.enable_caching:
      self.host.cache_pages(request, num_computed_tokens)

  def create_empty_page_list(self) -> CachePages:
    """Returns `CachePages` with an empty list for each group."""
    return CachePages(tuple([] for _ in self.kv_cache_groups))


class _FromTheStart:
  """A proxy for a request, with `num_computed_tokens` 0."""

  num_computed_tokens = 0

  def __init__(self, request: Any):
    self._request = request

  def __getattr__(self, name: str) -> Any:
    return getattr(self._request, name)
