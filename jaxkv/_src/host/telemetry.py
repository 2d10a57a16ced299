"""Reports of a manager: events of published pages, and statistics."""

import copy
import dataclasses
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

from jaxkv._src.cache.prefix.hashing import key_bytes
from jaxkv._src.host.groups import LayerGroup
from jaxkv._src.host.page_pool import HostPool
from jaxkv._src.host.page_pool import PageListener
from jaxkv._src.host.prefix_nodes import DeviceKeys
from jaxkv._src.host.prefix_nodes import DevicePage
from jaxkv._src.host.request import tokens_of


class Stored(NamedTuple):
  """A page was published.

  Attributes:
    page: the page's number.
    group: the page's group; None if a device loop published the page and no
      request holds it.
    key: 16 bytes, a hash of the root, the group and all tokens so far.
    parent: the key of the preceding page in this group, published or not; None
      for the first page of a sequence, or if `group` is None.
    root: 16 bytes, equal for all sequences with the same salt; None if `group`
      is None.
    tokens: the page's tokens. If `group` is None, zeros pad them to the largest
      page size of a group.
  """

  page: int
  group: int | None
  key: bytes
  parent: bytes | None
  root: bytes | None
  tokens: tuple[int, ...]


class Removed(NamedTuple):
  """A page left the index, for example by eviction.

  A move to offload memory or back is not logged, but it changes the page's
  number. So `page` can differ from the number in the page's `Stored` event.
  `group` is None if a device loop published the page and no request held it.
  """

  page: int
  group: int | None
  key: bytes


class Cleared(NamedTuple):
  """All pages left the index."""


class Drained(NamedTuple):
  """The events since the last reading.

  Attributes:
    events: oldest first.
    num_lost: the number of later events, for which the log had no room. If this
      is not 0, a mirror is out of date; see `Pages.cached_in_order`.
  """

  events: list[Stored | Removed | Cleared]
  num_lost: int


class EventList(PageListener):
  """A log of events, whose keys are computed when the log is read.

  Attributes:
    size: the capacity of the log, in events.
    num_lost: the number of events dropped because the log was full.
  """

  def __init__(
    self,
    size: int,
    pool: HostPool,
    keys: DeviceKeys,
    groups: Sequence[LayerGroup],
  ):
    self.size = size
    self.num_lost = 0
    self._pool, self._keys, self._groups = pool, keys, groups
    self._log = pool.undo_log
    # Tuples: class, page, group, content and, for `Stored`, tokens; `Cleared`
    # is kept unchanged. The content is stored, because the page may be reused
    # before the log is read.
    self._events: list[Any] = []

  def stored(
    self, request: Any, group: int, first: int, pages: Sequence[int]
  ) -> None:
    """Records published pages with their original, unmasked tokens."""
    page_size, token_ids = self._groups[group].size, tokens_of(request)
    for column, page in enumerate(pages, first):
      if page:
        tokens = token_ids[column * page_size : (column + 1) * page_size]
        # NumPy integers become ints, which consumers can serialize.
        tokens = tuple(int(token) for token in tokens)
        self._add((Stored, page, group, self._pool.content[page], tokens))

  def removed(self, page: int, group: int) -> None:
    """Records a page that left the index."""
    self._add((Removed, page, group, self._pool.content[page]))

  def cleared(self) -> None:
    """Records that all pages left the index."""
    self._add(Cleared())

  def add_changes(
    self,
    removed: Sequence[tuple[int, Any, int]],
    stored: Mapping[int, tuple[int, ...]],
  ) -> None:
    """Records the difference that a device loop made to the index.

    Pages in `removed`, with their content and group, left the index. The loop
    published pages with the tokens in `stored`, whose content the pool has.
    """
    for page, content, group in removed:
      self._add((Removed, page, group, content))
    content = self._pool.content
    groups = self._pool.group
    for page, tokens in stored.items():
      page_size = self._groups[groups[page]].size
      # The group of such a page may be unknown, so no token is cut off.
      if isinstance(content[page], DevicePage):
        page_size = len(tokens)
      self._add((Stored, page, groups[page], content[page], tokens[:page_size]))

  def drain(self) -> Drained:
    """Returns the events and empties the log."""
    events = self._events
    num_lost = self.num_lost
    # One call computes the keys of all events, which takes less time.
    self._keys.compute(event[3] for event in events if type(event) is tuple)
    self._log.replace(self, _events=[], num_lost=0)
    return Drained([self._finished(event) for event in events], num_lost)

  def _add(self, event: Any) -> None:
    if len(self._events) >= self.size:
      self._log.replace(self, num_lost=self.num_lost + 1)
      return
    self._log.save_length(self._events)
    self._events.append(event)

  def _finished(self, event: Any) -> Any:
    """Converts an element of the log to an event."""
    if type(event) is not tuple:
      return event
    make, page, group, node = event[:4]
    key = key_bytes(self._keys.group_key(node, group))
    if isinstance(node, DevicePage):
      if make is Removed:
        return Removed(page, None, key)
      return Stored(page, None, key, None, None, event[4])
    if make is Removed:
      return Removed(page, group, key)
    # The preceding page of the group ends `step` nodes earlier.
    root, parent, parent_key = node.root, node, None
    for _ in range(self._groups[group].step):
      parent = parent.parent
    if parent is not root:
      parent_key = key_bytes(self._keys.group_key(parent, group))
    return Stored(page, group, key, parent_key, key_bytes(root.key), event[4])


@dataclasses.dataclass
class PrefixCacheStats:
  """Prefix-cache hits of the requests admitted since the last reading.

  Attributes:
    requests: requests that received their first pages and did not skip the
      lookup.
    queries: tokens that were looked up.
    hits: looked-up tokens that were cached.
    preempted_requests, preempted_queries, preempted_hits: the same counts for
      preempted requests, which `requests`, `queries` and `hits` exclude.
    reset: True if the cache was reset.
    lifetime, idle: evicted pages by age, since they got a key and since they
      became free; empty without `track_residency`. An age is the number of
      pages that got a key meanwhile. Bin 0 counts ages of 0, and bin i counts
      ages of `2**(i - 1)` to `2**i - 1`.
    saved, restored: pages that moved to offload memory, and back.
    forgotten: cached offload pages that were overwritten.
    dropped: cached pages that were evicted, but not saved; needs
      `offload_pages`.
  """

  requests: int = 0
  queries: int = 0
  hits: int = 0
  preempted_requests: int = 0
  preempted_queries: int = 0
  preempted_hits: int = 0
  reset: bool = False
  lifetime: list[int] = dataclasses.field(default_factory=list)
  idle: list[int] = dataclasses.field(default_factory=list)
  saved: int = 0
  restored: int = 0
  forgotten: int = 0
  dropped: int = 0

  def counting(
    self, num_tokens: int, num_hits: int, *, is_preempted: bool
  ) -> "PrefixCacheStats":
    """Returns the statistics plus the lookup of an admitted request."""
    # As in vLLM, preempted requests are counted separately, because they often
    # hit pages that they computed themselves.
    prefix = "preempted_" if is_preempted else ""
    added = {"requests": 1, "queries": num_tokens, "hits": num_hits}
    # `copy` is faster than `dataclasses.replace`.
    totals = copy.copy(self)
    for name, number in added.items():
      setattr(totals, prefix + name, getattr(self, prefix + name) + number)
    return totals
