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
from jaxkv._src.cache.prefix.prefix_index import PrefixIndex
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import Stats
from jaxkv._src.host.prefix_nodes import DeviceKeys
from jaxkv._src.host.prefix_nodes import PrefixNode
from jaxkv._src.host.request import content
from jaxkv._src.host.request import read_request
from jaxkv._src.host.sequences import HeldSequence
from jaxkv._src.host.state import HostState

_MASK = 0xFFFFFFFF


def to_device(state: HostState) -> CacheState:
  """Returns the state of a manager as a value on the device.

  Its arrays are copies, so it stays valid when the manager goes on.

  Raises:
    ValueError: a request has fewer tokens than are published.
  """
  config, held = state.config, state.all_held()
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
  secret = root = hashes = None
  keys = state.device_keys
  if keys is not None:
    secret = _array(keys.secret, np.uint32)
    root = _array(keys.root_key(bytes(16)), np.uint32)
    hashes = _slot_hashes(state, keys, held)
  built: Any = CacheState(
    config=config,
    page_table=table,
    num_pages=num_pages,
    num_skipped_pages=skipped,
    length=length,
    secret=secret,
    root=root,
    hashes=hashes,
    pool=_pool(state),
    stats=Stats(**{name: _word(n) for name, n in state.counters().items()}),
    epoch=_word(keys.epoch if keys is not None else 0),
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


def _word(number: int) -> Any:
  return np.uint32(number & _MASK)


def _words(numbers: Sequence[int]) -> Any:
  return (np.array(numbers, np.int64) & _MASK).astype(np.uint32)


def _slot_hashes(
  state: HostState, keys: DeviceKeys, held: list[HeldSequence]
) -> SlotHashes:
  config = state.config
  steps = config.alignment // config.page_size
  # The chain ends at the last multiple of the alignment, A tokens. The tail has
  # the tokens after it.
  nodes: list[PrefixNode] = []
  for sequence in held:
    assert sequence.root is not None
    count = sequence.length // config.alignment * steps
    nodes.append(sequence.nodes[count - 1] if count else sequence.root)
  keys.compute(nodes)
  keys.compute(sequence.root for sequence in held if sequence.root is not None)
  roots = _filled((config.num_slots, KEY_WORDS), dtype=np.uint32)
  chain = _filled((config.num_slots, KEY_WORDS), dtype=np.uint32)
  tails = _filled((config.num_slots, config.alignment))
  prompt = _filled((config.num_slots,))
  boundary = _filled((config.num_slots,))
  for sequence, node in zip(held, nodes, strict=True):
    root = sequence.root
    assert root is not None and root.key is not None and node.key is not None
    roots[sequence.slot], chain[sequence.slot] = root.key, node.key
    tokens = tail(state, sequence)
    tails[sequence.slot, : len(tokens)] = tokens
    prompt[sequence.slot], boundary[sequence.slot] = (
      sequence.prompt_length,
      sequence.boundary,
    )
  by_prompt = config.publishes_by_prompt
  return SlotHashes(
    root=roots,
    chain=chain,
    tail=tails,
    prompt_length=prompt if by_prompt else None,
    shared_prefix_boundary=boundary if by_prompt else None,
  )


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
  pool, config = state.pool, state.config
  ages = None
  if pool.ages is not None:
    ages = telemetry.PageAges(
      released=_words(pool.ages.released),
      evicted=telemetry.Residency(
        lifetime=_words(pool.ages.lifetime), idle=_words(pool.ages.idle)
      ),
    )
  log = None
  if config.event_log:
    size = max(config.page_sizes)
    log = telemetry.init_log(config.event_log, config.num_pages, size)
    groups: Any = np.minimum(_array(pool.group), config.num_groups - 1)
    log = telemetry.with_groups(log, groups)
  return PoolState(
    unhashed_first=pool.unhashed_first,
    ref_count=_array(pool.ref_count),
    pin_count=_array(pool.pin_count),
    queue=_queue(config, pool.queue.in_order()),
    index=_index(state),
    events=log,
    new=None if pool.new is None else _array(pool.new, bool),
    ages=ages,
  )


def _queue(config: CacheConfig, pages: list[int]) -> FreeQueue:
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


def _index(state: HostState) -> PrefixIndex | None:
  if state.device_keys is None:
    return None
  # Only here and in `from_device` the mirror must be up to date.
  update_mirror(state, state.device_keys)
  # Copies, because jax can use the memory of a numpy array on a CPU, and the
  # mirror changes with the manager.
  mirror: Any = state.mirror
  return PrefixIndex(
    buckets=mirror.buckets.copy(),
    overflow=mirror.overflow.copy(),
    entry=mirror.entry.copy(),
    tokens=mirror.tokens.copy(),
    clock=_word(state.pool.clock),
  )


def update_mirror(state: HostState, keys: DeviceKeys) -> None:
  """Brings the mirror of the prefix index up to date."""
  # The mirror's arrays change one after the other, and the log does not follow
  # them. So after an undo the mirror is made anew.
  state.undo_log.record((state.reset_mirror,))
  pool, mirror = state.pool, state.mirror
  # Sorted, because the order of insertion decides the places in buckets.
  changed = np.array(sorted(pool.changed), np.int64)
  listed = mirror.is_cached()[changed]
  # Before the entries are written: the old keys lead to the old buckets.
  mirror.remove(changed[listed])
  full = [page for page in changed.tolist() if pool.content[page] is not None]
  keys.compute(pool.content[page] for page in full)
  words, tokens = [], []
  for page in full:
    group = pool.group[page]
    words.append(keys.group_key(pool.content[page], group))
    tokens.append(_tokens(state, pool.content[page], group))
  stamps = [pool.stamp[page] for page in full]
  mirror.write(np.array(full, np.int64), words, stamps, tokens)
  cached = [page for page in full if pool.is_cached[page]]
  mirror.insert(np.array(cached, np.int64))
  pool.changed.clear()


def _tokens(state: HostState, page_content: Any, group: int) -> bytes:
  if page_content.is_from_device:
    return page_content.tokens
  return page_content.last_tokens(state.groups[group].step)
