"""Stop rules: stop tokens, stop strings and the maximum length."""

import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.engine.config import RolloutConfig
from jaxkv._src.engine.hooks import Rows
from jaxkv._src.engine.queue.queue import Finish
from jaxkv._src.engine.queue.queue import Queue
from jaxkv._src.sampling.settings import Sampling


def endings(
  queue: Queue,
  rows: Rows,
  tokens: Array,
  sampling: Sampling,
  config: RolloutConfig,
) -> tuple[Array, Array, Array | None]:
  """Returns the sequences that end at their new token, and the reasons.

  If several rules apply, the reason is the first of: stop token, stop string,
  length. `queue` and `rows` are those before the tokens are appended.

  Returns:
    int32[R], a `Finish`, 0 for sequences that continue; int32[R], the stop
    token, or the index of the stop string, -1 for neither; int32[R], see
    `Queue.stop_states`, None without stop strings.
  """
  limit = indexing.take(queue.limit, rows.numbers)
  is_full = rows.lengths + 1 >= limit
  finish = jnp.where(is_full, jnp.int32(Finish.LENGTH), jnp.int32(0))
  stop_value = jnp.full_like(tokens, -1)
  states = None
  if sampling.stop_strings is not None and queue.stop_states is not None:
    start = indexing.take(sampling.stop_strings.start, rows.numbers)
    old_states = indexing.take(queue.stop_states, rows.numbers)
    # A stop string counts only within the sampled tokens of one turn, so the
    # first of these tokens restarts the automaton.
    states, string = sampling.stop_strings.advance(
      jnp.where(rows.counts == 0, start, old_states), tokens
    )
    minimum = sampling.min_tokens
    minimum = jnp.int32(0) if minimum is None else minimum
    string = jnp.where(rows.counts >= minimum, string, -1)
    finish = jnp.where(string >= 0, jnp.int32(Finish.STOP_STRING), finish)
    stop_value = jnp.where(string >= 0, string, stop_value)
  # Stop tokens need no check of `min_tokens`: sampling masks early ones.
  is_stop = tokens == config.stop_token
  if sampling.stop_tokens is not None:
    is_stop |= jnp.any(tokens[:, None] == sampling.stop_tokens, axis=1)
  finish = jnp.where(is_stop, jnp.int32(Finish.STOP_TOKEN), finish)
  return finish, jnp.where(is_stop, tokens, stop_value), states
