"""Runs functions of tokens so that their bits do not depend on the batch.

`in_tiles` calls a function on one tile of tokens at a time; the function must
treat tokens independently. `recur` runs a recurrence one token at a time.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv._src.arrays import sharding
from jaxkv._src.exact import gradient
from jaxkv._src.exact import row_loop

# The number of sequences that `recur` computes at a time.
_ROWS = 8

Recurrence = Callable[..., tuple[jax.Array, Any]]
"""`(weights, inputs, states, num_tokens) -> (out, states)`. `inputs` and `out`
are [B, T, ...], and `states` are [B, ...]. The first `num_tokens[b]` inputs of
sequence b are tokens, and the others are padding."""


def in_tiles(
  tile: int, function: Callable[..., Any], weights: Any, *arrays: Any
) -> Any:
  """Computes `function(weights, *arrays)`, a tile of tokens at a time.

  Equals `row_loop.in_tiles` for pytrees of arrays [B, T, ...].
  """
  shape = jax.tree.leaves(arrays)[0].shape[:2]

  def of_row(weights: Any, *rows: Any) -> Any:
    rows = jax.tree.map(lambda x: x[None], rows)
    return jax.tree.map(lambda x: x[0], function(weights, *rows))

  rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), arrays)
  out = row_loop.in_tiles(of_row, weights, rows, tile=tile)
  return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), out)


def recur(
  run: Recurrence, weights: Any, *arguments: Any
) -> tuple[jax.Array, Any]:
  """Runs a recurrence token by token, with the result of `run` up to rounding.

  The gradient is that of one call of `run` on all tokens. `run` must not close
  over arrays; `weights` are a pytree of arrays, and `*arguments` the other
  arguments of a `Recurrence`.
  """
  step = functools.partial(_token_by_token, run)
  return gradient.with_gradient(step, run, weights, *arguments)


def _token_by_token(
  run: Recurrence, weights: Any, inputs: Any, states: Any, num_tokens: jax.Array
) -> tuple[jax.Array, Any]:
  columns = jax.tree.leaves(inputs)[0].shape[1]
  shape = jax.eval_shape(run, weights, inputs, states, num_tokens)[0]
  out = jnp.zeros(shape.shape, shape.dtype)

  def of_token(
    weights: Any, token: Any, states: Any, count: jax.Array
  ) -> tuple[Any, Any]:
    # `run` treats columns past `count` as padding, so a sequence whose `count`
    # is 0 keeps its state.
    token = jax.tree.map(lambda x: x[:, None], token)
    out, states = run(weights, token, states, count)
    return out[:, 0], states

  def trip(column: jax.Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
    out, states = carry
    token = jax.tree.map(
      lambda x: lax.dynamic_index_in_dim(x, column, 1, keepdims=False), inputs
    )
    count = (column < num_tokens).astype(jnp.int32)
    rows = (token, states, count)
    read, states = row_loop.loop(of_token, weights, rows, tile=_ROWS)
    return lax.dynamic_update_index_in_dim(out, read, column, 1), states

  # Columns past the longest sequence are not computed.
  steps = jnp.minimum(jnp.max(num_tokens, initial=0), columns).astype(jnp.int32)
  out, states, steps, _ = sharding.match_varying_axes(
    (out, states, steps, (weights, inputs, num_tokens))
  )
  return lax.fori_loop(jnp.zeros_like(steps), steps, trip, (out, states))
