"""Records vLLM's hashes of cached blocks, and vLLM's events."""

from collections.abc import Sequence
from typing import Any

from jaxkv._src.host.atomic import atomic
from jaxkv._src.host.manager import CacheManager
from jaxkv._src.host.page_pool import PageListener
from jaxkv._src.host.vllm.events import AllBlocksCleared
from jaxkv._src.host.vllm.events import EventGroup
from jaxkv._src.host.vllm.events import KVCacheEvent
from jaxkv._src.host.vllm.events import removed_event
from jaxkv._src.host.vllm.events import stored_event

GROUP_BYTES = 4


class BlockHashes(PageListener):
  """Records the hashes of cached blocks, from the requests' `block_hashes`.

  Attributes:
    undo_log: see `CacheManager.undo_log`.
    has_events: True if events are recorded.
    events: the events since the last `take_events`.
  """

  def __init__(
    self,
    manager: CacheManager,
    groups: Sequence[EventGroup],
    *,
    has_events: bool,
  ):
    self.undo_log = manager.undo_log
    self.has_events = has_events
    self.events: list[KVCacheEvent] = []
    self._manager = manager
    self._groups = groups
    # For each cached block: its hash and group, as in `hash_of`, and the number
    # of tokens up to its end.
    self._names: list[tuple[bytes, int] | None]
    self._names = [None] * manager.config.total_pages
    # Block ids by hash and group, oldest first; None until `index` computes it.
    self._index: dict[bytes, list[int]] | None = None
    # For each request that began with external tokens: in each group, the
    # number of leading null blocks.
    self._first: dict[str, list[int]] = {}
    self._states: dict[str, list[tuple[int, int, int]]] = {}
    if manager.config.prefix_caching:
      manager.pages.add_listener(self)

  def hash_of(self, block_id: int) -> bytes | None:
    """Returns a block's hash, then its group in 4 bytes; None if not cached."""
    name = self._names[block_id]
    return None if name is None else name[0]

  def num_tokens(self, block_id: int) -> int | None:
    """Returns the number of tokens up to a block's end; None if not cached."""
    name = self._names[block_id]
    return None if name is None else name[1]

  @atomic
  def index(self) -> dict[bytes, list[int]]:
    """Returns the ids of cached blocks by hash and group, oldest first."""
    if self._index is None:
      index: dict[bytes, list[int]] = {}
      for page in self._manager.pages.cached_in_order():
        name = self._names[page]
        if name is not None:
          index.setdefault(name[0], []).append(page)
      self._index = index
    return self._index

  def begin(self, request_id: str) -> None:
    """Excludes leading null blocks from the events of a new request."""
    if self.has_events:
      tables = self._manager.get_page_ids(request_id)
      self.undo_log.save_key(self._first, request_id)
      self._first[request_id] = [
        next((n for n, page in enumerate(table) if page), len(table))
        for table in tables
      ]

  def forget(self, request_id: str) -> None:
    """Deletes the records of a request that is about to lose its blocks."""
    for mapping in (self._first, self._states):
      if request_id in mapping:
        self.undo_log.save_key(mapping, request_id)
        del mapping[request_id]

  @atomic
  def take_states(self) -> dict[str, list[tuple[int, int, int]]]:
    """Returns the recurrent states cached since the last call, by request.

    A state is a tuple: group, block id, number of tokens up to the block's end.
    Requests that no longer have blocks are omitted.
    """
    self.undo_log.save_attribute(self, "_states")
    states, self._states = self._states, {}
    return states

  @atomic
  def take_events(self) -> list[KVCacheEvent]:
    """Returns the events since the last call."""
    self.undo_log.save_attribute(self, "events")
    events, self.events = self.events, []
    return events

  @atomic
  def report_hit(self, request: Any, hit: Sequence[list[int]]) -> None:
    """Adds, for each group, an event with the blocks of a request's hit."""
    for group, table in zip(self._groups, hit, strict=True):
      if table and self.has_events:
        self._add(stored_event(request, group, 0, [True] * len(table)))

  def stored(
    self, request: Any, group: int, first: int, pages: Sequence[int]
  ) -> None:
    """See `PageListener`."""
    _, size, step, *_ = self._groups[group]
    suffix = group.to_bytes(GROUP_BYTES, "big")
    self.undo_log.save_items(self._names, pages)
    self._save_index()
    # `block_hashes` has `step` hashes per block; the last is the block's hash.
    last = (first + 1) * step - 1
    hashes = request.block_hashes[last : last + len(pages) * step : step]
    if len(hashes) < len(pages):
      raise ValueError(
        f"`block_hashes` of {request.request_id!r} must have a hash for each "
        f"full block, got {len(request.block_hashes)} hashes."
      )
    end = first * size
    for page, block_hash in zip(pages, hashes, strict=True):
      end += size
      if page:
        name = block_hash + suffix
        self._names[page] = name, end
        if self._index is not None:
          self._index.setdefault(name, []).append(page)
    if self._manager.config.groups[group].holds_states:
      self._offer_states(request.request_id, group, pages)
    if self.has_events:
      skipped = self._first.get(request.request_id)
      start = max(first, skipped[group]) if skipped else first
      # As in vLLM, the event is added even if it lists no hash, because its
      # receivers count tokens.
      if listed := pages[start - first :]:
        self._add(stored_event(request, self._groups[group], start, listed))

  def removed(self, page: int, group: int) -> None:
    """See `PageListener`."""
    name = self._names[page]
    assert name is not None
    self.undo_log.save_items(self._names, [page])
    self._names[page] = None
    if self._index is not None:
      self._save_index()
      self._index[name[0]].remove(page)
      if not self._index[name[0]]:
        del self._index[name[0]]
    if self.has_events:
      self._add(removed_event(name[0][:-GROUP_BYTES], group))

  def cleared(self) -> None:
    """See `PageListener`."""
    self.undo_log.save_attribute(self, "_names")
    self._save_index()
    self._names = [None] * len(self._names)
    self._index = None
    if self.has_events:
      self._add(AllBlocksCleared())

  def _save_index(self) -> None:
    """Lets an undo of the current call reset the index to None."""
    if self._index is not None:
      self.undo_log.record((setattr, self, "_index", None))

  def _add(self, event: KVCacheEvent) -> None:
    self.undo_log.save_length(self.events)
    self.events.append(event)

  def _offer_states(self, name: str, group: int, pages: Sequence[int]) -> None:
    states = [
      (group, page, self.num_tokens(page) or 0) for page in pages if page
    ]
    if states:
      self.undo_log.save_key(self._states, name)
      self._states[name] = [*self._states.get(name, ()), *states]
