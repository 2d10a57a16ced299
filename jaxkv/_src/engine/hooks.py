"""Protocols of the functions `process` and `draft`, and their arguments."""

from typing import Any
from typing import NamedTuple
from typing import Protocol

import jax
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.engine.queue import Queue


class Rows(NamedTuple):
  """The sequence of each of R rows of logits, or of R tokens of a call.

  Attributes:
    numbers: int32[R], the row of the sequence in `state.queue`; Q for none.
    ids: int32[R], the id of the sequence.
    counts: int32[R], the number of tokens sampled so far in this turn.
    lengths: int32[R], the current length, including the prompt.
    last_tokens: int32[R], the last token of the sequence.
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
  """A function that changes logits before tokens are sampled from them.

  Each call gets the logits for the next token of every slot.
  """

  def __call__(
    self, logits: Array, rows: Rows, extra: Any, /
  ) -> tuple[Array, Any]:
    """Returns new logits and new values of `extra`.

    Args:
      logits: float32[R, V], after penalties.
      rows: the sequence of each row of logits.
      extra: `rows.extra`, which a rollout carries from token to token.

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
    """Returns draft tokens and the number of drafts of each row.

    Args:
      params: weights, as `generate` received them.
      rows: the sequence of each of B slots; none if the slot does not decode.
      tokens: int32[B, W], the tokens of each slot's sequence, then 0.

    Returns:
      Tokens int32[B, K], where K is `RolloutConfig.draft_tokens`, and the
      number of drafts in each row, int32[B]. A wrong draft costs time, but does
      not change the sampled tokens.
    """
    ...


def rows_of(queue: Queue, numbers: Array) -> Rows:
  """Returns the `Rows` of the sequences in queue rows `numbers`, int32[R]."""
  length = indexing.take(queue.length, numbers)
  return Rows(
    numbers=numbers,
    ids=indexing.take(queue.ids, numbers),
    counts=length - indexing.take(queue.start, numbers),
    lengths=length,
    last_tokens=indexing.take(queue.tokens, numbers, length - 1),
    extra=jax.tree.map(lambda leaf: indexing.take(leaf, numbers), queue.extra),
  )
