"""Sequences of a rollout: the queue, the results, and their order.

One buffer holds a sequence's prompt, its generated tokens and the tokens of
`extend`, so preempted and extended sequences are admitted like new ones.
"""

import dataclasses
import enum
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays.arguments import as_int32
from jaxkv._src.arrays.arguments import check_shape
from jaxkv._src.cache.state import Status
from jaxkv._src.rollout.config import RolloutConfig
from jaxkv._src.sampling.sample import Drawn

NOT_DRAWN = -1
"""The version of a token that was not sampled."""


class SequenceStatus(enum.IntEnum):
  """Status of a sequence, or of its row of the queue.

  WAITING: waits for a slot.
  RUNNING: occupies a slot.
  DONE: has ended; `finish` has the reason.
  FAILED: cannot run; `code` has the reason.
  EMPTY: the row has no sequence.
  """

  WAITING = 0
  RUNNING = 1
  DONE = 2
  FAILED = 3
  EMPTY = 4


class Finish(enum.IntEnum):
  """Reason for the end of a sequence.

  UNFINISHED: the sequence has not ended.
  STOP_TOKEN: it sampled a stop token, which is kept and is in `stop`.
  STOP_STRING: its text contains the stop string with the index `stop`.
  LENGTH: it reached its maximum length.
  ABORTED: `abort` ended it.
  FAILED: it cannot run; `code` has the reason.
  """

  UNFINISHED = 0
  STOP_TOKEN = 1
  STOP_STRING = 2
  LENGTH = 3
  ABORTED = 4
  FAILED = 5


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Records:
  """Optional statistics of each token, if `RolloutConfig` enables them.

  All describe the model's distribution before `Sampling` changes it. Columns
  without a record are 0.

  Attributes:
    raw_log_probs: the log-prob of the token.  # float32[Q, W]
    entropy: the entropy of the distribution in nats.  # float32[Q, W]
    top_tokens: the most likely tokens, descending.  # int32[Q, W, X]
    top_log_probs: their log-probs.  # float32[Q, W, X]
  """

  raw_log_probs: Array | None = None
  entropy: Array | None = None
  top_tokens: Array | None = None
  top_log_probs: Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sequences:
  """Q sequences of up to W tokens; rows p * G to p * G + G - 1 are a group.

  A group has the G samples of one prompt. All arrays [Q, W] are aligned with
  `tokens`.

  Attributes:
    tokens: the prompt, then sampled tokens and those of `extend`, then 0.
      # int32[Q, W]
    ids: the id of the sequence in each row.  # int32[Q]
    prompt_length: the length of the first prompt.  # int32[Q]
    length: the total number of tokens.  # int32[Q]
    start: the length at the start of this turn: that of the prompt, or that
      after `extend`.  # int32[Q]
    limit: the length at which the sequence ends.  # int32[Q]
    budget: the maximum number of tokens sampled in the first turn.  # int32[Q]
    log_probs: the log-prob of each sampled token in the distribution that it
      was sampled from; 0 elsewhere.  # float32[Q, W]
    versions: the version of the weights that sampled each token; NOT_DRAWN for
      other tokens.  # int32[Q, W]
    records: optional statistics of each token.
    status: a `SequenceStatus`.  # int32[Q]
    code: the reason for a failure, a `jaxkv.Status`.  # int32[Q]
    finish: the reason for the end, a `Finish`.  # int32[Q]
    stop: the stop token, or the index of the stop string, that ended the
      sequence; -1 for none.  # int32[Q]
    keys: the random key of each sequence.  # key[Q]
    priority: lower numbers are admitted first and preempted last; None for
      equal priorities.  # int32[Q]
    stop_states: the stop-string automaton's state of each sequence; None
      without stop strings.  # int32[Q]
    experts: the experts of each token, written when the sequence leaves a slot;
      -1 if unknown. None unless `RolloutConfig.record_experts`.
      # int16 or int32[Q, W, J, k]
  """

  tokens: Array
  ids: Array
  prompt_length: Array
  length: Array
  start: Array
  limit: Array
  budget: Array
  log_probs: Array
  versions: Array
  records: Records
  status: Array
  code: Array
  finish: Array
  stop: Array
  keys: Array
  priority: Array | None = None
  stop_states: Array | None = None
  experts: Array | None = None


