"""The same rollout with a dense cache: the baseline of the paged one.

It runs one static batch after another. Every sequence has its own row; nothing
is shared or refilled.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import sharding
from jaxkv._src.rollout import sequences as queue
from jaxkv._src.rollout.config import RolloutConfig
from jaxkv._src.rollout.sequences import Finish
from jaxkv._src.rollout.sequences import Sequences
from jaxkv._src.sampling import sample
from jaxkv._src.sampling.logits import last_logits
from jaxkv._src.sampling.temperature import as_temperature

DenseModel = Callable[..., tuple[Array, Any]]
"""`(params, tokens int32[B, T], positions int32[B, T], memory, starts int32[B],
counts int32[B]) -> (logits float32[B, X, V], memory)`."""


def generate_dense(
  params: Any,
  memory: Any,
  sequences: Sequences,
  temperature: Array,
  *,
  batch_size: int,
  model: DenseModel,
  config: RolloutConfig,
) -> Sequences:
  """Generates every sequence with a dense cache.

  Args:
    params: the model's.
    memory: a dense cache of `batch_size` rows.
    sequences: from `sequences.from_prompts`.
    temperature: float32[], 0 for greedy.
    batch_size: B, rows of the dense cache.
    model: see `DenseModel`.
    config: the options.

  Returns:
    The sequences, all done.

  Raises:
    TypeError: as for `generate`.
    ValueError: as for `generate`.
  """
  params, memory, sequences, temperature = sharding.match_varying_axes(
    (params, memory, sequences, as_temperature(temperature))
  )
  total = sequences.length.shape[0]
  width = sequences.tokens.shape[1] - config.max_new_tokens

  def batch(loop):
    begin, memory, sequences = loop
    numbers = begin + jnp.arange(batch_size, dtype=jnp.int32)
    inside = indexing.take(sequences.status, numbers, fill=queue.DONE)
    inside = inside == queue.WAITING
    prompt = indexing.take(sequences.tokens, numbers)[:, :width]
    zeros = jnp.zeros((batch_size,), jnp.int32)
    positions = jnp.broadcast_to(
      jnp.arange(width, dtype=jnp.int32)[None], prompt.shape
    )
    counts = jnp.where(inside, indexing.take(sequences.length, numbers) - 1, 0)
    _, memory = model(params, prompt, positions, memory, zeros, counts)

    def step(loop):
      memory, sequences, going = loop
      last = indexing.take(sequences.length, numbers) - 1
      tokens = indexing.take(sequences.tokens, numbers, last)[:, None]
      logits, memory = model(
        params, tokens, last[:, None], memory, last, going.astype(jnp.int32)
      )
      drawn, log_probs = sample.sample(
        sequences.keys[jnp.minimum(numbers, total - 1)],
        indexing.take(queue.num_generated(sequences), numbers),
        last_logits(logits, batch_size),
        temperature,
      )
      length = indexing.take(sequences.length, numbers) + 1
      stops = drawn == config.stop_token
      ends = stops | (length >= indexing.take(sequences.limit, numbers))
      reason = jnp.where(stops, Finish.STOP_TOKEN, Finish.LENGTH)
      finish = jnp.where(ends, reason, 0).astype(jnp.int32)
      sequences, ended = queue.append(
        sequences,
        numbers,
        going,
        sample.Drawn(tokens=drawn, log_probs=log_probs),
        jnp.int32(0),
        queue.Ending(finish, jnp.where(stops, drawn, -1)),
      )
      return memory, sequences, going & ~ended

    memory, sequences, _ = lax.while_loop(
      lambda loop: jnp.any(loop[2]), step, (memory, sequences, inside)
    )
    return begin + batch_size, memory, sequences

  return lax.while_loop(
    lambda loop: loop[0] < total,
    batch,
    (sequences.length[0] & 0, memory, sequences),
  )[2]
