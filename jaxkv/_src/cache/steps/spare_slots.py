"""Spare slots: additional slots that exist during one call."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.cache.prefix import hashing
from jaxkv._src.cache.state import CacheState


def with_spare_slots(state: CacheState, num_slots: int) -> CacheState:
  """Returns a cache of the same pages with `num_slots` other slots, all empty.

  The reference counts of the returned cache include the slots of both caches.
  So do not call verbs on `state` before `take_slots` moves the sequences there.
  """
  config = dataclasses.replace(state.config, num_slots=num_slots)
  rows = (num_slots, config.num_groups)
  return dataclasses.replace(
    state,
    config=config,
    page_table=jnp.full(
      (*rows, config.pages_per_slot), config.no_page, jnp.int32
    ),
    num_pages=jnp.zeros(rows, jnp.int32),
    num_skipped_pages=jnp.zeros(rows, jnp.int32),
    length=jnp.zeros((num_slots,), jnp.int32),
    hashes=hashing.init_slots(config),
  )


def take_slots(
  state: CacheState, spare_cache: CacheState, slots: Array
) -> CacheState:
  """Moves the sequence of each spare slot r into slot `slots[r]`.

  Args:
    state: the cache.
    spare_cache: the result of `with_spare_slots`, after calls of verbs.
    slots: int32[R], distinct empty slots; out of range for an empty spare slot.

  Returns:
    The cache, with the pool and the counters of `spare_cache`.
  """

  def put(array: Array, values: Array) -> Array:
    return indexing.put(array, slots, values=values)

  names = ("page_table", "num_pages", "num_skipped_pages", "length", "hashes")
  fields = {
    name: jax.tree.map(put, getattr(state, name), getattr(spare_cache, name))
    for name in names
  }
  return dataclasses.replace(
    state, pool=spare_cache.pool, stats=spare_cache.stats, **fields
  )
