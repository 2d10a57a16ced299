"""Converts the state of a manager to a `CacheState`."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.pool.offload_pages import OffloadPages
from jaxkv._src.cache.pool.page_pool import PoolState
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import Status
from jaxkv._src.cache.stats import COUNTERS
from jaxkv._src.host.bridge import free_queue
from jaxkv._src.host.bridge import slot_hashes
from jaxkv._src.host.saved_pages import SAVED_COUNTERS
from jaxkv._src.host.saved_pages import SavedPages
from jaxkv._src.host.saved_pages import as_arrays
from jaxkv._src.host.state import HostState


def to_device(state: HostState) -> CacheState:
  """Returns `CacheManager.state`: copies, which later calls do not change."""
  wrong = [kind for kind in state.config.groups if not kind.is_on_device]
  if wrong:
    raise ValueError(
      f"`groups` must be kinds that a device has for `state`, got {wrong}; "
      "such groups have no loops on the device."
    )
  saved = state.pool.saved
  if saved is not None and saved.moves:
    raise ValueError(
      "`take_moves` must be called before `state` is read, got "
      f"{len(saved.moves)} moves that were not taken; perform them first."
    )
  config = state.config
  held = [*state.held.values()]
  keys = state.device_keys
  rows = config.num_slots, config.num_groups
  table = np.full((*rows, config.pages_per_slot), config.no_page, np.int32)
  num_pages = np.zeros(rows, np.int32)
  skipped = np.zeros(rows, np.int32)
  length = np.zeros(rows[:1], np.int32)
  for sequence in held:
    for group, pages in enumerate(sequence.tables):
      table[sequence.slot, group, : len(pages)] = pages
      num_pages[sequence.slot, group] = len(pages)
    skipped[sequence.slot] = sequence.skipped
    length[sequence.slot] = sequence.length
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
    counts=_words([state.pool.counts[name] for name in COUNTERS]),
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
  pool = state.pool
  config = state.config
  arrays = state.index_arrays
  make: Any = PoolState
  return make(
    unhashed_first=pool.unhashed_first,
    ref_count=np.array(pool.ref_count, np.int32),
    pin_count=np.array(pool.pin_count, np.int32),
    queue=free_queue.from_order(config.total_pages, pool.queue.in_order()),
    index=arrays and arrays.update(),
    offload=pool.saved and _offload_pages(config, pool.saved),
  )


def _offload_pages(config: CacheConfig, saved: SavedPages) -> OffloadPages:
  make: Any = OffloadPages
  return make(
    saves=saved.saves,
    queue=free_queue.from_order(
      config.num_offload_pages + 1, saved.queue.in_order()
    ),
    moves=as_arrays([], config.total_pages, saved.num_taken),
    # A manager has no epochs, so no page is stale.
    stale_before=_words(0),
    **{f"num_{name}": _words(saved.counts[name]) for name in SAVED_COUNTERS},
  )
