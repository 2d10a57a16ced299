"""vLLM's events about cached blocks: stored, removed, cleared."""

import dataclasses
import hashlib
import os
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import numpy as np

MEDIUM_GPU = "GPU"
ExternalHash = int | bytes


@dataclasses.dataclass
class BlockStored:
  """Consecutive blocks of one group that a request cached or hit.

  Attributes:
    block_hashes: hashes of the cached blocks, in order.
    parent_block_hash: hash of the preceding block; None without one.
    token_ids: the tokens of all blocks, including those that are not cached.
    block_size: tokens per block.
    lora_id, lora_name: the request's adapter.
    medium: the memory that has the blocks, "GPU".
    extra_keys: for each hash, the block's other inputs, such as images.
    group_idx: the index of the group.
    kv_cache_spec_kind: the kind of the group's layers, such as
      "full_attention".
    kv_cache_spec_sliding_window: the group's window, if it has one.
    locality, ownership, lookahead_token_ids: not used.
    session_id: the request's session.
    type: the name of the class, which receivers need to decode an event.
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


@dataclasses.dataclass
class BlockRemoved:
  """A block that left the prefix cache; see `BlockStored` for the fields."""

  block_hashes: list[ExternalHash]
  medium: str | None
  group_idx: int | None = None
  locality: str | None = None
  ownership: str | None = None
  type: str = "BlockRemoved"


@dataclasses.dataclass
class AllBlocksCleared:
  """Removal of all blocks from the prefix cache."""

  type: str = "AllBlocksCleared"


KVCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventGroup(NamedTuple):
  """A group in events; `step` is the number of `block_hashes` per block."""

  number: int
  block_size: int
  step: int
  kind: str
  window: int | None


def stored_event(
  request: Any, group: EventGroup, first: int, is_listed: Sequence[Any]
) -> BlockStored:
  """Returns an event for consecutive blocks that a request cached or hit.

  The first block is in column `first` of the request's block table. Blocks with
  a true value in `is_listed` list their hash.
  """
  size, step, hashes = group.block_size, group.step, request.block_hashes
  listed = [first + n for n, is_found in enumerate(is_listed) if is_found]
  parent = external_hash(hashes[first * step - 1]) if first else None
  extra = [_extra_keys(request, n * size, n * size + size) for n in listed]
  adapter, stop = request.lora_request, first + len(is_listed)
  return BlockStored(
    block_hashes=[external_hash(hashes[(n + 1) * step - 1]) for n in listed],
    parent_block_hash=parent,
    token_ids=list(request.all_token_ids[first * size : stop * size]),
    block_size=size,
    lora_id=adapter.adapter_id if adapter else None,
    medium=MEDIUM_GPU,
    lora_name=adapter.name if adapter else None,
    extra_keys=extra or None,
    group_idx=group.number,
    kv_cache_spec_kind=group.kind,
    kv_cache_spec_sliding_window=group.window,
    session_id=request.session_id,
  )


def removed_event(block_hash: bytes, group: int) -> BlockRemoved:
  """Returns an event for a block that left the prefix cache."""
  return BlockRemoved([external_hash(block_hash)], MEDIUM_GPU, group)


def external_hash(block_hash: bytes) -> ExternalHash:
  """Converts a hash for an event: to an int unless the variable below is 0."""
  if os.environ.get("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1") == "0":
    return block_hash
  return int.from_bytes(block_hash[-8:], "big")


def _extra_keys(request: Any, begin: int, end: int) -> tuple[Any, ...] | None:
  """Returns a block's inputs other than tokens; None if it has none."""
  keys: list[Any] = []
  if request.lora_request:
    keys.append(request.lora_request.lora_name)
  for feature in request.mm_features or ():
    place = feature.mm_position
    if place.offset < end and place.offset + place.length > begin:
      keys.append((feature.identifier, place.offset - begin))
  if begin == 0 and request.cache_salt:
    keys.append(request.cache_salt)
  keys.extend(_embeddings(request, begin, end))
  return tuple(keys) or None


def _embeddings(request: Any, begin: int, end: int) -> Iterator[bytes]:
  if request.prompt_embeds is None:
    return
  # A request has these digests if vLLM computed them for its block hashes.
  digests = getattr(request, "_prompt_embeds_per_block_hashes", {})
  if (begin, end) in digests:
    yield digests[begin, end]
  elif isinstance(request.prompt_embeds, np.ndarray):
    rows = np.ascontiguousarray(request.prompt_embeds[begin:end])
    yield hashlib.sha256(rows.tobytes()).digest()
