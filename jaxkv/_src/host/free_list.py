"""The free pages in eviction order: a doubly linked list of page numbers."""

from collections.abc import Iterable
from collections.abc import Sequence

from jaxkv._src.host.atomic import UndoLog

# The null page is never free, so it is the sentinel of the list: its successor
# is the first free page, and its predecessor the last.
_ENDS = 0


class FreeList:
  """Free pages, or all offload pages, in the order in which they are popped.

  Attributes:
    num_free: the number of pages in the list.
  """

  def __init__(self, pages: Sequence[int], num_pages: int, undo_log: UndoLog):
    self._log = undo_log
    self._next = self._previous = [_ENDS] * num_pages
    self.num_free = 0
    self.replace(pages)

  def replace(self, pages: Sequence[int]) -> None:
    """Replaces the whole list by pages in eviction order."""
    # New objects, so that an undo can restore the old ones without a copy.
    for name in ("_next", "_previous", "num_free"):
      self._log.save_attribute(self, name)
    self._next, self._previous = ([_ENDS] * len(self._next) for _ in range(2))
    self._link([_ENDS, *pages, _ENDS])
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
    # `_ENDS` links the two ends, so its successor is the first page.
    next_page = self._next[pages[-1] if pages else _ENDS]
    self._replace([_ENDS, *pages, next_page], (_ENDS, next_page))
    return pages

  def remove(self, pages: Iterable[int]) -> None:
    """Removes pages from any place; all must be in the list."""
    following, previous = self._next, self._previous
    # A page is added to `removed` before its links change, so an interrupt at
    # any point can be undone.
    removed: list[tuple[int, int, int]] = []
    self._log.save_attribute(self, "num_free")
    self._log.record((self._insert, removed))
    for page in pages:
      left = previous[page]
      right = following[page]
      removed.append((left, page, right))
      following[left] = right
      previous[right] = left
      self.num_free -= 1

  def push_back(self, pages: Sequence[int]) -> None:
    """Appends pages, which must not be in the list."""
    last_page = self._previous[_ENDS]
    self._replace((last_page, _ENDS), (last_page, *pages, _ENDS))

  def push_front(self, pages: Sequence[int]) -> None:
    """Prepends pages, which must not be in the list; keeps their order."""
    first = self._next[_ENDS]
    self._replace((_ENDS, first), (_ENDS, *pages, first))

  def _replace(self, old: Sequence[int], new: Sequence[int]) -> None:
    """Replaces a part of the list; both parts have the same two ends."""
    # The links of a removed page are not cleared. No method reads them before
    # the page is pushed again, which overwrites them.
    self._log.save_attribute(self, "num_free")
    self._log.record((self._link, old))
    self._link(new)
    self.num_free += len(new) - len(old)

  def _link(self, pages: Sequence[int]) -> None:
    """Makes each page the successor of the page before."""
    following, previous = self._next, self._previous
    previous_page = pages[0]
    for page in pages[1:]:
      following[previous_page] = page
      previous[page] = previous_page
      previous_page = page

  def _insert(self, removed: list[tuple[int, int, int]]) -> None:
    # In reverse order, because the saved neighbors of a page can include a page
    # that was removed later.
    for links in reversed(removed):
      self._link(links)
