"""The pages of a cache on the host: references, free queue, cached pages."""

import itertools
from collections.abc import Hashable
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any
from typing import Protocol

from jaxkv._src.cache.telemetry import NUM_BINS
from jaxkv._src.host.atomic import UndoLog
from jaxkv._src.host.free_list import FreeList


class Content(Protocol):
  """The content of a full page."""

  @property
  def digest(self) -> Hashable:
    """The page's key in the prefix index of its group."""
    ...

  @property
  def is_from_device(self) -> bool:
    """True if the page is known by its key on the device only."""
    ...


class PageListener(Protocol):
  """A listener of `jaxkv.host.CacheManager`: hears of cached pages.

  Its methods are called during a call of the manager. To be undone with that
  call, a change must be recorded in `CacheManager.undo_log` before it is made.
  """

  def stored(
    self, request: Any, group: int, first: int, pages: Sequence[int]
  ) -> None:
    """Hears that a request filled the columns of a group from `first` on.

    `pages` has a page for each column that was published, and 0 for a column
    that no lookup can find.
    """
    ...

  def removed(self, page: int, group: int) -> None:
    """Hears that a page left the prefix cache."""
    ...

  def cleared(self) -> None:
    """Hears that all pages left the prefix cache."""
    ...


class EvictionAges:
  """The times at which pages were released, and the ages of evicted pages.

  Attributes:
    released: the clock when each page's last reference was removed.
    lifetime, idle: evicted pages by age, as in `jaxkv.telemetry.Residency`.
  """

  def __init__(self, num_pages: int):
    self.released = [0] * num_pages
    self.lifetime = [0] * NUM_BINS
    self.idle = [0] * NUM_BINS


