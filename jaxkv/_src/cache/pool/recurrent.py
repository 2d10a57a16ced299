"""The states of recurrent groups, and the page-table columns that hold them.

The state after t tokens is in the column of token t - 1, where tokens count
from 0. Columns between two states hold the null page. The last state is the
running state. The columns after it hold the scratch pages, one for each draft
token. Scratch pages move to later columns when the sequence grows.
Without recurrent groups, the functions of this module do not change the table.
"""

import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.pool import page_table


def has_states(config: CacheConfig) -> bool:
  """Returns True if at least one group is recurrent."""
  return any(kind.holds_states for kind in config.groups)


def holds_states(config: CacheConfig) -> Array:
  """Returns bool[1, G]: True for recurrent groups."""
  return jnp.asarray([[kind.holds_states for kind in config.groups]])


def first_fresh(
  config: CacheConfig, held: Array, stop: Array, begins: Array
) -> Array:
  """Finds the first column that gets a fresh page, for each row and group.

  Args:
    config: the cache's groups.
    held: int32[R, G], the number of columns in use.
    stop: int32[R, G], the number after the call, at least `held`.
    begins: bool[R], True for new sequences, which have no scratch pages yet.

  Returns:
    int32[R, G]; `held` for groups that are not recurrent.
  """
  if not has_states(config):
    return held
  running, num_moved = _growth(config, held, stop, begins)
  return jnp.where(
    (stop > held) & holds_states(config),
    jnp.maximum(held, running) + num_moved,
    held,
  )


def place_scratch(
  config: CacheConfig,
  table: Array,
  slots: Array,
  held: Array,
  stop: Array,
  begins: Array,
) -> Array:
  """Writes null pages and moved scratch pages before the first fresh column.

  `table` is int32[B, G, M]. `slots` is int32[R], out of range for rows that
  must not change. The other arguments are those of `first_fresh`.
  """
  if not has_states(config):
    return table
  running, num_moved = _growth(config, held, stop, begins)
  states = holds_states(config)
  gap = jnp.where(states & (stop > held), jnp.maximum(held, running), held)
  table = page_table.fill(table, page_table.ranges(slots, held, gap), 0)
  return _move(config, table, slots, num_moved, held - _scratch(config), gap, 0)


def retract_scratch(
  config: CacheConfig,
  table: Array,
  slots: Array,
  held: Array,
  keep: Array,
  num_remaining: Array,
) -> Array:
  """Moves scratch pages of shortened sequences to the columns from `keep` on.

  Args:
    config: the cache's groups.
    table: int32[B, G, M]; columns from `keep` to the scratch pages hold no
      page.
    slots: int32[R], out of range for rows that must not change.
    held: int32[R, G], the number of columns before the call; the last columns
      hold scratch pages.
    keep: int32[R, G], the number of columns for the remaining tokens.
    num_remaining: int32[R, G], the number of scratch pages that remain.
  """
  if not has_states(config):
    return table
  num_moved = jnp.where(keep + num_remaining < held, num_remaining, 0)
  return _move(
    config, table, slots, num_moved, held - num_remaining, keep, config.no_page
  )


def num_scratch(config: CacheConfig, held: Array, keep: Array) -> Array:
  """Counts scratch pages from column `keep` to `held - 1`: int32[R, G]."""
  scratch = jnp.broadcast_to(_scratch(config), held.shape)
  return jnp.clip(held - keep, 0, scratch)


def num_pages(
  config: CacheConfig, table: Array, slots: Array, start: Array, stop: Array
) -> Array:
  """Counts pages of all groups, except null pages, from `start` to `stop - 1`.

  Takes `slots`, int32[R], `start` and `stop`, int32[R, G]. Returns int32[R].
  """
  counts = stop - start
  if has_states(config):
    inside = indexing.between(start, stop, table.shape[-1])
    held = indexing.take(table, slots) > 0
    counts = jnp.sum(inside & held, axis=2, dtype=jnp.int32)
  return jnp.sum(counts, axis=1, dtype=jnp.int32)


def can_continue(
  config: CacheConfig, table: Array, slots: Array, length: Array, tokens: Array
) -> Array:
  """Finds the rows whose recurrent groups hold the state after `tokens` tokens.

  Args:
    config: the cache's groups.
    table: int32[B, G, M].
    slots: int32[R].
    length: int32[R], tokens of the sequences.
    tokens: int32[R], 0 .. length.

  Returns:
    bool[R].
  """
  if not has_states(config):
    return tokens >= 0
  last = config.sizes.by_group(lambda _, size: (tokens - 1) // size)
  group = jnp.arange(config.num_groups, dtype=jnp.int32)[None]
  page = indexing.take(table, slots[:, None], group, last)
  # A page holds the state after its last token. The page in which the sequence
  # ends holds the running state. So inside a page, only the running state is
  # available.
  inside = config.sizes.open_pages(tokens) & (tokens < length)[:, None]
  available = ((page > 0) & ~inside) | ~holds_states(config)
  return (tokens == 0) | jnp.all(available, axis=1)


def _growth(
  config: CacheConfig, held: Array, stop: Array, begins: Array
) -> tuple[Array, Array]:
  """Returns the new columns of running states, and counts of pages to move."""
  # Scratch pages before the column of the new running state move to this column
  # or later columns. Other scratch pages stay.
  scratch = _scratch(config)
  running = stop - scratch - 1
  num_moved = jnp.minimum(held, running) - (held - scratch)
  num_moved = jnp.clip(num_moved, 0, scratch)
  moves = holds_states(config) & (stop > held) & ~begins[:, None]
  return running, jnp.where(moves, num_moved, 0)


def _move(
  config: CacheConfig,
  table: Array,
  slots: Array,
  counts: Array,
  source: Array,
  target: Array,
  replacement: int,
) -> Array:
  """Moves pages of each row from columns at `source` to columns at `target`.

  `counts`, `source` and `target` are int32[R, G]: the number of pages, and the
  first old and new column. The old columns get the page `replacement`.
  """
  row = (slots[:, None], jnp.arange(config.num_groups, dtype=jnp.int32)[None])
  # The new and old columns of a row may overlap, so the pages move one by one.
  # The loop is unrolled, because groups have few scratch pages.
  for index in range(max(kind.num_speculative for kind in config.groups)):
    moves = index < counts
    old = indexing.where_valid(moves, source + index)
    new = indexing.where_valid(moves, target + index)
    pages = indexing.take(table, *row, old)
    table = indexing.put(table, *row, new, values=pages)
    table = indexing.put(table, *row, old, values=replacement)
  return table


def _scratch(config: CacheConfig) -> Array:
  """Returns int32[1, G]: the scratch pages of a sequence in each group."""
  counts = [kind.num_speculative for kind in config.groups]
  return jnp.asarray([counts], jnp.int32)
