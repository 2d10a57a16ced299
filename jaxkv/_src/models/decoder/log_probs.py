"""Log-probs of tokens, computed from the output of the last layer."""

import jax
import jax.numpy as jnp

from jaxkv._src.exact import log_probs
from jaxkv._src.models.decoder import logits as all_logits
from jaxkv._src.models.decoder.description import Decoder
from jaxkv._src.models.decoder.numerics import is_exact
from jaxkv._src.models.decoder.params import Params

_MAX_LOGITS = 2**24
"""The default maximum number of logits per chunk, which take 64 MiB. With a
vocabulary of 49,152, a chunk has at most 341 positions."""


def of_tokens(
  params: Params,
  x: jax.Array,
  tokens: jax.Array,
  temperature: jax.Array,
  config: Decoder,
  *,
  max_logits: int = _MAX_LOGITS,
) -> jax.Array:
  """Computes log-probs of tokens without storing the logits of all positions.

  Logits are computed in chunks of at least one position and at most
  `max_logits` logits, and recomputed for the gradient. `x`, [..., E], is the
  last layer's output, `tokens`, int32[..., S], are S alternative next tokens of
  each position, and `temperature`, float32[], is above 0.

  Returns:
    float32[..., S]; NaN for a token outside the vocabulary.
  """
  shape = tokens.shape
  if tokens.size == 0:
    return jnp.zeros(shape, jnp.float32)
  x = x.reshape(-1, x.shape[-1])
  tokens = tokens.reshape(-1, shape[-1])
  rows = x.shape[0]
  # All chunks have the same size, so that one program computes them all.
  num_chunks = -(-rows // max(max_logits // config.vocab_size, 1))
  chunk_size = -(-rows // num_chunks)
  padding = ((0, num_chunks * chunk_size - rows), (0, 0))
  x = jnp.pad(x, padding).reshape(num_chunks, chunk_size, -1)
  tokens = jnp.pad(tokens, padding).reshape(num_chunks, chunk_size, -1)

  def of_chunk(inputs: tuple[jax.Array, jax.Array]) -> jax.Array:
    x, tokens = inputs
    if is_exact(config):
      logits = all_logits.head(params, x[None], config)[0]
      return _exact(logits, tokens, temperature)
    logits = all_logits.head(params, x, config)
    # Logits minus their maximum are at most 0, so a low temperature cannot make
    # them overflow to +inf.
    maximum = jnp.max(logits, axis=-1, keepdims=True)
    logits = (logits - jax.lax.stop_gradient(maximum)) / temperature
    row = jnp.arange(chunk_size, dtype=jnp.int32)[:, None]
    token_logits = logits.at[row, tokens].get(
      mode="fill", fill_value=jnp.nan, wrap_negative_indices=False
    )
    return token_logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)

  # `prevent_cse` costs time. It is not needed, because XLA cannot merge the
  # recomputation with the forward pass if each is in a loop.
  out = jax.lax.map(jax.checkpoint(of_chunk, prevent_cse=False), (x, tokens))
  return out.reshape(num_chunks * chunk_size, -1)[:rows].reshape(shape)


def _exact(
  logits: jax.Array, tokens: jax.Array, temperature: jax.Array
) -> jax.Array:
  """Returns float32[X, S] for logits float32[X, V] and tokens int32[X, S]."""
  count = tokens.shape[1]
  # The exact `log_probs.of_tokens` takes only one token per row of logits.
  if count > 1:
    logits = jnp.repeat(logits, count, axis=0)
  temperatures = jnp.broadcast_to(temperature, (tokens.size,))
  out = log_probs.of_tokens(logits, tokens.ravel(), temperatures)
  return out.reshape(tokens.shape)
