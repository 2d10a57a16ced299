"""The free queue of pages, in eviction order."""

from collections.abc import Iterable
from collections.abc import Sequence

import numpy as np

from jaxkv._src.cache import state as cache_state
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.host import calls
from jaxkv._src.host.atomic import Atomic
from jaxkv._src.host.calls import at_least
from jaxkv._src.host.esurge import changes
from jaxkv._src.host.esurge.pages import CachePage


def config_of(num_pages: int, *, caching: bool) -> CacheConfig:
  """Returns the config of a pool without sequences, in LRU order."""
  return CacheConfig(
    num_pages=num_pages,
    page_size=1,
    num_slots=1,
    pages_per_slot=1,
    prefix_caching=caching,
    free_policy="lru",
    prefix_rules="classic",
  )


class FreeCachePageQueue:
  """Free pages, the next one to be used first.

  Args:
    pages: pages without a pool and with different ids, in this order.

  Attributes:
    fake_free_list_head: sentinel before the first page, with id -1.
    fake_free_list_tail: sentinel after the last page, with id -1.

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
    config = config_of(max(len(pages), 1) + 1, caching=False)
    self._join(Atomic(cache_state.init(config)), [CachePage(0), *pages])
    if not pages:
      changes.change(self._holder, changes.take_front, np.int32(1), width=32)

  @classmethod
  def of_pool(
    cls, holder: Atomic, pages: Sequence[CachePage]
  ) -> "FreeCachePageQueue":
    """Returns the queue of a pool, whose null page is the first of `pages`."""
    queue = cls.__new__(cls)
    queue._join(holder, pages)
    return queue

  def _join(self, holder: Atomic, pages: Sequence[CachePage]) -> None:
    self._holder, self._pages = holder, pages
    self._places = {page.page_id: place for place, page in enumerate(pages)}
    self.fake_free_list_head = CachePage(-1)
    self.fake_free_list_tail = CachePage(-1)
    ends = (self.fake_free_list_head, self.fake_free_list_tail)
    for page in (*pages, *ends):
      page.join(self)

  @property
  def num_free_pages(self) -> int:
    """The number of pages in the queue."""
    return int(changes.read(self._holder, changes.num_free))

  def popleft(self) -> CachePage:
    """Removes and returns the first page, which keeps its hash.

    Raises:
      ValueError: the queue is empty.
    """
    return self.popleft_n(1)[0]

  def popleft_n(self, n: int) -> list[CachePage]:
    """Removes and returns the first n pages, which keep their hashes.

    Raises:
      ValueError: there are fewer.
    """
    count = min(at_least("n", n, 0), len(self._pages))
    width = calls.width_for(count)
    taken = changes.change(
      self._holder, changes.take_front, np.int32(count), width=width
    )
    return [self._pages[place] for place in taken[1 : 1 + count]]

  def remove(self, page: CachePage) -> None:
    """Removes a page from anywhere in the queue; it keeps its hash.

    Raises:
      RuntimeError: it is not in the queue.
    """
    changes.change(self._holder, changes.take_out, self._places_of([page]))

  def append(self, page: CachePage) -> None:
    """Appends a page to the queue.

    Raises:
      RuntimeError: it is in the queue, or has references.
    """
    self.append_n([page])

  def append_n(self, pages: Iterable[CachePage]) -> None:
    """Appends pages to the queue, in order.

    Raises:
      RuntimeError: a page is in the queue, or has references.
      ValueError: a page is repeated.
    """
    changes.change(self._holder, changes.put_back, self._places_of(pages))

  def get_all_free_pages(self) -> list[CachePage]:
    """Returns the free pages in eviction order."""
    count, order = changes.read(self._holder, changes.queued)
    return [self._pages[place] for place in order[: int(count)]]

  def neighbors(
    self, page: CachePage
  ) -> tuple[CachePage | None, CachePage | None]:
    """Returns the pages or sentinels around a page; None if not queued."""
    line = [
      self.fake_free_list_head,
      *self.get_all_free_pages(),
      self.fake_free_list_tail,
    ]
    place = next((n for n, one in enumerate(line) if one is page), None)
    if place is None:
      return None, None
    before = line[place - 1] if place > 0 else None
    return before, line[place + 1] if place + 1 < len(line) else None

  def _places_of(self, pages: Iterable[CachePage]) -> np.ndarray:
    places = []
    for page in pages:
      if page.queue is not self or page.page_id not in self._places:
        raise RuntimeError(
          f"Page {page.page_id} must be one of this queue's own pages."
        )
      if page.is_null:
        raise RuntimeError("The null page must stay out of the free queue.")
      places.append(self._places[page.page_id])
    return calls.pad_pages(places)
