"""Columns of recurrent groups: few pages, far apart.

The state after t tokens stands in the column of token t - 1; columns between
two states hold the null page. Behind the running state stand the scratch pages,
one for each speculative token; they move along when a sequence grows.

For caches without recurrent groups every function here is the identity.
"""

import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.pool import page_table


def has_states(config: CacheConfig) -> bool:
  """Whether some group is recurrent."""
  return any(kind.holds_states for kind in config.groups)


def holds_states(config: CacheConfig) -> Array:
  """bool[1, G]: the recurrent groups."""
  return jnp.asarray([[kind.holds_states for kind in config.groups]])


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
  if not has_states(config):
    return held
  running, moved = _growth(config, held, stop, begins)
  return jnp.where(
    (stop > held) & holds_states(config),
    jnp.maximum(held, running) + moved,
    held,
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
    table: int32[B, G, M].
    slots: int32[R], out of range for rows to leave alone.
    held: int32[R, G], as for `first_fresh`.
    stop: int32[R, G], as for `first_fresh`.
    begins: bool[R], as for `first_fresh`.

  Returns:
    The table.
  """
  if not has_states(config):
    return table
  running, moved = _growth(config, held, stop, begins)
  states = holds_states(config)
  gap = jnp.where(states & (stop > held), jnp.maximum(held, running), held)
  table = page_table.fill(table, page_table.ranges(slots, held, gap), 0)
  return _move(config, table, slots, moved, held - _scratch(config), gap, 0)


def draw_back(
  config: CacheConfig,
  table: Array,
  slots: Array,
  held: Array,
  keep: Array,
  left: Array,
) -> Array:
  """Moves the scratch pages to the columns behind `keep`, which are empty.

  Args:
    config: the cache's groups.
    table: int32[B, G, M].
    slots: int32[R], out of range for rows to leave alone.
    held: int32[R, G], columns in use; the last are those of scratch pages.
    keep: int32[R, G].
    left: int32[R, G], the number of scratch pages that remain.

  Returns:
    The table.
  """
  if not has_states(config):
    return table
  moved = jnp.where(keep + left < held, left, 0)
  return _move(config, table, slots, moved, held - left, keep, config.no_page)


def num_scratch(config: CacheConfig, held: Array, keep: Array) -> Array:
  """int32[R, G]: scratch pages among the columns `keep .. held`."""
  scratch = jnp.broadcast_to(_scratch(config), held.shape)
  return jnp.clip(held - keep, 0, scratch)


def num_pages(
  config: CacheConfig, table: Array, slots: Array, start: Array, stop: Array
) -> Array:
  """int32[R]: pages in the columns `start .. stop`, null pages not counted.

  Args:
    config: the cache's groups.
    table: int32[B, G, M].
    slots: int32[R].
    start: int32[R, G].
    stop: int32[R, G].
  """
  counts = stop - start
  if has_states(config):
    # Between two states there are only null pages.
    inside = indexing.between(start, stop, table.shape[-1])
    held = indexing.take(table, slots) > 0
    counts = jnp.sum(inside & held, axis=2, dtype=jnp.int32)
  return jnp.sum(counts, axis=1, dtype=jnp.int32)


def can_continue(
  config: CacheConfig, table: Array, slots: Array, length: Array, tokens: Array
) -> Array:
  """bool[R]: whether every group holds the state after `tokens` tokens.

  Args:
    config: the cache's groups.
    table: int32[B, G, M].
    slots: int32[R].
    length: int32[R], tokens of the sequences: the last state.
    tokens: int32[R], 0 .. length; before it, only ends of pages have a state.
  """
  if not has_states(config):
    return tokens >= 0
  last = config.sizes.by_group(lambda _, size: (tokens - 1) // size)
  group = jnp.arange(config.num_groups, dtype=jnp.int32)[None]
  page = indexing.take(table, slots[:, None], group, last)
  inside = config.sizes.open_pages(tokens) & (tokens < length)[:, None]
  kept = ((page > 0) & ~inside) | ~holds_states(config)
  return (tokens == 0) | jnp.all(kept, axis=1)


def _growth(
  config: CacheConfig, held: Array, stop: Array, begins: Array
) -> tuple[Array, Array]:
  """Columns of the running states, and the scratch pages that move there."""
  scratch = _scratch(config)
  running = stop - scratch - 1
  moved = jnp.minimum(held, running) - (held - scratch)
  moved = jnp.clip(moved, 0, scratch)
  moves = holds_states(config) & (stop > held) & ~begins[:, None]
  return running, jnp.where(moves, moved, 0)


def _move(
  config: CacheConfig,
  table: Array,
  slots: Array,
  counts: Array,
  source: Array,
  target: Array,
  left: int,
) -> Array:
  """Moves pages to other columns of their rows and leaves `left` behind.

  Args:
    config: the cache's groups.
    table: int32[B, G, M].
    slots: int32[R], out of range for rows to leave alone.
    counts: int32[R, G], pages to move, at most `num_speculative`.
    source: int32[R, G], the column of the first.
    target: int32[R, G], the column it goes to.
    left: a page number.

  Returns:
    The table.
  """
  row = (slots[:, None], jnp.arange(config.num_groups, dtype=jnp.int32)[None])
  for nth in range(max(kind.num_speculative for kind in config.groups)):
    moves = nth < counts
    old = indexing.where_valid(moves, source + nth)
    new = indexing.where_valid(moves, target + nth)
    pages = indexing.take(table, *row, old)
    table = indexing.put(table, *row, new, values=pages)
    table = indexing.put(table, *row, old, values=left)
  return table


def _scratch(config: CacheConfig) -> Array:
  """int32[1, G]: scratch pages of a sequence."""
  counts = [kind.num_speculative for kind in config.groups]
  return jnp.asarray([counts], jnp.int32)
