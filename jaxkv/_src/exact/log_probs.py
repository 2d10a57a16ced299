"""Log-probabilities of tokens: the same in a rollout, a score and a trainer."""

import jax.numpy as jnp
from jax import Array

from jaxkv._src.exact import row_loop

ROWS = 8
"""Rows of a tile: reductions over fewer are compiled in another way."""


def of_tokens(logits: Array, tokens: Array, temperature: Array) -> Array:
  """Log-probs of tokens in softmax(logits / temperature).

  A row has the same numbers, bit for bit, in every program. Differentiable.

  Args:
    logits: float32[X, V].
    tokens: int32[X]; one outside of the vocabulary has NaN.
    temperature: float32[X], above 0.

  Returns:
    float32[X].
  """
  rows = (logits, tokens, temperature)
  return row_loop.in_tiles(_of_tokens, (), rows, tile=ROWS)


def _of_tokens(
  weights: tuple[()], logits: Array, tokens: Array, temperature: Array
) -> Array:
  del weights
  best = jnp.max(logits, axis=-1, keepdims=True)
  scaled = (logits - best) / temperature[:, None]
  chosen = jnp.take_along_axis(scaled, tokens[:, None], axis=1, mode="fill")
  chosen = jnp.where(tokens < 0, jnp.nan, chosen[:, 0])
  return chosen - jnp.log(jnp.sum(jnp.exp(scaled), axis=-1))
