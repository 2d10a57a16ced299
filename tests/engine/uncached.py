"""A rollout without a cache: a forward pass of all tokens for each draw."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv import models
from jaxkv import rollout
from tests.tools.draws import sample


def generate(
  params: Any,
  queue: Any,
  temperature: jax.Array,
  *,
  decoder: models.Decoder,
  config: rollout.RolloutConfig,
) -> Any:
  """Runs all sequences to their ends; each draws one token in every step."""
  num_rows, width = queue.tokens.shape
  rows = jnp.arange(num_rows, dtype=jnp.int32)
  columns = jnp.arange(width, dtype=jnp.int32)[None]
  positions = jnp.broadcast_to(columns, queue.tokens.shape)

  def step(loop):
    queue, going = loop
    logits = models.forward_uncached(
      params, queue.tokens, positions, config=decoder
    )
    tokens, log_probs = sample(
      queue.keys,
      queue.length - queue.prompt_length,
      logits[rows, queue.length - 1],
      temperature,
    )
    is_next = going[:, None] & (columns == queue.length[:, None])
    queue = dataclasses.replace(
      queue,
      tokens=jnp.where(is_next, tokens[:, None], queue.tokens),
      log_probs=jnp.where(is_next, log_probs[:, None], queue.log_probs),
      length=queue.length + going.astype(jnp.int32),
    )
    ends = (tokens == config.stop_token) | (queue.length >= queue.limit)
    return queue, going & ~ends

  going = queue.status == rollout.SequenceStatus.WAITING
  return jax.lax.while_loop(
    lambda loop: jnp.any(loop[1]), step, (queue, going)
  )[0]
