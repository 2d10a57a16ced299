"""Formats a cache state in one line."""

import enum
from typing import Any

import jax
import jax.core
import numpy as np


def describe(state: Any, status: type[enum.IntEnum]) -> str:
  """Returns a line that describes a cache.

  If the arrays can be read, the line describes the contents of the cache, as in
  `CacheState(5 of 63 pages in use, 12 free pages cached; 2 of 4 slots, 30
  tokens; FullAttention; OK)`. Otherwise, it has the sizes and the reason.

  Args:
    state: a CacheState, or a tree with its structure.
    status: the enum that names the values of `state.error`.
  """
  # JAX formats states in its error messages, even if their leaves are tracers,
  # shapes or donated buffers. So this function must never raise.
  config = state.config
  kinds = ", ".join(_kind_names(config.groups))
  obstacle = _obstacle(state)
  if obstacle:
    return (
      f"CacheState({config.total_pages - config.num_pools} pages of"
      f" {config.page_size} tokens;"
      f" {config.num_slots} slots; {kinds}; {obstacle})"
    )
  running = np.asarray(state.num_pages)[:, 0] > 0
  usable_pages = np.asarray(config.numbers.sizes) - 1
  num_used = usable_pages - np.asarray(state.pool.queue.num_free)
  suffixes = [f" of pool {pool}" for pool in range(config.num_pools)]
  if config.num_pools == 1:
    suffixes = [""]
  pages = [
    f"{num_used[pool]} of {usable_pages[pool]} pages{suffix} in use"
    for pool, suffix in enumerate(suffixes)
  ]
  if state.pool.index is not None:
    buckets = np.asarray(state.pool.index.buckets)
    cached = buckets[buckets > 0]
    on_device = cached[cached < config.total_pages]
    free = np.asarray(state.pool.ref_count)[on_device] == 0
    pages.append(f"{np.count_nonzero(free)} free pages cached")
    if state.pool.offload is not None:
      num_offloaded = len(cached) - len(on_device)
      pages.append(
        f"{num_offloaded} of {config.num_offload_pages} offload pages cached"
      )
  error = int(state.error)
  return (
    f"CacheState({', '.join(pages)};"
    f" {np.count_nonzero(running)} of {config.num_slots} slots,"
    f" {np.asarray(state.length).sum()} tokens; {kinds};"
    f" {status(error).name if error in list(status) else error})"
  )


def _kind_names(groups: tuple[Any, ...]) -> list[str]:
  """Returns the group kinds with their counts, such as `2 SlidingWindow`."""
  names = [type(kind).__name__ for kind in groups]
  distinct = dict.fromkeys(names)
  return [
    name if names.count(name) == 1 else f"{names.count(name)} {name}"
    for name in distinct
  ]


def _obstacle(state: Any) -> str:
  """Returns the reason why values cannot be read, or an empty string."""
  leaves = jax.tree.leaves(state)
  if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
    return "traced"
  arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array | np.ndarray)]
  if not leaves or len(arrays) < len(leaves):
    return "leaves are not arrays"
  if state.length.ndim > 1:
    return f"a stack of {state.length.shape[:-1]}"
  arrays = [leaf for leaf in arrays if isinstance(leaf, jax.Array)]
  if any(leaf.is_deleted() for leaf in arrays):
    return "donated"
  if not all(leaf.is_fully_addressable for leaf in arrays):
    return "on several hosts"
  return ""
