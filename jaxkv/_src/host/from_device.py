"""Continues a manager from a state that comes back from a device."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxkv._src.cache import telemetry
from jaxkv._src.cache.prefix.hashing import KEY_WORDS
from jaxkv._src.cache.prefix.hashing import SlotHashes
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import Status
from jaxkv._src.cache.state import check_single
from jaxkv._src.host import to_device
from jaxkv._src.host.allocate import room_of
from jaxkv._src.host.index_arrays import IndexArrays
from jaxkv._src.host.index_arrays import are_cached
from jaxkv._src.host.prefix_nodes import DeviceKeys
from jaxkv._src.host.prefix_nodes import DevicePage
from jaxkv._src.host.publish import more_nodes
from jaxkv._src.host.request import read_request
from jaxkv._src.host.state import HeldSequence
from jaxkv._src.host.state import HostState


def from_device(
  state: HostState, device: CacheState, requests: Mapping[int, Any]
) -> list[str]:
  """Replaces the state of a manager; see `CacheManager.take`."""
  check_single(device)
  _check_identity(state, device)
  host: Any = jax.device_get(device)
  sequences = _sequences(state, host, requests)
  # `free_pages` still needs the pages of a removed request.
  popped = {
    slot: (waiting, sequences.pop(slot))
    for slot, (waiting, _) in state.popped.items()
    if slot in sequences
  }
  names = [sequence.request_id for sequence in sequences.values()]
  for name in names:
    if names.count(name) > 1:
      raise ValueError(
        f"`requests` must name each request once, got {name!r} again."
      )
  held = dict(zip(names, sequences.values(), strict=True))
  released = [name for name in state.held if name not in held]
  if host.hashes is not None and state.device_keys is not None:
    _check_hashes(state, state.device_keys, host.hashes, [*held.values()])
  # All checks are done before the first change.
  log, pool, config = state.undo_log, state.pool, state.config
  log.replace(state, held=held, popped=popped)
  # Slots that were vacant before are used first, in the same order.
  occupied = {held.slot for held in state.all_held()}
  vacant = [slot for slot in state.vacant if slot not in occupied]
  new_vacant = set(range(config.num_slots)) - occupied - set(vacant)
  log.replace(state, vacant=sorted(new_vacant, reverse=True) + vacant)
  log.replace(
    pool,
    ref_count=host.pool.ref_count.tolist(),
    pin_count=host.pool.pin_count.tolist(),
    new=None if pool.new is None else host.pool.new.tolist(),
    counts={
      name: _continued(count, getattr(host.stats, name))
      for name, count in pool.counts.items()
    },
  )
  pool.queue.replace(_free_pages(host))
  if host.pool.events is not None and state.events is not None:
    events = telemetry.read_log(host.pool.events, config.page_sizes)
    state.events.extend(events)
  if state.index_arrays is not None:
    _adopt_index(state, state.index_arrays, host)
  return released


def _continued(before: int, numbers: Any) -> Any:
  """Returns the counts closest to `before` that are `numbers` modulo 2**32."""
  # A device counts modulo 2**32, and the host does not. A state that is older
  # than the host's lowers the count.
  distance = (numbers.astype(np.int64) - before + 2**31) % 2**32 - 2**31
  return (before + distance).tolist()


def _check_identity(state: HostState, device: CacheState) -> None:
  """Raises unless a state can have come from this manager."""
  if device.config != state.config:
    raise ValueError(
      f"`state` must have the manager's config, {state.config}, got "
      f"{device.config}; take back a state that `manager.state` began."
    )
  keys = state.device_keys
  if keys is not None and device.secret is not None:
    if not np.array_equal(np.asarray(device.secret), keys.secret):
      raise ValueError(
        "`state` must have the manager's secret, got another one; take back a "
        "state that `manager.state` began."
      )
    if int(device.epoch) != keys.epoch:
      raise ValueError(
        f"`state` must have epoch {keys.epoch}, got {int(device.epoch)}: a "
        "manager has no epochs; free its requests and call reset_prefix_cache "
        "after a change of weights."
      )
  error = int(device.error)
  if error != Status.OK:
    raise ValueError(
      f"`state` must have no recorded error, got {Status(error).name}; handle "
      "the failed rows and call jaxkv.clear_error."
    )


def _sequences(
  state: HostState, host: Any, requests: Mapping[int, Any]
) -> dict[int, HeldSequence]:
  """Returns the sequences of a state that is on the host, by slot."""
  occupied = np.flatnonzero(host.num_pages.any(axis=1)).tolist()
  wrong = sorted(set(requests) - set(occupied))
  if wrong:
    raise ValueError(
      f"`requests` must name slots with pages, {occupied}, got {wrong}."
    )
  waiting = sorted(set(requests) & set(state.popped))
  if waiting:
    raise ValueError(
      f"`requests` must not name slots {waiting}, whose pages wait for "
      "free_pages."
    )
  before = {held.slot: held for held in state.all_held()}
  unnamed = set(occupied) - set(before) - set(requests)
  if unnamed:
    raise ValueError(
      f"`requests` must name the request in slot {min(unnamed)}, which was "
      f"empty, got {sorted(requests)}; add it."
    )
  return {
    # The loop filled a slot that is named, so nothing of an old sequence stays.
    slot: _sequence(state, host, slot, None, requests[slot])
    if slot in requests
    else _sequence(state, host, slot, before[slot], before[slot].request)
    for slot in occupied
  }


def _sequence(
  state: HostState,
  host: Any,
  slot: int,
  old: HeldSequence | None,
  request: Any,
) -> HeldSequence:
  """Returns the sequence in a slot, with nodes for its published tokens."""
  name = request.request_id if old is None else old.request_id
  tables = [
    host.page_table[slot, group, :count].tolist()
    for group, count in enumerate(host.num_pages[slot].tolist())
  ]
  skipped = host.num_skipped_pages[slot].tolist()
  held = HeldSequence(name, slot, tables, skipped, request)
  held.length = int(host.length[slot])
  held.room = room_of(state, held)
  hashes = host.hashes
  if hashes is None:
    return held
  if hashes.prompt_length is not None:
    held.prompt_length = int(hashes.prompt_length[slot])
    held.boundary = int(hashes.shared_prefix_boundary[slot])
  count = held.length // state.config.page_size
  # Without a new full page the request need not be read.
  if old is not None and count <= len(old.nodes):
    held.root, held.nodes = old.root, old.nodes[:count]
    return held
  fields = read_request(request)
  if fields.num_tokens < held.length:
    raise ValueError(
      f"`token_ids` of {name!r} must have the {held.length} tokens that slot "
      f"{slot} has, got {fields.num_tokens}; append the new tokens before take."
    )
  # Old nodes are reused, so only new tokens are hashed.
  if old is None:
    held.root = state.root_of(fields)
  else:
    held.root, held.nodes = old.root, old.nodes[:]
  held.nodes += more_nodes(state, held, fields, held.length)
  return held


def _check_hashes(
  state: HostState,
  keys: DeviceKeys,
  hashes: SlotHashes,
  sequences: list[HeldSequence],
) -> None:
  """Raises unless the requests have the tokens that the device committed."""
  ends = to_device.chain_ends(state, keys, sequences)
  for held, (root, end) in zip(sequences, ends, strict=True):
    slot, tail = held.slot, to_device.tail(state, held).tolist()
    if tuple(hashes.root[slot].tolist()) != root.key:
      salt = state.root_of(read_request(held.request)).tokens
      raise ValueError(
        f"`requests` must name for slot {slot} a request with the salt of its "
        f"sequence, got {held.request_id!r} with the salt {salt.hex()}; admit "
        "with the request's salt."
      )
    # The chain covers the tokens up to the last multiple of A.
    is_same = tuple(hashes.chain[slot].tolist()) == end.key
    if not is_same or tail != hashes.tail[slot, : len(tail)].tolist():
      raise ValueError(
        f"`token_ids` of {held.request_id!r} must begin with the tokens that "
        f"slot {slot} has; name the request in `requests` if the slot was "
        "filled again."
      )


def _free_pages(host: Any) -> list[int]:
  """Returns the free pages of a state in eviction order."""
  # A page that left the middle of the queue leaves a stale entry. The page's
  # position no longer names the place of the entry.
  queue = host.pool.queue
  capacity = len(queue.ring)
  place = (int(queue.head) + np.arange(int(queue.span))) % capacity
  pages = queue.ring[place]
  return pages[queue.position[pages] == place].tolist()


def _adopt_index(state: HostState, arrays: IndexArrays, host: Any) -> None:
  """Takes over the contents of pages, and the pages that are cached."""
  # The contents that pages got on the host since the last crossing are lost.
  # For the others, equal keys and stamps mean equal contents. The position is
  # not compared, because an equal page may have moved to another place.
  pool, index, ages = state.pool, host.pool.index, host.pool.ages
  before, cached = arrays.index.entry, are_cached(index.entry)
  differs = (before != index.entry)[:, : KEY_WORDS + 1].any(axis=1)
  differs |= arrays.are_fresh() | (np.array(pool.is_cached, bool) != cached)
  changed = np.flatnonzero(differs)
  clock = _continued(pool.clock, index.clock)

  def clocks(stamps: np.ndarray) -> list[int]:
    # Stamps keep their distance from the clock.
    return (clock - (index.clock - stamps).astype(np.int64)).tolist()

  contents, groups = _contents(state, host, changed)
  pages = changed.tolist()
  pool.unlist(page for page in pages if pool.is_cached[page])
  pool.set_contents(
    pages,
    contents,
    groups,
    clocks(index.entry[changed, KEY_WORDS]),
    cached[changed].tolist(),
  )
  state.undo_log.replace(pool, clock=clock)
  # Copies, because a loop may be given the memory of the state.
  arrays.replace(jax.tree.map(np.copy, index), clock)
  if ages is not None:
    state.undo_log.replace(
      pool,
      released=clocks(ages.released),
      lifetime=ages.evicted.lifetime.tolist(),
      idle=ages.evicted.idle.tolist(),
    )


def _contents(
  state: HostState, host: Any, changed: np.ndarray
) -> tuple[list[Any], list[int]]:
  """Returns the contents of changed pages, and their groups; 0 if unknown."""
  index, log = host.pool.index, host.pool.events
  pages, groups = changed.tolist(), [0] * len(changed)
  if log is not None:
    groups = log.group_of[changed].tolist()
  group_of = dict(zip(pages, groups, strict=True))
  keys, tokens = (
    index.entry[changed, :KEY_WORDS].tolist(),
    index.tokens[changed],
  )
  contents: dict[int, Any] = {
    page: DevicePage(tuple(key), row.tobytes())
    for page, key, row in zip(pages, keys, tokens, strict=True)
  }
  # A request's page gets its prefix node, so that lookups need no device key.
  for held in state.all_held():
    for group in state.groups:
      nodes = held.nodes[group.step - 1 :: group.step]
      stop = group.final_pages(held.length)
      for column, page in enumerate(held.tables[group.number]):
        if page in contents:
          group_of[page] = group.number
          if column < stop:
            contents[page] = nodes[column]
  return [*contents.values()], [*group_of.values()]
