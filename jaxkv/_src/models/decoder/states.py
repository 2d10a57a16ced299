"""States of recurrent layers: for tokens of a call, and in pages."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv._src.kv.recurrent_pages import StatePages
from jaxkv._src.kv.recurrent_pages import read_state
from jaxkv._src.kv.recurrent_pages import write_state
from jaxkv._src.kv.view import FreshView
from jaxkv._src.kv.view import PackedView
from jaxkv._src.kv.view import View
from jaxkv._src.kv.view import rows_of
from jaxkv._src.models.decoder import delta_net
from jaxkv._src.models.decoder.description import DeltaNet

Run = Callable[..., tuple[jax.Array, dict[str, jax.Array]]]
"""A recurrence: takes inputs [R, T, ...], states and counts int32[R]; returns
outputs [R, T, ...] and the states after so many tokens."""


def by_page(
  run: Run,
  inputs: tuple[jax.Array, ...],
  pool: StatePages,
  view: View | FreshView,
  layer: jax.Array | int,
) -> tuple[jax.Array, StatePages]:
  """Rows of tokens, and the states after them.

  A page that is full is found by others, and must hold the state at its end. So
  tokens up to the end of an open page are computed first.
  """
  rows, size = rows_of(view), pool.page_size
  if inputs[0].shape[1] == 1:
    return _once(run, inputs, pool, rows, layer)
  room = -rows.starts % size
  first = jnp.where(room < rows.counts, room, 0)

  def begin(pool: StatePages) -> tuple[jax.Array, StatePages]:
    head = dataclasses.replace(rows, counts=first)
    return _once(run, inputs, pool, head, layer)

  def nothing(pool: StatePages) -> tuple[jax.Array, StatePages]:
    shape = jax.eval_shape(begin, pool)[0]
    return jnp.zeros(shape.shape, shape.dtype), pool

  early, pool = jax.lax.cond(jnp.any(first > 0), begin, nothing, pool)
  column = jnp.arange(inputs[0].shape[1], dtype=jnp.int32)[None]
  later = _columns(inputs, first[:, None] + column)
  rest = dataclasses.replace(
    rows, starts=rows.starts + first, counts=rows.counts - first
  )
  out, pool = _once(run, later, pool, rest, layer)
  (out,) = _columns((out,), jnp.maximum(column - first[:, None], 0))
  mask = (column < first[:, None]).reshape(*out.shape[:2], 1, 1)
  return jnp.where(mask, early, out), pool


def _columns(
  arrays: tuple[jax.Array, ...], column: jax.Array
) -> tuple[jax.Array, ...]:
  """The columns int32[B, T] of arrays [B, T, ...]."""
  row = jnp.arange(column.shape[0], dtype=jnp.int32)[:, None]
  return tuple(array.at[row, column].get(mode="clip") for array in arrays)


def packed(
  run: Run,
  inputs: tuple[jax.Array, ...],
  pool: StatePages,
  view: PackedView,
  layer: jax.Array | int,
) -> tuple[jax.Array, StatePages]:
  """Single tokens [1, B, ...] as rows, then those of prompts."""
  decode = rows_of(view.decode)
  count = decode.starts.shape[0]
  single = tuple(array[0, :count, None] for array in inputs)
  out, pool = _once(run, single, pool, decode, layer)
  out = out[:, 0]
  if view.prefill is not None:
    columns = inputs[0].shape[1] - count
    counts = view.prefill.counts
    width = min(pool.page_size, columns)
    rows = tuple(
      delta_net.to_rows(array[0, count:], counts, width) for array in inputs
    )
    more, pool = _once(run, rows, pool, view.prefill, layer)
    more = delta_net.to_columns(more, counts, columns)
    out = jnp.concatenate([out, more])
  return out[None], pool


def _once(
  run: Run,
  inputs: tuple[jax.Array, ...],
  pool: StatePages,
  rows: View,
  layer: jax.Array | int,
) -> tuple[jax.Array, StatePages]:
  states = read_state(pool, rows, layer)
  out, states = run(inputs, states, rows.counts)
  return out, write_state(pool, rows, layer, states)


def zeros(attention: DeltaNet, rows: int) -> dict[str, jax.Array]:
  """The states of sequences without tokens."""
  return {
    name: jnp.zeros((rows, *shape), dtype)
    for name, (shape, dtype) in state_shapes(attention).items()
  }


def state_shapes(
  attention: DeltaNet,
) -> dict[str, tuple[tuple[int, ...], Any]]:
  """For `jaxkv.kv.init_states`: what a recurrent layer carries."""
  a = attention
  return {
    "convolution": ((a.num_channels, a.kernel_size - 1), jnp.float32),
    "delta": ((a.num_value_heads, a.key_dim, a.value_dim), jnp.float32),
  }
