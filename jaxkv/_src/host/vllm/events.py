"""vLLM's events of cached blocks: stored, removed, all cleared."""

import dataclasses
import hashlib
import os
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxkv._src.host.atomic import UndoLog
from jaxkv._src.host.atomic import atomic
from jaxkv._src.host.request import tokens_of

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


@dataclasses.dataclass(frozen=True)
class EventGroup:
  """The fields of a group in events, see `BlockStored`."""

  block_size: int
  kind: str
  window: int | None


class EventQueue:
  """The events since `take`.

  Attributes:
    events: the events.
    undo_log: that of the manager, whose calls add events.
  """

  def __init__(self, groups: Sequence[EventGroup], undo_log: UndoLog):
    self.events: list[KVCacheEvent] = []
    self.undo_log = undo_log
    self._groups = groups

  @atomic
  def take(self) -> list[KVCacheEvent]:
    """Returns the events since the last call."""
    self.undo_log.save_attribute(self, "events")
    events, self.events = self.events, []
    return events

  def add(self, event: KVCacheEvent) -> None:
    """Appends an event, as a part of a call of the manager."""
    self.undo_log.save_length(self.events)
    self.events.append(event)

  def add_stored(
    self,
    request: Any,
    group: int,
    columns: range,
    hashes: Sequence[bytes | None],
    parent: bytes | None,
  ) -> None:
    """Appends a `BlockStored`.

    Args:
      request: the request that stored the blocks, or found them.
      group: the group.
      columns: the places of the blocks in the request's table.
      hashes: the hash of each block; None for a block that is not published.
      parent: the hash of the block before; None for none.
    """
    fields, adapter = (
      self._groups[group],
      getattr(request, "lora_request", None),
    )
    size, tokens = fields.block_size, getattr(request, "all_token_ids", None)
    tokens = tokens_of(request) if tokens is None else tokens
    published = [
      (block_hash, column * size)
      for block_hash, column in zip(hashes, columns, strict=True)
      if block_hash is not None
    ]
    extra = [
      _extra_keys(request, begin, begin + size) for _, begin in published
    ]
    event = BlockStored(
      block_hashes=[_external(block_hash) for block_hash, _ in published],
      parent_block_hash=None if parent is None else _external(parent),
      token_ids=list(tokens[columns.start * size : columns.stop * size]),
      block_size=size,
      lora_id=getattr(adapter, "adapter_id", None),
      medium=MEDIUM_GPU,
      lora_name=getattr(adapter, "name", None),
      extra_keys=extra or None,
      group_idx=group,
      kv_cache_spec_kind=fields.kind,
      kv_cache_spec_sliding_window=fields.window,
      session_id=getattr(request, "session_id", None),
    )
    self.add(event)

  def add_removed(self, block_hash: bytes, group: int) -> None:
    """Appends a `BlockRemoved`."""
    self.add(BlockRemoved([_external(block_hash)], MEDIUM_GPU, group))


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
  # vLLM keeps the digests that it computed for its own keys.
  digests = getattr(request, "_prompt_embeds_per_block_hashes", {})
  if (begin, end) in digests:
    yield digests[begin, end]
  elif isinstance(embeddings, np.ndarray):
    rows = np.ascontiguousarray(embeddings[begin:end])
    yield hashlib.sha256(rows.tobytes()).digest()
