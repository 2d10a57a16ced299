"""The hashes of cached blocks, as vLLM's requests name them."""

from collections.abc import Sequence
from typing import Any

from jaxkv._src.host.atomic import atomic
from jaxkv._src.host.manager import CacheManager
from jaxkv._src.host.page_pool import PageListener
from jaxkv._src.host.vllm.events import AllBlocksCleared
from jaxkv._src.host.vllm.events import EventQueue

_NO_BLOCKS: tuple[int, ...] = ()


class BlockHashes(PageListener):
  """Records under which hash of its request each block was cached.

  A block of a request without `block_hashes` has its key in the cache for a
  hash. Such keys are computed when a hash is read.

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
    # For each block, its hash with its group, and the tokens up to its end. A
    # cached block without a hash is in `_unnamed`.
    self._hashes: list[bytes | None] = [None] * config.num_pages
    self._ends = [0] * config.num_pages
    self._blocks: dict[bytes, tuple[int, ...]] = {}
    self._unnamed: dict[int, int] = {}
    # Requests that began with external tokens: their first columns.
    self._first: dict[str, list[int]] = {}
    self._states: dict[str, list[tuple[int, int, int]]] = {}
    self._hit: Sequence[list[int]] = ()
    if config.prefix_caching:
      manager.pages.add_listener(self)

  def hash_of(self, block_id: int) -> bytes | None:
    """Returns a block's hash and group; None if it is not cached."""
    if self._unnamed:
      self._name_blocks()
    return self._hashes[block_id]

  def num_tokens(self, block_id: int) -> int | None:
    """Returns the tokens up to a block's end; None if it is not cached."""
    return self._ends[block_id] or None

  def blocks_with(self, block_hash: bytes) -> tuple[int, ...]:
    """Returns the blocks cached under a hash and group, the oldest first."""
    if self._unnamed:
      self._name_blocks()
    return self._blocks.get(block_hash, _NO_BLOCKS)

  def all_hashes(self) -> list[bytes]:
    """Returns the hashes, with their groups, of all cached blocks."""
    if self._unnamed:
      self._name_blocks()
    return list(self._blocks)

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
    for column, page in enumerate(pages, first):
      if page:
        place = (column + 1) * step - 1
        name = hashes[place] + suffix if place < len(hashes) else None
        self._add(page, group, name, (column + 1) * size)
    if self._holds_states[group]:
      self._offer_states(request.request_id, group, pages)
    if self.events is not None:
      self._report(self.events, request, group, first, pages)

  def removed(self, page: int, group: int) -> None:
    """See `PageListener`."""
    name = self._hashes[page]
    self._save(page, name)
    self._hashes[page], self._ends[page] = None, 0
    if name is None:
      self.undo_log.save_key(self._unnamed, page)
      self._unnamed.pop(page, None)
      return
    rest = tuple(other for other in self._blocks[name] if other != page)
    if rest:
      self._blocks[name] = rest
    else:
      del self._blocks[name]
    if self.events is not None:
      self.events.add_removed(name[:-4], group)

  def cleared(self) -> None:
    """See `PageListener`."""
    for name in ("_hashes", "_ends", "_blocks", "_unnamed"):
      self.undo_log.save_attribute(self, name)
    self._hashes = [None] * len(self._hashes)
    self._ends = [0] * len(self._ends)
    self._blocks, self._unnamed = {}, {}
    if self.events is not None:
      self.events.add(AllBlocksCleared())

  def _add(self, page: int, group: int, name: bytes | None, end: int) -> None:
    self._save(page, name)
    self._hashes[page], self._ends[page] = name, end
    if name is None:
      self.undo_log.save_key(self._unnamed, page)
      self._unnamed[page] = group
    else:
      self._blocks[name] = (*self._blocks.get(name, _NO_BLOCKS), page)

  @atomic
  def _name_blocks(self) -> None:
    """Gives blocks without a hash their keys in the cache."""
    unnamed = self._unnamed
    self.undo_log.save_attribute(self, "_unnamed")
    self._unnamed = {}
    keys = self._manager.pages.keys(unnamed)
    for (page, group), key in zip(unnamed.items(), keys, strict=True):
      if key is not None:
        self._add(page, group, key + self._suffixes[group], self._ends[page])

  def _save(self, page: int, name: bytes | None) -> None:
    """Records a block that is about to get or lose a hash."""
    before = self._hashes[page], self._ends[page]
    blocks = None if name is None else self._blocks.get(name)
    self.undo_log.record((self._restore, page, before, name, blocks))

  def _restore(
    self,
    page: int,
    before: tuple[bytes | None, int],
    name: bytes | None,
    blocks: tuple[int, ...] | None,
  ) -> None:
    self._hashes[page], self._ends[page] = before
    if blocks is not None and name is not None:
      self._blocks[name] = blocks
    elif name is not None:
      self._blocks.pop(name, None)

  def _offer_states(self, name: str, group: int, pages: Sequence[int]) -> None:
    states = [(group, page, self._ends[page]) for page in pages if page]
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
    return None if name is None else name[:-4]


def with_group(block_hash: bytes, group: int) -> bytes:
  """Appends a group to a hash, as four big-endian bytes."""
  return block_hash + group.to_bytes(4, "big")