class HostPool:
  """Pages with references, a free queue and an index of cached pages.

  The methods are the steps of atomic calls: each records in `undo_log` how to
  undo its changes, and the caller commits them. They check nothing.

  Attributes:
    undo_log: the changes of the current call.
    num_pages: N, including the null page 0.
    caching: True if pages that are popped can be cached.
    unhashed_first: True if pages that are not cached go to the front of the
      free queue; see `CacheConfig.free_policy`.
    ref_count: the references of each page, with its pins.
    pin_count: the references of each page that no request holds.
    queue: the free pages.
    content: the content that each page got last; None for none.
    group: the group in which each page got it.
    stamp: the clock when each page got it.
    is_cached: True for pages that a lookup can find.
    clock: the number of pages that got a content.
    new: pages popped since `take_new`; None if they are not tracked.
    ages: None if they are not tracked.
    num_popped, num_evicted, num_published: as in `jaxkv.Stats`.
    listeners: hear of pages that enter or leave the index.
    changed: pages whose content, or place in the index, may have changed since
      the device state was built.
  """

  def __init__(
    self,
    num_pages: int,
    num_groups: int,
    *,
    undo_log: UndoLog,
    caching: bool,
    unhashed_first: bool,
    track_new: bool = False,
    track_ages: bool = False,
  ):
    self.undo_log = undo_log
    self.num_pages = num_pages
    self.caching = caching
    self.unhashed_first = unhashed_first
    self.ref_count = [0] * num_pages
    self.pin_count = [0] * num_pages
    self.queue = FreeList(range(1, num_pages), num_pages, undo_log)
    self.content: list[Any] = [None] * num_pages
    self.group = [0] * num_pages
    self.stamp = [0] * num_pages
    self.is_cached = [False] * num_pages
    self.clock = 0
    self.new: list[bool] | None = [False] * num_pages if track_new else None
    self.ages = EvictionAges(num_pages) if track_ages else None
    self.num_popped = self.num_evicted = self.num_published = 0
    self.listeners: list[PageListener] = []
    # In each group, the page with a digest. If there are several, a tuple of
    # them in the order of publication. The last index has the pages that are
    # known by their key on the device only.
    self._index: list[dict[Hashable, int | tuple[int, ...]]] = [
      {} for _ in range(num_groups + 1)
    ]
    self.changed: set[int] = set()

  @property
  def num_digests(self) -> int:
    """The number of different digests of cached pages, in all groups."""
    return sum(map(len, self._index))

  @property
  def num_free(self) -> int:
    """The number of free pages."""
    return self.queue.num_free

  def pop(self, count: int) -> list[int]:
    """Pops pages, with one reference each; `count` must be free."""
    if not count:
      return []
    # The content of a popped page will be overwritten, so the page leaves the
    # index first.
    pages, log = self.queue.pop(count), self.undo_log
    if self.caching:
      self._evict_popped(pages)
    log.save_items(self.ref_count, pages)
    log.save_attribute(self, "num_popped")
    for page in pages:
      self.ref_count[page] = 1
    if self.new is not None:
      log.save_items(self.new, pages)
      for page in pages:
        self.new[page] = True
    self.num_popped += count
    return pages

  def _evict_popped(self, pages: list[int]) -> None:
    cached = self.is_cached
    evicted = [page for page in pages if cached[page]]
    if not evicted:
      return
    if self.ages is not None:
      self._count_ages(self.ages, evicted)
    self.undo_log.save_attribute(self, "num_evicted")
    self.num_evicted += len(evicted)
    self.unpublish(evicted)

  def hold(self, pages: Sequence[int]) -> None:
    """Adds a reference for each page; null pages are ignored."""
    # Pages behind a window are null, and the null page has no references.
    counts, pages = self.ref_count, [page for page in pages if page]
    self.undo_log.save_items(counts, pages)
    free = [page for page in pages if not counts[page]]
    # A page can occur twice, but it leaves the queue once.
    if free:
      self.queue.remove(dict.fromkeys(free))
    for page in pages:
      counts[page] += 1

  def release(self, pages: Iterable[int]) -> None:
    """Removes a reference for each page, in eviction order.

    The first page that becomes free is evicted first. Null pages are ignored.
    """
    counts, pages = self.ref_count, [page for page in pages if page]
    self.undo_log.save_items(counts, pages)
    for page in pages:
      counts[page] -= 1
    # The last of several references to a page makes it free.
    freed = [page for page in pages if not counts[page]]
    if len(set(freed)) < len(freed):
      freed = list(dict.fromkeys(reversed(freed)))[::-1]
    if self.ages is not None:
      self.undo_log.save_items(self.ages.released, freed)
      for page in freed:
        self.ages.released[page] = self.clock
    # Pages without a key cannot be hit, so they are used before any cached page
    # is evicted. They keep the order in which they were released.
    if self.unhashed_first:
      cached = self.is_cached
      self.queue.push_front([page for page in freed if not cached[page]])
      freed = [page for page in freed if cached[page]]
    self.queue.push_back(freed)

  def pin(self, pages: Sequence[int], amount: int) -> None:
    """Adds `amount` to the pins of each page, but not to its references."""
    self.undo_log.save_items(self.pin_count, pages)
    for page in pages:
      self.pin_count[page] += amount

  def fill(
    self,
    pages: Sequence[int],
    contents: Sequence[Content],
    group: int,
    published: Sequence[bool],
  ) -> None:
    """Gives full pages of a group their contents; publishes some of them."""
    log = self.undo_log
    for values in (self.content, self.group, self.stamp):
      log.save_items(values, pages)
    log.save_attribute(self, "clock")
    # Every content advances the clock, published or not, as on the device.
    for page, content in zip(pages, contents, strict=True):
      self.content[page] = content
      self.group[page] = group
      self.stamp[page] = self.clock
      self.clock += 1
    listed = list(itertools.compress(pages, published))
    self._enter_index(listed)
    self.changed.update(pages)
    log.save_attribute(self, "num_published")
    self.num_published += len(listed)

  def unpublish(self, pages: Iterable[int]) -> None:
    """Removes pages from the index; those that are not cached are ignored."""
    # A caller may name a page twice, but it leaves the index once.
    cached = [page for page in dict.fromkeys(pages) if self.is_cached[page]]
    self._leave_index(cached)
    # After the index has changed, so that listeners find the page not cached.
    for listener in self.listeners:
      for page in cached:
        listener.removed(page, self.group[page])

  def _enter_index(self, pages: Iterable[int]) -> None:
    """Adds pages with contents to the index."""
    entries: list[tuple[int, dict[Hashable, Any], Hashable, Any]] = []
    self.undo_log.record((self._restore_entries, entries))
    for page in pages:
      content = self.content[page]
      index, digest = self._index_of(page, content), content.digest
      listed = index.get(digest)
      # Recorded before the change. If an interrupt comes between the two, the
      # undo writes the value that is still there.
      entries.append((page, index, digest, listed))
      if listed is None:
        index[digest] = page
      else:
        pages_of_digest = (
          (listed, page) if isinstance(listed, int) else (*listed, page)
        )
        index[digest] = tuple(
          sorted(pages_of_digest, key=self.stamp.__getitem__)
        )
      self.is_cached[page] = True
      self.changed.add(page)

  def _leave_index(self, pages: Iterable[int]) -> None:
    """Removes cached pages from the index."""
    entries: list[tuple[int, dict[Hashable, Any], Hashable, Any]] = []
    self.undo_log.record((self._restore_entries, entries))
    for page in pages:
      content = self.content[page]
      index, digest = self._index_of(page, content), content.digest
      listed = index[digest]
      entries.append((page, index, digest, listed))
      if isinstance(listed, int):
        del index[digest]
      else:
        other_pages = tuple(other for other in listed if other != page)
        index[digest] = other_pages[0] if len(other_pages) == 1 else other_pages
      self.is_cached[page] = False
      self.changed.add(page)

  def _index_of(self, page: int, content: Content) -> dict[Hashable, Any]:
    # The key of a page from a device is another one in every group.
    return self._index[-1 if content.is_from_device else self.group[page]]

  @property
  def knows_device_pages(self) -> bool:
    """True if a cached page is known by its key on the device only."""
    return bool(self._index[-1])

  def find_from_device(self, digest: Hashable) -> int:
    """Returns the first page known by a key on the device; 0 for none."""
    return self._first(self._index[-1].get(digest, 0))

  def find(self, digest: Hashable, group: int) -> int:
    """Returns the page published first under a digest; 0 for none."""
    return self._first(self._index[group].get(digest, 0))

  def _first(self, pages: int | tuple[int, ...]) -> int:
    return pages if isinstance(pages, int) else pages[0]

  def find_all(self, digest: Hashable, group: int) -> tuple[int, ...]:
    """Returns the pages with a digest in the order of publication."""
    pages = self._index[group].get(digest, ())
    return (pages,) if isinstance(pages, int) else pages

  def finder(self, group: int) -> Any:
    """Returns the index of a group: digest -> page, or a tuple of pages."""
    return self._index[group].get

  def clear(self) -> None:
    """Removes all pages from the index; the queue keeps its order."""
    log = self.undo_log
    for name in ("_index", "is_cached"):
      log.save_attribute(self, name)
    self.changed.update(self.cached_pages())
    # New dictionaries, so that an undo can put the old ones back as they were.
    self._index = [{} for _ in self._index]
    self.is_cached = [False] * self.num_pages
    for listener in self.listeners:
      listener.cleared()

  def cached_pages(self) -> list[int]:
    """Returns the cached pages in the order of publication."""
    pages = [page for page, cached in enumerate(self.is_cached) if cached]
    return sorted(pages, key=self.stamp.__getitem__)

  def take_new(self) -> list[int]:
    """Returns the pages popped since the last call."""
    assert self.new is not None
    self.undo_log.save_attribute(self, "new")
    pages = [page for page, is_new in enumerate(self.new) if is_new]
    self.new = [False] * self.num_pages
    return pages

  def hide_new(self, pages: Sequence[int]) -> None:
    """Removes pages from those that `take_new` will return."""
    if self.new is not None:
      self.undo_log.save_items(self.new, pages)
      for page in pages:
        self.new[page] = False

  def replace_contents(
    self,
    pages: Sequence[int],
    contents: Sequence[Any],
    groups: Sequence[int],
    stamps: Sequence[int],
    cached: Sequence[bool],
  ) -> None:
    """Replaces what pages hold by what a device says that they hold."""
    self._leave_index(page for page in pages if self.is_cached[page])
    for values in (self.content, self.group, self.stamp):
      self.undo_log.save_items(values, pages)
    for page, *fields in zip(pages, contents, groups, stamps, strict=True):
      self.content[page], self.group[page], self.stamp[page] = fields
    self._enter_index(itertools.compress(pages, cached))

  def replace_ages(
    self, released: list[int], lifetime: list[int], idle: list[int]
  ) -> None:
    """Replaces the ages of pages."""
    assert self.ages is not None
    for name in ("released", "lifetime", "idle"):
      self.undo_log.save_attribute(self.ages, name)
    self.ages.released, self.ages.lifetime = released, lifetime
    self.ages.idle = idle

  def _count_ages(self, ages: EvictionAges, pages: list[int]) -> None:
    self.undo_log.save_list(ages.lifetime)
    self.undo_log.save_list(ages.idle)
    for page in pages:
      # The page's own publication advanced the clock by 1 after its stamp.
      age = self.clock - self.stamp[page] - 1
      ages.lifetime[age.bit_length()] += 1
      ages.idle[(self.clock - ages.released[page]).bit_length()] += 1

  def _restore_entries(
    self, entries: list[tuple[int, dict[Hashable, Any], Hashable, Any]]
  ) -> None:
    for page, index, digest, pages in reversed(entries):
      if pages is None:
        index.pop(digest, None)
        self.is_cached[page] = False
      else:
        index[digest] = pages
        listed = (pages,) if isinstance(pages, int) else pages
        self.is_cached[page] = page in listed
