"""The pages of requests, group by group."""

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from jaxkv._src.host.calls import at_least
from jaxkv._src.host.esurge.groups import shares_prefixes
from jaxkv._src.host.esurge.hashes import PageHash
from jaxkv._src.host.esurge.keys import ChainKeys
from jaxkv._src.host.esurge.pages import CachePage
from jaxkv._src.host.esurge.pool import PagePool
from jaxkv._src.host.manager import CacheManager
from jaxkv._src.host.request import tokens_of


class CacheCoordinator:
  """Access to a manager's requests by their ids.

  Attributes:
    page_pool, num_pages, kv_cache_groups, max_model_len, enable_caching,
      use_eagle: those of the manager.
  """

  def __init__(self, cache: CacheManager, page_pool: PagePool, **given: Any):
    self._cache = cache
    self.page_pool = page_pool
    self.num_pages: int = page_pool.num_pages
    self.kv_cache_groups: Sequence[Any] = given["kv_cache_groups"]
    self.max_model_len: int = given["max_model_len"]
    self.enable_caching: bool = given["enable_caching"]
    self.use_eagle: bool = given["use_eagle"]

  def get_page_ids(self, request_id: str) -> tuple[list[int], ...]:
    """Returns the ids of a request's pages by group."""
    groups = len(self.kv_cache_groups)
    return self._cache.get_page_ids(request_id)[:groups]

  def get_pages(self, request_id: str) -> tuple[list[CachePage], ...]:
    """Returns a request's pages by group."""
    pages = self.page_pool.pages
    held = self.get_page_ids(request_id)
    return tuple([pages[page] for page in group] for group in held)

  def remove_skipped_pages(
    self, request_id: str, num_computed_tokens: int
  ) -> None:
    """Frees the pages that these tokens leave behind windows and chunks."""
    self._cache.remove_skipped_pages(request_id, num_computed_tokens)

  def get_num_common_prefix_pages(
    self, request_id: str, num_scheduled_requests: int
  ) -> list[int]:
    """Counts leading pages with that many references in full attention."""
    at_least("num_scheduled_requests", num_scheduled_requests, 0)
    common = [0] * len(self.kv_cache_groups)
    if not self.enable_caching:
      return common
    for group, pages in enumerate(self.get_pages(request_id)):
      if shares_prefixes(self.kv_cache_groups[group]):
        counts = self.page_pool.references(pages)
        short = [count < num_scheduled_requests for count in counts]
        common[group] = [*short, True].index(True)
    return common


class RequestHashes(Mapping[str, list[PageHash]]):
  """A view of the hashes of requests' pages.

  It has a request from its first lookup to `free_page_hashes`, with the pages
  that were full at the lookup or published since. Other requests have no
  hashes.
  """

  def __init__(self, keys: ChainKeys | None, page_size: int | None):
    self._keys, self._page_size = keys, page_size
    self._known: dict[str, tuple[Any, int]] = {}

  def look_up(self, request: Any) -> None:
    """Records a lookup."""
    if self._known.get(request.request_id, (None, 0))[1] == 0:
      self._known[request.request_id] = request, self._full(request)

  def publish(self, request: Any, num_tokens: int) -> None:
    """Records that a request's first tokens were published."""
    full = self._full(request, num_tokens)
    before = self._known.get(request.request_id, (None, 0))[1]
    self._known[request.request_id] = request, max(before, full)

  def forget(self, request_id: str) -> None:
    """Forgets a request."""
    self._known.pop(request_id, None)

  def __getitem__(self, request_id: str) -> list[PageHash]:
    request, count = self._known.get(request_id, (None, 0))
    if self._keys is None or self._page_size is None or count == 0:
      return []
    return self._keys.hashes_of(request, count, self._page_size)

  def __contains__(self, request_id: object) -> bool:
    return request_id in self._known

  def __iter__(self) -> Iterator[str]:
    return iter([*self._known])

  def __len__(self) -> int:
    return len(self._known)

  def _full(self, request: Any, num_tokens: int | None = None) -> int:
    known = len(tokens_of(request))
    tokens = known if num_tokens is None else min(num_tokens, known)
    return tokens // self._page_size if self._page_size else 0
