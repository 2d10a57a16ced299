"""Converts the state of a manager to a `CacheState`, and back."""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxkv._src.cache import telemetry
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.pool.offload_pages import OffloadPages
from jaxkv._src.cache.pool.offload_pages import num_planned
from jaxkv._src.cache.pool.page_pool import PoolState
from jaxkv._src.cache.prefix.hashing import KEY_WORDS
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import Status
from jaxkv._src.cache.state import check_single
from jaxkv._src.cache.stats import Stats
from jaxkv._src.host import queue_arrays
from jaxkv._src.host import slot_hashes
from jaxkv._src.host.allocate import room_of
from jaxkv._src.host.atomic import UndoLog
from jaxkv._src.host.index_arrays import IndexArrays
from jaxkv._src.host.index_arrays import are_cached
from jaxkv._src.host.prefix_nodes import DevicePage
from jaxkv._src.host.publish import more_nodes
from jaxkv._src.host.saved_pages import COUNTERS
from jaxkv._src.host.saved_pages import SavedPages
from jaxkv._src.host.saved_pages import as_arrays
from jaxkv._src.host.state import HeldSequence
from jaxkv._src.host.state import HostState


def to_device(state: HostState) -> CacheState:
  """Returns the state of a manager as a value on the device.

  The arrays are copies, which later calls of the manager do not change.

  Raises:
    ValueError: a request has fewer tokens than are published, or a token that
      is not a 32-bit integer; or `saved.moves` is not empty.
  """
  saved = state.pool.saved
  if saved is not None and saved.moves:
    raise ValueError(
      "`take_moves` must be called before `state` is read, got "
      f"{len(saved.moves)} moves that were not taken; perform them first."
    )
  config, held, keys = state.config, state.all_held(), state.device_keys
  rows = config.num_slots, config.num_groups
  table = np.full((*rows, config.pages_per_slot), config.no_page, np.int32)
  num_pages, skipped = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
  length = np.zeros(rows[:1], np.int32)
  # Removed requests keep their slots until their pages are freed.
  for sequence in held:
    for group, pages in enumerate(sequence.tables):
      table[sequence.slot, group, : len(pages)] = pages
      num_pages[sequence.slot, group] = len(pages)
    skipped[sequence.slot] = sequence.skipped
    length[sequence.slot] = sequence.length
  counts = {name: _words(count) for name, count in state.pool.counts.items()}
  # `Any`, because the fields of `CacheState` are annotated as JAX arrays.
  make: Any = CacheState
  built = make(
    config=config,
    page_table=table,
    num_pages=num_pages,
    num_skipped_pages=skipped,
    length=length,
    secret=keys and keys.secret.copy(),
    root=keys and np.array(keys.root_key(bytes(16)), np.uint32),
    # Before `hashes`, so that the keys of all pages are computed in one pass.
    pool=_pool(state),
    hashes=keys and slot_hashes.of_sequences(state, keys, held),
    stats=Stats(**counts),
    epoch=_words(keys.epoch if keys else 0),
    # A manager raises exceptions and records no error.
    error=np.int32(Status.OK),
  )
  # One transfer for all arrays.
  return jax.device_put(built)


def _words(numbers: int | Sequence[int]) -> Any:
  """Converts ints to uint32, modulo 2**32, as the device counts."""
  return np.array(numbers, np.int64).astype(np.uint32)


def _pool(state: HostState) -> PoolState:
  pool, config, arrays = state.pool, state.config, state.index_arrays
  ages = log = None
  if pool.released is not None:
    ages = telemetry.PageAges(
      released=_words(pool.released),
      evicted=telemetry.Residency(
        lifetime=_words(pool.lifetime), idle=_words(pool.idle)
      ),
    )
  if config.event_log:
    size = max(config.page_sizes)
    log = telemetry.init_log(config.event_log, config.num_numbers, size)
    groups: Any = np.array(pool.group, np.int32)
    log = telemetry.with_groups(log, groups.clip(max=config.num_groups - 1))
  make: Any = PoolState
  return make(
    unhashed_first=pool.unhashed_first,
    ref_count=np.array(pool.ref_count, np.int32),
    pin_count=np.array(pool.pin_count, np.int32),
    queue=queue_arrays.from_order(config.num_pages, pool.queue.in_order()),
    index=arrays and arrays.update(),
    events=log,
    new=None if pool.new is None else np.array(pool.new, bool),
    ages=ages,
    offload=pool.saved and _offload_pages(config, pool.saved),
  )


