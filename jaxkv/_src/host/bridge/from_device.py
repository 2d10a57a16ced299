"""Continues a manager from a `CacheState` that a device loop returned."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxkv._src.arrays.arguments import check_type
from jaxkv._src.cache.pool.offload_pages import num_planned
from jaxkv._src.cache.prefix.hashing import KEY_WORDS
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import Status
from jaxkv._src.cache.state import check_single
from jaxkv._src.host.allocate import room_of
from jaxkv._src.host.atomic import UndoLog
from jaxkv._src.host.bridge import free_queue
from jaxkv._src.host.bridge import slot_hashes
from jaxkv._src.host.bridge.prefix_index import IndexArrays
from jaxkv._src.host.bridge.prefix_index import are_cached
from jaxkv._src.host.prefix_nodes import DevicePage
from jaxkv._src.host.publish import more_nodes
from jaxkv._src.host.saved_pages import SavedPages
from jaxkv._src.host.state import HeldSequence
from jaxkv._src.host.state import HostState


def from_device(
  state: HostState, device: CacheState, requests: Mapping[int, Any]
) -> list[str]:
  """Replaces the state of a manager; see `CacheManager.take`."""
  check_single(device)
  expected = "a dictionary from slots to requests"
  check_type("requests", requests, Mapping, expected)
  _check_identity(state, device)
  host: Any = jax.device_get(device)
  sequences = _sequences(state, host, requests)
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
      for held in state.held.values()
      if held.slot not in requests
    }
    slot_hashes.check(
      state, state.device_keys, host.hashes, [*held.values()], counts
    )
  # All checks are done before the first change.
  log = state.undo_log
  pool = state.pool
  # Slots that were vacant before are used first, in the same order.
  vacant = [slot for slot in state.vacant if slot not in sequences]
  new_vacant = set(range(state.config.num_slots)) - set(sequences) - set(vacant)
  vacant = sorted(new_vacant, reverse=True) + vacant
  log.replace(state, held=held, vacant=vacant)
  ref_count = host.pool.ref_count.tolist()
  pairs = zip(pool.ref_count, ref_count, strict=True)
  freed = [page for page, (old, new) in enumerate(pairs) if old and not new]
  log.replace(
    pool,
    ref_count=ref_count,
    pin_count=host.pool.pin_count.tolist(),
    counts={
      name: _continued(count, getattr(host.stats, name))
      for name, count in pool.counts.items()
    },
  )
  pool.queue.replace(free_queue.in_order(host.pool.queue))
  if pool.saved is not None:
    _adopt_offload_pages(pool.saved, host.pool.offload, log)
  if state.index_arrays is not None:
    _adopt_index(state, state.index_arrays, host)
  # The time at which the loop released these pages is unknown.
  pool.stamp_released(freed)
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
  before: dict[int, HeldSequence | None]
  before = {held.slot: held for held in state.held.values()}
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
  state: HostState, host: Any, slot: int, old: HeldSequence | None, request: Any
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
    num_aligned = slot_hashes.aligned(config, held.length)
    held.root = old.root
    held.nodes = old.nodes[: num_aligned // config.page_size]
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
  saved.queue.replace(free_queue.in_order(offload_pages.queue))
  counts = {
    name: _continued(count, getattr(offload_pages, f"num_{name}"))
    for name, count in saved.counts.items()
  }
  num_taken = int(num_planned(offload_pages))
  log.replace(saved, counts=counts, moves=[], num_taken=num_taken)


def _adopt_index(state: HostState, arrays: IndexArrays, host: Any) -> None:
  """Copies the contents of pages and the set of cached pages; logs events."""
  # A page differs if the host filled it after the last update of `arrays`, if
  # its key or stamp changed, or if it was published or evicted. Positions are
  # not compared, because a position can change without the content.
  pool = state.pool
  index = host.pool.index
  before = arrays.index.entry
  cached = are_cached(index.entry)
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
  removed, stored = _index_changes(state, index, pages, cached)
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
  if state.events is not None:
    # A page is published after the page before it, so parents come first.
    stored.sort(key=pool.stamp.__getitem__)
    tokens = {page: tuple(index.tokens[page].tolist()) for page in stored}
    state.events.add_changes(removed, tokens)


def _index_changes(
  state: HostState, index: Any, pages: list[int], cached: np.ndarray
) -> tuple[list[tuple[int, Any, int]], list[int]]:
  """Compares the cached pages of a manager with those of a device.

  Returns:
    The page, content and group of each page that left the index, and the pages
    that entered it. A key that left one page and entered another one is not
    reported with offload pages, because contents move there and back.
  """
  pool, keys = state.pool, state.device_keys
  if state.events is None or keys is None:
    return [], []
  was_cached = [page for page in pages if pool.is_cached[page]]
  keys.compute(pool.content[page] for page in was_cached)
  old_keys = {
    page: keys.group_key(pool.content[page], pool.group[page])
    for page in was_cached
  }
  new_keys = {
    page: tuple(index.entry[page, :KEY_WORDS].tolist())
    for page in pages
    if cached[page]
  }
  removed = {p: key for p, key in old_keys.items() if new_keys.get(p) != key}
  stored = {p: key for p, key in new_keys.items() if old_keys.get(p) != key}
  if pool.saved is not None:
    page_of_key = {key: page for page, key in stored.items()}
    for page, key in [*removed.items()]:
      target = page_of_key.pop(key, None)
      if target is not None:
        del removed[page], stored[target]
  return [(p, pool.content[p], pool.group[p]) for p in removed], [*stored]


def _contents(
  state: HostState, host: Any, pages: list[int], page_of_key: dict[Any, int]
) -> tuple[list[Any], list[int]]:
  """Returns the content and group of each changed page; group 0 if unknown.

  `page_of_key` maps a key to the page that has this content in the manager.
  """
  index = host.pool.index
  group_of = dict.fromkeys(pages, 0)
  keys = map(tuple, index.entry[pages, :KEY_WORDS].tolist())
  contents: dict[int, Any] = {}
  for page, key in zip(pages, keys, strict=True):
    contents[page] = DevicePage(key, index.tokens[page].tobytes())
    source = page_of_key.get(key)
    if source is not None:
      contents[page] = state.pool.content[source]
      group_of[page] = state.pool.group[source]
  for held in state.held.values():
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
    num_final = group.final_pages(held.length)
    for column, page in enumerate(held.tables[group.number]):
      if page in contents:
        group_of[page] = group.number
        if column < num_final:
          contents[page] = nodes[column]
