"""The pages of a cache on the host: references, free queue, cached pages."""

import itertools
from collections.abc import Hashable
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any
from typing import Protocol

from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.stats import Stats
from jaxkv._src.cache.telemetry import NUM_BINS
from jaxkv._src.host.atomic import UndoLog
from jaxkv._src.host.free_list import FreeList
from jaxkv._src.host.saved_pages import SavedPages

Index = dict[Hashable, tuple[int, ...]]


class PageListener(Protocol):
  """A listener of `jaxkv.host.CacheManager`: hears of cached pages.

  Its methods are called during a call of the manager. To be undone with that
  call, a change must be recorded in `CacheManager.undo_log` before it is made.
  """

  def stored(
    self, request: Any, group: int, first: int, pages: Sequence[int]
  ) -> None:
    """Hears that a request filled the columns of a group from `first` on.

    `pages` has a page for each column that this call published, and 0 for the
    others: those that no lookup can find, and pages that were cached before.
    """

  def removed(self, page: int, group: int) -> None:
    """Hears that a page left the prefix cache."""

  def cleared(self) -> None:
    """Hears that all pages left the prefix cache."""


class HostPool:
  """Pages with references, a free queue and an index of cached pages.

  The methods are the steps of atomic calls: each records in `undo_log` how to
  undo its changes, and the caller commits them. They check nothing.

  A content is a `PrefixNode` or a `DevicePage`. The lists `content`, `group`,
  `stamp` and `is_cached` also have the numbers of host pages.

  Attributes:
    undo_log: the changes of the current call.
    unhashed_first: True if pages that are not cached go to the front of the
      free queue; see `CacheConfig.free_policy`.
    ref_count: the references of each page, with its pins.
    pin_count: how many of a page's references belong to callers of `Pages`.
    queue: the free pages.
    content: the content that each page got last; None for none.
    group: the group in which each page got it.
    stamp: the clock when each page got it; -1 for none.
    is_cached: True for pages that a lookup can find.
    clock: the number of pages that got a content, published or not.
    new: pages popped since `take_new`; None if they are not tracked.
    released: the clock when each page's last reference was removed; None if
      ages are not tracked.
    lifetime, idle: evicted pages by age, as in `jaxkv.telemetry.Residency`.
    counts: the fields of `jaxkv.Stats`.
    listeners: hear of pages that enter or leave the index.
    saved: the pages in host memory; None without `CacheConfig.host_pages`.
    index: for each group, the pages with a digest: first those on the device,
      then those in host memory, each in the order of their stamps. The last
      index has the pages of all groups that are known by their key on the
      device only.
  """

  def __init__(self, config: CacheConfig, undo_log: UndoLog):
    num_pages, num_numbers = config.num_pages, config.num_numbers
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
    self.new = [False] * num_pages if config.track_new_pages else None
    self.released = [0] * num_pages if config.track_residency else None
    self.lifetime, self.idle = [0] * NUM_BINS, [0] * NUM_BINS
    self.counts = dict.fromkeys(Stats.names(), 0)
    self.listeners: list[PageListener] = []
    self.saved = SavedPages(config, undo_log) if config.host_pages else None
    self.index: list[Index] = [{} for _ in range(config.num_groups + 1)]

  @property
  def num_free(self) -> int:
    """The number of free pages."""
    return self.queue.num_free

  @property
  def knows_device_pages(self) -> bool:
    """True if a cached page is known by its key on the device only."""
    return bool(self.index[-1])

  def count(self, name: str, amount: int) -> None:
    """Adds to a counter of `jaxkv.Stats`."""
    self.undo_log.save_key(self.counts, name)
    self.counts[name] += amount

  def pop(self, count: int) -> list[int]:
    """Pops pages, with one reference each; `count` must be free."""
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
      The host page to which the content of each saved page goes.
    """
    cached, saved = self.is_cached, self.saved
    evicted = [page for page in pages if cached[page]]
    if not evicted:
      return {}
    self._count_ages(evicted)
    self.count("evicted_pages", len(evicted))
    if saved is None or not saved.saves:
      self.unpublish(evicted)
      if saved is not None:
        saved.count("dropped", len(evicted))
      return {}
    return self._save(saved, evicted)

  def _save(self, saved: SavedPages, pages: list[int]) -> dict[int, int]:
    """Moves contents to the oldest host pages, whose contents are forgotten."""
    targets: list[int] = []
    # More pages than there are host pages replace each other.
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
    """Adds a reference for each page of hits, after its return to the device.

    Returns:
      The pages, with the numbers of device pages.
    """
    pages = [page for column in columns for page in column]
    saved, on_host = self.saved, []
    if saved is not None:
      on_host = [page for page in pages if saved.is_on_host(page)]
    if saved is None or not on_host:
      self.hold(pages)
      return columns
    # Hits on the device are held first, so that no restored page evicts them.
    self.hold([page for page in pages if not saved.is_on_host(page)])
    places = self._restore(saved, list(dict.fromkeys(on_host)))
    self.undo_log.save_items(self.ref_count, [*places.values()])
    for page in on_host:
      self.ref_count[places[page]] += 1
    return [[places.get(page, page) for page in column] for column in columns]

  def _restore(self, saved: SavedPages, pages: list[int]) -> dict[int, int]:
    """Moves host pages to free device pages, and returns those."""
    # The contents leave their numbers first, because a page that makes room can
    # be saved to the same host page.
    contents = self._lift(pages)
    saved.to_front(pages)
    places = self.queue.pop(len(pages))
    targets = self._evict(places)
    self._settle(places, contents)
    # A restored page has its content already.
    self.mark_new(places, is_new=False)
    saved.record(places, targets, dict(zip(places, pages, strict=True)))
    saved.count("restored", len(pages))
    return dict(zip(pages, places, strict=True))

  def _lift(self, pages: Sequence[int]) -> list[tuple[Any, int, int]]:
    """Removes cached pages from the index, unheard by listeners.

    Returns:
      The content of each page, with its group and stamp, for `_settle`.
    """
    self.set_listed(pages, is_listed=False)
    return [
      (self.content[page], self.group[page], self.stamp[page]) for page in pages
    ]

  def _settle(
    self, pages: Sequence[int], lifted: list[tuple[Any, int, int]]
  ) -> None:
    """Gives lifted contents to pages that are not cached."""
    contents, groups, stamps = zip(*lifted, strict=True)
    self.set_contents(pages, contents, groups, stamps, [True] * len(lifted))

  def hold(self, pages: Sequence[int]) -> None:
    """Adds a reference for each page; null pages are ignored."""
    # Pages behind a window are null, and the null page has no references.
    counts, pages = self.ref_count, [page for page in pages if page]
    self.undo_log.save_items(counts, pages)
    # A page can occur twice, but it leaves the queue once.
    free = dict.fromkeys(page for page in pages if not counts[page])
    self.queue.remove(free)
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
    if self.released is not None:
      self.undo_log.save_items(self.released, freed)
      for page in freed:
        self.released[page] = self.clock
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
    contents: Sequence[Any],
    group: int,
    published: Sequence[bool],
  ) -> None:
    """Gives full pages of a group their contents; publishes some of them."""
    stamps = range(self.clock, self.clock + len(pages))
    groups = itertools.repeat(group)
    self.set_contents(pages, contents, groups, stamps, published)
    # Every content advances the clock, published or not, as on the device.
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
    """Sets the contents of pages that are not cached; publishes some."""
    for values in (self.content, self.group, self.stamp):
      self.undo_log.save_items(values, pages)
    # The pages set the length, because `groups` may be endless.
    content_of, group_of, stamp_of = self.content, self.group, self.stamp
    rows = zip(pages, contents, groups, stamps, strict=False)
    for page, content, group, stamp in rows:
      content_of[page], group_of[page], stamp_of[page] = content, group, stamp
    self.set_listed(itertools.compress(pages, published), True)

  def unpublish(self, pages: Iterable[int]) -> None:
    """Removes pages from the index; those that are not cached are ignored."""
    # A caller may name a page twice, but it leaves the index once.
    cached = [page for page in dict.fromkeys(pages) if self.is_cached[page]]
    self.set_listed(cached, False)
    # After the index has changed, so that listeners find the page not cached.
    for listener in self.listeners:
      for page in cached:
        listener.removed(page, self.group[page])

  def equal_pages(self, page: int) -> tuple[int, ...]:
    """Returns the pages with the digest of a cached page, by their stamps."""
    content = self.content[page]
    # The key of a page from a device is another one in every group.
    number = -1 if content.is_from_device else self.group[page]
    return self.index[number][content.digest]

  def lookup_order(self, page: int) -> tuple[bool, int]:
    """Returns the order of equal pages: on the device first, then by stamp."""
    is_on_host = self.saved is not None and self.saved.is_on_host(page)
    return is_on_host, self.stamp[page]

  def clear(self) -> None:
    """Removes all pages from the index; the queue keeps its order."""
    # New objects, so that an undo can put the old ones back as they were.
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
    """Returns the pages popped since the last call."""
    assert self.new is not None
    pages = [page for page, is_new in enumerate(self.new) if is_new]
    self.mark_new(pages, is_new=False)
    return pages

  def mark_new(self, pages: Sequence[int], *, is_new: bool) -> None:
    """Adds pages to those that `take_new` will return, or removes them."""
    if self.new is not None:
      self.undo_log.save_items(self.new, pages)
      for page in pages:
        self.new[page] = is_new

  def _count_ages(self, pages: list[int]) -> None:
    """Counts the ages of pages that are evicted."""
    if self.released is None:
      return
    lifetime, idle = self.lifetime[:], self.idle[:]
    for page in pages:
      # The page's own content advanced the clock by 1 after its stamp.
      lifetime[(self.clock - self.stamp[page] - 1).bit_length()] += 1
      idle[(self.clock - self.released[page]).bit_length()] += 1
    self.undo_log.replace(self, lifetime=lifetime, idle=idle)

  def set_listed(self, pages: Iterable[int], is_listed: bool) -> None:
    """Adds pages with contents to the index, or removes cached ones.

    No listener hears of it.
    """
    # Each entry is recorded before its change. If an interrupt comes between
    # the two, the undo writes what is still there.
    before: list[tuple[int, Index, Hashable, tuple[int, ...]]] = []
    self.undo_log.record((self._restore_index, before))
    contents, groups, cached = self.content, self.group, self.is_cached
    for page in pages:
      # As in `equal_pages`, without a call for each page.
      content = contents[page]
      index = self.index[-1 if content.is_from_device else groups[page]]
      digest = content.digest
      listed = index.get(digest, ())
      before.append((page, index, digest, listed))
      if is_listed and listed:
        pages_now = sorted((*listed, page), key=self.lookup_order)
        index[digest] = tuple(pages_now)
      elif is_listed:
        index[digest] = (page,)
      elif len(listed) > 1:
        index[digest] = tuple(other for other in listed if other != page)
      else:
        del index[digest]
      cached[page] = is_listed

  def _restore_index(
    self, before: list[tuple[int, Index, Hashable, tuple[int, ...]]]
  ) -> None:
    for page, index, digest, listed in reversed(before):
      if listed:
        index[digest] = listed
      else:
        index.pop(digest, None)
      self.is_cached[page] = page in listed
