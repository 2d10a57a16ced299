"""Stop strings, which end a sequence when it generates one of them.

An Aho-Corasick automaton searches for all stop strings of a sequence at once
("Efficient string matching: an aid to bibliographic search", 1975). It reads
the bytes of tokens, so a string can begin in one token and end in a later one.
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import sharding
from jaxkv._src.arrays.arguments import as_int32
from jaxkv._src.arrays.arguments import check_shape
from jaxkv._src.guides.token_bytes import TokenBytes
from jaxkv._src.guides.token_bytes import fold_bytes
from jaxkv._src.guides.token_bytes import read_byte

Strings = Sequence[str | bytes]
"""A list of stop strings. A `str` is encoded as UTF-8."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StopStrings:
  """The stop strings of Q sequences, as automata of S states in total.

  The rollout stores an int32 state for each sequence. `init` returns the start
  states, and `advance` updates them with each generated token. The rollout does
  not search the prompt.

  Attributes:
    start: the start state of each sequence, or a scalar if one list applies to
      all sequences.  # int32[Q] or int32[]
    next: the state after a state and a byte.  # int32[S, 256]
    ends: for each state, the lowest index of the stop strings that end there,
      counted in their list; -1 for none.  # int32[S]
    tokens: the bytes of all tokens.
  """

  start: Array
  next: Array
  ends: Array
  tokens: TokenBytes

  def init(self, num_sequences: int) -> Array:
    """Returns the start state of each of Q sequences, int32[Q].

    Raises:
      ValueError: `num_sequences` is not the number of lists.
    """
    if self.start.ndim == 0:
      return jnp.full((num_sequences,), self.start)
    meaning = ", a list of stop strings for each sequence"
    check_shape("start", self.start, (num_sequences,), meaning)
    return jnp.copy(self.start)

  def select(self, lists: Any) -> "StopStrings":
    """Returns stop strings for new sequences, each with an existing list.

    Args:
      lists: int32[Q], the index of an existing list for each new sequence.

    Raises:
      TypeError: `lists` does not hold integers.
      ValueError: `lists` does not have one axis, an index is out of range, or
        all sequences share one list. Traced indices are not checked.
    """
    lists = as_int32("lists", lists, ("Q",))
    check_shape("start", self.start, ("Q",), ", one for each list")
    count = self.start.shape[0]
    if not isinstance(lists, Tracer):
      numbers = np.asarray(lists)
      for row in np.flatnonzero((numbers < 0) | (numbers >= count)).tolist():
        raise ValueError(
          f"`lists[{row}]` must be 0 .. {count - 1}, got {numbers[row]}."
        )
    return dataclasses.replace(
      self, start=indexing.take(self.start, jnp.asarray(lists))
    )

  def string(self, start: int, index: int) -> bytes:
    """Returns a stop string of a list, on the host.

    Args:
      start: the start state of the list.
      index: the index of the string, which must have ended a sequence.
    """
    # The string leads to the nearest state that reports its index: longer paths
    # to such a state end with the string.
    next_states, ends = np.asarray(self.next), np.asarray(self.ends)
    paths = {start: b""}
    waiting = collections.deque([start])
    while waiting:
      state = waiting.popleft()
      if ends[state] == index:
        return paths[state]
      for byte, target in enumerate(next_states[state].tolist()):
        if target not in paths:
          paths[target] = paths[state] + bytes([byte])
          waiting.append(target)
    raise ValueError(f"`index` must be that of a stop string, got {index}.")

  def advance(self, states: Array, numbers: Array) -> tuple[Array, Array]:
    """Reads one token in each of R sequences.

    Args:
      states: int32[R], the states of the sequences.
      numbers: int32[R], the token that each sequence reads.

    Returns:
      The states after the token, int32[R], and the index of the stop string
      that the token completes, int32[R], counted in the list of the sequence;
      -1 for none. If a token completes several strings, returns the index of
      the string that ends first, or the lowest index if they end together.
    """
    dfa, states, numbers = sharding.match_varying_axes((self, states, numbers))

    def body(
      carry: tuple[Array, Array], byte: Array, reads: Array
    ) -> tuple[Array, Array]:
      states, completed = carry
      states = read_byte(dfa.next, states, byte, reads)
      # A string that ends later in the token does not replace the first one.
      ended = indexing.take(dfa.ends, states, fill=-1)
      return states, jnp.where(reads & (completed < 0), ended, completed)

    no_string = sharding.zeros_like(states) - 1
    return fold_bytes(dfa.tokens, numbers, body, (states, no_string))


def stop_strings(
  strings: Strings | Sequence[Strings | None], tokens: TokenBytes
) -> StopStrings:
  """Builds the automata of stop strings, on the host.

  They have at most one state for each byte in the distinct lists, plus one for
  each distinct list. A state takes 1 KiB.

  Args:
    strings: a list of strings for all sequences; or a list of Q such lists, one
      for each sequence, where None or an empty list means no stop strings.
    tokens: the bytes of all tokens. The result stores a copy, so that `tokens`
      survives a donation of the result.

  Raises:
    TypeError: `strings` is a single string, or has entries of a wrong type.
    ValueError: a string is empty.

  Examples:
    >>> from jaxkv.guides import token_bytes
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
  # Equal lists share an automaton. The tables of all automata are concatenated.
  for row in lists:
    if row in starts:
      continue
    starts[row] = size
    table, end = _build_automaton(row)
    tables.append(table + size)
    ends.append(end)
    size += len(end)
  start = np.array([starts[row] for row in lists], np.int32)
  return StopStrings(
    start=jnp.asarray(start[0] if shared else start),
    next=jnp.asarray(np.concatenate(tables), jnp.int32),
    ends=jnp.asarray(np.concatenate(ends), jnp.int32),
    tokens=tokens.copy(),
  )


def _build_automaton(strings: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
  """Builds `StopStrings.next` and `.ends` of one list; state 0 is the start."""
  children: list[dict[int, int]] = [{}]
  ends = [-1]
  for index, string in enumerate(strings):
    state = 0
    for byte in string:
      if byte not in children[state]:
        children[state][byte] = len(children)
        children.append({})
        ends.append(-1)
      state = children[state][byte]
    # If two strings are equal, the first index is kept.
    if ends[state] < 0:
      ends[state] = index
  table = np.zeros((len(children), 256), np.int32)
  # `fallback` is the failure function: the state of the longest proper suffix
  # of the bytes read that is a prefix of a string. The suffix is shorter, so a
  # breadth-first search completes its table row before this one.
  fallback = [0] * len(children)
  queue = collections.deque([0])
  while queue:
    state = queue.popleft()
    indices = {ends[state], ends[fallback[state]]} - {-1}
    ends[state] = min(indices, default=-1)
    table[state] = table[fallback[state]]
    for byte, child in children[state].items():
      fallback[child] = int(table[state, byte])
      table[state, byte] = child
      queue.append(child)
  return table, np.array(ends, np.int32)


def _lists(
  strings: Strings | Sequence[Strings | None],
) -> tuple[list[tuple[bytes, ...]], bool]:
  """Returns the checked lists, and True if all sequences share one list."""
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
  encoded = []
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
    encoded.append(string.encode() if isinstance(string, str) else string)
  return tuple(encoded)
