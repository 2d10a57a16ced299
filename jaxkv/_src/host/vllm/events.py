"""What vLLM's event publishers send: blocks stored, removed, all cleared.

`EventReader` makes them of the rows of the core's event log, and remembers
under which hash of its request a block was stored. Without a hash of its own, a
block is called by its key in the cache.
"""

import dataclasses
import hashlib
import os
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import numpy as np

from jaxkv._src.cache import telemetry
from jaxkv._src.host.vllm.page_cache import LogRow

MEDIUM_GPU = "GPU"
ExternalHash = int | bytes


class KVCacheEvent:
  """Something that happened to blocks."""

  def __hash__(self) -> int:
    return hash(repr(self))


@dataclasses.dataclass
class BlockStored(KVCacheEvent):
  """Blocks of one request and group that one call published.

  Attributes:
    block_hashes: of the blocks that can be found, in order.
    parent_block_hash: of the block before the first; None at the beginning.
    token_ids: all tokens from the first block to the last, also of blocks
      between them that are not published.
    block_size: tokens a block.
    lora_id, lora_name: the request's adapter.
    medium: where the blocks are.
    extra_keys: what tells a block apart besides its tokens, for each hash.
    group_idx: the group.
    kv_cache_spec_kind: what the group's layers are, such as "full_attention".
    kv_cache_spec_sliding_window: its window, if it has one.
    locality, ownership, lookahead_token_ids: not used.
    session_id: of the request.
    type: the name of the class, by which receivers know it.
  """

  block_hashes: list[ExternalHash]
  parent_block_hash: ExternalHash | None
  token_ids: list[int]
  block_size: int
  lora_id: int | None
  medium: str | None
  lora_name: str | None
  extra_keys: list[tuple[Any, ...] | None] | None = None
  group_idx: int | None = None
  kv_cache_spec_kind: str | None = None
  kv_cache_spec_sliding_window: int | None = None
  locality: str | None = None
  ownership: str | None = None
  session_id: str | None = None
  lookahead_token_ids: list[list[int]] | None = None
  type: str = "BlockStored"

  __hash__ = KVCacheEvent.__hash__


@dataclasses.dataclass
class BlockRemoved(KVCacheEvent):
  """A block that can no longer be found.

  Attributes:
    block_hashes: its hash.
    medium: where it was.
    group_idx: its group.
    locality, ownership: not used.
    type: the name of the class, by which receivers know it.
  """

  block_hashes: list[ExternalHash]
  medium: str | None
  group_idx: int | None = None
  locality: str | None = None
  ownership: str | None = None
  type: str = "BlockRemoved"

  __hash__ = KVCacheEvent.__hash__


@dataclasses.dataclass
class AllBlocksCleared(KVCacheEvent):
  """No block can be found any more.

  Attributes:
    type: the name of the class, by which receivers know it.
  """

  type: str = "AllBlocksCleared"

  __hash__ = KVCacheEvent.__hash__


class BlockName(NamedTuple):
  """How a block is called outside.

  Attributes:
    hash: its hash, as its request has it, or its key.
    num_tokens: tokens from the sequence's start to the block's end.
  """

  hash: bytes
  num_tokens: int


@dataclasses.dataclass(frozen=True)
class EventGroup:
  """What events tell of a group.

  Attributes:
    block_size: tokens a block.
    kind, window: see `BlockStored`.
  """

  block_size: int
  kind: str
  window: int | None


