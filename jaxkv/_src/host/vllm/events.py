"""vLLM's events of cached blocks: stored, removed, all cleared.

`EventReader` makes them from the rows of the core's event log, and records
under which hash of its request a block was stored. A block without such a hash
is named by its key in the cache.
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
  """Base class of events."""

  def __hash__(self) -> int:
    return hash(repr(self))


@dataclasses.dataclass
class BlockStored(KVCacheEvent):
  """Blocks of one request and group that one call published.

  Attributes:
    block_hashes: hashes of the blocks that lookups can find, in order.
    parent_block_hash: hash of the preceding block; None at the beginning.
    token_ids: all tokens from the first block to the last, also of blocks
      between them that are not published.
    block_size: tokens a block.
    lora_id, lora_name: the request's adapter.
    medium: where the blocks are stored.
    extra_keys: for each hash, the block's key besides its tokens.
    group_idx: the group.
    kv_cache_spec_kind: the kind of the group's layers, such as
      "full_attention".
    kv_cache_spec_sliding_window: its window, if it has one.
    locality, ownership, lookahead_token_ids: not used.
    session_id: the request's session.
    type: the name of the class, by which receivers recognize it.
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
  """A block that lookups can no longer find.

  Attributes:
    block_hashes: its hash.
    medium: where it was stored.
    group_idx: its group.
    locality, ownership: not used.
    type: the name of the class, by which receivers recognize it.
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
  """Removal of all blocks from the prefix cache.

  Attributes:
    type: the name of the class, by which receivers recognize it.
  """

  type: str = "AllBlocksCleared"

  __hash__ = KVCacheEvent.__hash__


class BlockName(NamedTuple):
  """The external name of a block."""

  hash: bytes  # the hash of its request, or its key
  num_tokens: int  # tokens from the sequence's start to the block's end


@dataclasses.dataclass(frozen=True)
class EventGroup:
  """The fields of a group in events, see `BlockStored`."""

  block_size: int
  kind: str
  window: int | None


class EventReader:
  """Converts rows of the core's log to events.

  Attributes:
    queue: the events since `take`; empty unless events are enabled.
    names: key of a page -> its block's external name.
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
    """Returns the events since the last call."""
    events, self.queue = self.queue, []
    return events

  def read(
    self,
    rows: list[LogRow],
    request: Any = None,
    spans: Sequence[tuple[int, int]] = (),
  ) -> None:
    """Records the rows of one call of a request.

    `spans` are the columns that the call filled, by group.
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
    """Reports the first blocks of a request again, for a hit."""
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
    """Returns the external name of a page with this key."""
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
    """Returns the request's hash of a block, if it has one."""
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
    """Returns an event without hashes."""
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
  """Appends a group to a hash, as four big-endian bytes."""
  return block_hash + group.to_bytes(4, "big")


def _external(block_hash: bytes) -> ExternalHash:
  """Converts a hash as vLLM's environment variable says."""
  if os.environ.get("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1") == "0":
    return block_hash
  return int.from_bytes(block_hash[-8:], "big")


def _extra_keys(request: Any, begin: int, end: int) -> tuple[Any, ...] | None:
  """Returns a block's adapter, items, salt and embeddings; None if empty."""
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
