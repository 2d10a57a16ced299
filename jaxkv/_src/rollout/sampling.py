"""From logits to a token and its log-probability."""

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv._src.rollout.arguments import as_logits


def sample(
  keys: Array, counts: Array, logits: Array, temperature: Array
) -> tuple[Array, Array]:
  """Draws a token for every row.

  The draw depends on the row's own key and count alone, never on its place in
  the batch or on the rows beside it.

  Args:
    keys: key[B], a sequence's own key.
    counts: int32[B], tokens the sequence has generated so far.
    logits: floats [B, V] of any width; computed with in float32.
    temperature: float32[]; 0 takes the most likely token.

  Returns:
    int32[B], and float32[B]: the log-probability of the token in the
    distribution it was drawn from; for temperature 0, in the model's own.

  Raises:
    TypeError: `logits` holds no floats.
  """
  logits = as_logits(logits)
  greedy = temperature == 0
  # Of the differences none overflows upwards, however low the temperature.
  below = logits - jnp.max(logits, axis=-1, keepdims=True)
  scaled = below / jnp.where(greedy, jnp.float32(1), temperature)
  keys = jax.vmap(jax.random.fold_in)(keys, counts)
  drawn = jax.vmap(jax.random.categorical)(keys, scaled)
  token = jnp.where(greedy, jnp.argmax(logits, axis=-1), drawn)
  token = token.astype(jnp.int32)
  log_probs = jax.nn.log_softmax(scaled, axis=-1)
  chosen = jnp.take_along_axis(log_probs, token[:, None], axis=-1)[:, 0]
  return token, chosen
