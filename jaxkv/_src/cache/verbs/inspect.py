"""Looking at a cache without changing it."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxkv._src.cache.pool import free_queue
from jaxkv._src.cache.pool import page_pool
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import Stats
from jaxkv._src.cache.state import check_single
from jaxkv._src.cache.telemetry.residency import Residency
from jaxkv._src.cache.verb import verb


@verb
def stats(state: CacheState) -> Stats:
  """The counters; subtract two readings to get an interval.

  Args:
    state: the cache.

  Returns:
    uint32[] counters, which wrap around.

  Examples:
    >>> import jaxkv
    >>> state = jaxkv.init(jaxkv.CacheConfig(
    ...   num_pages=8, page_size=2, num_slots=1, pages_per_slot=4))
    >>> int(jaxkv.stats(state).evicted)
    0
  """
  # New buffers: a reading outlives the state, which may be donated.
  return jax.tree.map(lambda counter: counter + jnp.uint32(0), state.stats)


@verb
def residency(state: CacheState) -> Residency:
  """How old the evicted pages were; subtract two readings for an interval.

  Only what makes room for something new is evicted: pages that `evict`,
  `truncate` or a reset take out of the index do not count.

  Args:
    state: a cache with `CacheConfig.track_residency`.

  Returns:
    Counts by age.

  Raises:
    ValueError: the cache does not keep them.

  Examples:
    >>> import jaxkv
    >>> state = jaxkv.init(jaxkv.CacheConfig(num_pages=8, page_size=2,
    ...   num_slots=1, pages_per_slot=4, track_residency=True))
    >>> int(jaxkv.residency(state).idle.sum())
    0
  """
  if state.pool.ages is None:
    raise ValueError(
      "The cache does not keep the ages of its pages; make it with "
      "CacheConfig(track_residency=True)."
    )
  # New buffers: a reading outlives the state, which may be donated.
  return jax.tree.map(
    lambda bins: bins + jnp.uint32(0), state.pool.ages.evicted
  )


@verb
def usage(state: CacheState) -> Array:
  """The part of the pool that is referenced; the null page does not count.

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
  pages = state.config.num_pages - 1
  used = pages - state.pool.queue.num_free
  return used.astype(jnp.float32) / pages


@verb
def num_common_prefix_pages(state: CacheState) -> Array:
  """Leading pages that all sequences share.

  Compares the page tables themselves: reference counts alone would also count
  pages shared by some sequences only.

  Args:
    state: the cache.

  Returns:
    int32[G]; 0 where no slot holds a page, all its pages where one does.

  Examples:
    >>> import jaxkv
    >>> state = jaxkv.init(jaxkv.CacheConfig(
    ...   num_pages=8, page_size=2, num_slots=1, pages_per_slot=4))
    >>> jaxkv.num_common_prefix_pages(state).tolist()
    [0]
  """
  lead = state.num_pages[state.config.lead_group]
  active = jnp.broadcast_to(lead > 0, state.num_pages.shape)
  first = jnp.argmax(active, axis=1)[:, None, None]
  sample = jnp.take_along_axis(state.page_table, first, axis=1)
  same = (state.page_table == sample) | ~active[..., None]
  here = (sample[:, 0] > 0) & (sample[:, 0] < state.config.no_page)
  common = jnp.all(same, axis=1) & here & jnp.any(active, axis=1)[:, None]
  return jnp.sum(
    jnp.cumprod(common, axis=1, dtype=jnp.int32), axis=1, dtype=jnp.int32
  )


def free_pages(state: CacheState) -> list[int]:
  """The free pages in the order in which they will be taken. On the host.

  Args:
    state: the cache.

  Returns:
    Page numbers.

  Examples:
    >>> import jaxkv
    >>> state = jaxkv.init(jaxkv.CacheConfig(
    ...   num_pages=4, page_size=2, num_slots=1, pages_per_slot=4))
    >>> jaxkv.free_pages(state)
    [1, 2, 3]
  """
  check_single(state)
  count = int(state.pool.queue.num_free)
  return np.asarray(free_queue.in_order(state.pool.queue))[:count].tolist()


def cached_pages(state: CacheState) -> list[int]:
  """The pages that are cached, in ascending order. On the host.

  Args:
    state: the cache.

  Returns:
    Page numbers.

  Examples:
    >>> import jaxkv
    >>> state = jaxkv.init(jaxkv.CacheConfig(
    ...   num_pages=4, page_size=2, num_slots=1, pages_per_slot=4))
    >>> jaxkv.cached_pages(state)
    []
  """
  check_single(state)
  pages = jnp.arange(state.config.num_pages, dtype=jnp.int32)
  cached = np.asarray(page_pool.is_cached(state.pool, pages))
  return np.flatnonzero(cached).tolist()
