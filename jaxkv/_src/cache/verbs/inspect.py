"""Reads a cache: counters and pages."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxkv._src.arrays.arguments import as_count
from jaxkv._src.arrays.arguments import refuse
from jaxkv._src.cache.pool import free_queue
from jaxkv._src.cache.pool import page_pool
from jaxkv._src.cache.pool.page_pool import PoolState
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import check_single
from jaxkv._src.cache.state import verb
from jaxkv._src.cache.stats import Stats


@verb
def stats(state: CacheState) -> Stats:
  """Returns the counters; subtract two readings to count an interval.

  Args:
    state: the cache.

  Returns:
    uint32[] counters, modulo 2**32.

  Examples:
    >>> import jaxkv
    >>> state = jaxkv.init(jaxkv.CacheConfig(
    ...   num_pages=8, page_size=2, num_slots=1, pages_per_slot=4))
    >>> int(jaxkv.stats(state).evicted_pages)
    0
  """
  counters = state.stats
  offload = state.pool.offload
  if offload is not None:
    counters = dataclasses.replace(
      counters,
      saved_pages=offload.num_saved,
      restored_pages=offload.num_restored,
      forgotten_pages=offload.num_forgotten,
      dropped_pages=offload.num_dropped,
    )
  # Copies, which stay valid if the caller donates the state.
  return jax.tree.map(lambda counter: counter + jnp.uint32(0), counters)


@verb
def usage(state: CacheState) -> Array:
  """Returns the fraction of pages in use, in the fullest pool.

  Pages that no sequence can get, such as the null page, do not count.

  Args:
    state: the cache.

  Returns:
    float32[], 0 .. 1.

  Examples:
    >>> import jaxkv
    >>> state = jaxkv.init(jaxkv.CacheConfig(
    ...   num_pages=8, page_size=2, num_slots=1, pages_per_slot=4))
    >>> float(jaxkv.usage(state))
    0.0
  """
  usable_pages = jnp.asarray(state.config.numbers.sizes, jnp.float32) - 1
  num_used = page_pool.num_in_use(state.pool).astype(jnp.float32)
  return jnp.max(num_used / usable_pages)


@verb
def num_common_prefix_pages(state: CacheState) -> Array:
  """Counts the leading pages that all sequences share.

  Args:
    state: the cache.

  Returns:
    int32[G]; 0 if no slot holds a page, or if the first page of a sequence was
    skipped. All pages of a single sequence count.

  Examples:
    >>> import jaxkv
    >>> state = jaxkv.init(jaxkv.CacheConfig(
    ...   num_pages=8, page_size=2, num_slots=1, pages_per_slot=4))
    >>> jaxkv.num_common_prefix_pages(state).tolist()
    [0]
  """
  # Reference counts are not used here, because they also include pins.
  active = state.num_pages[:, 0] > 0
  first_row = state.page_table[jnp.argmax(active)]
  is_shared = (state.page_table == first_row[None]) | ~active[:, None, None]
  has_page = (first_row > 0) & (first_row < state.config.no_page)
  common = jnp.all(is_shared, axis=0) & has_page & jnp.any(active)
  # The cumulative product is 1 before the first column that is not common.
  return jnp.sum(
    jnp.cumprod(common, axis=1, dtype=jnp.int32), axis=1, dtype=jnp.int32
  )


def free_pages(state: CacheState, *, pool: int | None = None) -> list[int]:
  """Returns the free pages in eviction order. Runs on the host.

  Args:
    state: the cache.
    pool: the index of a pool; None for all pools, one after the other.

  Returns:
    Page numbers.

  Raises:
    TypeError: `pool` is not an int, or `state` is not a CacheState.
    ValueError: the pool does not exist, or `state` is a stack of states.

  Examples:
    >>> import jaxkv
    >>> state = jaxkv.init(jaxkv.CacheConfig(
    ...   num_pages=4, page_size=2, num_slots=1, pages_per_slot=4))
    >>> jaxkv.free_pages(state)
    [1, 2, 3]
  """
  check_single(state)
  num_pools = state.config.num_pools
  if pool is not None and as_count("pool", pool, 0) >= num_pools:
    refuse(ValueError, "pool", f"below {num_pools}, the number of pools", pool)
  pages = np.asarray(_in_order(state.pool.queue)).reshape(num_pools, -1)
  pages = pages if pool is None else pages[pool]
  return pages[pages > 0].tolist()


def cached_pages(state: CacheState) -> list[int]:
  """Returns the cached pages in ascending order. Runs on the host.

  Args:
    state: the cache.

  Returns:
    Page numbers; with one pool, offload page h has the number `num_pages + 1 +
    h`.

  Examples:
    >>> import jaxkv
    >>> state = jaxkv.init(jaxkv.CacheConfig(
    ...   num_pages=4, page_size=2, num_slots=1, pages_per_slot=4))
    >>> jaxkv.cached_pages(state)
    []
  """
  check_single(state)
  return np.flatnonzero(np.asarray(_are_cached(state.pool))).tolist()


_in_order = jax.jit(free_queue.in_order)


@jax.jit
def _are_cached(pool: PoolState) -> Array:
  count = 0 if pool.index is None else pool.index.entry.shape[0]
  return page_pool.is_cached(pool, jnp.arange(count, dtype=jnp.int32))
