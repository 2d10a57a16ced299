"""References to single pages of a manager, for engines that hold them."""

from collections.abc import Iterable

from jaxkv._src.arrays.arguments import as_count
from jaxkv._src.cache.prefix.hashing import key_bytes
from jaxkv._src.host.atomic import atomic
from jaxkv._src.host.page_pool import PageListener
from jaxkv._src.host.page_pool import as_page_ids
from jaxkv._src.host.state import HostState


class Pages:
  """The pages of a `CacheManager`: references, keys and listeners.

  A reference that a method adds belongs to the caller, until `release`. Page
  ids are 1 to N - 1, where N is `num_pages`. `cached_in_order` also returns
  N + 1 + h for offload page h. Only `keys` accepts such ids. Each method raises
  `TypeError` for an id that is not an int, and `ValueError` for one that is out
  of range. Methods that only read accept the null page 0.
  """

  def __init__(self, state: HostState):
    self._state = state
    self.undo_log = state.undo_log

  def add_listener(self, listener: PageListener) -> None:
    """Adds a listener for pages that enter or leave the prefix cache.

    Args:
      listener: an object with three methods. `stored(request, group, first,
        pages)`: a request filled columns of a group, from `first` on; `pages`
        has 0 for columns that this call did not publish: null pages, pages that
        were cached before, and those that no hit can include. `removed(page,
        group)`: a page, perhaps of offload memory, left the prefix cache.
        `cleared()`: all pages left it. The methods run inside those of the
        manager, so they must record each change of their state in
        `CacheManager.undo_log` first.
    """
    self._state.pool.listeners.append(listener)

  @atomic
  def take(self, count: int) -> list[int]:
    """Pops `count` free pages, in eviction order, with one reference each.

    Raises:
      TypeError: `count` is not an int.
      ValueError: `count` is negative, or too few pages are free.
    """
    pool = self._state.pool
    if as_count("count", count, 0) > pool.num_free:
      raise ValueError(
        f"`count` must be at most {pool.num_free}, the number of free pages, "
        f"got {count}."
      )
    pages = pool.pop(count)
    pool.pin(pages, 1)
    return pages

  @atomic
  def hold(self, page_ids: Iterable[int]) -> None:
    """Adds a reference to each page; free pages leave the free queue."""
    pages = as_page_ids(page_ids, 1, self._state.config.total_pages - 1)
    self._state.pool.hold(pages)
    self._state.pool.pin(pages, 1)

  @atomic
  def release(self, page_ids: Iterable[int]) -> None:
    """Removes a reference from each page; the first page is evicted first.

    Raises:
      ValueError: an id names a page more often than callers have references to
        it.
    """
    pages = as_page_ids(page_ids, 1, self._state.config.total_pages - 1)
    pool = self._state.pool
    # Decremented first, so that a page that is named too often has a negative
    # count. If the check raises, the undo log restores the counts.
    pool.pin(pages, -1)
    wrong = sorted({page for page in pages if pool.pin_count[page] < 0})
    if wrong:
      raise ValueError(
        "`page_ids` must name no page more often than callers have references "
        f"to it, got {wrong} too often."
      )
    pool.release(pages)

  @atomic
  def ref_counts(self, page_ids: Iterable[int] | None = None) -> list[int]:
    """Returns the number of references to each page; None for all pages."""
    counts = self._state.pool.ref_count
    if page_ids is None:
      return counts[:]
    return [counts[page] for page in as_page_ids(page_ids, 0, len(counts) - 1)]

  @atomic
  def cached_in_order(self) -> list[int]:
    """Returns the cached pages in the order of publication."""
    return self._state.pool.cached_pages()

  @atomic
  def keys(self, page_ids: Iterable[int]) -> list[bytes | None]:
    """Returns the key of each page in its group; None for uncached pages."""
    pool, keys = self._state.pool, self._state.device_keys
    pages = as_page_ids(page_ids, 0, len(pool.is_cached) - 1)
    cached = [page for page in pages if pool.is_cached[page]]
    if keys is None or not cached:
      return [None] * len(pages)
    keys.compute(pool.content[page] for page in cached)
    return [
      key_bytes(keys.group_key(pool.content[page], pool.group[page]))
      if pool.is_cached[page]
      else None
      for page in pages
    ]

  @atomic
  def num_keys(self) -> int:
    """Returns the number of different keys of cached pages, in all groups."""
    pool = self._state.pool
    if not pool.knows_device_pages:
      return sum(map(len, pool.index))
    # The index has other digests for pages that a device loop filled, so equal
    # contents can have two digests, but have one key.
    return len({*self.keys(pool.cached_pages())})