def _offload_pages(config: CacheConfig, saved: SavedPages) -> OffloadPages:
  make: Any = OffloadPages
  return make(
    saves=saved.saves,
    queue=queue_arrays.from_order(
      config.offload_pages + 1, saved.queue.in_order()
    ),
    moves=as_arrays([], config.num_pages, saved.num_taken),
    # A manager has no epochs, so no page is stale.
    stale_before=_words(0),
    **{f"num_{name}": _words(saved.counts[name]) for name in COUNTERS},
  )


def from_device(
  state: HostState, device: CacheState, requests: Mapping[int, Any]
) -> list[str]:
  """Replaces the state of a manager; see `CacheManager.take`."""
  check_single(device)
  if not isinstance(requests, Mapping):
    raise TypeError(
      f"`requests` must be a dictionary from slots to requests, got {requests}."
    )
  _check_identity(state, device)
  host: Any = jax.device_get(device)
  sequences = _sequences(state, host, requests)
  # Removed requests stay in `popped` until `free_pages` frees their pages.
  popped = {
    slot: (waiting, sequences.pop(slot))
    for slot, (waiting, _) in state.popped.items()
    if slot in sequences
  }
  names = [sequence.request_id for sequence in sequences.values()]
  for name in names:
    if names.count(name) > 1:
      raise ValueError(
        f"`requests` must give each slot its own request, got {name!r} twice."
      )
  held = dict(zip(names, sequences.values(), strict=True))
  released = [name for name in state.held if name not in held]
  if host.hashes is not None and state.device_keys is not None:
    counts = {
      held.slot: held.length
      for held in state.all_held()
      if held.slot not in requests
    }
    slot_hashes.check(
      state, state.device_keys, host.hashes, [*held.values()], counts
    )
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
  pool.queue.replace(queue_arrays.in_order(host.pool.queue))
  if pool.saved is not None:
    _adopt_offload_pages(pool.saved, host.pool.offload, log)
  if host.pool.events is not None and state.events is not None:
    events = telemetry.read_log(host.pool.events, config.page_sizes)
    state.events.extend(events)
  if state.index_arrays is not None:
    _adopt_index(state, state.index_arrays, host)
  state.lower_readings()
  return released


def _continued(before: int, numbers: Any) -> Any:
  """Returns the counts closest to `before` that are `numbers` modulo 2**32."""
  # The device counts modulo 2**32, but the host does not. The distance is
  # negative if the manager has counted further than the state.
  distance = (numbers.astype(np.int64) - before + 2**31) % 2**32 - 2**31
  return (before + distance).tolist()


