"""The page pool of a manager: references, free queue and prefix index."""

import itertools
from collections.abc import Hashable
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any
from typing import Protocol

from jaxkv._src.arrays.arguments import as_int
from jaxkv._src.cache.stats import COUNTERS
from jaxkv._src.host.atomic import UndoLog
from jaxkv._src.host.config import ManagerOptions
from jaxkv._src.host.free_list import FreeList
from jaxkv._src.host.saved_pages import SavedPages

Index = dict[Hashable, tuple[int, ...]]

NUM_BINS = 33
"""One bin for each bit length of an age, 0 to 32."""


def as_page_ids(
  page_ids: Iterable[int], first_page: int, last_page: int
) -> list[int]:
  """Converts page ids to ints; raises for ids that are out of range."""
  # Most ids are ints, and the test avoids a function call for them.
  pages = [
    page if page.__class__ is int else as_int("page_ids", page)
    for page in page_ids
  ]
  wrong = [page for page in pages if not first_page <= page <= last_page]
  if wrong:
    raise ValueError(
      f"`page_ids` must be {first_page} to {last_page}, got {wrong}."
    )
  return pages


class PageListener(Protocol):
  """Listens to changes of the prefix cache, see `Pages.add_listener`."""

  def stored(
    self, request: Any, group: int, first: int, pages: Sequence[int]
  ) -> None:
    """Is called when a request filled columns of a group, from `first` on."""

  def removed(self, page: int, group: int) -> None:
    """Is called when a page has left the prefix cache."""

  def cleared(self) -> None:
    """Is called when all pages have left the prefix cache."""


