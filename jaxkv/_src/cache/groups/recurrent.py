"""Columns of groups that hold states: a few pages, far apart.

A state after t tokens stands in the column of token t - 1, and what lies
between two states is null. Behind the running state stand as many scratch
pages as there are speculative tokens; they move along when a sequence grows.
"""

import jax.numpy as jnp
from jax import Array

from jaxkv._src.cache import masked
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.groups import sizes as groups
from jaxkv._src.cache.pool import page_table


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
  return _moved(config, table, slots, moved, held - _scratch(config), gap, 0)


def drawn_back(
  config: CacheConfig,
  table: Array,
  held: Array,
  keep: Array,
  left: Array,
) -> Array:
  """Puts the scratch pages behind column `keep`, where nothing is any more.

  Args:
    config: the cache's groups.
    table: int32[G, B, M].
    held: int32[B, G], columns in use, those of the scratch pages the last.
    keep: int32[B, G].
    left: int32[B, G], how many of the scratch pages remain.

  Returns:
    The table.
  """
  if not config.holds_states:
    return table
  slots = jnp.arange(config.num_slots, dtype=jnp.int32)
  moved = jnp.where(keep + left < held, left, 0)
  return _moved(config, table, slots, moved, held - left, keep, config.no_page)


def num_scratch(config: CacheConfig, held: Array, keep: Array) -> Array:
  """int32[R, G]: scratch pages among the columns `keep .. held`."""
  scratch = jnp.broadcast_to(_scratch(config), held.shape)
  return jnp.clip(held - keep, 0, scratch)


def can_go_on(
  config: CacheConfig, table: Array, slots: Array, length: Array, tokens: Array
) -> Array:
  """bool[R]: whether all states after so many tokens are kept.

  Args:
    config: the cache's groups.
    table: int32[G, B, M].
    slots: int32[R].
    length: int32[R], tokens of the sequences: the last state.
    tokens: int32[R], 0 .. length; before it, only ends of pages have a state.
  """
  if not config.holds_states:
    return tokens >= 0
  last = groups.by_group(config, lambda _, size: (tokens - 1) // size)
  numbers = jnp.arange(config.num_groups, dtype=jnp.int32)[None]
  page = masked.take(table, numbers, slots[:, None], last)
  inside = groups.open_pages(config, tokens) & (tokens < length)[:, None]
  kept = ((page > 0) & ~inside) | ~jnp.broadcast_to(_states(config), page.shape)
  return (tokens == 0) | jnp.all(kept, axis=1)


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


def _moved(
  config: CacheConfig,
  table: Array,
  slots: Array,
  counts: Array,
  source: Array,
  target: Array,
  left: int,
) -> Array:
  """Moves pages to other columns of their rows, and puts `left` behind them.

  Args:
    config: the cache's groups.
    table: int32[G, B, M].
    slots: int32[R], out of range for rows that do not count.
    counts: int32[R, G], pages to move, no more than are speculative.
    source: int32[R, G], the column of the first.
    target: int32[R, G], where it goes.
    left: a page number.

  Returns:
    The table.
  """
  row = (jnp.arange(config.num_groups, dtype=jnp.int32)[None], slots[:, None])
  for place in range(max(kind.num_speculative for kind in config.groups)):
    moves = place < counts
    old = masked.where_valid(moves, source + place)
    new = masked.where_valid(moves, target + place)
    pages = masked.take(table, *row, old)
    table = masked.put(table, *row, new, values=pages)
    table = masked.put(table, *row, old, values=left)
  return table


def _scratch(config: CacheConfig) -> Array:
  """int32[1, G]: scratch pages of a sequence."""
  counts = [kind.num_speculative for kind in config.groups]
  return jnp.asarray([counts], jnp.int32)


def _states(config: CacheConfig) -> Array:
  """bool[1, G]: groups that hold states."""
  return jnp.asarray([[kind.holds_states for kind in config.groups]])
