"""The arguments of the caller's functions that describe sequences."""

from typing import Any
from typing import NamedTuple
from typing import Protocol

import jax
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.engine.queue import Queue


class Rows(NamedTuple):
  """The sequences of R rows of logits, or of R tokens of a call.

  Attributes:
    numbers: int32[R], the row of `Queue`; Q for none.
    ids: int32[R], the id of the sequence.
    counts: int32[R], tokens sampled so far in this turn.
    lengths: int32[R], the current length, including the prompt.
    last_tokens: int32[R], the last token.
    extra: values of these sequences, a pytree of arrays [R, ...]; see
      `Requests`.
  """

  numbers: Array
  ids: Array
  counts: Array
  lengths: Array
  last_tokens: Array
  extra: Any


class Process(Protocol):
  """A function that changes the logits of a step before tokens are sampled.

  It is called once for every token that a sequence samples.
  """

  def __call__(
    self, logits: Array, rows: Rows, extra: Any, /
  ) -> tuple[Array, Any]:
    """Returns new logits and new values of `extra`.

    Args:
      logits: float32[R, V].
      rows: the sequence of each row.
      extra: the values that the rollout carries for these sequences, a pytree
        of arrays [R, ...]; see `Requests`.

    Returns:
      Logits float32[R, V] and `extra` with the same structure, shapes and
      dtypes. Both are ignored for rows that sample no token.
    """
    ...


class Draft(Protocol):
  """A function that proposes the next tokens of every slot's sequence."""

  def __call__(
    self, params: Any, rows: Rows, tokens: Array, /
  ) -> tuple[Array, Array]:
    """Returns proposed tokens int32[B, K] and their numbers int32[B].

    Args:
      params: weights, as `generate` received them.
      rows: the sequence of each slot, B rows.
      tokens: int32[B, W], the tokens of each slot's sequence; W is the width of
        the queue.

    Returns:
      Tokens int32[B, K], where K is `RolloutConfig.draft_tokens`, and how many
      of each row count, int32[B]. The loop verifies them: a wrong one costs
      time and changes no token.
    """
    ...


def rows_of(queue: Queue, numbers: Array) -> Rows:
  """Returns the `Rows` of the sequences in rows int32[R] of the queue."""
  length = indexing.take(queue.length, numbers)
  return Rows(
    numbers=numbers,
    ids=indexing.take(queue.ids, numbers),
    counts=length - indexing.take(queue.start, numbers),
    lengths=length,
    last_tokens=indexing.take(queue.tokens, numbers, length - 1),
    extra=jax.tree.map(lambda leaf: indexing.take(leaf, numbers), queue.extra),
  )