class HostPool:
  """Pages with references, a free queue and an index of cached pages.

  The methods run inside atomic methods of the manager. They record changes in
  `undo_log`, but do not commit them, and do not check arguments.

  The content of a page is a `PrefixNode` or a `DevicePage`. The lists
  `content`, `group`, `stamp` and `is_cached` include offload pages.

  Attributes:
    undo_log: the changes of the current call.
    unhashed_first: True if pages that are not cached go to the front of the
      free queue; see `CacheConfig.free_policy`.
    ref_count: the number of references to each page, pins included.
    pin_count: the number of references to each page that users of `Pages` hold.
    queue: the free pages.
    content: the latest content of each page; None for none.
    group: the group in which each page got its content.
    stamp: the clock when each page's content was first stored; -1 for none.
    is_cached: True for pages that a lookup can find.
    clock: the number of pages that got a content, published or not.
    new: True for pages that `take_new` returns next; None without tracking.
    released: the clock when each page's last reference was removed; None if
      ages are not tracked.
    lifetime, idle: evicted pages by age, see `PrefixCacheStats`.
    counts: one for each of `COUNTERS`.
    listeners: the `PageListener`s to call.
    saved: the offloaded pages; None without `CacheConfig.offload_pages`.
    index: for each group, a dictionary from a digest to the cached pages with
      this digest, sorted by `lookup_order`. Cached pages whose content is a
      `DevicePage` are in one last dictionary instead, whatever their group.
  """

  def __init__(self, options: ManagerOptions, undo_log: UndoLog):
    config = options.config
    num_pages = config.total_pages
    num_numbers = config.num_numbers
    self.undo_log = undo_log
    self.unhashed_first = config.free_policy == "unhashed_first"
    self.ref_count = [0] * num_pages
    self.pin_count = [0] * num_pages
    self.queue = FreeList(range(1, num_pages), num_pages, undo_log)
    self.content: list[Any] = [None] * num_numbers
    self.group = [0] * num_numbers
    self.stamp = [-1] * num_numbers
    self.is_cached = [False] * num_numbers
    self.clock = 0
    self.new = [False] * num_pages if options.track_new_pages else None
    self.released = [0] * num_pages if options.track_residency else None
    self.lifetime = [0] * NUM_BINS
    self.idle = [0] * NUM_BINS
    self.counts = dict.fromkeys(COUNTERS, 0)
    self.listeners: list[PageListener] = []
    self.saved = SavedPages(config, undo_log) if config.offload_pages else None
    self.index: list[Index] = [{} for _ in range(config.num_groups + 1)]

  @property
  def num_free(self) -> int:
    """The number of free pages."""
    return self.queue.num_free

  @property
  def knows_device_pages(self) -> bool:
    """True if the content of at least one cached page is a `DevicePage`."""
    return bool(self.index[-1])

  def count(self, name: str, amount: int) -> None:
    """Adds to a counter of `jaxkv.Stats`."""
    self.undo_log.save_key(self.counts, name)
    self.counts[name] += amount

  def pop(self, count: int) -> list[int]:
    """Pops `count` free pages, which must exist; sets one reference to each."""
    if not count:
      return []
    pages = self.queue.pop(count)
    targets = self._evict(pages)
    if self.saved is not None:
      self.saved.record(pages, targets, {})
    self.undo_log.save_items(self.ref_count, pages)
    for page in pages:
      self.ref_count[page] = 1
    self.mark_new(pages, is_new=True)
    self.count("popped_pages", count)
    return pages

  def _evict(self, pages: list[int]) -> dict[int, int]:
    """Removes popped pages from the index, before they are overwritten.

    Returns:
      A dictionary from each saved page to the offload page that gets its
      content.
    """
    cached = self.is_cached
    evicted = [page for page in pages if cached[page]]
    if not evicted:
      return {}
    saved = self.saved
    self._count_ages(evicted)
    self.count("evicted_pages", len(evicted))
    if saved is None or not saved.saves:
      self.unpublish(evicted)
      if saved is not None:
        saved.count("dropped", len(evicted))
      return {}
    return self._save(saved, evicted)

  def _save(self, saved: SavedPages, pages: list[int]) -> dict[int, int]:
    """Saves contents of pages; returns the offload page of each page."""
    targets: list[int] = []
    # If there are more pages than offload pages, later contents replace
    # earlier.
    while len(targets) < len(pages):
      batch = saved.next_targets(len(pages) - len(targets))
      forgotten = [page for page in batch if self.is_cached[page]]
      saved.count("forgotten", len(forgotten))
      self.unpublish(forgotten)
      moving = pages[len(targets) : len(targets) + len(batch)]
      self._settle(batch, self._lift(moving))
      targets += batch
    saved.count("saved", len(targets))
    return dict(zip(pages, targets, strict=True))

  def hold_hits(self, columns: list[list[int]]) -> list[list[int]]:
    """Restores the offload pages of a hit, and adds a reference to each page.

    Returns:
      The pages, with device pages in place of the offload pages.
    """
    pages = [page for column in columns for page in column]
    saved = self.saved
    offloaded: list[int] = []
    if saved is not None:
      offloaded = [page for page in pages if saved.is_offloaded(page)]
    if saved is None or not offloaded:
      self.hold(pages)
      return columns
    # Device pages are held first, so that no restored page evicts them.
    self.hold([page for page in pages if not saved.is_offloaded(page)])
    page_of = self._restore(saved, list(dict.fromkeys(offloaded)))
    self.undo_log.save_items(self.ref_count, [*page_of.values()])
    for page in offloaded:
      self.ref_count[page_of[page]] += 1
    return [[page_of.get(page, page) for page in column] for column in columns]

  def _restore(self, saved: SavedPages, pages: list[int]) -> dict[int, int]:
    """Restores offload pages to free pages; returns the new page of each."""
    # The contents are lifted first, because a page that is evicted to make room
    # can be saved to one of these offload pages.
    contents = self._lift(pages)
    saved.to_front(pages)
    new_pages = self.queue.pop(len(pages))
    targets = self._evict(new_pages)
    self._settle(new_pages, contents)
    # Restored pages have a content, so they must not be zeroed.
    self.mark_new(new_pages, is_new=False)
    saved.record(new_pages, targets, dict(zip(new_pages, pages, strict=True)))
    saved.count("restored", len(pages))
    return dict(zip(pages, new_pages, strict=True))

  def _lift(self, pages: Sequence[int]) -> list[tuple[Any, int, int]]:
    """Removes cached pages from the index, without a call of listeners.

    Returns:
      The content, group and stamp of each page, for `_settle`.
    """
    self.set_listed(pages, is_listed=False)
    return [
      (self.content[page], self.group[page], self.stamp[page]) for page in pages
    ]

  def _settle(
    self, pages: Sequence[int], lifted: list[tuple[Any, int, int]]
  ) -> None:
    """Gives lifted contents to uncached pages, which become cached."""
    contents, groups, stamps = zip(*lifted, strict=True)
    self.set_contents(pages, contents, groups, stamps, [True] * len(lifted))

  def hold(self, pages: Sequence[int]) -> None:
    """Adds a reference to each page; null pages are ignored."""
    counts, pages = self.ref_count, [page for page in pages if page]
    self.undo_log.save_items(counts, pages)
    # A page can occur twice in `pages`, but it leaves the queue once.
    self.queue.remove(dict.fromkeys(page for page in pages if not counts[page]))
    for page in pages:
      counts[page] += 1

  def release(self, pages: Iterable[int]) -> None:
    """Removes a reference from each page; null pages are ignored.

    The first page that becomes free is evicted first.
    """
    counts, pages = self.ref_count, [page for page in pages if page]
    self.undo_log.save_items(counts, pages)
    for page in pages:
      counts[page] -= 1
    # A page that occurs more than once becomes free at its last occurrence.
    freed = [page for page in pages if not counts[page]]
    if len(set(freed)) < len(freed):
      freed = list(dict.fromkeys(reversed(freed)))[::-1]
    self.stamp_released(freed)
    # No lookup finds uncached pages, so they are used before any cached page is
    # evicted. They keep the order in which they were released.
    if self.unhashed_first:
      cached = self.is_cached
      self.queue.push_front([page for page in freed if not cached[page]])
      freed = [page for page in freed if cached[page]]
    self.queue.push_back(freed)

  def stamp_released(self, pages: Sequence[int]) -> None:
    """Stores the clock as the release time of pages, if ages are tracked."""
    if self.released is not None:
      self.undo_log.save_items(self.released, pages)
      for page in pages:
        self.released[page] = self.clock

  def pin(self, pages: Sequence[int], amount: int) -> None:
    """Adds `amount` to the `pin_count` of each page; keeps `ref_count`."""
    self.undo_log.save_items(self.pin_count, pages)
    for page in pages:
      self.pin_count[page] += amount

  def fill(
    self,
    pages: Sequence[int],
    contents: Sequence[Any],
    group: int,
    published: Sequence[bool],
  ) -> None:
    """Sets the contents of full pages; publishes those marked `published`."""
    stamps = range(self.clock, self.clock + len(pages))
    groups = itertools.repeat(group)
    self.set_contents(pages, contents, groups, stamps, published)
    self.undo_log.replace(self, clock=stamps.stop)
    self.count("published_pages", sum(published))

  def set_contents(
    self,
    pages: Sequence[int],
    contents: Sequence[Any],
    groups: Iterable[int],
    stamps: Iterable[int],
    published: Sequence[bool],
  ) -> None:
    """Sets contents of uncached pages; publishes those marked `published`."""
    for values in (self.content, self.group, self.stamp):
      self.undo_log.save_items(values, pages)
    # Not strict, because `groups` can be an infinite iterator.
    # Locals, because the loop below runs for each page of a prompt.
    content_of, group_of, stamp_of = self.content, self.group, self.stamp
    rows = zip(pages, contents, groups, stamps, strict=False)
    for page, content, group, stamp in rows:
      content_of[page], group_of[page], stamp_of[page] = content, group, stamp
    self.set_listed(itertools.compress(pages, published), True)

  def unpublish(self, pages: Iterable[int]) -> None:
    """Removes pages from the index; uncached pages are ignored."""
    cached = [page for page in dict.fromkeys(pages) if self.is_cached[page]]
    self.set_listed(cached, False)
    # Listeners are called after the index has changed, so they see the change.
    for listener in self.listeners:
      for page in cached:
        listener.removed(page, self.group[page])

  def equal_pages(self, page: int) -> tuple[int, ...]:
    """Returns the cached pages with the same digest as a cached page."""
    content = self.content[page]
    # A device key depends on the group, so all groups share one dictionary.
    group = -1 if content.is_from_device else self.group[page]
    return self.index[group][content.digest]

  def lookup_order(self, page: int) -> tuple[bool, int]:
    """Returns a sort key for equal pages: offload pages last, then by stamp."""
    is_offloaded = self.saved is not None and self.saved.is_offloaded(page)
    return is_offloaded, self.stamp[page]

  def clear(self) -> None:
    """Removes all pages from the index; the queue keeps its order."""
    # New objects, so that an undo can restore the old ones.
    self.undo_log.replace(
      self,
      index=[{} for _ in self.index],
      is_cached=[False] * len(self.is_cached),
    )
    for listener in self.listeners:
      listener.cleared()

  def cached_pages(self) -> list[int]:
    """Returns the cached pages in the order of publication."""
    pages = [page for page, cached in enumerate(self.is_cached) if cached]
    return sorted(pages, key=self.stamp.__getitem__)

  def take_new(self) -> list[int]:
    """Returns the pages marked as new, and removes the marks."""
    assert self.new is not None
    pages = [page for page, is_new in enumerate(self.new) if is_new]
    self.mark_new(pages, is_new=False)
    return pages

  def mark_new(self, pages: Sequence[int], *, is_new: bool) -> None:
    """Adds pages to the result of the next `take_new`, or removes them."""
    if self.new is not None:
      self.undo_log.save_items(self.new, pages)
      for page in pages:
        self.new[page] = is_new

  def _count_ages(self, pages: list[int]) -> None:
    """Counts the ages of pages that are evicted."""
    if self.released is None:
      return
    lifetime = self.lifetime[:]
    idle = self.idle[:]
    # Ages of 2**32 and more are in the last bin.
    last_bin = NUM_BINS - 1
    for page in pages:
      # The clock advanced by 1 for the page itself, after it got its stamp.
      age = self.clock - self.stamp[page] - 1
      lifetime[min(age.bit_length(), last_bin)] += 1
      idle_age = self.clock - self.released[page]
      idle[min(idle_age.bit_length(), last_bin)] += 1
    self.undo_log.replace(self, lifetime=lifetime, idle=idle)

  def set_listed(self, pages: Iterable[int], is_listed: bool) -> None:
    """Adds pages to the index, or removes them, without calling listeners."""
    # Each entry is recorded before its change. After an interrupt between the
    # two, the undo writes the value that the entry still has.
    changes: list[tuple[int, Index, Hashable, tuple[int, ...]]] = []
    self.undo_log.record((self._restore_index, changes))
    contents, groups, cached = self.content, self.group, self.is_cached
    for page in pages:
      # As in `equal_pages`, without a call for each page.
      content = contents[page]
      index = self.index[-1 if content.is_from_device else groups[page]]
      digest = content.digest
      listed = index.get(digest, ())
      changes.append((page, index, digest, listed))
      if is_listed and listed:
        index[digest] = tuple(sorted((*listed, page), key=self.lookup_order))
      elif is_listed:
        index[digest] = (page,)
      elif len(listed) > 1:
        index[digest] = tuple(entry for entry in listed if entry != page)
      else:
        del index[digest]
      cached[page] = is_listed

  def _restore_index(
    self, changes: list[tuple[int, Index, Hashable, tuple[int, ...]]]
  ) -> None:
    for page, index, digest, listed in reversed(changes):
      if listed:
        index[digest] = listed
      else:
        index.pop(digest, None)
      self.is_cached[page] = page in listed
