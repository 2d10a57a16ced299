"""The free queue of pages, in eviction order."""

from collections.abc import Iterable
from collections.abc import Sequence

from jaxkv._src.cache.group_kinds import FullAttention
from jaxkv._src.host.arguments import at_least
from jaxkv._src.host.atomic import atomic
from jaxkv._src.host.esurge.pages import CachePage
from jaxkv._src.host.manager import CacheManager


def manager_without_requests(num_pages: int, caching: bool) -> CacheManager:
  """Returns a manager that keeps the pages of a pool or a queue."""
  # The sizes have no effect, because no request is ever allocated.
  group = FullAttention(page_size=1)
  return CacheManager(num_pages, [group], 1, caching, policy="classic")


class FreeCachePageQueue:
  """Free pages, the next one to be used first.

  A page is loose if it is outside of the queue and has no reference. A manager
  has no such pages, so the queue holds a reference to it until `append`.

  Args:
    pages: pages without a pool and with different ids, in this order.

  Attributes:
    fake_free_list_head: sentinel before the first page, with id -1.
    fake_free_list_tail: sentinel after the last page, with id -1.
    loose: the loose pages, by their numbers in the manager.
    undo_log: that of the manager.

  Raises:
    ValueError: two pages have one id, or a page has a pool.

  Examples:
    >>> from jaxkv.host.esurge import CachePage, FreeCachePageQueue
    >>> pages = [CachePage(number) for number in range(4)]
    >>> queue = FreeCachePageQueue(pages)
    >>> queue.popleft() is pages[0]
    True
    >>> queue.remove(pages[2])
    >>> queue.append(pages[0])
    >>> [page.page_id for page in queue.get_all_free_pages()]
    [1, 3, 0]
  """

  def __init__(self, pages: Sequence[CachePage]):
    ids = {page.page_id for page in pages}
    if len(ids) < len(pages) or any(page.pool is not None for page in pages):
      raise ValueError(
        "`pages` must have ids of their own and no pool, got "
        f"{[page.page_id for page in pages]}; a pool has its queue."
      )
    # A manager has at least one page besides the null page.
    cache = manager_without_requests(max(len(pages), 1) + 1, caching=False)
    if not pages:
      cache.pages.take(1)
    self._join(cache, [CachePage(0, is_null=True), *pages])

  @classmethod
  def of_pool(
    cls, cache: CacheManager, pages: Sequence[CachePage]
  ) -> "FreeCachePageQueue":
    """Returns the queue of a pool, whose null page is the first of `pages`."""
    queue = cls.__new__(cls)
    queue._join(cache, pages)
    return queue

  def _join(self, cache: CacheManager, pages: Sequence[CachePage]) -> None:
    self._cache, self._pages = cache, pages
    # The pages of a queue without a pool may have any ids.
    self._numbers = {page.page_id: n for n, page in enumerate(pages)}
    self.undo_log = cache.undo_log
    self.loose: dict[int, bool] = {}
    self.fake_free_list_head = CachePage(-1)
    self.fake_free_list_tail = CachePage(-1)
    ends = (self.fake_free_list_head, self.fake_free_list_tail)
    for page in (*pages, *ends):
      page.queue = self

  @property
  def num_free_pages(self) -> int:
    """The number of pages in the queue."""
    return self._cache.num_free_pages

  def popleft(self) -> CachePage:
    """Removes and returns the first page, which keeps its hash.

    Raises:
      ValueError: the queue is empty.
    """
    return self.popleft_n(1)[0]

  @atomic
  def popleft_n(self, n: int) -> list[CachePage]:
    """Removes and returns the first n pages, which keep their hashes.

    Raises:
      ValueError: there are fewer.
    """
    self.check_free(at_least("n", n, 0))
    pages = [self._pages[number] for number in self._cache.free_queue(n)]
    for page in pages:
      self.remove(page)
    return pages

  @atomic
  def remove(self, page: CachePage) -> None:
    """Removes a page from anywhere in the queue; it keeps its hash.

    Raises:
      RuntimeError: it is not in the queue.
    """
    number = self._number_of(page)
    # A page without references is in the queue, because the queue holds one to
    # each loose page.
    is_queued = not self._cache.pages.ref_counts([number])[0]
    text = "stand in the free queue to be removed from it."
    check_pages([page.page_id], [is_queued], text)
    self._cache.pages.hold([number])
    self.set_loose(number, True)

  def append(self, page: CachePage) -> None:
    """Appends a page to the queue.

    Raises:
      RuntimeError: it is in the queue, or has references.
    """
    self.append_n([page])

  @atomic
  def append_n(self, pages: Iterable[CachePage]) -> None:
    """Appends pages to the queue, in order.

    Raises:
      RuntimeError: a page is in the queue, or has references.
      ValueError: a page is repeated.
    """
    pages = list(pages)
    numbers = [self._number_of(page) for page in pages]
    counts = zip(numbers, self.references(numbers), strict=True)
    check_pages(
      different(pages),
      [number in self.loose and not count for number, count in counts],
      "stand outside of the free queue, without a reference, to be appended to "
      "it; give references back with free_pages.",
    )
    # All pages have been checked, so the call changes all or nothing.
    for number in numbers:
      self.set_loose(number, False)
    self._cache.pages.release(numbers)

  def get_all_free_pages(self) -> list[CachePage]:
    """Returns the free pages in eviction order."""
    return [self._pages[number] for number in self._cache.free_queue()]

  def neighbors(
    self, page: CachePage
  ) -> tuple[CachePage | None, CachePage | None]:
    """Returns the pages or sentinels around a page; None if not queued."""
    # Schedulers never ask for neighbors, so a walk is fast enough. The outer
    # neighbors of the sentinels are None.
    ends = self.fake_free_list_head, self.fake_free_list_tail
    line = [None, ends[0], *self.get_all_free_pages(), ends[1], None]
    for place, other in enumerate(line):
      if other is page:
        return line[place - 1], line[place + 1]
    return None, None

  @atomic
  def references(self, numbers: Sequence[int]) -> list[int]:
    """Returns the references of pages, without those of the queue."""
    counts = self._cache.pages.ref_counts(numbers)
    pairs = zip(numbers, counts, strict=True)
    return [count - (number in self.loose) for number, count in pairs]

  def set_loose(self, number: int, is_loose: bool) -> None:
    """Records that the queue begins or ends to hold a reference to a page."""
    # The caller is atomic and undoes this change too.
    self.undo_log.save_key(self.loose, number)
    if is_loose:
      self.loose[number] = True
    else:
      del self.loose[number]

  def check_free(self, count: int) -> None:
    """Raises if fewer pages are free."""
    if count > self.num_free_pages:
      raise ValueError(
        f"Cannot get so many free pages; {self.num_free_pages} left."
      )

  def _number_of(self, page: CachePage) -> int:
    if page.queue is not self or page.page_id not in self._numbers:
      raise RuntimeError(
        f"Page {page.page_id} must be one of this queue's own pages."
      )
    if page.is_null:
      raise RuntimeError("The null page must stay out of the free queue.")
    return self._numbers[page.page_id]


def check_pages(
  page_ids: Iterable[int], conditions: Iterable[bool], text: str
) -> None:
  """Raises for the first page of which a condition is False."""
  for page, is_met in zip(page_ids, conditions, strict=True):
    if not is_met:
      raise RuntimeError(f"Page {page} must {text}")


def different(pages: Sequence[CachePage]) -> list[int]:
  """Returns the ids of pages, none of which may be repeated."""
  page_ids = [page.page_id for page in pages]
  if len(set(page_ids)) < len(page_ids):
    repeated = next(n for n in page_ids if page_ids.count(n) > 1)
    raise ValueError(f"Page {repeated} must be named once.")
  return page_ids
