"""Events of pages that were published or removed since the last reading."""

from collections.abc import Sequence
from typing import Any

from jaxkv._src.cache.prefix.hashing import key_bytes
from jaxkv._src.cache.telemetry import Cleared
from jaxkv._src.cache.telemetry import Drained
from jaxkv._src.cache.telemetry import Removed
from jaxkv._src.cache.telemetry import Stored
from jaxkv._src.host.page_pool import HostPool
from jaxkv._src.host.page_pool import PageListener
from jaxkv._src.host.prefix_nodes import DeviceKeys
from jaxkv._src.host.prefix_nodes import DevicePage
from jaxkv._src.host.request import tokens_of


class EventList(PageListener):
  """A log of events, whose keys are computed when the log is read.

  Attributes:
    size: the most events between two readings.
    num_lost: later events, for which the log had no room.
  """

  def __init__(self, size: int, pool: HostPool, page_sizes: Sequence[int]):
    self.size = size
    self.num_lost = 0
    self._pool = pool
    self._page_sizes = page_sizes
    self._log = pool.undo_log
    # Events of a device are in their final form. The others are tuples of the
    # class of the event, its page, group, node and, if stored, its tokens. The
    # node is kept, because the page may hold another prefix at the reading.
    self._events: list[Any] = []

  def stored(
    self, request: Any, group: int, first: int, pages: Sequence[int]
  ) -> None:
    """Records published pages with their tokens, without masks."""
    size, token_ids = self._page_sizes[group], tokens_of(request)
    for column, page in enumerate(pages, first):
      if page:
        tokens = token_ids[column * size : (column + 1) * size]
        # Numbers of numpy become ints, which consumers can serialize.
        tokens = tuple(int(token) for token in tokens)
        self._add((Stored, page, group, self._pool.content[page], tokens))

  def removed(self, page: int, group: int) -> None:
    """Records a page that left the index."""
    self._add((Removed, page, group, self._pool.content[page]))

  def cleared(self) -> None:
    """Records that all pages left the index."""
    self._add(Cleared())

  def extend(self, drained: Drained) -> None:
    """Appends the events of a device."""
    for event in drained.events:
      self._add(event)
    self._log.save_attribute(self, "num_lost")
    self.num_lost += drained.num_lost

  def drain(self, keys: DeviceKeys, steps: Sequence[int]) -> Drained:
    """Returns the events and empties the log.

    Args:
      keys: computes the keys.
      steps: nodes a page, for each group.
    """
    events, num_lost = self._events, self.num_lost
    # The keys of all events together cost little more than those of one.
    raw = [event for event in events if type(event) is tuple]
    keys.compute(event[3] for event in raw)
    self._log.save_attribute(self, "_events")
    self._log.save_attribute(self, "num_lost")
    self._events, self.num_lost = [], 0
    return Drained(
      [_finished(event, keys, steps) for event in events], num_lost
    )

  def _add(self, event: Any) -> None:
    if len(self._events) >= self.size:
      self._log.save_attribute(self, "num_lost")
      self.num_lost += 1
      return
    self._log.save_length(self._events)
    self._events.append(event)


def _finished(event: Any, keys: DeviceKeys, steps: Sequence[int]) -> Any:
  """Returns an event of `jaxkv.telemetry`."""
  if type(event) is not tuple:
    return event
  # A page of a device has neither its tokens nor its parent.
  make, page, group, node = event[:4]
  if isinstance(node, DevicePage):
    return make(page, group, key_bytes(node.group_key))
  key = key_bytes(keys.group_key(node, group))
  if make is Removed:
    return Removed(page, group, key)
  # The page before in this group ends `step` nodes earlier.
  parent, root = node, node
  for _ in range(steps[group]):
    parent = parent.parent
  while root.parent is not None:
    root = root.parent
  is_first = parent is root
  before = None if is_first else key_bytes(keys.group_key(parent, group))
  return Stored(page, group, key, before, key_bytes(root.key), event[4])
