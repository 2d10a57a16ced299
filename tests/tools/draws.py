"""Draws at one temperature, and the distributions that are drawn from."""

import jax.numpy as jnp

from jaxkv._src.sampling import reductions
from jaxkv._src.sampling import sample as drawing
from jaxkv._src.sampling.logits import as_logits
from jaxkv._src.sampling.settings import Sampling


def sample(keys, counts, logits, temperature):
  """Draws a token for every row: (int32[B], float32[B] log-probabilities).

  Args:
    keys: key[B].
    counts: int32[B].
    logits: floats [B, V].
    temperature: float32[] or float32[B].
  """
  temperature = jnp.broadcast_to(temperature, keys.shape)
  drawn = drawing.draw(keys, counts, logits, Sampling(temperature=temperature))
  return drawn.tokens, drawn.log_probs


def probabilities(logits, sampling):
  """float32[R, V]: the distributions that `draw` draws from.

  In a row with temperature 0, 1 for the token that is taken.
  """
  logits = as_logits(logits)
  weights = drawing._weights(logits, sampling)
  some = weights.filtered()
  some = some / reductions.sums(some)[:, None]
  if weights.greedy is None:
    return some
  column = jnp.arange(logits.shape[1], dtype=jnp.int32)
  taken = column[None] == drawing._most_likely(weights)[:, None]
  return jnp.where(weights.greedy[:, None], taken.astype(jnp.float32), some)
