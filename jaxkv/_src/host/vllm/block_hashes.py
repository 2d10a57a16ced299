"""The hashes of cached blocks, as vLLM's requests name them."""

from collections.abc import Sequence
from typing import Any

from jaxkv._src.host.atomic import atomic
from jaxkv._src.host.manager import CacheManager
from jaxkv._src.host.page_pool import PageListener
from jaxkv._src.host.vllm.events import AllBlocksCleared
from jaxkv._src.host.vllm.events import EventQueue

KEY_BYTES, GROUP_BYTES = 16, 4


class BlockHashes(PageListener):
  """Records under which hash of its request each block was cached.

  The hash of a block of a request without `block_hashes` is its key in the
  cache. Such a key is computed when it is read.

  Attributes:
    undo_log: that of the manager.
    events: the events of stored and removed blocks; None for none.
  """

  def __init__(
    self,
    manager: CacheManager,
    hash_block_size: int,
    events: EventQueue | None,
  ):
    config = manager.config
    self.undo_log = manager.undo_log
    self.events = events
    self._manager = manager
    self._sizes = config.page_sizes
    self._steps = [size // hash_block_size for size in config.page_sizes]
    self._suffixes = [with_group(b"", n) for n in range(config.num_groups)]
    self._holds_states = [kind.holds_states for kind in config.groups]
    # For each cached block, its hash with its group, None if its request has
    # none, and the tokens up to its end.
    self._names: list[tuple[bytes | None, int] | None]
    self._names = [None] * config.num_pages
    self._blocks: dict[bytes, tuple[int, ...]] = {}
    # Requests that began with external tokens: their first columns.
    self._first: dict[str, list[int]] = {}
    self._states: dict[str, list[tuple[int, int, int]]] = {}
    self._hit: Sequence[list[int]] = ()
    if config.prefix_caching:
      manager.pages.add_listener(self)

  def hash_of(self, block_id: int) -> bytes | None:
    """Returns a block's hash and group; None if it is not cached."""
    name = self._names[block_id]
    if name is None:
      return None
    return name[0] or self._keys_of([block_id])[0]

  def num_tokens(self, block_id: int) -> int | None:
    """Returns the tokens up to a block's end; None if it is not cached."""
    name = self._names[block_id]
    return None if name is None else name[1]

  def blocks_with(self, name: bytes) -> Sequence[int]:
    """Returns the blocks cached under a hash and group, the oldest first."""
    blocks = self._blocks.get(name, ())
    if blocks or len(name) != KEY_BYTES + GROUP_BYTES:
      return blocks
    # The key of a page differs from group to group, so it tells the group too.
    return self._manager.pages.find(name[:-GROUP_BYTES])

  def all_hashes(self) -> set[bytes]:
    """Returns the hashes, with their groups, of all cached blocks."""
    nameless = [
      page
      for page, name in enumerate(self._names)
      if name is not None and name[0] is None
    ]
    return {*self._blocks, *self._keys_of(nameless)}

  def begin(self, hit: Sequence[list[int]]) -> None:
    """Prepares for a request that begins with the blocks of a hit."""
    if self.events is not None:
      self.undo_log.save_attribute(self, "_hit")
      self._hit = hit

  def skip_loaded(self, request_id: str) -> None:
    """Excludes null blocks, with which a request began, from its events."""
    if self.events is not None:
      tables = self._manager.get_page_ids(request_id)
      self.undo_log.save_key(self._first, request_id)
      self._first[request_id] = [
        next((n for n, page in enumerate(table) if page), len(table))
        for table in tables
      ]

  def forget(self, request_id: str) -> None:
    """Forgets a request that loses its blocks."""
    for mapping in (self._first, self._states):
      if request_id in mapping:
        self.undo_log.save_key(mapping, request_id)
        del mapping[request_id]

  @atomic
  def take_states(self) -> dict[str, list[tuple[int, int, int]]]:
    """Returns states cached since the last call, of requests with blocks.

    For each request: group, block, and tokens up to the block's end.
    """
    self.undo_log.save_attribute(self, "_states")
    states, self._states = self._states, {}
    return states

  @atomic
  def report_hit(self, request: Any, hit: Sequence[list[int]]) -> None:
    """Adds an event for each group of blocks that a request found."""
    for group, table in enumerate(hit):
      if table and self.events is not None:
        columns = range(len(table))
        hashes = [self._hash_in(request, group, n, table) for n in columns]
        self.events.add_stored(request, group, columns, hashes, None)

  def stored(
    self, request: Any, group: int, first: int, pages: Sequence[int]
  ) -> None:
    """See `PageListener`."""
    size, step = self._sizes[group], self._steps[group]
    suffix = self._suffixes[group]
    hashes = getattr(request, "block_hashes", None) or ()
    self.undo_log.save_items(self._names, pages)
    for column, page in enumerate(pages, first):
      if not page:
        continue
      place = (column + 1) * step - 1
      block_hash = None
      if place < len(hashes):
        block_hash = hashes[place] + suffix
      # An event of the removal will need a name, which the manager then has
      # lost.
      elif self.events is not None:
        block_hash = self._keys_of([page])[0]
      self._names[page] = block_hash, (column + 1) * size
      if block_hash is not None:
        self.undo_log.save_key(self._blocks, block_hash)
        blocks = self._blocks.get(block_hash, ())
        self._blocks[block_hash] = (*blocks, page)
    if self._holds_states[group]:
      self._offer_states(request.request_id, group, pages)
    if self.events is not None:
      self._report(self.events, request, group, first, pages)

  def removed(self, page: int, group: int) -> None:
    """See `PageListener`."""
    name = self._names[page]
    self.undo_log.save_items(self._names, [page])
    self._names[page] = None
    block_hash = None if name is None else name[0]
    if block_hash is None:
      return
    others = [other for other in self._blocks[block_hash] if other != page]
    self.undo_log.save_key(self._blocks, block_hash)
    if others:
      self._blocks[block_hash] = tuple(others)
    else:
      del self._blocks[block_hash]
    if self.events is not None:
      self.events.add_removed(block_hash[:-GROUP_BYTES], group)

  def cleared(self) -> None:
    """See `PageListener`."""
    for name in ("_names", "_blocks"):
      self.undo_log.save_attribute(self, name)
    self._names = [None] * len(self._names)
    self._blocks = {}
    if self.events is not None:
      self.events.add(AllBlocksCleared())

  def _keys_of(self, pages: Sequence[int]) -> list[Any]:
    """Returns the keys in the cache, with their groups, of cached pages."""
    keys = self._manager.pages.keys(pages)
    groups = self._manager.pages.groups(pages)
    return [
      None if key is None else key + self._suffixes[group]
      for key, group in zip(keys, groups, strict=True)
    ]

  def _offer_states(self, name: str, group: int, pages: Sequence[int]) -> None:
    states = [
      (group, page, self.num_tokens(page) or 0) for page in pages if page
    ]
    if states:
      self.undo_log.save_key(self._states, name)
      self._states[name] = [*self._states.get(name, ()), *states]

  def _report(
    self,
    events: EventQueue,
    request: Any,
    group: int,
    first: int,
    pages: Sequence[int],
  ) -> None:
    """Adds the event of the columns that a call filled."""
    skipped = self._first.get(request.request_id)
    start = max(first, skipped[group]) if skipped else first
    stop = first + len(pages)
    # vLLM reports a span even if no block of it is published, because its
    # receivers count tokens.
    if start >= stop:
      return
    hashes = [self._bare_hash(page) for page in pages[start - first :]]
    parent = None
    if start:
      tables = self._manager.get_page_ids(request.request_id)
      # A request that begins has no table before its call ends.
      table = tables[group] or (self._hit[group] if self._hit else [])
      parent = self._hash_in(request, group, start - 1, table)
    events.add_stored(request, group, range(start, stop), hashes, parent)

  def _hash_in(
    self, request: Any, group: int, column: int, table: list[int]
  ) -> bytes | None:
    """Returns the request's hash of a block, or else the block's own."""
    hashes = getattr(request, "block_hashes", None) or ()
    place = (column + 1) * self._steps[group] - 1
    if place < len(hashes):
      return hashes[place]
    return self._bare_hash(table[column]) if column < len(table) else None

  def _bare_hash(self, page: int) -> bytes | None:
    name = self.hash_of(page)
    return None if name is None else name[:-GROUP_BYTES]


def with_group(block_hash: bytes, group: int) -> bytes:
  """Appends a group to a hash, as four big-endian bytes."""
  return block_hash + group.to_bytes(GROUP_BYTES, "big")
