"""The queue: all sequences of a rollout, their settings and their results.

A row has all tokens of a sequence, from its prompt, from sampling and from
`extend`. So preempted and extended sequences are admitted like new ones.
"""

import dataclasses
import enum
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.sampling.settings import Sampling
from jaxkv._src.sampling.statistics import Records

NOT_SAMPLED = -1
"""The value of `Queue.versions` for a token that was not sampled."""

FIRST_DRAFT_RATE = 0.8
"""Initial acceptance rate of drafts."""


class SequenceStatus(enum.IntEnum):
  """Status of a sequence, or of its row of the queue.

  WAITING: waits for a slot.
  RUNNING: occupies a slot.
  DONE: has ended; `queue.finish` has the reason.
  FAILED: has ended with an error; `queue.code` has the reason.
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
  STOP_TOKEN: it sampled the stop token `queue.stop`.
  STOP_STRING: its text contains the stop string with the index `queue.stop`.
  LENGTH: it reached its maximum length.
  ABORTED: `abort` ended it.
  FAILED: an error ended it; `queue.code` has the reason.
  """

  UNFINISHED = 0
  STOP_TOKEN = 1
  STOP_STRING = 2
  LENGTH = 3
  ABORTED = 4
  FAILED = 5


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Queue:
  """Q sequences of up to W tokens.

  Rows p * G to p * G + G - 1 are the group of prompt p: its G samples. All
  arrays [Q, W] are aligned with `tokens`.

  Attributes:
    tokens: the prompt, then sampled tokens and those of `extend`, then 0.
      # int32[Q, W]
    ids: the id of the sequence in each row.  # int32[Q]
    prompt_length: the length of the prompt in `Requests`.  # int32[Q]
    length: the total number of tokens.  # int32[Q]
    start: the length at the start of the current turn.  # int32[Q]
    limit: the length at which the sequence ends. The model never computes the
      token at which a sequence reaches it.  # int32[Q]
    budget: the default maximum number of tokens sampled in a turn.  # int32[Q]
    log_probs: see `Generated`.  # float32[Q, W]
    versions: see `Generated`; NOT_SAMPLED is -1.  # int32[Q, W]
    records: see `Generated`.
    status: a `SequenceStatus`.  # int32[Q]
    code: the reason for a failure, a `jaxkv.Status`.  # int32[Q]
    finish: see `Generated`.  # int32[Q]
    stop: see `Generated`.  # int32[Q]
    is_new: see `Generated`.  # bool[Q]
    keys: the random key of each sequence.  # key[Q]
    sampling: settings of each sequence; fields that are None are not compiled.
    extra: the values for `process` and the model, a pytree of arrays [Q, ...];
      None for no values.
    computed: the maximum number of tokens in the cache so far.  # int32[Q]
    overtaken: the number of later sequences admitted first.  # int32[Q]
    order: the rows, sorted by priority, then by id.  # int32[Q]
    place: the position of each row in `order`.  # int32[Q]
    epochs: the epoch for which a row's page keys are valid. In other epochs the
      sequence does not look up pages.  # uint32[Q]
    page_keys: the chain key after each page of S tokens. Pages with sampled
      tokens get keys in `extend`, in `update_weights`, or in a commit if all
      groups end a page there. None without prefix caching.
      # uint32[Q, W // S, 4]
    next_id: the next id for `submit` without `ids`.  # int32[]
    priority: lower numbers are admitted first and preempted last; None for
      equal priorities.  # int32[Q]
    log_probs_from: see `Requests`; None for no log-probs of given tokens.
      # int32[Q]
    salts: see `jaxkv.salt`: sequences with different salts share no page. None
      for no salts.  # uint32[Q, 4]
    stop_states: the stop-string automaton's state of each sequence; None
      without stop strings.  # int32[Q]
    experts: the k experts of each token in each of J layers, written when the
      sequence leaves a slot; -1 if unknown. None unless
      `RolloutConfig.record_experts`.  # int16 or int32[Q, W, J, k]
    draft_rates: the share of each sequence's recent drafts that were accepted;
      None without speculation.  # float32[Q]
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
  is_new: Array
  keys: Array
  sampling: Sampling
  extra: Any
  computed: Array
  overtaken: Array
  order: Array
  place: Array
  epochs: Array
  page_keys: Array | None
  next_id: Array
  priority: Array | None = None
  log_probs_from: Array | None = None
  salts: Array | None = None
  stop_states: Array | None = None
  experts: Array | None = None
  draft_rates: Array | None = None

  @property
  def size(self) -> int:
    """Q, the number of rows."""
    return self.ids.shape[0]

  @property
  def width(self) -> int:
    """W, the maximum number of tokens of a sequence."""
    return self.tokens.shape[1]

  @property
  def no_row(self) -> int:
    """The sentinel Q for no sequence."""
    # Out of range: gathers return the fill value, and scatters write nothing.
    return self.size


def order_of(ids: Array, priority: Array | None) -> tuple[Array, Array]:
  """Sorts rows by priority, then by id.

  Returns:
    int32[Q], the row at each position; int32[Q], the position of each row.
  """
  keys = [ids] if priority is None else [ids, priority]
  order = jnp.lexsort(keys).astype(jnp.int32)
  position = jnp.arange(order.shape[0], dtype=jnp.int32)
  return order, jnp.zeros_like(order).at[order].set(position)


def first_of(condition: Array, count: int) -> Array:
  """Returns the first `count` True indices of bool[X], padded with X."""
  length = condition.shape[0]
  rank = jnp.cumsum(condition, dtype=jnp.int32) - 1
  return indexing.put(
    jnp.full((count,), length, jnp.int32),
    indexing.where_valid(condition, rank),
    values=jnp.arange(length, dtype=jnp.int32),
  )


def set_status(queue: Queue, rows: Array, mask: Array, status: int) -> Queue:
  """Sets the status of rows int32[R] where `mask` is True."""
  target_rows = indexing.where_valid(mask, rows)
  status_of = indexing.put(queue.status, target_rows, values=status)
  return dataclasses.replace(queue, status=status_of)


def fail(queue: Queue, rows: Array, mask: Array, code: Array) -> Queue:
  """Fails rows int32[R] with codes int32[R] where `mask` is True."""
  queue = set_status(queue, rows, mask, SequenceStatus.FAILED)
  target_rows = indexing.where_valid(mask, rows)
  return dataclasses.replace(
    queue,
    code=indexing.put(queue.code, target_rows, values=code),
    finish=indexing.put(queue.finish, target_rows, values=int(Finish.FAILED)),
  )


def has_ended(status: Array) -> Array:
  """Returns bool[...], True for the status of an ended sequence."""
  return (status == SequenceStatus.DONE) | (status == SequenceStatus.FAILED)


def copy_recorded(queue: Queue, rows: Array, source_rows: Array) -> Queue:
  """Copies what is recorded of rows `source_rows` to `rows`, int32[R]."""
  if queue.log_probs_from is None:
    return queue
  values, records = jax.tree.map(
    lambda array: indexing.put(
      array, rows, values=indexing.take(array, source_rows)
    ),
    (queue.log_probs, queue.records),
  )
  return dataclasses.replace(queue, log_probs=values, records=records)
