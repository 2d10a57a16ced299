"""The arguments of a `Process` and of a model that describe sequences."""

from typing import Any
from typing import NamedTuple
from typing import Protocol

import jax
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.rollout.sequences import Sequences


class Rows(NamedTuple):
  """Sequences of R rows: rows of logits, or tokens of a packed call.

  Attributes:
    numbers: int32[R], the row of `Sequences`; Q for none.
    ids: int32[R], the id of the sequence.
    counts: int32[R], tokens sampled so far in this turn.
    lengths: int32[R], the current length, including the prompt.
    last_tokens: int32[R], the last token.
    user: values of these sequences, a pytree of arrays [R, ...]; see
      `rollout.init`.
  """

  numbers: Array
  ids: Array
  counts: Array
  lengths: Array
  last_tokens: Array
  user: Any


class Process(Protocol):
  """A function that changes the logits of a step before tokens are sampled.

  It is called once for every token that a sequence draws.
  """

  def __call__(
    self, logits: Array, rows: Rows, user: Any, /
  ) -> tuple[Array, Any]:
    """Returns new logits and new values of `user`.

    Args:
      logits: float32[R, V].
      rows: the sequence of each row.
      user: the values that the rollout carries for these sequences, a pytree of
        arrays [R, ...]; see `init`.

    Returns:
      Logits float32[R, V] and `user` with the same structure, shapes and
      dtypes. Both are ignored for rows that draw no token.
    """
    ...


def rows_of(sequences: Sequences, user: Any, numbers: Array) -> Rows:
  """Returns the `Rows` of sequences `numbers`, int32[R]."""
  length = indexing.take(sequences.length, numbers)
  return Rows(
    numbers=numbers,
    ids=indexing.take(sequences.ids, numbers),
    counts=length - indexing.take(sequences.start, numbers),
    lengths=length,
    last_tokens=indexing.take(sequences.tokens, numbers, length - 1),
    user=jax.tree.map(lambda leaf: indexing.take(leaf, numbers), user),
  )
