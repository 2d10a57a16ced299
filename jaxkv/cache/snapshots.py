"""Columns of groups that hold states: a few pages, far apart.

A state after t tokens stands in the column of token t - 1, and what lies
between two states is null. Behind the running state stand as many scratch
pages as there are speculative tokens; they move along when a sequence grows.
"""

import jax.numpy as jnp
from jax import Array

from jaxkv.cache import indexing
from jaxkv.cache import page_table
from jaxkv.cache.config import CacheConfig


def first_fresh(
  config: CacheConfig, held: Array, stop: Array, begins: Array
) -> Array:
  """The first column of each row that is filled from the free queue.

  Args:
    config: the cache's groups.
    held: int32[R, G], columns in use.
    stop: int32[R, G], columns in use afterwards, not fewer.
    begins: bool[R], sequences that have no scratch pages yet.

  Returns:
    int32[R, G]; `held` itself for groups that hold every token.
  """
  if not config.holds_states:
    return held
  running, moved = _growth(config, held, stop, begins)
  return jnp.where(
    (stop > held) & _states(config), jnp.maximum(held, running) + moved, held
  )


def spread(
  config: CacheConfig,
  table: Array,
  slots: Array,
  held: Array,
  stop: Array,
  begins: Array,
) -> Array:
  """Puts null pages and moved scratch pages before the first fresh column.

  Args:
    config: the cache's groups.
    table: int32[G, B, M].
    slots: int32[R], out of range for rows that do not count.
    held: int32[R, G], as for `first_fresh`.
    stop: int32[R, G], likewise.
    begins: bool[R], likewise.

  Returns:
    The table.
  """
  if not config.holds_states:
    return table
  running, moved = _growth(config, held, stop, begins)
  states = _states(config)
  gap = jnp.where(states & (stop > held), jnp.maximum(held, running), held)
  table = page_table.fill(table, page_table.rows_of(slots, held, gap), 0)
  numbers = jnp.arange(config.num_groups, dtype=jnp.int32)[None]
  scratch = _scratch(config)
  for place in range(max(kind.num_speculative for kind in config.groups)):
    moves = place < moved
    source = indexing.where_valid(moves, held - scratch + place)
    target = indexing.where_valid(moves, gap + place)
    pages = indexing.take(table, numbers, slots[:, None], source)
    table = indexing.put(table, numbers, slots[:, None], target, values=pages)
    table = indexing.put(table, numbers, slots[:, None], source, values=0)
  return table


def _growth(
  config: CacheConfig, held: Array, stop: Array, begins: Array
) -> tuple[Array, Array]:
  """Columns of the running states, and scratch pages that stand before them."""
  scratch = _scratch(config)
  running = stop - scratch - 1
  moved = jnp.minimum(held, running) - (held - scratch)
  moved = jnp.clip(moved, 0, scratch)
  moves = _states(config) & (stop > held) & ~begins[:, None]
  return running, jnp.where(moves, moved, 0)


def _scratch(config: CacheConfig) -> Array:
  """int32[1, G]: scratch pages of a sequence."""
  counts = [kind.num_speculative for kind in config.groups]
  return jnp.asarray([counts], jnp.int32)


def _states(config: CacheConfig) -> Array:
  """bool[1, G]: groups that hold states."""
  return jnp.asarray([[kind.holds_states for kind in config.groups]])