def _check_identity(state: HostState, device: CacheState) -> None:
  """Raises for a state of another manager or epoch, or with an error."""
  if device.config != state.config:
    raise ValueError(
      f"`state` must have the manager's config, {state.config}, got "
      f"{device.config}; take a state that began as `manager.state`."
    )
  keys = state.device_keys
  if keys is not None and device.secret is not None:
    if not np.array_equal(np.asarray(device.secret), keys.secret):
      raise ValueError(
        "`state` must have the manager's secret, got another one; take a state "
        "that began as `manager.state`."
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
  """Returns the sequence in each slot of `host`, a state of NumPy arrays."""
  occupied = np.flatnonzero(host.num_pages.any(axis=1)).tolist()
  wrong = sorted(set(requests) - set(occupied))
  if wrong:
    raise ValueError(
      f"`requests` must name slots with pages, {occupied}, got {wrong}."
    )
  missing = sorted(set(state.popped) - set(occupied))
  if missing:
    raise ValueError(
      f"`state` must hold pages in slots {missing}, which wait for free_pages, "
      "got none; do not free these slots in a loop."
    )
  waiting = sorted(set(requests) & set(state.popped))
  if waiting:
    raise ValueError(
      f"`requests` must not name slots {waiting}, whose pages wait for "
      "free_pages."
    )
  before: dict[int, HeldSequence | None]
  before = {held.slot: held for held in state.all_held()}
  unnamed = set(occupied) - set(before) - set(requests)
  if unnamed:
    raise ValueError(
      f"`requests` must name the request in slot {min(unnamed)}, which was "
      f"empty, got {sorted(requests)}; add it."
    )
  # The loop filled the slots in `requests`, so their old sequences are dropped.
  before |= dict.fromkeys(requests)
  return {
    slot: _sequence(state, host, slot, before[slot], requests.get(slot))
    for slot in occupied
  }


def _sequence(
  state: HostState,
  host: Any,
  slot: int,
  old: HeldSequence | None,
  request: Any,
) -> HeldSequence:
  """Returns the sequence in a slot, with nodes for its final tokens."""
  if old is not None:
    request = old.request
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
  config = state.config
  count = held.length // config.page_size
  if old is not None:
    # `slot_hashes.check` checks these nodes. The loop may have replaced tokens
    # after the last multiple of the alignment, so their nodes are recomputed.
    end = slot_hashes.aligned(config, held.length)
    held.root, held.nodes = old.root, old.nodes[: end // config.page_size]
  # The request is read only if a node is missing.
  if old is None or len(held.nodes) < count:
    fields = slot_hashes.read(held, old and old.length)
    held.root = held.root or state.root_of(fields)
    held.nodes += more_nodes(state, held, fields, held.length)
  return held


def _adopt_offload_pages(
  saved: SavedPages, offload_pages: Any, log: UndoLog
) -> None:
  """Copies the queue and the counters of a state, and clears the moves."""
  saved.queue.replace(queue_arrays.in_order(offload_pages.queue))
  counts = {
    name: _continued(count, getattr(offload_pages, f"num_{name}"))
    for name, count in saved.counts.items()
  }
  num_taken = int(num_planned(offload_pages))
  log.replace(saved, counts=counts, moves=[], num_taken=num_taken)


def _adopt_index(state: HostState, arrays: IndexArrays, host: Any) -> None:
  """Copies the contents and ages of pages, and the set of cached pages."""
  # A page differs if the host filled it after the last update of `arrays`, if
  # its key or stamp changed, or if it was published or evicted. Positions are
  # not compared, because a position can change without the content.
  pool, index, ages = state.pool, host.pool.index, host.pool.ages
  before, cached = arrays.index.entry, are_cached(index.entry)
  differs = (before != index.entry)[:, : KEY_WORDS + 1].any(axis=1)
  is_fresh = arrays.are_fresh()
  differs |= is_fresh | (np.array(pool.is_cached, bool) != cached)
  changed = np.flatnonzero(differs)
  clock = _continued(pool.clock, index.clock)

  def clocks(stamps: np.ndarray) -> list[int]:
    # The distance between stamp and clock is the same on device and host.
    return (clock - (index.clock - stamps).astype(np.int64)).tolist()

  pages = changed.tolist()
  # A content that moved between device and offload memory keeps its node.
  sources = np.flatnonzero(differs & ~is_fresh).tolist()
  keys = map(tuple, before[sources, :KEY_WORDS].tolist())
  page_of_key = dict(zip(keys, sources, strict=True))
  contents, groups = _contents(state, host, pages, page_of_key)
  pool.set_listed([page for page in pages if pool.is_cached[page]], False)
  pool.set_contents(
    pages,
    contents,
    groups,
    clocks(index.entry[changed, KEY_WORDS]),
    cached[changed].tolist(),
  )
  state.undo_log.replace(pool, clock=clock)
  # Copies, because the arrays may share memory with a state that is donated.
  arrays.replace(jax.tree.map(np.copy, index), clock)
  # The model has written all states that the loop published.
  state.undo_log.replace(state, step_clock=clock)
  if ages is not None:
    state.undo_log.replace(
      pool,
      released=clocks(ages.released),
      lifetime=ages.evicted.lifetime.tolist(),
      idle=ages.evicted.idle.tolist(),
    )


def _contents(
  state: HostState, host: Any, pages: list[int], page_of_key: dict[Any, int]
) -> tuple[list[Any], list[int]]:
  """Returns the content and group of each changed page; group 0 if unknown.

  `page_of_key` maps a key to the page that has this content in the manager.
  """
  index, log = host.pool.index, host.pool.events
  group_of = dict.fromkeys(pages, 0)
  if log is not None:
    group_of = dict(zip(pages, log.group_of[pages].tolist(), strict=True))
  keys = map(tuple, index.entry[pages, :KEY_WORDS].tolist())
  contents: dict[int, Any] = {}
  for page, key in zip(pages, keys, strict=True):
    contents[page] = DevicePage(key, index.tokens[page].tobytes())
    source = page_of_key.get(key)
    if source is not None:
      contents[page] = state.pool.content[source]
      group_of[page] = state.pool.group[source]
  for held in state.all_held():
    _add_held(state, held, contents, group_of)
  return [*contents.values()], [*group_of.values()]


def _add_held(
  state: HostState,
  held: HeldSequence,
  contents: dict[int, Any],
  group_of: dict[int, int],
) -> None:
  """Sets the contents and groups of the changed pages that a request holds."""
  # A lookup finds a page with a `PrefixNode` without computing device keys.
  for group in state.groups:
    nodes = held.nodes[group.step - 1 :: group.step]
    stop = group.final_pages(held.length)
    for column, page in enumerate(held.tables[group.number]):
      if page in contents:
        group_of[page] = group.number
        if column < stop:
          contents[page] = nodes[column]
