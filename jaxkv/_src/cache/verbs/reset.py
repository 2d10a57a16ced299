"""reset_prefix_cache, new_epoch, clear_error: what was no longer counts."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv._src.cache.prefix import prefix_index
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import counted
from jaxkv._src.cache.status import Code
from jaxkv._src.cache.status import first_code
from jaxkv._src.cache.status import is_failure
from jaxkv._src.cache.status import sticky
from jaxkv._src.cache.telemetry import event_log
from jaxkv._src.cache.verb import verb


class Reset(NamedTuple):
  """What `reset_prefix_cache` did.

  Attributes:
    code: int32[], a `Code`.
  """

  code: Array

  @property
  def ok(self) -> Array:
    """bool[]: whether the prefix cache is empty now."""
    return self.code == Code.OK


@verb
def reset_prefix_cache(state: CacheState) -> tuple[CacheState, Reset]:
  """Drops every key, if no page is referenced; the queue keeps its order.

  The one verb whose cost grows with the pool. Inside a loop `new_epoch` does
  the same for lookups at once.

  Args:
    state: the cache.

  Returns:
    The cache, and OK or STILL_HELD.

  Examples:
    >>> import jaxkv
    >>> state = jaxkv.init(jaxkv.CacheConfig(
    ...   num_pages=8, page_size=2, num_slots=1, pages_per_slot=4))
    >>> state, out = jaxkv.reset_prefix_cache(state)
    >>> bool(out.ok)
    True
  """
  pool = state.pool
  held = pool.queue.num_free < state.config.num_pages - 1
  code = first_code((held, Code.STILL_HELD))
  if pool.index is not None:
    index = jax.tree.map(
      lambda old, new: jnp.where(held, old, new),
      pool.index,
      prefix_index.clear(pool.index),
    )
    pool = dataclasses.replace(pool, index=index)
  if pool.events is not None:
    events = event_log.cleared(pool.events, ~held)
    pool = dataclasses.replace(pool, events=events)
  state = dataclasses.replace(
    state,
    pool=pool,
    stats=counted(state.stats, failed=is_failure(code)),
    error=sticky(state.error, code),
  )
  return state, Reset(code)


@verb
def new_epoch(state: CacheState) -> CacheState:
  """Makes every page cached so far unreachable, at once.

  For a change of weights: K/V computed with the old ones must not be hit.
  Running sequences keep their pages, and what they publish from now on stays
  unreachable too, since it rests on old K/V; a sequence runs from its admission
  on, with or without a committed token. Old pages are evicted as they come up
  in the free queue.

  Args:
    state: the cache.

  Returns:
    The cache.

  Examples:
    >>> import jaxkv
    >>> state = jaxkv.init(jaxkv.CacheConfig(
    ...   num_pages=8, page_size=2, num_slots=1, pages_per_slot=4))
    >>> int(jaxkv.new_epoch(state).epoch)
    1
  """
  return dataclasses.replace(state, epoch=state.epoch + jnp.uint32(1))


@verb
def clear_error(state: CacheState) -> CacheState:
  """Forgets the recorded failure, once it was dealt with.

  Args:
    state: the cache.

  Returns:
    The cache, with `error` OK.

  Examples:
    >>> import jaxkv
    >>> state = jaxkv.init(jaxkv.CacheConfig(
    ...   num_pages=8, page_size=2, num_slots=1, pages_per_slot=4))
    >>> int(jaxkv.clear_error(state).error)
    0
  """
  return dataclasses.replace(state, error=state.error & 0)
