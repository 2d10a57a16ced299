"""The states of recurrent groups, and the page-table columns that hold them.

The state after t tokens is in the column of token t - 1, where tokens count
from 0. Columns between two states hold the null page. The last state is the
running state.
"""

import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.cache.config import CacheConfig


def has_states(config: CacheConfig) -> bool:
  """Returns True if at least one group is recurrent."""
  return any(kind.holds_states for kind in config.groups)


def holds_states(config: CacheConfig) -> Array:
  """Returns bool[1, G]: True for recurrent groups."""
  return jnp.asarray([[kind.holds_states for kind in config.groups]])


def first_fresh(config: CacheConfig, held: Array, stop: Array) -> Array:
  """Finds the first column that gets a fresh page, for each row and group.

  Args:
    config: the cache's groups.
    held: int32[R, G], the number of columns in use.
    stop: int32[R, G], the number after the call, at least `held`.

  Returns:
    int32[R, G]; `held` for groups that are not recurrent.
  """
  if not has_states(config):
    return held
  # The running state takes the last new column. New columns before it stay
  # null.
  running = jnp.maximum(held, stop - 1)
  return jnp.where((stop > held) & holds_states(config), running, held)


def num_pages(
  config: CacheConfig, table: Array, slots: Array, start: Array, stop: Array
) -> Array:
  """Counts pages of all groups, except null pages, from `start` to `stop - 1`.

  Takes `slots`, int32[R], `start` and `stop`, int32[R, G]. Returns int32[R].
  """
  counts = stop - start
  if has_states(config):
    # Columns between two states hold the null page, which is not counted.
    inside = indexing.between(start, stop, table.shape[-1])
    is_page = indexing.take(table, slots) > 0
    counts = jnp.sum(inside & is_page, axis=2, dtype=jnp.int32)
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
  last_column = config.sizes.by_group(lambda _, size: (tokens - 1) // size)
  group = jnp.arange(config.num_groups, dtype=jnp.int32)[None]
  page = indexing.take(table, slots[:, None], group, last_column)
  # A page holds the state after its last token. The page in which the sequence
  # ends holds the running state. So inside a page, only the running state is
  # available.
  inside = config.sizes.open_pages(tokens) & (tokens < length)[:, None]
  available = ((page > 0) & ~inside) | ~holds_states(config)
  return (tokens == 0) | jnp.all(available, axis=1)