def from_prompts(
  prompts: Array,
  lengths: Array,
  key: Array,
  config: RolloutConfig,
  *,
  num_samples: Array | None = None,
  priority: Array | None = None,
  first_sequence: Array | int = 0,
  max_tokens: Array | None = None,
  seed: Array | None = None,
) -> Sequences:
  """Returns all samples of all prompts as waiting sequences.

  `init` documents the arguments and errors. Traced numbers are not checked.
  """
  prompts, lengths = as_prompts(prompts, lengths, config)
  num_prompts, columns = prompts.shape
  width = width_of(columns, config)
  if num_samples is not None:
    num_samples = as_num_samples(num_samples, num_prompts, config)
  if priority is not None:
    shape = (num_prompts * config.num_samples,)
    priority = jnp.asarray(as_int32("priority", priority))
    check_shape("priority", priority, shape, ", one for each sequence")
  first = as_int32("first_sequence", first_sequence)
  check_shape("first_sequence", first, ())
  most = 2**31 - 1 - num_prompts * config.num_samples
  if not isinstance(first, Tracer) and not 0 <= int(first) <= most:
    raise ValueError(
      f"`first_sequence` must be 0 .. {most}, so that all numbers fit int32, "
      f"got {int(first)}."
    )
  numbers = jnp.arange(num_prompts, dtype=jnp.int32) * config.num_samples
  return samples_of(
    prompts,
    lengths,
    jnp.asarray(first) + numbers,
    key,
    width,
    config,
    num_samples=num_samples,
    priority=priority,
    max_tokens=max_tokens,
    seed=seed,
  )


def width_of(columns: int, config: RolloutConfig) -> int:
  """Returns W for prompts of `columns` tokens; raises ValueError if too few."""
  width = config.max_length or columns + config.max_new_tokens
  if columns >= width:
    raise ValueError(
      f"`prompts` must have fewer columns than RolloutConfig.max_length "
      f"({width}), got {columns}; raise it, or cut the prompts."
    )
  return width


def as_num_samples(
  num_samples: Any, num_prompts: int, config: RolloutConfig
) -> Array:
  """Returns `num_samples` as int32[P]; raises as `from_prompts`."""
  counts = as_int32("num_samples", num_samples)
  most = config.num_samples
  check_shape("num_samples", counts, (num_prompts,), ", one for each prompt")
  if not isinstance(counts, Tracer):
    for row, count in enumerate(np.asarray(counts).tolist()):
      if not 0 <= count <= most:
        raise ValueError(
          f"`num_samples[{row}]` must be 0 .. {most}, got {count}; raise "
          "RolloutConfig.num_samples for more."
        )
  return jnp.asarray(counts)


def as_prompts(
  prompts: Any, lengths: Any, config: RolloutConfig
) -> tuple[Any, Any]:
  """Returns prompts and lengths as int32; raises as `from_prompts`."""
  prompts, lengths = as_int32("prompts", prompts), as_int32("lengths", lengths)
  check_shape("prompts", prompts, ("P", "L"))
  check_shape("lengths", lengths, prompts.shape[:1], ", one for each prompt")
  if prompts.shape[0] * config.num_samples >= 2**31:
    raise ValueError(
      "`RolloutConfig.num_samples` times the prompts must be below 2**31, got "
      f"{config.num_samples} times {prompts.shape[0]}; use fewer of either."
    )
  return prompts, lengths


def samples_of(
  prompts: Array,
  lengths: Array,
  ids: Array,
  key: Array,
  width: int,
  config: RolloutConfig,
  *,
  num_samples: Array | None = None,
  priority: Array | None = None,
  max_tokens: Array | None = None,
  seed: Array | None = None,
) -> Sequences:
  """Returns waiting samples of prompts whose first samples have `ids`.

  A sequence is FAILED if its length or budget is out of range, or if their sum
  exceeds the width.
  """
  samples, columns = config.num_samples, prompts.shape[1]
  total = prompts.shape[0] * samples
  sample = jnp.arange(total, dtype=jnp.int32) % samples
  lengths = jnp.repeat(lengths, samples)
  numbers = jnp.repeat(ids, samples) + sample
  column = jnp.arange(columns, dtype=jnp.int32)[None]
  tokens = jnp.repeat(prompts, samples, axis=0)
  tokens = jnp.where(column < lengths[:, None], tokens, 0)
  budget = jnp.full((total,), config.max_new_tokens, jnp.int32)
  if max_tokens is not None:
    budget = jnp.minimum(budget, max_tokens)
  # Only traced numbers can be bad here; `init` refuses concrete ones.
  bad = (lengths < 1) | (lengths > columns) | (budget < 1)
  bad |= lengths > width - budget
  failed, waiting = SequenceStatus.FAILED, SequenceStatus.WAITING
  status = jnp.where(bad, jnp.int32(failed), jnp.int32(waiting))
  if num_samples is not None:
    exists = sample < jnp.repeat(num_samples, samples)
    status = jnp.where(exists, status, jnp.int32(SequenceStatus.EMPTY))
  failed = status == SequenceStatus.FAILED
  none = jnp.full((total,), -1, jnp.int32)
  return Sequences(
    tokens=jnp.pad(tokens, ((0, 0), (0, width - columns))),
    ids=numbers,
    prompt_length=lengths,
    length=lengths + 0,
    start=lengths + 0,
    limit=lengths + budget,
    budget=budget,
    log_probs=jnp.zeros((total, width), jnp.float32),
    versions=jnp.full((total, width), NOT_DRAWN, jnp.int32),
    records=_no_records(total, width, config),
    status=status,
    code=jnp.where(failed, jnp.int32(Status.BAD_LENGTH), jnp.int32(Status.OK)),
    finish=jnp.where(failed, jnp.int32(Finish.FAILED), jnp.int32(0)),
    stop=none,
    keys=keys_of(key, numbers, seed),
    priority=priority,
  )


