"""Draws tokens at one temperature, and returns their distributions."""

import jax
import jax.numpy as jnp

from jaxkv._src.sampling import reductions
from jaxkv._src.sampling import sample as sample_module
from jaxkv._src.sampling.settings import Sampling


@jax.jit
def sample(keys, counts, logits, temperature):
  """Draws a token for every row; returns tokens and log-probs, [B] each."""
  temperature = jnp.broadcast_to(temperature, keys.shape)
  settings = Sampling(temperature=temperature)
  sampled = sample_module.sample_tokens(keys, counts, logits, settings)
  return sampled.tokens, sampled.log_probs


def probabilities(logits, sampling):
  """Returns the distributions that `sample_tokens` samples, float32[R, V].

  A row with temperature 0 has 1 for its most likely token.
  """
  logits = logits.astype(jnp.float32)
  weights = sample_module._weights(logits, sampling)
  shares = weights.filtered()
  shares = shares / reductions.sums(shares)[:, None]
  if weights.greedy is None:
    return shares
  column = jnp.arange(logits.shape[1], dtype=jnp.int32)
  best = column[None] == sample_module._most_likely(weights)[:, None]
  return jnp.where(weights.greedy[:, None], best.astype(jnp.float32), shares)
