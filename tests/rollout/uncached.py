"""A rollout without a cache: a forward pass of all tokens for each draw."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkv import models
from jaxkv import rollout
from jaxkv._src.rollout import sequences as queue
from jaxkv._src.sampling.sample import Drawn
from tests.tools.draws import sample


def generate(
  params: Any,
  sequences: rollout.Sequences,
  temperature: jax.Array,
  *,
  decoder: models.Decoder,
  config: rollout.RolloutConfig,
) -> rollout.Sequences:
  """Runs all sequences to their ends; each draws one token in every step."""
  total, width = sequences.tokens.shape
  numbers = jnp.arange(total, dtype=jnp.int32)
  columns = jnp.arange(width, dtype=jnp.int32)
  positions = jnp.broadcast_to(columns, sequences.tokens.shape)

  def step(loop):
    sequences, going = loop
    logits = models.forward_uncached(
      params, sequences.tokens, positions, config=decoder
    )
    drawn, log_probs = sample(
      sequences.keys,
      queue.num_generated(sequences),
      logits[numbers, sequences.length - 1],
      temperature,
    )
    stops = drawn == config.stop_token
    ends = stops | (sequences.length + 1 >= sequences.limit)
    reason = jnp.where(stops, rollout.Finish.STOP_TOKEN, rollout.Finish.LENGTH)
    sequences, ended = queue.append(
      sequences,
      numbers,
      going,
      Drawn(tokens=drawn, log_probs=log_probs),
      jnp.int32(0),
      queue.Ending(
        jnp.where(ends, reason, 0).astype(jnp.int32),
        jnp.where(stops, drawn, -1),
      ),
    )
    return sequences, going & ~ended

  going = sequences.status == rollout.SequenceStatus.WAITING
  return jax.lax.while_loop(
    lambda loop: jnp.any(loop[1]), step, (sequences, going)
  )[0]
