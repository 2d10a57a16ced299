"""The free pages in eviction order: a doubly linked list of page numbers."""

from collections.abc import Iterable
from collections.abc import Sequence

import numpy as np

from jaxkv._src.host.atomic import UndoLog

# The null page is never free. So its links hold both ends of the queue: the
# first page is its successor, and the last one its predecessor.
_ENDS = 0


class FreeList:
  """The free pages, in the order in which they will be popped.

  Attributes:
    num_free: the number of pages in the queue.
  """

  def __init__(self, pages: Sequence[int], num_pages: int, undo_log: UndoLog):
    self._next = [_ENDS] * num_pages
    self._previous = [_ENDS] * num_pages
    self._log = undo_log
    self.num_free = 0
    self._link([_ENDS, *pages, _ENDS])
    self.num_free = len(pages)

  def replace(self, pages: Sequence[int]) -> None:
    """Replaces the queue by pages in eviction order."""
    # The new lists replace the old ones, so the log needs no copy of those.
    for name in ("_next", "_previous", "num_free"):
      self._log.save_attribute(self, name)
    line = np.array([_ENDS, *pages, _ENDS])
    following, previous = np.zeros((2, len(self._next)), np.int64)
    following[line[:-1]] = line[1:]
    previous[line[1:]] = line[:-1]
    self._next, self._previous = following.tolist(), previous.tolist()
    self.num_free = len(pages)

  def in_order(self) -> list[int]:
    """Returns the pages in eviction order."""
    return self.first(self.num_free)

  def first(self, count: int) -> list[int]:
    """Returns the first `count` pages, which must exist."""
    pages, page, following = [], _ENDS, self._next
    for _ in range(count):
      page = following[page]
      pages.append(page)
    return pages

  def pop(self, count: int) -> list[int]:
    """Removes and returns the first `count` pages, which must exist."""
    pages = self.first(count)
    if not pages:
      return pages
    after = self._next[pages[-1]]
    self._log.record((self._link, [_ENDS, *pages, after]))
    self._log.save_attribute(self, "num_free")
    # The links of popped pages are stale. They are written before the pages
    # enter the queue again, and not read until then.
    self._link((_ENDS, after))
    self.num_free -= count
    return pages

  def remove(self, pages: Iterable[int]) -> None:
    """Removes pages from any place; all must be in the queue."""
    following, previous = self._next, self._previous
    # The log has the list before the first page leaves, and the list has each
    # page before its links change. So an interrupt at any point can be undone.
    removed: list[tuple[int, int, int]] = []
    self._log.save_attribute(self, "num_free")
    self._log.record((self._insert, removed))
    for page in pages:
      before, after = previous[page], following[page]
      removed.append((before, page, after))
      following[before] = after
      previous[after] = before
      self.num_free -= 1

  def push_back(self, pages: Sequence[int]) -> None:
    """Appends pages, which must not be in the queue."""
    if not pages:
      return
    last = self._previous[_ENDS]
    self._log.save_attribute(self, "num_free")
    self._log.record((self._link, (last, _ENDS)))
    self._link((last, *pages, _ENDS))
    self.num_free += len(pages)

  def push_front(self, pages: Sequence[int]) -> None:
    """Prepends pages, which must not be in the queue, in the given order."""
    if not pages:
      return
    first = self._next[_ENDS]
    self._log.save_attribute(self, "num_free")
    self._log.record((self._link, (_ENDS, first)))
    self._link((_ENDS, *pages, first))
    self.num_free += len(pages)

  def _link(self, pages: Sequence[int]) -> None:
    """Makes each page the successor of the page before."""
    following, previous = self._next, self._previous
    before = pages[0]
    for page in pages[1:]:
      following[before] = page
      previous[page] = before
      before = page

  def _insert(self, removed: list[tuple[int, int, int]]) -> None:
    """Inserts removed pages again."""
    # The last one first, because its saved links are those of its removal, when
    # the earlier ones had left already.
    for links in reversed(removed):
      self._link(links)
