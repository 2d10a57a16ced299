"""From logits to a token and its log-probability."""

import jax
import jax.numpy as jnp
from jax import Array


def sample(
  keys: Array, counts: Array, logits: Array, temperature: Array
) -> tuple[Array, Array]:
  """Draws a token for every row.

  The draw depends on the row's own key and count alone, never on its place in
  the batch or on the rows beside it.

  Args:
    keys: key[B], a sequence's own key.
    counts: int32[B], tokens the sequence has generated so far.
    logits: float32[B, V].
    temperature: float32[]; 0 takes the most likely token.

  Returns:
    int32[B], and float32[B]: the log-probability of the token in the
    distribution it was drawn from; for temperature 0, in the model's own.
  """
  greedy = temperature == 0
  scaled = logits / jnp.where(greedy, jnp.float32(1), temperature)
  keys = jax.vmap(jax.random.fold_in)(keys, counts)
  drawn = jax.vmap(jax.random.categorical)(keys, scaled)
  token = jnp.where(greedy, jnp.argmax(logits, axis=-1), drawn)
  token = token.astype(jnp.int32)
  log_probs = jax.nn.log_softmax(scaled, axis=-1)
  chosen = jnp.take_along_axis(log_probs, token[:, None], axis=-1)[:, 0]
  return token, chosen
