"""References to single pages of a manager, for engines that hold them."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from jaxkv._src.arrays.arguments import as_count
from jaxkv._src.cache.prefix.hashing import key_bytes
from jaxkv._src.host import allocate
from jaxkv._src.host.atomic import atomic
from jaxkv._src.host.page_pool import PageListener
from jaxkv._src.host.page_pool import as_page_ids
from jaxkv._src.host.prefix_nodes import Key
from jaxkv._src.host.state import HostState


class Pages:
  """The pages of a `CacheManager`: references, keys and listeners.

  A reference that a method adds belongs to the caller, until `release`. Page
  ids are 1 to N - 1, where N is `num_pages`. `cached_in_order` and `find` also
  return N + 1 + h for offload page h. Only `keys` and `groups` accept such ids.
  Each method raises `TypeError` for an id that is not an int, and `ValueError`
  for one that is out of range. Methods that only read accept the null page 0.
  """

  def __init__(self, state: HostState):
    self._state = state
    self.undo_log = state.undo_log

  def add_listener(self, listener: PageListener) -> None:
    """Adds a listener for pages that enter or leave the prefix cache.

    Args:
      listener: an object with three methods. `stored(request, group, first,
        pages)`: a request filled columns of a group, from `first` on; `pages`
        has 0 for columns that this call did not publish. `removed(page,
        group)`: a page, perhaps of offload memory, left the prefix cache.
        `cleared()`: all pages left it. The methods run inside those of the
        manager, so they must record each change of their state in
        `CacheManager.undo_log` first.
    """
    self._state.pool.listeners.append(listener)

  @atomic
  def detach(self, request: Any) -> list[int]:
    """Removes a request, whose references then belong to the caller.

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
    state.forget(held)
    allocate.vacate(state, held)
    return pages

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
    pages = as_page_ids(page_ids, 1, self._state.config.num_pages - 1)
    self._state.pool.hold(pages)
    self._state.pool.pin(pages, 1)

  @atomic
  def release(self, page_ids: Iterable[int]) -> None:
    """Removes a reference from each page; the first page is evicted first.

    Raises:
      ValueError: an id names a page more often than callers have references to
        it.
    """
    pages = as_page_ids(page_ids, 1, self._state.config.num_pages - 1)
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
  def num_leading(self, request_id: str, num_references: int) -> list[int]:
    """Counts a request's leading pages that many sequences share, by group.

    Args:
      request_id: a request; the counts are 0 if it holds no page.
      num_references: the least number of references to a page that counts.
    """
    held = self._state.held.get(request_id)
    if held is None:
      return [0] * self._state.config.num_groups
    counts = self._state.pool.ref_count
    num_leading = []
    for table in held.tables:
      has_too_few = [counts[page] < num_references for page in table]
      # The last element ends the count if every page has enough references.
      num_leading.append([*has_too_few, True].index(True))
    return num_leading

  @atomic
  def groups(self, page_ids: Iterable[int]) -> list[int]:
    """Returns the group in which each page was last filled; 0 if unknown.

    The group of a page that a device loop filled can be unknown.
    """
    groups = self._state.pool.group
    return [groups[page] for page in as_page_ids(page_ids, 0, len(groups) - 1)]

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
      key_bytes(self._key_of(page)) if pool.is_cached[page] else None
      for page in pages
    ]

  @atomic
  def find(self, key: bytes) -> list[int]:
    """Returns the cached pages with a key, in the order of publication.

    The cost grows with the number of cached pages.

    Args:
      key: a key, 16 bytes, as `keys` returns it.
    """
    pool = self._state.pool
    words = tuple(np.frombuffer(key, "<u4").tolist())
    if self._state.device_keys is None:
      return []
    pages = pool.cached_pages()
    self._state.device_keys.compute(pool.content[page] for page in pages)
    return [page for page in pages if self._key_of(page) == words]

  @atomic
  def num_keys(self) -> int:
    """Returns the number of different keys of cached pages, in all groups."""
    pool = self._state.pool
    if not pool.knows_device_pages:
      return sum(map(len, pool.index))
    # The index has other digests for pages that a device loop filled, so equal
    # contents can have two digests, but have one key.
    return len({*self.keys(pool.cached_pages())})

  def _key_of(self, page: int) -> Key:
    pool = self._state.pool
    keys = self._state.device_keys
    assert keys is not None
    return keys.group_key(pool.content[page], pool.group[page])
