"""The sequences of a rollout: the queue, the results, and their order.

One buffer holds a sequence's prompt, its generated tokens and what others said
in between, so a preempted sequence, or one in its next turn, is admitted
exactly like a new one.
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
"""The version of a token that no weights drew."""


class SequenceStatus(enum.IntEnum):
  """The state of a sequence, or of its row of the queue.

  WAITING: it waits for a slot.
  RUNNING: it is in a slot.
  DONE: it has ended; `finish` says why.
  FAILED: it cannot run; `code` says why.
  EMPTY: the row has no sequence.
  """

  WAITING = 0
  RUNNING = 1
  DONE = 2
  FAILED = 3
  EMPTY = 4


class Finish(enum.IntEnum):
  """Why a sequence ended.

  UNFINISHED: it has not.
  STOP_TOKEN: it drew a stop token, which is kept; `stop` says which.
  STOP_STRING: its text contains a stop string; `stop` says which.
  LENGTH: it has as many tokens as it may.
  ABORTED: `abort` ended it.
  FAILED: it could never run; `code` says why.
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
  """What is kept of a token where `RolloutConfig` asks for it; 0 elsewhere.

  All of it is about the model's own distribution, before `Sampling`.

  Attributes:
    raw_log_probs: of the token.  # float32[Q, W]
    entropy: of the distribution, in nats.  # float32[Q, W]
    top_tokens: the most likely tokens, descending.  # int32[Q, W, X]
    top_log_probs: of those.  # float32[Q, W, X]
  """

  raw_log_probs: Array | None = None
  entropy: Array | None = None
  top_tokens: Array | None = None
  top_log_probs: Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sequences:
  """Q sequences of up to W tokens; rows p * G to p * G + G - 1 are a group.

  A group has the G samples of one prompt. What is said of tokens stands in the
  column of its token.

  Attributes:
    tokens: the prompt, then what was drawn and what others said, then 0.
      # int32[Q, W]
    ids: the number of the sequence in each row.  # int32[Q]
    prompt_length: tokens of the first prompt.  # int32[Q]
    length: tokens in all.  # int32[Q]
    start: tokens when it began to draw in this turn: the prompt's length, or
      the length after `extend`.  # int32[Q]
    limit: the length at which it ends.  # int32[Q]
    budget: tokens that it may draw in its first turn.  # int32[Q]
    log_probs: of each drawn token, in the distribution that it was drawn from;
      0 elsewhere.  # float32[Q, W]
    versions: of the weights that drew each token; NOT_DRAWN for tokens of
      prompts and what others said.  # int32[Q, W]
    records: what else is kept of each token.
    status: a `SequenceStatus`.  # int32[Q]
    code: why a sequence failed, a `jaxkv.Status`.  # int32[Q]
    finish: why a sequence ended, a `Finish`.  # int32[Q]
    stop: the stop token, or the index of the stop string, that ended it; -1
      for none.  # int32[Q]
    keys: a random key for each sequence.  # key[Q]
    priority: those with lower numbers enter first and are preempted last; None
      if all are equal.  # int32[Q]
    stop_states: what each one has of a stop string; None without stop strings.
      # int32[Q]
    experts: that each token used, as the sequence last left a slot; -1 for
      tokens of which none are known. None if `RolloutConfig` does not ask.
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
  """All samples of all prompts, waiting.

  Args:
    prompts: int32[P, L], padded at the end.
    lengths: int32[P], 1 .. L.
    key: key[], from which every sequence's key is derived.
    config: how many samples, of how many tokens.
    num_samples: int32[P], 0 .. G samples of each prompt; the rows of the others
      are EMPTY. None for G.
    priority: int32[Q], of all G samples of all prompts; None for none.
    first_sequence: int32[], the number of the first one, at least 0.
    max_tokens: int32[Q], at least 1: tokens that each one draws at most, if
      that is less than `config.max_new_tokens`. None for no limit of its own.
    seed: int32[Q], from which a sequence's key is made instead; negative for
      none of its own.

  Raises:
    TypeError: an argument does not hold integers.
    ValueError: an argument has the wrong shape or does not fit int32, a number
      of samples is out of range, a prompt leaves no room for a token, or there
      are 2**31 sequences or more. Traced numbers are not checked.
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
  """W, for first prompts of up to so many tokens.

  Raises:
    ValueError: no token could follow the longest prompt.
  """
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
  """The samples of each prompt, int32[P]; raises what `from_prompts` does."""
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
  """The prompts and their lengths as int32; raises what `from_prompts` does."""
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
  """All samples of all prompts, waiting; `ids` are those of the first ones.

  A sequence without room for its tokens, or with a length or a number of tokens
  out of range, is FAILED.
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
  # Only of traced numbers: known ones are refused.
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
  """key[Q]: from the numbers of sequences, or from seeds of their own."""
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
  """The sequences by priority, then by number.

  Returns:
    int32[Q], the row of each place; int32[Q], the place of each row.
  """
  keys = [sequences.ids]
  if sequences.priority is not None:
    keys.append(sequences.priority)
  order = jnp.lexsort(keys).astype(jnp.int32)
  place = jnp.arange(order.shape[0], dtype=jnp.int32)
  return order, jnp.zeros_like(order).at[order].set(place)


def num_generated(sequences: Sequences) -> Array:
  """int32[Q]: tokens after the first prompt."""
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
  """Why sequences end with a token.

  Attributes:
    finish: int32[R], a `Finish`; 0 for those that go on.
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
  """Appends a token to each sequence named, and ends those that are complete.

  Args:
    sequences: all sequences.
    numbers: int32[B], the rows to append to.
    mask: bool[B], which of them got a token.
    drawn: the tokens, and what is kept of them.
    version: int32[], of the weights that drew them.
    ending: which sequences end with their token.

  Returns:
    The sequences, and bool[B]: which of `numbers` ended.
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