class EventReader:
  """Turns rows of the core's log into events.

  Attributes:
    queue: the events since `take`; none are kept unless events are enabled.
    names: key of a page -> what the block is called outside.
    keys: hash and group -> key.
  """

  def __init__(
    self, groups: list[EventGroup], hash_block_size: int, *, enabled: bool
  ):
    self.queue: list[KVCacheEvent] = []
    self.names: dict[bytes, BlockName] = {}
    self.keys: dict[bytes, bytes] = {}
    self._groups = groups
    self._hash_block_size = hash_block_size
    self._enabled = enabled

  def take(self) -> list[KVCacheEvent]:
    """The events since the last call."""
    events, self.queue = self.queue, []
    return events

  def read(
    self,
    rows: list[LogRow],
    request: Any = None,
    spans: Sequence[tuple[int, int]] = (),
  ) -> None:
    """Takes note of what one call did.

    Args:
      rows: of the log.
      request: the one whose blocks it published.
      spans: the columns that the call made full, by group.
    """
    stored: dict[int, list[LogRow]] = {}
    for row in rows:
      if row.kind == telemetry.CLEARED:
        self._add(AllBlocksCleared())
      elif row.kind == telemetry.REMOVED:
        self._add(self._removed(row))
      else:
        self._name(request, row)
        stored.setdefault(row.group, []).append(row)
    if not self._enabled:
      return
    for group, (first, stop) in enumerate(spans):
      if first < stop:
        new = stored.get(group, [])
        self._add(self._stored(request, group, first, stop, new))

  def repeat(self, request: Any, group: int, num_blocks: int) -> None:
    """Tells of the first blocks of a request again, which it has found."""
    if self._enabled and num_blocks:
      columns = list(range(num_blocks))
      hashes = [self._hash(request, group, column) for column in columns]
      event = self._event(request, group, 0, num_blocks, columns)
      event.block_hashes = [_external(one) for one in hashes if one]
      self._add(event)

  def forget_all_but(self, keys: set[bytes]) -> None:
    """Drops the names of other keys."""
    self.names = {key: self.names[key] for key in keys & self.names.keys()}
    self.keys = {name: key for name, key in self.keys.items() if key in keys}

  def name_of(self, key: bytes) -> BlockName:
    """What a page with this key is called."""
    return self.names.get(key) or BlockName(key, 0)

  def _add(self, event: KVCacheEvent) -> None:
    if self._enabled:
      self.queue.append(event)

  def _name(self, request: Any, row: LogRow) -> None:
    own = self._hash(request, row.group, row.column) or row.key
    end = (row.column + 1) * self._groups[row.group].block_size
    self.names[row.key] = BlockName(own, end)
    self.keys[with_group(own, row.group)] = row.key

  def _hash(self, request: Any, group: int, column: int) -> bytes | None:
    """The request's own hash of a block; None if it has none."""
    hashes = getattr(request, "block_hashes", None) or ()
    end = (column + 1) * self._groups[group].block_size
    place = end // self._hash_block_size - 1
    if end % self._hash_block_size or not 0 <= place < len(hashes):
      return None
    return bytes(hashes[place])

  def _removed(self, row: LogRow) -> BlockRemoved:
    own = self.name_of(row.key).hash
    return BlockRemoved([_external(own)], MEDIUM_GPU, row.group)

  def _stored(
    self, request: Any, group: int, first: int, stop: int, rows: list[LogRow]
  ) -> BlockStored:
    columns = [row.column for row in rows]
    event = self._event(request, group, first, stop, columns)
    event.block_hashes = [_external(self.name_of(row.key).hash) for row in rows]
    if first:
      parent = self._hash(request, group, first - 1)
      if parent is None and columns[:1] == [first]:
        parent = self.name_of(rows[0].parent).hash
      event.parent_block_hash = None if parent is None else _external(parent)
    return event

  def _event(
    self, request: Any, group: int, first: int, stop: int, columns: list[int]
  ) -> BlockStored:
    """An event without hashes."""
    told = self._groups[group]
    tokens = getattr(request, "all_token_ids", None)
    tokens = request.token_ids if tokens is None else tokens
    size = told.block_size
    adapter = getattr(request, "lora_request", None)
    extra = [_extra_keys(request, n * size, (n + 1) * size) for n in columns]
    return BlockStored(
      block_hashes=[],
      parent_block_hash=None,
      token_ids=list(tokens[first * size : stop * size]),
      block_size=size,
      lora_id=getattr(adapter, "adapter_id", None),
      medium=MEDIUM_GPU,
      lora_name=getattr(adapter, "name", None),
      extra_keys=extra or None,
      group_idx=group,
      kv_cache_spec_kind=told.kind,
      kv_cache_spec_sliding_window=told.window,
      session_id=getattr(request, "session_id", None),
    )


def with_group(block_hash: bytes, group: int) -> bytes:
  """A hash, then its group in four bytes, the highest first."""
  return block_hash + group.to_bytes(4, "big")


def _external(block_hash: bytes) -> ExternalHash:
  """A hash as events carry it; the variable is vLLM's."""
  if os.environ.get("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1") == "0":
    return block_hash
  return int.from_bytes(block_hash[-8:], "big")


def _extra_keys(request: Any, begin: int, end: int) -> tuple[Any, ...] | None:
  """What tells a block apart: adapter, items, salt, embeddings."""
  adapter = getattr(request, "lora_request", None)
  salt = getattr(request, "cache_salt", None)
  keys: list[Any] = []
  if adapter is not None:
    keys.append(getattr(adapter, "lora_name", None) or adapter.name)
  keys.extend(_items(request, begin, end))
  if begin == 0 and salt:
    keys.append(salt)
  keys.extend(_embeddings(request, begin, end))
  return tuple(keys) or None


def _items(request: Any, begin: int, end: int) -> Iterator[tuple[str, int]]:
  for feature in getattr(request, "mm_features", None) or ():
    place = feature.mm_position
    if place.offset < end and place.offset + place.length > begin:
      yield feature.identifier, place.offset - begin


def _embeddings(request: Any, begin: int, end: int) -> Iterator[bytes]:
  embeddings = getattr(request, "prompt_embeds", None)
  if embeddings is None:
    return
  known = getattr(request, "_prompt_embeds_per_block_hashes", {})
  if (begin, end) in known:
    yield known[begin, end]
  elif isinstance(embeddings, np.ndarray):
    rows = np.ascontiguousarray(embeddings[begin:end])
    yield hashlib.sha256(rows.tobytes()).digest()
