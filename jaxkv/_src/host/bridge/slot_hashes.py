"""The `SlotHashes` of a manager's sequences, made from requests or checked."""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.prefix.hashing import KEY_WORDS
from jaxkv._src.cache.prefix.hashing import SlotHashes
from jaxkv._src.host.prefix_nodes import DeviceKeys
from jaxkv._src.host.prefix_nodes import PrefixNode
from jaxkv._src.host.publish import more_nodes
from jaxkv._src.host.request import RequestFields
from jaxkv._src.host.request import content
from jaxkv._src.host.request import read_request
from jaxkv._src.host.state import HeldSequence
from jaxkv._src.host.state import HostState


def of_sequences(
  state: HostState, keys: DeviceKeys, held: list[HeldSequence]
) -> SlotHashes:
  """Returns the hashes of the tokens that each sequence has published."""
  num_slots = state.config.num_slots
  by_prompt = state.config.publishes_by_prompt
  make: Any = SlotHashes
  hashes = make(
    root=np.zeros((num_slots, KEY_WORDS), np.uint32),
    chain=np.zeros((num_slots, KEY_WORDS), np.uint32),
    tail=np.zeros((num_slots, state.config.alignment), np.int32),
    prompt_length=np.zeros(num_slots, np.int32) if by_prompt else None,
    shared_prefix_boundary=np.zeros(num_slots, np.int32) if by_prompt else None,
  )
  ends = _chain_ends(state, keys, held)
  for sequence, (root, last_node) in zip(held, ends, strict=True):
    slot = sequence.slot
    tokens = _tail(state, sequence)
    hashes.root[slot] = root.key
    hashes.chain[slot] = last_node.key
    hashes.tail[slot, : len(tokens)] = tokens
    if by_prompt:
      hashes.prompt_length[slot] = sequence.prompt_length
      hashes.shared_prefix_boundary[slot] = sequence.boundary
  return hashes


def check(
  state: HostState,
  keys: DeviceKeys,
  hashes: SlotHashes,
  sequences: list[HeldSequence],
  num_host_tokens: Mapping[int, int],
) -> None:
  """Raises unless the requests have the tokens that the device committed.

  Args:
    state: the manager's state.
    keys: the keys of its pages.
    hashes: those of the device.
    sequences: the sequences of all slots; their `nodes` are corrected.
    num_host_tokens: by slot, the tokens that the manager had published.
  """
  ends = _chain_ends(state, keys, sequences)
  for held, (root, last_node) in zip(sequences, ends, strict=True):
    slot = held.slot
    count = num_host_tokens.get(slot)
    tail = _tail(state, held, count).tolist()
    if tuple(hashes.root[slot].tolist()) != root.key:
      salt = state.root_of(read(held)).tokens
      raise ValueError(
        f"`requests` must name a request with the salt of slot {slot}, got "
        f"{held.request_id!r} with the salt {salt.hex()}; pass this salt to "
        "jaxkv.admit."
      )
    chain = tuple(hashes.chain[slot].tolist())
    if chain != last_node.key:
      # The loop may have replaced tokens that the old nodes cover.
      held.nodes = []
      held.nodes = more_nodes(state, held, read(held, count), held.length)
      last_node = _chain_ends(state, keys, [held])[0][1]
    is_same = chain == last_node.key
    if not is_same or tail != hashes.tail[slot, : len(tail)].tolist():
      raise ValueError(
        f"`token_ids` of {held.request_id!r} must begin with the tokens that "
        f"slot {slot} has; name the request in `requests` if the slot was "
        "filled again."
      )


def _chain_ends(
  state: HostState, keys: DeviceKeys, held: Sequence[HeldSequence]
) -> list[tuple[PrefixNode, PrefixNode]]:
  """Returns the nodes of `SlotHashes.root` and `chain`; computes their keys."""
  # `SlotHashes.chain` covers the tokens up to the last multiple of
  # `CacheConfig.alignment`, and `SlotHashes.tail` has the tokens after it.
  config = state.config
  ends = []
  for sequence in held:
    root = sequence.root
    assert root is not None
    count = aligned(config, sequence.length) // config.page_size
    ends.append((root, sequence.nodes[count - 1] if count else root))
  keys.compute(node for pair in ends for node in pair)
  return ends


def aligned(config: CacheConfig, tokens: int) -> int:
  """Rounds a number of tokens down to a multiple of the alignment."""
  return tokens // config.alignment * config.alignment


def _tail(
  state: HostState, held: HeldSequence, num_host_tokens: int | None = None
) -> np.ndarray:
  """Returns a sequence's `SlotHashes.tail`: masked tokens, without padding."""
  # Nodes have only the tokens of full pages, so the request is read.
  config = state.config
  start = aligned(config, held.length)
  if start == held.length:
    return np.zeros((0,), np.int32)
  fields = read(held, num_host_tokens)
  tokens = content(fields, start, held.length, config.page_size, state.secret)
  return np.frombuffer(tokens, "<i4")


def read(
  held: HeldSequence, num_host_tokens: int | None = None
) -> RequestFields:
  """Reads the request of a sequence; raises if tokens are missing."""
  fields = read_request(held.request)
  if fields.num_tokens < held.length:
    raise ValueError(
      f"`token_ids` of {held.request_id!r} must have the {held.length} tokens "
      f"that are published in slot {held.slot}, got {fields.num_tokens}; "
      "append the new tokens."
    )
  return fields._replace(num_host_tokens=num_host_tokens)
