"""Strings that end a sequence, wherever they stand in its tokens.

The strings of a sequence are searched all at once, by one automaton that reads
the bytes of the generated tokens (Aho and Corasick, "Efficient string matching:
an aid to bibliographic search", 1975). A string may begin in one token and end
in the middle of a later one.
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import sharding
from jaxkv._src.arrays.arguments import as_int32
from jaxkv._src.arrays.arguments import check_shape
from jaxkv._src.guides.token_bytes import TokenBytes
from jaxkv._src.guides.token_bytes import fold_bytes
from jaxkv._src.guides.token_bytes import read_byte

Strings = Sequence[str | bytes]
"""The stop strings of a sequence, or of all; a `str` stands for its UTF-8."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StopStrings:
  """The stop strings of Q sequences, as one automaton with S states.

  A sequence's state, an int32, belongs to the loop: it begins as `init` says,
  and `advance` moves it by each generated token. The prompt is not searched.

  Attributes:
    start: the state before the first generated token of each sequence. A
      scalar if all have the same strings.  # int32[Q] or int32[]
    next: the state after a state and a byte.  # int32[S, 256]
    ends: the string that ends in each state, by its number in the sequence's
      own list; -1 for none.  # int32[S]
    tokens: the bytes of all tokens.
  """

  start: Array
  next: Array
  ends: Array
  tokens: TokenBytes

  def init(self, num_sequences: int) -> Array:
    """int32[Q]: the state of each sequence before its first generated token.

    Raises:
      ValueError: there are lists for another number of sequences.
    """
    if self.start.ndim == 0:
      return jnp.full((num_sequences,), self.start)
    meaning = ", a list of stop strings for each sequence"
    check_shape("start", self.start, (num_sequences,), meaning)
    return jnp.copy(self.start)

  def select(self, lists: Any) -> "StopStrings":
    """The stop strings of other sequences, out of the lists that are known.

    Args:
      lists: int32[Q], for each sequence the row of the list it has.

    Raises:
      TypeError: `lists` does not hold integers.
      ValueError: `lists` has another rank, or there is but one list for all.
    """
    lists = as_int32("lists", lists)
    check_shape("lists", lists, ("Q",))
    check_shape("start", self.start, ("Q",), ", one for each list")
    return dataclasses.replace(
      self, start=indexing.take(self.start, jnp.asarray(lists))
    )

  def advance(self, states: Array, numbers: Array) -> tuple[Array, Array]:
    """Reads one token in each row.

    Args:
      states: int32[R], the rows' states; any rows, in any order.
      numbers: int32[R], the token that each row reads.

    Returns:
      The states after the token, int32[R], and the string that this token
      completes, by its number in the sequence's own list, int32[R], -1 for
      none. If it completes several, the one that ends first, and of those that
      end at the same byte the first in the list.
    """
    own, states, numbers = sharding.match_varying_axes((self, states, numbers))

    def body(
      carry: tuple[Array, Array], byte: Array, reads: Array
    ) -> tuple[Array, Array]:
      states, found = carry
      states = read_byte(own.next, states, byte, reads)
      ended = indexing.take(own.ends, states, fill=-1)
      return states, jnp.where(reads & (found < 0), ended, found)

    none = sharding.zeros_like(states) - 1
    return fold_bytes(own.tokens, numbers, body, (states, none))


def stop_strings(
  strings: Strings | Sequence[Strings | None], tokens: TokenBytes
) -> StopStrings:
  """Makes the automaton of stop strings, on the host.

  It has at most one state for each byte of all different lists, and one more
  for each list; a state takes 1 KiB.

  Args:
    strings: a list for all sequences, or a list for each of Q sequences, where
      None and an empty list mean no stop strings.
    tokens: the bytes of all tokens; they are copied, so that a state with stop
      strings may be donated.

  Raises:
    TypeError: `strings` is a single string, or holds something else.
    ValueError: a string is empty.

  Examples:
    >>> from jaxkv.rollout import token_bytes
    >>> tokens = token_bytes([b"a", b"bc", b"c d"])
    >>> stop = stop_strings([["ab", "cc"], ["c"]], tokens)
    >>> states, found = stop.advance(stop.init(2), jnp.asarray([0, 0]))
    >>> stop.advance(states, jnp.asarray([1, 1]))[1]
    Array([0, 0], dtype=int32)
  """
  lists, shared = _lists(strings)
  starts: dict[tuple[bytes, ...], int] = {}
  tables: list[np.ndarray] = []
  ends: list[np.ndarray] = []
  size = 0
  for own in lists:
    if own in starts:
      continue
    starts[own] = size
    table, end = _automaton(own)
    tables.append(table + size)
    ends.append(end)
    size += len(end)
  start = np.array([starts[own] for own in lists], np.int32)
  return StopStrings(
    start=jnp.asarray(start[0] if shared else start),
    next=jnp.asarray(np.concatenate(tables), jnp.int32),
    ends=jnp.asarray(np.concatenate(ends), jnp.int32),
    tokens=tokens.copy(),
  )


def _automaton(strings: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
  """`StopStrings.next` and `.ends` of one list; it starts in state 0."""
  children: list[dict[int, int]] = [{}]
  ends = [-1]
  for number, string in enumerate(strings):
    state = 0
    for byte in string:
      if byte not in children[state]:
        children[state][byte] = len(children)
        children.append({})
        ends.append(-1)
      state = children[state][byte]
    if ends[state] < 0:
      ends[state] = number
  table = np.zeros((len(children), 256), np.int32)
  # The longest other state that the bytes so far end with.
  shorter = [0] * len(children)
  queue = collections.deque([0])
  while queue:
    state = queue.popleft()
    ends[state] = _first(ends[state], ends[shorter[state]])
    table[state] = table[shorter[state]]
    for byte, child in children[state].items():
      shorter[child] = int(table[state, byte])
      table[state, byte] = child
      queue.append(child)
  return table, np.array(ends, np.int32)


def _first(number: int, other: int) -> int:
  """The lower of two numbers of strings, where -1 is none."""
  return max(number, other) if min(number, other) < 0 else min(number, other)


def _lists(
  strings: Strings | Sequence[Strings | None],
) -> tuple[list[tuple[bytes, ...]], bool]:
  """The lists, and whether there is but one for all sequences."""
  if isinstance(strings, str | bytes):
    raise TypeError(
      f"`strings` must be a list, got {strings!r}; write [{strings!r}]."
    )
  rows = list(strings)
  if all(isinstance(row, str | bytes) for row in rows):
    return [_as_bytes("strings", rows)], True
  lists = []
  for number, row in enumerate(rows):
    name = f"strings[{number}]"
    if isinstance(row, str | bytes):
      raise TypeError(
        f"`{name}` must be a list like the others, got {row!r}; write "
        f"[{row!r}]."
      )
    lists.append(_as_bytes(name, [] if row is None else row))
  return lists, False


def _as_bytes(name: str, strings: Any) -> tuple[bytes, ...]:
  if not isinstance(strings, Sequence):
    raise TypeError(
      f"`{name}` must be a list of strings or None, got {strings!r}."
    )
  found = []
  for number, string in enumerate(strings):
    if not isinstance(string, str | bytes):
      raise TypeError(
        f"`{name}[{number}]` must be a str or bytes, got {string!r} of type "
        f"{type(string).__name__}."
      )
    if not string:
      raise ValueError(
        f"`{name}[{number}]` must not be empty: it would end every sequence "
        "at its first token."
      )
    found.append(string.encode() if isinstance(string, str) else string)
  return tuple(found)
