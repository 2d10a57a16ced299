"""The sequences of a rollout: the queue, the results, and their order.

One buffer holds a sequence's prompt and its generated tokens, so a preempted
sequence is admitted again exactly like a new one.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from jaxkv._src.cache import ops
from jaxkv._src.cache.checks import as_int32
from jaxkv._src.cache.checks import check_shape
from jaxkv._src.cache.state import Status
from jaxkv._src.rollout.config import RolloutConfig

WAITING, RUNNING, DONE, FAILED = 0, 1, 2, 3


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sequences:
  """Q sequences of up to W tokens; sequence p * G + g is sample g of prompt p.

  Attributes:
    tokens: prompt, then generated tokens, then 0.  # int32[Q, W]
    prompt_length: tokens of the prompt.  # int32[Q]
    length: tokens in all.  # int32[Q]
    log_probs: of the generated tokens, then 0.  # float32[Q, T]
    priority: those with lower numbers enter first and are preempted last; None
      if all are equal.  # int32[Q]
    status: WAITING, RUNNING, DONE or FAILED.  # int32[Q]
    code: why a sequence failed, a `jaxkv.Status`.  # int32[Q]
    keys: a random key for each sequence.  # key[Q]
  """

  tokens: Array
  prompt_length: Array
  length: Array
  log_probs: Array
  status: Array
  code: Array
  keys: Array
  priority: Array | None = None


def from_prompts(
  prompts: Array,
  lengths: Array,
  key: Array,
  config: RolloutConfig,
  *,
  num_samples: Array | None = None,
  priority: Array | None = None,
) -> Sequences:
  """All samples of all prompts, waiting.

  Args:
    prompts: int32[P, L], padded at the end.
    lengths: int32[P], 1 .. L.
    key: key[], from which every sequence's key is derived.
    config: how many samples, of how many tokens.
    num_samples: int32[P], 0 .. G samples of each prompt; the sequences of the
      others are DONE, without a token of their own. None for G.
    priority: int32[Q], of all G samples of all prompts; None for none.

  Raises:
    TypeError: `prompts`, `lengths`, `num_samples` or `priority` does not hold
      integers.
    ValueError: one of them has the wrong shape or does not fit int32, a number
      of samples is out of range, or there are 2**31 sequences or more. Traced
      numbers are not checked.
  """
  prompts, lengths = as_prompts(prompts, lengths, config)
  sequences = samples_of(prompts, lengths, key, config)
  if num_samples is not None:
    sequences = _without(sequences, num_samples, config)
  if priority is not None:
    numbers = as_int32("priority", priority)
    shape = sequences.length.shape
    check_shape("priority", numbers, shape, ", one for each sequence")
    sequences = dataclasses.replace(sequences, priority=numbers)
  return sequences


def _without(
  sequences: Sequences, num_samples: Any, config: RolloutConfig
) -> Sequences:
  """Sequences of which some prompts have fewer samples."""
  num_samples = as_int32("num_samples", num_samples)
  most = config.num_samples
  shape = (sequences.length.shape[0] // most,)
  check_shape("num_samples", num_samples, shape, ", one for each prompt")
  if not isinstance(num_samples, Tracer):
    for row, count in enumerate(np.asarray(num_samples).tolist()):
      if not 0 <= count <= most:
        raise ValueError(
          f"`num_samples[{row}]` must be 0 .. {most}, got {count}; raise "
          "RolloutConfig.num_samples for more."
        )
  sample = jnp.arange(most, dtype=jnp.int32)[None]
  waits = (sample < num_samples[:, None]).reshape(-1)
  status = jnp.where(waits, sequences.status, jnp.int32(DONE))
  return dataclasses.replace(sequences, status=status)


def order_of(sequences: Sequences) -> Array | None:
  """int32[Q]: the sequences by priority, then by number; None without one."""
  if sequences.priority is None:
    return None
  return jnp.argsort(sequences.priority, stable=True).astype(jnp.int32)


def as_prompts(
  prompts: Any, lengths: Any, config: RolloutConfig
) -> tuple[Any, Any]:
  """The prompts and their lengths as int32; raises what `from_prompts` does."""
  prompts, lengths = as_int32("prompts", prompts), as_int32("lengths", lengths)
  check_shape("prompts", prompts, ("P", "L"))
  check_shape("lengths", lengths, prompts.shape[:1], ", one for each prompt")
  if prompts.shape[0] * config.num_samples >= 2**31:
    raise ValueError(
      "`RolloutConfig.num_samples` times the prompts must be below 2**31, got "
      f"{config.num_samples} * {prompts.shape[0]}; make several rollouts."
    )
  return prompts, lengths


def samples_of(
  prompts: Array, lengths: Array, key: Array, config: RolloutConfig
) -> Sequences:
  """All samples of what `as_prompts` has returned."""
  num_sequences = prompts.shape[0] * config.num_samples
  tokens = jnp.repeat(prompts, config.num_samples, axis=0)
  lengths = jnp.repeat(lengths, config.num_samples)
  column = jnp.arange(prompts.shape[1], dtype=jnp.int32)[None]
  tokens = jnp.where(column < lengths[:, None], tokens, 0)
  # Only of traced lengths: known ones are refused.
  bad = (lengths < 1) | (lengths > prompts.shape[1])
  numbers = jnp.arange(num_sequences, dtype=jnp.int32)
  return Sequences(
    tokens=jnp.pad(tokens, ((0, 0), (0, config.max_new_tokens))),
    prompt_length=lengths,
    length=lengths + 0,
    log_probs=jnp.zeros((num_sequences, config.max_new_tokens), jnp.float32),
    status=jnp.where(bad, jnp.int32(FAILED), jnp.int32(WAITING)),
    code=jnp.where(bad, jnp.int32(Status.BAD_LENGTH), jnp.int32(Status.OK)),
    keys=jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, numbers),
  )


def num_generated(sequences: Sequences) -> Array:
  """int32[Q]: tokens generated so far."""
  return sequences.length - sequences.prompt_length


def first_of(condition: Array, count: int) -> Array:
  """The first indices at which a condition holds.

  Args:
    condition: bool[X].
    count: how many indices to return.

  Returns:
    int32[count], padded with X.
  """
  size = condition.shape[0]
  rank = jnp.cumsum(condition, dtype=jnp.int32) - 1
  return ops.put(
    jnp.full((count,), size, jnp.int32),
    ops.where_valid(condition, rank),
    values=jnp.arange(size, dtype=jnp.int32),
  )


def with_status(
  sequences: Sequences, numbers: Array, mask: Array, status: int
) -> Sequences:
  """Sets the status of the sequences `numbers` where `mask` holds."""
  place = ops.where_valid(mask, numbers)
  return dataclasses.replace(
    sequences,
    status=ops.put(sequences.status, place, values=status),
  )


def fail(
  sequences: Sequences, numbers: Array, mask: Array, code: Array
) -> Sequences:
  """Sets status FAILED and the codes of `numbers` where `mask` holds."""
  sequences = with_status(sequences, numbers, mask, FAILED)
  place = ops.where_valid(mask, numbers)
  return dataclasses.replace(
    sequences, code=ops.put(sequences.code, place, values=code)
  )


def append(
  sequences: Sequences,
  numbers: Array,
  mask: Array,
  tokens: Array,
  log_probs: Array,
  config: RolloutConfig,
) -> tuple[Sequences, Array]:
  """Appends a token to each sequence named, and ends those that are complete.

  Args:
    sequences: all sequences.
    numbers: int32[B], the sequences to append to.
    mask: bool[B], which of them got a token.
    tokens: int32[B].
    log_probs: float32[B].
    config: the stop token and the most tokens.

  Returns:
    The sequences, and bool[B]: which of `numbers` ended.
  """
  place = ops.where_valid(mask, numbers)
  length = ops.take(sequences.length, place)
  generated = ops.take(num_generated(sequences), place)
  ended = tokens == config.stop_token
  ended = mask & (ended | (generated + 1 >= config.max_new_tokens))
  sequences = dataclasses.replace(
    sequences,
    tokens=ops.put(sequences.tokens, place, length, values=tokens),
    length=ops.add(sequences.length, place, values=1),
    log_probs=ops.put(sequences.log_probs, place, generated, values=log_probs),
  )
  return with_status(sequences, numbers, ended, DONE), ended
