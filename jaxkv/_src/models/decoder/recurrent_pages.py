"""Runs recurrences whose states are stored in pages."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv._src.arrays import loops
from jaxkv._src.arrays import sharding
from jaxkv._src.kv.recurrent_pages import StatePages
from jaxkv._src.kv.recurrent_pages import read_state
from jaxkv._src.kv.recurrent_pages import write_state
from jaxkv._src.kv.view import FreshView
from jaxkv._src.kv.view import PackedView
from jaxkv._src.kv.view import View
from jaxkv._src.kv.view import rows_of
from jaxkv._src.models.decoder import delta_net
from jaxkv._src.models.decoder.description import DeltaNet

_BLOCK = 64
"""The maximum number of tokens of a block, see `_run_blocks`."""

Recurrence = Callable[..., tuple[jax.Array, dict[str, jax.Array]]]
"""`(inputs, states, num_tokens) -> (outputs, states)`. Runs the first
`num_tokens` int32[R] of T tokens of R sequences, from the states before these
tokens to the states after them. Inputs and outputs are [R, T, ...]."""


def run_rows(
  run: Recurrence,
  inputs: tuple[jax.Array, ...],
  pool: StatePages,
  view: View | FreshView,
  layer: jax.Array | int,
) -> tuple[jax.Array, StatePages]:
  """Runs up to T tokens of each of B sequences, and stores the new states."""
  rows = rows_of(view)
  page_size = pool.page_size
  if inputs[0].shape[1] == 1 or pool.has_moving_states:
    return _run_stored(run, inputs, pool, rows, layer)
  # Other sequences can reuse a full page as a prefix, so a full page must hold
  # the state at its end. If the tokens of a row go past the end of a partly
  # filled page, the tokens up to this end (the head) run before the tail.
  room = -rows.starts % page_size
  head_counts = jnp.where(room < rows.num_tokens, room, 0)

  def run_head(pool: StatePages) -> tuple[jax.Array, StatePages]:
    head = dataclasses.replace(rows, num_tokens=head_counts)
    return _run_stored(run, inputs, pool, head, layer)

  def skip_head(pool: StatePages) -> tuple[jax.Array, StatePages]:
    shape = jax.eval_shape(run_head, pool)[0]
    out = jnp.zeros(shape.shape, shape.dtype)
    # Inside `shard_map`, both branches must vary over the same mesh axes.
    out, pool, _ = sharding.match_varying_axes((out, pool, (inputs, rows)))
    return out, pool

  # Skips the heads at run time if no row has one.
  head_out, pool = jax.lax.cond(
    jnp.any(head_counts > 0), run_head, skip_head, pool
  )
  column = jnp.arange(inputs[0].shape[1], dtype=jnp.int32)[None]
  tail_inputs = _columns(inputs, head_counts[:, None] + column)
  tail = dataclasses.replace(
    rows,
    starts=rows.starts + head_counts,
    num_tokens=rows.num_tokens - head_counts,
  )
  out, pool = _run_stored(run, tail_inputs, pool, tail, layer)
  # The tail ran from column 0, so its outputs move back to their columns.
  (out,) = _columns((out,), jnp.maximum(column - head_counts[:, None], 0))
  is_head = (column < head_counts[:, None]).reshape(*out.shape[:2], 1, 1)
  return jnp.where(is_head, head_out, out), pool


def _columns(
  arrays: tuple[jax.Array, ...], column: jax.Array
) -> tuple[jax.Array, ...]:
  """Gathers the columns int32[B, T] of arrays [B, T, ...]."""
  row = jnp.arange(column.shape[0], dtype=jnp.int32)[:, None]
  # "clip" is safe, because a column past the end is padding.
  return tuple(array.at[row, column].get(mode="clip") for array in arrays)


def run_packed(
  run: Recurrence,
  inputs: tuple[jax.Array, ...],
  pool: StatePages,
  view: PackedView,
  layer: jax.Array | int,
  *,
  by_rows: bool = False,
) -> tuple[jax.Array, StatePages]:
  """Runs inputs [1, T, ...]: one decode token per row, then all prompts.

  The prompts run in blocks of tokens of one row. `by_rows` runs all rows
  together, padded to the number of columns.
  """
  decode = rows_of(view.decode)
  count = decode.starts.shape[0]
  single = tuple(array[0, :count, None] for array in inputs)
  out, pool = _run_stored(run, single, pool, decode, layer)
  out = out[:, 0]
  if view.prefill is not None:
    columns = inputs[0].shape[1] - count
    num_tokens = view.prefill.num_tokens
    prompts = tuple(array[0, count:] for array in inputs)
    if by_rows:
      rows = tuple(
        delta_net.to_rows(array, num_tokens, columns) for array in prompts
      )
      prompt_out, pool = _run_stored(run, rows, pool, view.prefill, layer)
      prompt_out = delta_net.to_columns(prompt_out, num_tokens, columns)
    else:
      states = read_state(pool, view.prefill, layer)
      prompt_out, states = _run_blocks(
        run, prompts, states, num_tokens, min(pool.page_size, _BLOCK, columns)
      )
      pool = write_state(pool, view.prefill, layer, states)
    out = jnp.concatenate([out, prompt_out])
  return out[None], pool


def _run_blocks(
  run: Recurrence,
  inputs: tuple[jax.Array, ...],
  states: dict[str, jax.Array],
  num_tokens: jax.Array,
  block: int,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Runs packed rows, one block of tokens after another.

  Rows of any lengths need little padding: at most `block` - 1 columns each.
  `inputs`, [C, ...] each, have the tokens of R rows, row after row, and
  `states`, [R, ...] each, are those before these tokens. Returns the outputs
  [C, ...], arbitrary past the last token, and the new states.
  """
  columns = inputs[0].shape[0]
  num_blocks = -(-num_tokens // block)
  first_columns = jnp.cumsum(num_tokens, dtype=jnp.int32) - num_tokens
  most_blocks = -(-columns // block) + num_tokens.shape[0]
  blocks = loops.locate(num_blocks, jnp.arange(most_blocks, dtype=jnp.int32))
  # The last block of a row can go past the last column.
  padded = tuple(
    jnp.pad(array, ((0, block), *((0, 0),) * (array.ndim - 1)))
    for array in inputs
  )

  def run_block(
    index: jax.Array, inputs: tuple[jax.Array, ...], states: Any
  ) -> tuple[jax.Array, jax.Array, jax.Array, Any]:
    row = jnp.minimum(blocks.row[index], num_tokens.shape[0] - 1)
    offset = blocks.offset[index] * block
    is_block = blocks.valid[index]
    count = jnp.clip(num_tokens[row] - offset, 0, block)
    count = jnp.where(is_block, count, 0)
    first_column = jnp.where(is_block, first_columns[row] + offset, columns)
    tokens = tuple(
      jax.lax.dynamic_slice_in_dim(array, first_column, block)[None]
      for array in inputs
    )
    state = jax.tree.map(
      lambda x: jax.lax.dynamic_slice_in_dim(x, row, 1), states
    )
    out, state = run(tokens, state, count[None])
    return row, first_column, out[0], state

  shape = jax.eval_shape(run_block, jnp.int32(0), padded, states)[2]

  def trip(index: jax.Array, loop: Any) -> Any:
    out, states = loop
    row, first_column, new_out, state = run_block(index, padded, states)
    # Later blocks overwrite the columns past the row's last token.
    out = jax.lax.dynamic_update_slice_in_dim(out, new_out, first_column, 0)
    states = jax.tree.map(
      lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, row, 0),
      states,
      state,
    )
    return out, states

  out = jnp.zeros((columns + block, *shape.shape[1:]), shape.dtype)
  # On an accelerator, the trip count is static: a block of padding costs less
  # than the wait for the host before each trip.
  num_trips = jax.lax.platform_dependent(
    jnp.sum(num_blocks, dtype=jnp.int32),
    cpu=lambda count: count,
    default=lambda count: jnp.full_like(count, most_blocks),
  )
  num_trips, out, states, _ = sharding.match_varying_axes(
    (num_trips, out, states, (padded, num_tokens))
  )
  start = jnp.zeros_like(num_trips)
  out, states = jax.lax.fori_loop(start, num_trips, trip, (out, states))
  return out[:columns], states


def _run_stored(
  run: Recurrence,
  inputs: tuple[jax.Array, ...],
  pool: StatePages,
  rows: View,
  layer: jax.Array | int,
) -> tuple[jax.Array, StatePages]:
  states = read_state(pool, rows, layer)
  out, states = run(inputs, states, rows.num_tokens)
  return out, write_state(pool, rows, layer, states)


def empty_state(attention: DeltaNet, rows: int) -> dict[str, jax.Array]:
  """Returns the states before the first token, which are zeros."""
  return {
    name: jnp.zeros((rows, *shape), dtype)
    for name, (shape, dtype) in state_shapes(attention).items()
  }


def state_shapes(attention: DeltaNet) -> dict[str, tuple[tuple[int, ...], Any]]:
  """Returns the `shapes` of `jaxkv.kv.init_states` for a recurrent layer."""
  a = attention
  # "delta" is float32, because it accumulates rounding errors over all tokens.
  return {
    "convolution": ((a.num_channels, a.kernel_size - 1), jnp.float32),
    "delta": ((a.num_value_heads, a.key_dim, a.value_dim), jnp.float32),
  }
