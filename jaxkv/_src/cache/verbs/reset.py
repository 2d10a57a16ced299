"""reset_prefix_cache, new_epoch, clear_error: reset parts of the state."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import sharding
from jaxkv._src.cache.pool import page_pool
from jaxkv._src.cache.prefix import hashing
from jaxkv._src.cache.prefix import prefix_index
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import Outcome
from jaxkv._src.cache.state import Status
from jaxkv._src.cache.state import first_code
from jaxkv._src.cache.state import verb


class NewEpoch(NamedTuple):
  """The result of `new_epoch`.

  Attributes:
    epoch: uint32[], the new version of the weights.
  """

  epoch: Array


class ClearedError(NamedTuple):
  """The result of `clear_error`.

  Attributes:
    code: int32[], the `Status` that was cleared.
  """

  code: Array


@verb
def reset_prefix_cache(state: CacheState) -> tuple[CacheState, Outcome]:
  """Removes all pages from the prefix index if no page is referenced.

  The free queue keeps its order. The cost grows with the pool. In a loop, use
  `new_epoch`, which has a constant cost.

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
  is_in_use = jnp.any(page_pool.num_in_use(pool) > 0)
  code = first_code((is_in_use, Status.STILL_HELD))
  if pool.index is not None:
    index = jax.tree.map(
      functools.partial(jnp.where, is_in_use),
      pool.index,
      prefix_index.clear(pool.index),
    )
    pool = dataclasses.replace(pool, index=index)
  return dataclasses.replace(state, pool=pool), Outcome(code=code)


@verb
def new_epoch(state: CacheState) -> tuple[CacheState, NewEpoch]:
  """Makes every page cached so far unreachable, at a constant cost.

  Call this verb after a change of weights, so that no lookup finds K/V of the
  old weights. Sequences in slots keep their pages and their epoch. Their later
  pages depend on old K/V, so these pages get keys of the old epoch, and lookups
  do not find them. But `merge_duplicates` can still replace such a page by an
  equal page of the same epoch. Unreachable pages stay in the index until they
  are evicted. Pages published before this call are no longer saved to host
  memory.

  Args:
    state: the cache.

  Returns:
    The cache, and `epoch`, uint32[], the new version of the weights.

  Examples:
    >>> import jaxkv
    >>> state = jaxkv.init(jaxkv.CacheConfig(
    ...   num_pages=8, page_size=2, num_slots=1, pages_per_slot=4))
    >>> state, out = jaxkv.new_epoch(state)
    >>> int(out.epoch)
    1
  """
  epoch = state.epoch + jnp.uint32(1)
  root = state.root
  if root is not None and state.secret is not None:
    # The old root is used, because `jit` drops unused inputs, and then could
    # not reuse the donated buffer of the old root for the new root.
    root = sharding.zeros_like(root) ^ hashing.root_key(
      state.secret, epoch, None
    )
  pool = page_pool.end_epoch(state.pool)
  state = dataclasses.replace(state, epoch=epoch, root=root, pool=pool)
  return state, NewEpoch(epoch)


@verb
def clear_error(state: CacheState) -> tuple[CacheState, ClearedError]:
  """Sets `state.error` to OK, and returns the failure that it recorded.

  Args:
    state: the cache.

  Returns:
    The cache with `error` OK, and `code`, int32[], the cleared failure.

  Examples:
    >>> import jaxkv
    >>> state = jaxkv.init(jaxkv.CacheConfig(
    ...   num_pages=8, page_size=2, num_slots=1, pages_per_slot=4))
    >>> state, _ = jaxkv.allocate(state, [-1])
    >>> state, out = jaxkv.clear_error(state)
    >>> jaxkv.Status(int(out.code)).name, int(state.error)
    ('BAD_LENGTH', 0)
  """
  cleared = ClearedError(state.error)
  return dataclasses.replace(
    state, error=sharding.zeros_like(state.error)
  ), cleared
