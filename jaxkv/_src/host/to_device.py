"""Builds the device state of a manager."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxkv._src.arrays.indexing import NOWHERE
from jaxkv._src.cache import telemetry
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.pool import free_queue
from jaxkv._src.cache.pool.free_queue import FreeQueue
from jaxkv._src.cache.pool.page_pool import PoolState
from jaxkv._src.cache.prefix.hashing import KEY_WORDS
from jaxkv._src.cache.prefix.hashing import SlotHashes
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import Stats
from jaxkv._src.host.prefix_nodes import DeviceKeys
from jaxkv._src.host.prefix_nodes import PrefixNode
from jaxkv._src.host.request import content
from jaxkv._src.host.request import read_request
from jaxkv._src.host.state import HeldSequence
from jaxkv._src.host.state import HostState


def to_device(state: HostState) -> CacheState:
  """Returns the state of a manager as a value on the device.

  Its arrays are copies, so it stays valid when the manager goes on.

  Raises:
    ValueError: a request has fewer tokens than are published.
  """
  config, held, keys = state.config, state.all_held(), state.device_keys
  rows = (config.num_slots, config.num_groups)
  table = _filled((*rows, config.pages_per_slot), config.no_page)
  num_pages, skipped = _filled(rows), _filled(rows)
  length = _filled(rows[:1])
  # Removed requests keep their slots until their pages are freed.
  for sequence in held:
    for group, pages in enumerate(sequence.tables):
      table[sequence.slot, group, : len(pages)] = pages
      num_pages[sequence.slot, group] = len(pages)
    skipped[sequence.slot] = sequence.skipped
    length[sequence.slot] = sequence.length
  counts = {name: _word(count) for name, count in state.pool.counts.items()}
  built: Any = CacheState(
    config=config,
    page_table=table,
    num_pages=num_pages,
    num_skipped_pages=skipped,
    length=length,
    secret=keys and _array(keys.secret, np.uint32),
    root=keys and _array(keys.root_key(bytes(16)), np.uint32),
    # The keys of all pages are computed at once, then those of slots exist.
    pool=_pool(state),
    hashes=keys and _slot_hashes(state, keys, held),
    stats=Stats(**counts),
    epoch=_word(keys.epoch if keys else 0),
    # Errors of the host are exceptions, so none is recorded.
    error=_array(0),
  )
  # One transfer for all arrays.
  return jax.device_put(built)


# Typed Any: they are arrays of numpy here, and of jax after `device_put`.
def _filled(
  shape: tuple[int, ...], number: int = 0, dtype: Any = np.int32
) -> Any:
  return np.full(shape, number, dtype)


def _array(values: Any, dtype: Any = np.int32) -> Any:
  return np.array(values, dtype)


def _word(numbers: int | Sequence[int]) -> Any:
  """Returns a number or numbers modulo 2**32, as a device counts."""
  return np.array(numbers, np.int64).astype(np.uint32)


def _slot_hashes(
  state: HostState, keys: DeviceKeys, held: list[HeldSequence]
) -> SlotHashes:
  config = state.config
  ends = chain_ends(state, keys, held)
  roots = _filled((config.num_slots, KEY_WORDS), dtype=np.uint32)
  chain = _filled((config.num_slots, KEY_WORDS), dtype=np.uint32)
  tails = _filled((config.num_slots, config.alignment))
  prompt = _filled((config.num_slots,))
  boundary = _filled((config.num_slots,))
  for sequence, (root, end) in zip(held, ends, strict=True):
    slot, tokens = sequence.slot, tail(state, sequence)
    roots[slot], chain[slot] = root.key, end.key
    tails[slot, : len(tokens)] = tokens
    prompt[slot], boundary[slot] = sequence.prompt_length, sequence.boundary
  by_prompt = config.publishes_by_prompt
  return SlotHashes(
    root=roots,
    chain=chain,
    tail=tails,
    prompt_length=prompt if by_prompt else None,
    shared_prefix_boundary=boundary if by_prompt else None,
  )


def chain_ends(
  state: HostState, keys: DeviceKeys, held: Sequence[HeldSequence]
) -> list[tuple[PrefixNode, PrefixNode]]:
  """Returns each sequence's root and the node of its chain, with their keys."""
  # The chain ends at the last multiple of the alignment, A tokens. The tail has
  # the tokens after it.
  config, ends = state.config, []
  for sequence in held:
    root = sequence.root
    assert root is not None
    aligned = sequence.length // config.alignment * config.alignment
    count = aligned // config.page_size
    ends.append((root, sequence.nodes[count - 1] if count else root))
  keys.compute(node for pair in ends for node in pair)
  return ends


def tail(state: HostState, held: HeldSequence) -> np.ndarray:
  """Returns the published tokens after the last multiple of A, masked."""
  # No node has the tokens of a page that is not full, so the request is read.
  config = state.config
  begin = held.length // config.alignment * config.alignment
  if begin == held.length:
    return np.zeros((0,), np.int32)
  fields = read_request(held.request)
  if fields.num_tokens < held.length:
    raise ValueError(
      f"`token_ids` of {held.request_id!r} must have the {held.length} tokens "
      f"that are published, got {fields.num_tokens}; append the new tokens."
    )
  return content(fields, begin, held.length, config.page_size, state.secret)


def _pool(state: HostState) -> PoolState:
  pool, config, arrays = state.pool, state.config, state.index_arrays
  ages = log = None
  if pool.released is not None:
    ages = telemetry.PageAges(
      released=_word(pool.released),
      evicted=telemetry.Residency(
        lifetime=_word(pool.lifetime), idle=_word(pool.idle)
      ),
    )
  if config.event_log:
    size = max(config.page_sizes)
    log = telemetry.init_log(config.event_log, config.num_pages, size)
    groups: Any = np.minimum(_array(pool.group), config.num_groups - 1)
    log = telemetry.with_groups(log, groups)
  return PoolState(
    unhashed_first=pool.unhashed_first,
    ref_count=_array(pool.ref_count),
    pin_count=_array(pool.pin_count),
    queue=_queue(config, _array(pool.queue.in_order())),
    index=None if arrays is None else arrays.update(),
    events=log,
    new=None if pool.new is None else _array(pool.new, bool),
    ages=ages,
  )


def _queue(config: CacheConfig, pages: np.ndarray) -> FreeQueue:
  # No entry is stale, so the queue is the ring's beginning.
  ring = _filled((free_queue.capacity(config.num_pages),))
  position = _filled((config.num_pages,), NOWHERE)
  ring[: len(pages)] = pages
  position[pages] = np.arange(len(pages))
  return FreeQueue(
    ring=ring,
    position=position,
    head=_array(0),
    span=_array(len(pages)),
    num_free=_array(len(pages)),
  )
