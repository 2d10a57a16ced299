"""The states of recurrent groups, and the page-table columns that hold them.

The state after t tokens is in the column of token t - 1, where tokens count
from 0. Columns between two states hold the null page. The last state is the
running state.
"""

import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import elementwise
from jaxkv._src.arrays import indexing
from jaxkv._src.cache.config import CacheConfig


def has_states(config: CacheConfig) -> bool:
  """Returns True if at least one group is recurrent."""
  return any(kind.holds_states for kind in config.groups)


def holds_states(config: CacheConfig) -> Array:
  """Returns bool[1, G]: True for recurrent groups."""
  return jnp.asarray([[kind.holds_states for kind in config.groups]])


def first_fresh(
  config: CacheConfig, held: Array, stop: Array, length: Array
) -> Array:
  """Finds the first column that gets a fresh page, for each row and group.

  Takes the number of columns in use before and after the call, `held` and
  `stop`, int32[R, G], and the tokens of the sequences, int32[R]. Returns
  int32[R, G]: `held` for groups that are not recurrent, and `stop` for rows
  that need no fresh page.
  """
  if not has_states(config):
    return held
  # The running state takes the last new column. New columns before it stay
  # null.
  running = jnp.maximum(held, stop - 1)
  running = jnp.where(moves(config, held, stop, length), stop, running)
  return jnp.where((stop > held) & holds_states(config), running, held)


def moves(
  config: CacheConfig, held: Array, stop: Array, length: Array
) -> Array:
  """Finds the rows whose running state moves to the last new column.

  With a `StateRetention`, a state that is not at a page end is not kept, so its
  page moves on with the sequence. Takes arrays as `first_fresh`, and returns
  bool[R, G].
  """
  if config.state_retention is None:
    return held < 0
  sizes = jnp.asarray(config.page_sizes, jnp.int32)[None]
  is_open = held * sizes > length[:, None]
  return (stop > held) & (held > 0) & is_open & holds_states(config)


def last_end(
  config: CacheConfig, table: Array, slots: Array, lengths: Array
) -> Array:
  """Finds the column of the last state at a page end, for each row and group.

  Ignores states of more than `lengths`, int32[R], tokens. Returns int32[R, G];
  -1 for no such state, and for groups that are not recurrent.
  """
  columns = jnp.arange(table.shape[-1], dtype=jnp.int32)
  last_columns = []
  for group, kind in enumerate(config.groups):
    if not kind.holds_states:
      last_columns.append(jnp.full_like(lengths, -1))
      continue
    pages = indexing.take(table[:, group], slots)
    num_full = elementwise.quotient(lengths, config.page_sizes[group])
    is_end = (pages > 0) & (columns[None] < num_full[:, None])
    last_columns.append(jnp.max(jnp.where(is_end, columns[None], -1), axis=1))
  return jnp.stack(last_columns, axis=1)


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
  """Finds rows with the recurrent states of their first `tokens` tokens.

  `tokens`, int32[R], is at most `length`, the tokens of the sequences. Returns
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
