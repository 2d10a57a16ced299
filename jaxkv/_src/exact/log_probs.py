"""Log-probs that are bit-identical in `generate`, `score` and a trainer."""

import jax.numpy as jnp
from jax import Array

from jaxkv._src.exact import row_loop

# The number of rows per tile. Reductions over fewer rows round differently.
ROWS = 8


def of_tokens(logits: Array, tokens: Array, temperature: Array) -> Array:
  """Returns log-probs of tokens in softmax(logits / temperature).

  The result, float32[X], is differentiable, with the same bits in every
  program. Logits are float32[X, V]; a token, int32[X], outside of the
  vocabulary gets NaN; `temperature`, float32[X], is above 0.
  """
  rows = (logits, tokens, temperature)
  return row_loop.in_tiles(_of_tokens, (), rows, tile=ROWS)


def _of_tokens(
  weights: tuple[()], logits: Array, tokens: Array, temperature: Array
) -> Array:
  del weights
  highest = jnp.max(logits, axis=-1, keepdims=True)
  # The maximum is subtracted first, so that division cannot overflow to +inf.
  scaled = (logits - highest) / temperature[:, None]
  logit = jnp.take_along_axis(scaled, tokens[:, None], axis=1, mode="fill")
  # The mode "fill" gives NaN past the vocabulary, but wraps negative tokens.
  logit = jnp.where(tokens < 0, jnp.nan, logit[:, 0])
  return logit - jnp.log(jnp.sum(jnp.exp(scaled), axis=-1))
