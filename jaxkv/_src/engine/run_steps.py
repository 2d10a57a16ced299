"""Runs steps in a loop, and evicts the pages of sequences with bad logits.

If the logits of a sequence are not a distribution, its K/V may hold NaN. A
later sequence that found one of its pages in the prefix index would fail too.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import sharding
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.steps.unpublish import unpublish_unheld
from jaxkv._src.engine.queue.queue import Queue
from jaxkv._src.engine.state import RolloutState
from jaxkv._src.engine.step import Buffers

_Loop = tuple[RolloutState, Buffers]


def run_steps(
  goes_on: Callable[[RolloutState], Array],
  one_step: Callable[[_Loop], _Loop],
  state: RolloutState,
  buffers: Buffers,
) -> _Loop:
  """Runs steps while `goes_on(state)`, bool[], is True on any shard.

  After a step in which sequences fail with BAD_LOGITS, their pages leave the
  index, on the device and in offload memory, unless a running sequence holds
  them.
  """
  axis = state.config.lockstep_axis

  def is_unfinished(loop: _Loop) -> Array:
    return sharding.any_shard(goes_on(loop[0]), axis)

  if state.queue.page_keys is None:
    return lax.while_loop(is_unfinished, one_step, (state, buffers))

  def is_undisturbed(loop: _Loop) -> Array:
    state, buffers = loop
    fails = _any_exists(state.queue, buffers.bad_rows)
    if axis is None:
      return goes_on(state) & ~fails
    flags = jnp.stack([goes_on(state), fails])
    flags = sharding.any_shard(flags, axis)
    return flags[0] & ~flags[1]

  # The eviction is outside of the loop over steps, so a step in which no
  # sequence fails has neither its kernels nor a wait of the host.
  def run_and_evict(loop: _Loop) -> _Loop:
    state, buffers = lax.while_loop(is_undisturbed, one_step, loop)
    with jax.named_scope("rare/evict"):
      cache, rows = _evict(state.queue, state.memory.cache, buffers.bad_rows)
    memory = dataclasses.replace(state.memory, cache=cache)
    state = dataclasses.replace(state, memory=memory)
    return state, buffers._replace(bad_rows=rows)

  return lax.while_loop(is_unfinished, run_and_evict, (state, buffers))


def _evict(
  queue: Queue, cache: CacheState, rows: Array | None
) -> tuple[CacheState, Array]:
  """Removes pages of rows int32[B] from the index, unless a slot holds them.

  Returns:
    The cache; int32[B], all Q.
  """
  page_size = cache.config.page_size
  page_keys = queue.page_keys
  assert rows is not None and page_keys is not None

  def evict_one(loop: tuple[CacheState, Array]) -> tuple[CacheState, Array]:
    cache, rows = loop
    index = jnp.argmin(rows).astype(jnp.int32)
    row = rows[index]
    keys = indexing.take(page_keys, row)
    tokens = indexing.take(queue.tokens, row)[: keys.shape[0] * page_size]
    cache, was_cached = unpublish_unheld(
      cache,
      keys,
      tokens.reshape(keys.shape[0], page_size),
      indexing.take(queue.length, row),
    )
    row = jnp.where(was_cached, row, queue.no_row)
    return cache, rows.at[index].set(row)

  return lax.while_loop(
    lambda loop: _any_exists(queue, loop[1]), evict_one, (cache, rows)
  )


def _any_exists(queue: Queue, rows: Array | None) -> Array:
  """Returns bool[], False if all of the rows int32[B] are Q."""
  assert rows is not None
  return jnp.any(rows < queue.no_row)
