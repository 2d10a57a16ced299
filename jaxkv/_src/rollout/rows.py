"""What `process` and a model are told about the sequences of their rows."""

from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import jax
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.rollout.state import RolloutState


class Rows(NamedTuple):
  """The sequences of R rows: of logits, or of the tokens in a packed call.

  Attributes:
    numbers: int32[R], the row of `Sequences`; Q for none.
    ids: int32[R], the number of the sequence.
    counts: int32[R], tokens drawn so far in this turn.
    lengths: int32[R], tokens so far, with those of the prompt.
    last_tokens: int32[R], the last one of them.
    user: what the rollout carries of these sequences, a pytree of arrays
      [R, ...]; see `rollout.init`.
  """

  numbers: Array
  ids: Array
  counts: Array
  lengths: Array
  last_tokens: Array
  user: Any


Process = Callable[[Array, Rows, Any], tuple[Array, Any]]
"""`(logits float32[R, V], rows, user) -> (logits, user)`: changes the logits of
each row, and what the rollout carries of its sequence, a pytree of arrays
[R, ...]. It is called for every token that a sequence draws, and once for each.
What it returns for rows that draw nothing is dropped."""


def rows_of(state: RolloutState, numbers: Array) -> Rows:
  """The rows of some sequences, int32[R]."""
  sequences = state.sequences
  length = indexing.take(sequences.length, numbers)
  return Rows(
    numbers=numbers,
    ids=indexing.take(sequences.ids, numbers),
    counts=length - indexing.take(sequences.start, numbers),
    lengths=length,
    last_tokens=indexing.take(sequences.tokens, numbers, length - 1),
    user=jax.tree.map(lambda leaf: indexing.take(leaf, numbers), state.user),
  )
