"""Stop rules: ends sequences after stop tokens, stop strings or the limit."""

import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.rollout.config import RolloutConfig
from jaxkv._src.rollout.rows import Rows
from jaxkv._src.rollout.sequences import Ending
from jaxkv._src.rollout.sequences import Finish
from jaxkv._src.rollout.sequences import Sequences
from jaxkv._src.sampling.settings import Sampling


def ending(
  sequences: Sequences,
  rows: Rows,
  tokens: Array,
  own: Sampling,
  config: RolloutConfig,
) -> Ending:
  """Returns the reasons for which sequences end after their new tokens.

  If several apply, a stop token comes before a stop string, and that before the
  length.

  Args:
    sequences: before the tokens are appended.
    rows: the rows of these sequences.
    tokens: int32[R], the sampled tokens.
    own: the settings of the rows.
    config: has the stop token of all sequences.
  """
  limit = indexing.take(sequences.limit, rows.numbers)
  ends = rows.lengths + 1 >= limit
  finish = jnp.where(ends, jnp.int32(Finish.LENGTH), jnp.int32(0))
  stop, states = jnp.full_like(tokens, -1), None
  if own.stop_strings is not None and sequences.stop_states is not None:
    begin = indexing.take(own.stop_strings.start, rows.numbers)
    before = indexing.take(sequences.stop_states, rows.numbers)
    states, found = own.stop_strings.advance(
      jnp.where(rows.counts == 0, begin, before), tokens
    )
    least = jnp.int32(0) if own.min_tokens is None else own.min_tokens
    found = jnp.where(rows.counts >= least, found, -1)
    finish = jnp.where(found >= 0, jnp.int32(Finish.STOP_STRING), finish)
    stop = jnp.where(found >= 0, found, stop)
  stops = tokens == config.stop_token
  if own.stop_tokens is not None:
    stops |= jnp.any(tokens[:, None] == own.stop_tokens, axis=1)
  finish = jnp.where(stops, jnp.int32(Finish.STOP_TOKEN), finish)
  return Ending(finish, jnp.where(stops, tokens, stop), states)
