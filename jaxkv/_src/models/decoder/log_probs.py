"""From what the last layer gives to the log-probs of some tokens."""

import jax
import jax.numpy as jnp

from jaxkv._src.exact import log_probs
from jaxkv._src.models.decoder import logits as all_logits
from jaxkv._src.models.decoder.description import Decoder
from jaxkv._src.models.decoder.numerics import is_exact
from jaxkv._src.models.decoder.params import Params

_MOST = 2**24
"""Logits that exist at once: 64 MiB, and 341 rows of 49,152."""


def of_tokens(
  params: Params,
  x: jax.Array,
  tokens: jax.Array,
  temperature: jax.Array,
  config: Decoder,
  *,
  most: int = _MOST,
) -> jax.Array:
  """Log-probs of tokens, in the distributions that rows of the model give.

  The head runs over some rows at a time, in a gradient once more, so that there
  are never the logits of all rows.

  Args:
    params: of the decoder.
    x: [..., E], what the last layer gives; X rows in all.
    tokens: int32[..., S], S tokens that might follow each row.
    temperature: float32[], above 0, that logits are divided by.
    config: static.
    most: static; logits that may exist at once.

  Returns:
    float32[..., S]; NaN for a token outside the vocabulary.
  """
  shape = tokens.shape
  if tokens.size == 0:
    return jnp.zeros(shape, jnp.float32)
  x, tokens = x.reshape(-1, x.shape[-1]), tokens.reshape(-1, shape[-1])
  rows = x.shape[0]
  number = -(-rows // max(most // config.vocab_size, 1))
  size = -(-rows // number)
  spare = ((0, number * size - rows), (0, 0))
  x = jnp.pad(x, spare).reshape(number, size, -1)
  tokens = jnp.pad(tokens, spare).reshape(number, size, -1)

  def some(inputs: tuple[jax.Array, jax.Array]) -> jax.Array:
    x, tokens = inputs
    if is_exact(config):
      logits = all_logits.head(params, x[None], config)[0]
      return _exact(logits, tokens, temperature)
    logits = all_logits.head(params, x, config)
    # Of the differences none overflows upwards, however low the temperature.
    best = jnp.max(logits, axis=-1, keepdims=True)
    logits = (logits - jax.lax.stop_gradient(best)) / temperature
    row = jnp.arange(size, dtype=jnp.int32)[:, None]
    chosen = logits.at[row, tokens].get(
      mode="fill", fill_value=jnp.nan, wrap_negative_indices=False
    )
    return chosen - jax.nn.logsumexp(logits, axis=-1, keepdims=True)

  # A loop keeps XLA from computing what is alike once, and keeping it.
  out = jax.lax.map(jax.checkpoint(some, prevent_cse=False), (x, tokens))
  return out.reshape(number * size, -1)[:rows].reshape(shape)


def _exact(
  logits: jax.Array, tokens: jax.Array, temperature: jax.Array
) -> jax.Array:
  """float32[X, S] of float32[X, V] and int32[X, S], a token at a time."""
  count = tokens.shape[1]
  if count > 1:
    logits = jnp.repeat(logits, count, axis=0)
  heat = jnp.broadcast_to(temperature, (tokens.size,))
  return log_probs.of_tokens(logits, tokens.ravel(), heat).reshape(tokens.shape)
