"""The pool of pages, for engines that hold references to pages."""

from collections.abc import Iterable
from collections.abc import Sized

from jaxkv._src.host.manager import CacheManager
from jaxkv._src.host.page_references import Pages


def refuse_shards(
  num_pages: int, dp_shard_hint: int | None, data_parallel_size: int | None
) -> None:
  """Raises ValueError unless the arguments select the only shard.

  As in eSurge, both arguments are ignored if the number of shards does not
  divide the number of pages.
  """
  # Without data parallelism, eSurge's schedulers pass 1.
  shards = data_parallel_size or 1
  if shards > 1 and num_pages % shards:
    return
  if dp_shard_hint not in (None, 0) or shards != 1:
    raise ValueError(
      "`dp_shard_hint` must be None or 0, and `data_parallel_size` None or 1, "
      f"got {dp_shard_hint} and {data_parallel_size}; make a CacheManager for "
      "each shard."
    )


class PagePool:
  """References to single pages of a manager, which callers add and remove.

  Page 0 is the null page, which is never free. Methods ignore it in arguments.

  Attributes:
    num_pages: the number of pages, including the null page.
    enable_caching: True if pages are published.
    cached_page_hash_to_page: supports only `len`, which returns the number of
      different hashes of cached pages.
  """

  def __init__(self, host: CacheManager):
    self._host = host
    self.num_pages = host.config.total_pages
    self.enable_caching = host.config.prefix_caching
    self.cached_page_hash_to_page = CachedHashes(host.pages)

  def get_new_pages(
    self,
    num_pages: int,
    *,
    dp_shard_hint: int | None = None,
    data_parallel_size: int | None = None,
  ) -> list[int]:
    """Allocates free pages in eviction order, with one reference each.

    Raises:
      ValueError: `num_pages` is negative or exceeds the number of free pages,
        or the other arguments do not select the only shard.
    """
    refuse_shards(self.num_pages, dp_shard_hint, data_parallel_size)
    return self._host.pages.take(num_pages)

  def touch(self, pages: Iterable[Iterable[int]]) -> None:
    """Adds a reference to each page; free pages leave the free queue.

    Args:
      pages: page ids by group, such as `CachePages.pages`.
    """
    self._host.pages.hold([page for group in pages for page in group if page])

  def free_pages(self, ordered_pages: Iterable[int]) -> None:
    """Removes a reference from each page; the first page is evicted first.

    Raises:
      ValueError: an id is out of range, or a reference was not added by
        `get_new_pages` or `touch`. Nothing is removed.
    """
    self._host.pages.release([page for page in ordered_pages if page])

  def reset_prefix_cache(self) -> bool:
    """Calls `CacheManager.reset_prefix_cache`."""
    return self._host.reset_prefix_cache()

  def get_num_free_pages(self) -> int:
    """Returns the number of free pages."""
    return self._host.num_free_pages

  def get_usage(self) -> float:
    """Returns the fraction of pages in use, the null page included."""
    return 1 - self._host.num_free_pages / self.num_pages


class CachedHashes(Sized):
  """Stand-in for eSurge's dictionary of page hashes; has only `len`."""

  def __init__(self, pages: Pages):
    self._pages = pages

  def __len__(self) -> int:
    return self._pages.num_keys()