def keys_of(key: Array, ids: Array, seed: Array | None) -> Array:
  """Returns key[Q], from `seed` where it is not negative, else from `ids`."""
  keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, ids)
  if seed is None:
    return keys
  kind = jax.random.key_impl(key)
  own = jax.vmap(lambda number: jax.random.key(number, impl=kind))(seed)
  return jnp.where(seed >= 0, own, keys)


def _no_records(total: int, width: int, config: RolloutConfig) -> Records:
  def numbers(wanted: bool, *more: int, dtype: Any = jnp.float32) -> Any:
    return jnp.zeros((total, width, *more), dtype) if wanted else None

  top = config.top_log_probs
  return Records(
    raw_log_probs=numbers(config.raw_log_probs or config.prompt_log_probs),
    entropy=numbers(config.entropy),
    top_tokens=numbers(top > 0, top, dtype=jnp.int32),
    top_log_probs=numbers(top > 0, top),
  )


def order_of(sequences: Sequences) -> tuple[Array, Array]:
  """Sorts the sequences by priority, then by id.

  Returns:
    int32[Q], the row at each place; int32[Q], the place of each row.
  """
  keys = [sequences.ids]
  if sequences.priority is not None:
    keys.append(sequences.priority)
  order = jnp.lexsort(keys).astype(jnp.int32)
  place = jnp.arange(order.shape[0], dtype=jnp.int32)
  return order, jnp.zeros_like(order).at[order].set(place)


def num_generated(sequences: Sequences) -> Array:
  """Returns the number of tokens after the first prompt, int32[Q]."""
  return sequences.length - sequences.prompt_length


def first_of(condition: Array, count: int) -> Array:
  """Returns the first `count` indices of True in bool[X], padded with X."""
  size = condition.shape[0]
  rank = jnp.cumsum(condition, dtype=jnp.int32) - 1
  return indexing.put(
    jnp.full((count,), size, jnp.int32),
    indexing.where_valid(condition, rank),
    values=jnp.arange(size, dtype=jnp.int32),
  )


def with_status(
  sequences: Sequences, numbers: Array, mask: Array, status: int
) -> Sequences:
  """Sets the status of the rows `numbers` where `mask` holds."""
  place = indexing.where_valid(mask, numbers)
  return dataclasses.replace(
    sequences,
    status=indexing.put(sequences.status, place, values=status),
  )


def fail(
  sequences: Sequences, numbers: Array, mask: Array, code: Array
) -> Sequences:
  """Sets status FAILED and the codes of `numbers` where `mask` holds."""
  sequences = with_status(sequences, numbers, mask, SequenceStatus.FAILED)
  place = indexing.where_valid(mask, numbers)
  return dataclasses.replace(
    sequences,
    code=indexing.put(sequences.code, place, values=code),
    finish=indexing.put(sequences.finish, place, values=int(Finish.FAILED)),
  )


class Ending(NamedTuple):
  """Reasons for the end of sequences after a token.

  Attributes:
    finish: int32[R], a `Finish`; 0 for sequences that continue.
    stop: int32[R], see `Sequences.stop`.
    states: int32[R], see `Sequences.stop_states`; None without stop strings.
  """

  finish: Array
  stop: Array
  states: Array | None = None


def append(
  sequences: Sequences,
  numbers: Array,
  mask: Array,
  drawn: Drawn,
  version: Array,
  ending: Ending,
) -> tuple[Sequences, Array]:
  """Appends a token to `numbers` where `mask` holds; ends complete sequences.

  Returns:
    The sequences, and bool[B], the rows of `numbers` that ended.
  """
  place = indexing.where_valid(mask, numbers)
  length = indexing.take(sequences.length, place)
  ended = mask & (ending.finish > 0)
  records = sequences.records
  kept = {
    name: indexing.put(array, place, length, values=getattr(drawn, name))
    for name in (field.name for field in dataclasses.fields(Records))
    if (array := getattr(records, name)) is not None
  }
  states = sequences.stop_states
  if states is not None and ending.states is not None:
    states = indexing.put(states, place, values=ending.states)
  sequences = dataclasses.replace(
    sequences,
    tokens=indexing.put(sequences.tokens, place, length, values=drawn.tokens),
    length=indexing.add(sequences.length, place, values=1),
    log_probs=indexing.put(
      sequences.log_probs, place, length, values=drawn.log_probs
    ),
    versions=indexing.put(sequences.versions, place, length, values=version),
    records=dataclasses.replace(records, **kept),
    finish=indexing.put(sequences.finish, place, values=ending.finish),
    stop=indexing.put(sequences.stop, place, values=ending.stop),
    stop_states=states,
  )
  return with_status(sequences, numbers, ended, SequenceStatus.DONE), ended
