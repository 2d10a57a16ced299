"""Compiles a grammar to its minimal DFA over bytes.

Thompson's construction gives an NFA (`nfa`). Subset construction converts it to
a DFA whose states are sets of NFA states (Rabin and Scott, "Finite automata and
their decision problems", 1959). `minimize` then merges equivalent states.
"""

import collections
import dataclasses
from collections.abc import Callable

import numpy as np

from jaxkv._src.guides.grammars import Grammar
from jaxkv._src.guides.minimize import longest_accepted
from jaxkv._src.guides.minimize import minimize
from jaxkv._src.guides.nfa import Nfa
from jaxkv._src.guides.nfa import check_size

START = 1
"""The start state of every `ByteDfa`."""

MOST_STATES = 100_000
"""The maximum number of states of a DFA before its minimization."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByteDfa:
  """The minimal DFA of a set of byte strings.

  State 1 is the start state. State 0 is the dead state, from which no accepting
  state can be reached.

  Attributes:
    next: the next state for each state and byte.  # int32[S, 256]
    accepts: True for accepting states.  # bool[S]
  """

  next: np.ndarray
  accepts: np.ndarray

  @property
  def num_states(self) -> int:
    """The number of states S, including the dead state."""
    return len(self.accepts)

  @property
  def max_bytes(self) -> int | None:
    """The length of the longest accepted string in bytes; None if unbounded."""
    longest = longest_accepted(self.next, self.accepts)[START]
    return None if longest >= 2**30 else int(longest)

  def matches(self, text: str | bytes) -> bool:
    """Returns True if the DFA accepts a text; a `str` is encoded as UTF-8."""
    state = START
    for byte in text.encode() if isinstance(text, str) else text:
      state = self.next[state, byte]
    return bool(self.accepts[state])


def compile_grammar(grammar: Grammar) -> ByteDfa:
  """Compiles a grammar, which must match a text, to its minimal DFA.

  Examples:
    >>> from jaxkv.guides import regex
    >>> dfa = compile_grammar(regex("(ab)*"))
    >>> dfa.num_states, dfa.max_bytes
    (3, None)
  """
  nfa = Nfa()
  final = nfa.add(grammar, nfa.new_state())
  classes, table, accepts = _determinize(nfa, final)
  table, accepts = minimize(table, accepts)
  if len(accepts) == 1:
    raise ValueError(
      "`grammar` must match some text, got one that matches nothing."
    )
  # One column for each byte lets the device read a byte with one look-up.
  return ByteDfa(next=table[:, classes], accepts=accepts)


def _byte_classes(nfa: Nfa) -> tuple[np.ndarray, dict[int, list[int]]]:
  """Groups bytes that belong to the same byte sets of the NFA.

  Returns:
    The class of each byte, int[256], and a dict from each byte set, in the
    form of `ByteSet.mask`, to the classes of its bytes.
  """
  masks = sorted({mask for edges in nfa.byte_edges for mask, _ in edges})
  # The last column stays False, so that the matrix is not empty for an NFA
  # without byte edges.
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


def _determinize(
  nfa: Nfa, final: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Determinizes an NFA by subset construction.

  Returns:
    The class of each byte, int[256]; the next state for each of S states and C
    classes, int32[S, C]; and bool[S], True for accepting states. State 0 is the
    start, and S - 1 is the dead state, until `minimize` renumbers the states.
  """
  classes, classes_of_mask = _byte_classes(nfa)
  closure = nfa.closure(final)
  numbers = {closure(0): 0}
  rows: list[dict[int, int]] = []
  queue = collections.deque(numbers)
  while queue:
    row = {}
    moves = _moves(queue.popleft(), nfa, classes_of_mask, closure)
    for byte_class, subset in moves.items():
      if subset not in numbers:
        numbers[subset] = len(numbers)
        queue.append(subset)
      row[byte_class] = numbers[subset]
    rows.append(row)
    check_size(len(numbers), MOST_STATES, "states")
  # A class without an edge leads to the dead state, which is the last one.
  table = np.full((len(rows) + 1, int(classes.max()) + 1), len(rows), np.int32)
  for state, row in enumerate(rows):
    table[state, [*row]] = [*row.values()]
  accepts = [final in subset for subset in numbers]
  return classes, table, np.array([*accepts, False])


def _moves(
  subset: frozenset[int],
  nfa: Nfa,
  classes_of_mask: dict[int, list[int]],
  closure: Callable[[int], frozenset[int]],
) -> dict[int, frozenset[int]]:
  """Maps each byte class with an edge to the NFA states after `subset`."""
  moves: dict[int, set[int]] = collections.defaultdict(set)
  for state in subset:
    for mask, target in nfa.byte_edges[state]:
      for byte_class in classes_of_mask[mask]:
        moves[byte_class] |= closure(target)
  return {key: frozenset(states) for key, states in moves.items()}
