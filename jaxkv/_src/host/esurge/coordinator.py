"""The pages and the hashes of requests, by the requests' ids."""

import dataclasses
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from jaxkv._src.host.arguments import at_least
from jaxkv._src.host.esurge.hashes import PageHash
from jaxkv._src.host.esurge.pages import CachePage
from jaxkv._src.host.esurge.pool import PagePool
from jaxkv._src.host.manager import CacheManager
from jaxkv._src.host.request import tokens_of


@dataclasses.dataclass(frozen=True)
class CacheCoordinator:
  """Access to a manager's requests by their ids.

  Attributes:
    cache: holds the pages of requests.
    page_pool, num_pages, kv_cache_groups, max_model_len, enable_caching,
      use_eagle: those of the manager.
    shares_prefixes: for each group, True if it keeps and caches every page.
  """

  cache: CacheManager = dataclasses.field(repr=False)
  page_pool: PagePool = dataclasses.field(repr=False)
  num_pages: int
  kv_cache_groups: Sequence[Any]
  max_model_len: int
  enable_caching: bool
  use_eagle: bool
  shares_prefixes: Sequence[bool]

  def get_page_ids(self, request_id: str) -> tuple[list[int], ...]:
    """Returns the ids of a request's pages by group."""
    # The manager has a group even if the model has none.
    return self.cache.get_page_ids(request_id)[: len(self.kv_cache_groups)]

  def get_pages(self, request_id: str) -> tuple[list[CachePage], ...]:
    """Returns a request's pages by group."""
    pages = self.page_pool.pages
    page_ids = self.get_page_ids(request_id)
    return tuple([pages[page] for page in group] for group in page_ids)

  def remove_skipped_pages(
    self, request_id: str, num_computed_tokens: int
  ) -> None:
    """Frees the pages that these tokens leave behind windows and chunks."""
    self.cache.remove_skipped_pages(request_id, num_computed_tokens)

  def get_num_common_prefix_pages(
    self, request_id: str, num_scheduled_requests: int
  ) -> list[int]:
    """Counts leading pages with enough references; 0 for windows and states."""
    at_least("num_scheduled_requests", num_scheduled_requests, 0)
    page_ids = self.get_page_ids(request_id)
    return [
      self._num_shared(group, num_scheduled_requests) if shares else 0
      for shares, group in zip(self.shares_prefixes, page_ids, strict=True)
    ]

  def _num_shared(self, page_ids: list[int], num_requests: int) -> int:
    """Counts leading pages with at least that many references."""
    queue, begin = self.page_pool.free_page_queue, 0
    while begin < len(page_ids):
      # Usually the first page has too few references. So the first part is one
      # page, and each part is longer than all before.
      part = page_ids[begin : 2 * begin + 1]
      is_short = [count < num_requests for count in queue.references(part)]
      if any(is_short):
        return begin + is_short.index(True)
      begin += len(part)
    return begin


class RequestHashes(Mapping[str, list[PageHash]]):
  """A view of the hashes of requests' pages.

  A request is in the view from its first lookup or allocation to
  `free_page_hashes`. Its hashes are those of the pages that were full at the
  lookup or published since. Other requests have no hashes.
  """

  def __init__(
    self, cache: CacheManager, page_pool: PagePool, page_size: int | None
  ):
    self._cache, self._pool, self._page_size = cache, page_pool, page_size
    # For each request its object, and the number of pages that had hashes when
    # it was recorded. While a request holds pages, the manager knows how many
    # have been published since, so a step records nothing.
    self._requests: dict[str, tuple[Any, int]] = {}

  def look_up(self, request: Any) -> None:
    """Records a lookup."""
    # As in eSurge, only the first lookup hashes all full pages.
    if self._count(request.request_id) == 0 and self._page_size is not None:
      self.record(request, len(tokens_of(request)) // self._page_size)

  def record(self, request: Any, num_pages: int = 0) -> None:
    """Records a request, and how many of its pages have hashes by now."""
    name = request.request_id
    count = max(num_pages, self._count(name))
    self._cache.undo_log.save_key(self._requests, name)
    self._requests[name] = request, count

  def forget(self, request_id: str) -> None:
    """Forgets a request."""
    # One call of C code, which needs no undo.
    self._requests.pop(request_id, None)

  def _count(self, request_id: str) -> int:
    _, num_pages = self._requests.get(request_id, (None, 0))
    num_tokens = self._cache.num_published_tokens(request_id)
    return max(num_pages, num_tokens // (self._page_size or 1))

  def __getitem__(self, request_id: str) -> list[PageHash]:
    if request_id not in self._requests or not self._pool.enable_caching:
      return []
    assert self._page_size is not None
    request, count = self._requests[request_id][0], self._count(request_id)
    keys = self._pool.keys
    return keys.request_hashes(request, [], count, self._page_size)

  def __contains__(self, request_id: object) -> bool:
    return request_id in self._requests

  def __iter__(self) -> Iterator[str]:
    # A copy, because the caller may free requests in its loop.
    return iter([*self._requests])

  def __len__(self) -> int:
    return len(self._requests)
