"""How a decoder computes what tokens do alone: all at once, or in tiles.

With `Decoder.numerics="exact"` a token has the same numbers, bit for bit, in a
rollout, in its score, and in a trainer; see `Decoder`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv._src.arrays import sharding
from jaxkv._src.exact import row_loop
from jaxkv._src.models.decoder import attention as attentions
from jaxkv._src.models.decoder.description import Decoder
from jaxkv._src.models.decoder.description import DeltaNet
from jaxkv._src.models.decoder.params import Params

Each = Callable[..., Any]
"""`(function, weights, *arrays [B, T, ...])`: calls a function of them, which
treats each token alone, and closes over no arrays."""

_ROWS = 8
"""Sequences whose recurrences are computed together."""


def is_exact(decoder: Decoder) -> bool:
  """Whether tokens have the same numbers wherever they stand."""
  return decoder.numerics == "exact"


def token_wise(decoder: Decoder) -> Each:
  """How functions that treat each token alone are called."""
  if not is_exact(decoder):
    return lambda function, weights, *arrays: function(weights, *arrays)
  return functools.partial(_in_tiles, decoder.tile)


def _in_tiles(tile: int, function: Any, weights: Any, *arrays: Any) -> Any:
  shape = jax.tree.leaves(arrays)[0].shape[:2]

  def one_row(weights: Any, *rows: Any) -> Any:
    rows = jax.tree.map(lambda x: x[None], rows)
    return jax.tree.map(lambda x: x[0], function(weights, *rows))

  rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), arrays)
  out = row_loop.in_tiles(one_row, weights, rows, tile=tile)
  return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), out)


def recurrence(decoder: Decoder, attention: DeltaNet, weights: Params) -> Any:
  """The recurrence of a layer, see `memories.Nowhere.recurrent`."""
  run = functools.partial(attentions.recur, attention=attention)
  own = {"convolution": weights["convolution"]}
  if is_exact(decoder):
    return functools.partial(_recur, run, own)
  return functools.partial(run, own)


def _recur(
  run: Any, weights: Params, *arguments: Any
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """A token at a time, with the gradient of all of them at once."""
  step = functools.partial(_token_by_token, run)
  return row_loop.with_gradient(step, run, weights, *arguments)


def _token_by_token(
  run: Any,
  weights: Params,
  inputs: tuple[jax.Array, ...],
  states: dict[str, jax.Array],
  counts: jax.Array,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  columns = inputs[0].shape[1]
  shape = jax.eval_shape(run, weights, inputs, states, counts)[0]
  out = jnp.zeros(shape.shape, shape.dtype)

  def one(
    weights: Params, token: Any, states: Any, count: jax.Array
  ) -> tuple[Any, Any]:
    token = jax.tree.map(lambda x: x[:, None], token)
    out, states = run(weights, token, states, count)
    return out[:, 0], states

  def trip(column: jax.Array, loop: tuple[Any, Any]) -> tuple[Any, Any]:
    out, states = loop
    token = jax.tree.map(
      lambda x: lax.dynamic_index_in_dim(x, column, 1, keepdims=False), inputs
    )
    count = (column < counts).astype(jnp.int32)
    read, states = row_loop.loop(
      one, weights, (token, states, count), tile=_ROWS
    )
    return lax.dynamic_update_index_in_dim(out, read, column, 1), states

  most = jnp.minimum(jnp.max(counts, initial=0), columns).astype(jnp.int32)
  out, states, most, _ = sharding.match_varying_axes(
    (out, states, most, (weights, inputs, counts))
  )
  return lax.fori_loop(jnp.zeros_like(most), most, trip, (out, states))
