"""The smallest automaton of a grammar, over bytes.

A grammar becomes an automaton that may be in several states at once (Thompson,
"Regular expression search algorithm", 1968). Each set of states that it can be
in is a state of the automaton that is built from it.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from jaxkv._src.guides.grammars import ByteSet
from jaxkv._src.guides.grammars import Chain
from jaxkv._src.guides.grammars import Choice
from jaxkv._src.guides.grammars import Grammar
from jaxkv._src.guides.grammars import Repeat
from jaxkv._src.guides.minimize import longest_accepted
from jaxkv._src.guides.minimize import minimize

START = 1
"""The state in which an automaton begins."""

MOST_STATES = 100_000
"""An automaton with more states is refused."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByteDfa:
  """The smallest automaton that accepts certain byte strings.

  State 0 is dead: nothing is accepted any more. It begins in state 1.

  Attributes:
    next: the state after a state and a byte.  # int32[S, 256]
    accepts: whether a string may end in each state.  # bool[S]
  """

  next: np.ndarray
  accepts: np.ndarray

  @property
  def num_states(self) -> int:
    """S, the dead state included."""
    return len(self.accepts)

  @property
  def max_bytes(self) -> int | None:
    """Bytes of the longest string that is accepted; None if there is none."""
    longest = longest_accepted(self.next, self.accepts)[START]
    return None if longest >= 2**30 else int(longest)

  def matches(self, text: str | bytes) -> bool:
    """Whether a string is accepted; a `str` stands for its UTF-8."""
    state = START
    for byte in text.encode() if isinstance(text, str) else text:
      state = self.next[state, byte]
    return bool(self.accepts[state])


def compile_grammar(grammar: Grammar) -> ByteDfa:
  """The automaton of a grammar.

  Args:
    grammar: what shall be accepted.

  Raises:
    ValueError: nothing matches the grammar, or it needs too many states.

  Examples:
    >>> from jaxkv.rollout import regex
    >>> dfa = compile_grammar(regex("(ab)*"))
    >>> dfa.num_states, dfa.max_bytes
    (3, None)
  """
  parts = _Parts()
  final = parts.add(grammar, parts.state())
  classes, table, accepts = _subsets(parts, final)
  table, accepts = minimize(table, accepts)
  if len(accepts) == 1:
    raise ValueError(
      "`grammar` must match some text, got one that matches nothing."
    )
  return ByteDfa(next=table[:, classes], accepts=accepts)


class _Parts:
  """Thompson's automaton, which grows by parts of a grammar.

  Attributes:
    bytes: for each state the sets of bytes that lead to other states.
    empty: for each state those that it leads to without a byte.
  """

  def __init__(self):
    self.bytes: list[list[tuple[int, int]]] = []
    self.empty: list[list[int]] = []

  def state(self) -> int:
    """A new state."""
    _check_size(len(self.empty), 10 * MOST_STATES, "parts")
    self.bytes.append([])
    self.empty.append([])
    return len(self.empty) - 1

  def add(self, grammar: Grammar, start: int) -> int:
    """Adds a grammar after a state; returns the state at its end."""
    if isinstance(grammar, ByteSet):
      end = self.state()
      if grammar.mask:
        self.bytes[start].append((grammar.mask, end))
      return end
    if isinstance(grammar, Chain):
      for part in grammar.parts:
        start = self.add(part, start)
      return start
    if isinstance(grammar, Choice):
      end = self.state()
      for part in grammar.parts:
        self.empty[self.add(part, self._after(start))].append(end)
      return end
    if isinstance(grammar, Repeat):
      return self._repeat(grammar, start)
    raise TypeError(f"`grammar` must be a Grammar, got {grammar!r}.")

  def _after(self, start: int) -> int:
    """A new state that another leads to."""
    state = self.state()
    self.empty[start].append(state)
    return state

  def _repeat(self, grammar: Repeat, start: int) -> int:
    end = self.state()
    if grammar.least == 0:
      self.empty[start].append(end)
    begin = here = start
    copies = grammar.most
    if copies is None:
      copies = max(grammar.least, 1)
    for copy in range(copies):
      after = self.add(grammar.separator, here) if copy else here
      begin = self._after(after)
      here = self.add(grammar.item, begin)
      if copy + 1 >= grammar.least:
        self.empty[here].append(end)
    if grammar.most is None:
      again = self.add(grammar.separator, self._after(here))
      self.empty[again].append(begin)
    return end


def _classes(parts: _Parts) -> tuple[np.ndarray, dict[int, list[int]]]:
  """Bytes that are in the same sets are one class.

  Returns:
    The class of each byte, int[256], and the classes of each set.
  """
  masks = sorted({mask for edges in parts.bytes for mask, _ in edges})
  members = np.zeros((256, len(masks) + 1), bool)
  for column, mask in enumerate(masks):
    bits = np.frombuffer(mask.to_bytes(32, "little"), np.uint8)
    members[:, column] = np.unpackbits(bits, bitorder="little")
  _, first, classes = np.unique(
    members, axis=0, return_index=True, return_inverse=True
  )
  return classes.reshape(-1), {
    mask: np.flatnonzero(members[first, column]).tolist()
    for column, mask in enumerate(masks)
  }


def _subsets(
  parts: _Parts, final: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """The automaton of sets of states.

  Returns:
    The class of each byte, int[256]; the state after each state and class,
    int32[S, C]; which states accept, bool[S]. It begins in state 0.
  """
  classes, members = _classes(parts)
  reached = _closure(parts, final)
  numbers = {reached(0): 0}
  rows: list[dict[int, int]] = []
  queue = collections.deque(numbers)
  while queue:
    row = {}
    for one, states in _moves(queue.popleft(), parts, members, reached).items():
      subset = frozenset(states)
      if subset not in numbers:
        numbers[subset] = len(numbers)
        queue.append(subset)
      row[one] = numbers[subset]
    rows.append(row)
    _check_size(len(numbers), MOST_STATES, "states")
  table = np.full((len(rows) + 1, int(classes.max()) + 1), len(rows), np.int32)
  for state, row in enumerate(rows):
    table[state, [*row]] = [*row.values()]
  accepts = [final in subset for subset in numbers]
  return classes, table, np.array([*accepts, False])


def _moves(
  subset: frozenset[int],
  parts: _Parts,
  members: dict[int, list[int]],
  reached: Callable[[int], frozenset[int]],
) -> dict[int, set[int]]:
  """The states that some states lead to, by the class of the byte read."""
  moves: dict[int, set[int]] = collections.defaultdict(set)
  for state in subset:
    for mask, target in parts.bytes[state]:
      for one in members[mask]:
        moves[one] |= reached(target)
  return moves


def _check_size(size: int, most: int, what: str) -> None:
  if size > most:
    raise ValueError(
      f"`grammar` must need at most {most} {what}, got more; repeat less in "
      "it, or make it less ambiguous."
    )


def _closure(parts: _Parts, final: int) -> Callable[[int], frozenset[int]]:
  """Returns the states that a state leads to without a byte.

  Only those count that read a byte, and the last one.
  """

  @functools.cache
  def reached(state: int) -> frozenset[int]:
    seen, stack = {state}, [state]
    while stack:
      for follower in parts.empty[stack.pop()]:
        if follower not in seen:
          seen.add(follower)
          stack.append(follower)
    return frozenset(s for s in seen if parts.bytes[s] or s == final)

  return reached
