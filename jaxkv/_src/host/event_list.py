"""Events of pages that were published or removed since the last reading."""

from collections.abc import Sequence
from typing import Any

from jaxkv._src.cache.prefix.hashing import key_bytes
from jaxkv._src.cache.telemetry import Cleared
from jaxkv._src.cache.telemetry import Drained
from jaxkv._src.cache.telemetry import Removed
from jaxkv._src.cache.telemetry import Stored
from jaxkv._src.host.groups import LayerGroup
from jaxkv._src.host.page_pool import HostPool
from jaxkv._src.host.page_pool import PageListener
from jaxkv._src.host.prefix_nodes import DeviceKeys
from jaxkv._src.host.prefix_nodes import DevicePage
from jaxkv._src.host.request import tokens_of


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
    # `Cleared` and the events of a device are kept unchanged. Other events are
    # tuples: class, page, group, content and, for `Stored`, tokens. The content
    # is stored, because the page can get another one before the log is read.
    self._events: list[Any] = []

  def stored(
    self, request: Any, group: int, first: int, pages: Sequence[int]
  ) -> None:
    """Records published pages with their original, unmasked tokens."""
    size, token_ids = self._groups[group].size, tokens_of(request)
    for column, page in enumerate(pages, first):
      if page:
        tokens = token_ids[column * size : (column + 1) * size]
        # NumPy integers become ints, which consumers can serialize.
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
    self._log.replace(self, num_lost=self.num_lost + drained.num_lost)

  def drain(self) -> Drained:
    """Returns the events and empties the log."""
    events, num_lost = self._events, self.num_lost
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
    """Converts an element of the log to an event of `jaxkv.telemetry`."""
    if type(event) is not tuple:
      return event
    make, page, group, node = event[:4]
    key = key_bytes(self._keys.group_key(node, group))
    # The content of a `Stored` event is a node, never a `DevicePage`.
    if make is Removed or isinstance(node, DevicePage):
      return make(page, group, key)
    # The preceding page of the group ends `step` nodes earlier.
    root, parent, before = node.root, node, None
    for _ in range(self._groups[group].step):
      parent = parent.parent
    if parent is not root:
      before = key_bytes(self._keys.group_key(parent, group))
    return Stored(page, group, key, before, key_bytes(root.key), event[4])
