"""Builds the NFA of a grammar over bytes, by Thompson's construction.

Thompson, "Regular expression search algorithm", 1968.
"""

import functools
from collections.abc import Callable

from jaxkv._src.guides.grammars import ByteSet
from jaxkv._src.guides.grammars import Chain
from jaxkv._src.guides.grammars import Choice
from jaxkv._src.guides.grammars import Grammar
from jaxkv._src.guides.grammars import Repeat

MOST_STATES = 1_000_000
"""The maximum number of states of an NFA."""


class Nfa:
  """A nondeterministic finite automaton (NFA), to which `add` adds grammars.

  Attributes:
    byte_edges: for each state, its edges that read a byte: pairs of a set of
      bytes (see `ByteSet.mask`) and the next state.
    epsilon_edges: for each state, the next states of edges without a byte.
  """

  def __init__(self):
    self.byte_edges: list[list[tuple[int, int]]] = []
    self.epsilon_edges: list[list[int]] = []

  def new_state(self) -> int:
    """Adds a state without edges, and returns its number."""
    check_size(len(self.epsilon_edges) + 1, MOST_STATES, "parts")
    self.byte_edges.append([])
    self.epsilon_edges.append([])
    return len(self.epsilon_edges) - 1

  def add(self, grammar: Grammar, start: int) -> int:
    """Adds a grammar that starts in `start`, and returns its final state."""
    if isinstance(grammar, ByteSet):
      end = self.new_state()
      if grammar.mask:
        self.byte_edges[start].append((grammar.mask, end))
      return end
    if isinstance(grammar, Chain):
      for part in grammar.parts:
        start = self.add(part, start)
      return start
    if isinstance(grammar, Choice):
      # As in Thompson's construction, each part gets a separate start state.
      end = self.new_state()
      for part in grammar.parts:
        part_end = self.add(part, self._successor(start))
        self.epsilon_edges[part_end].append(end)
      return end
    if isinstance(grammar, Repeat):
      return self._add_repeat(grammar, start)
    raise TypeError(f"`grammar` must be a Grammar, got {grammar!r}.")

  def _successor(self, start: int) -> int:
    """Adds a state with an epsilon edge from `start`, and returns it."""
    state = self.new_state()
    self.epsilon_edges[start].append(state)
    return state

  def _add_repeat(self, grammar: Repeat, start: int) -> int:
    end = self.new_state()
    if grammar.least == 0:
      self.epsilon_edges[start].append(end)
    begin = state = start
    # An unbounded repeat has at least one copy of the item, because its loop
    # leads back to the start of the last copy.
    copies = grammar.most
    if copies is None:
      copies = max(grammar.least, 1)
    for copy in range(copies):
      # Each copy gets a new start state `begin`, because a loop back to `state`
      # could continue with edges of `state` that are outside of the copy.
      begin = self._successor(state)
      state = self.add(grammar.item, begin)
      if copy + 1 >= grammar.least:
        self.epsilon_edges[state].append(end)
    if grammar.most is None:
      self.epsilon_edges[self._successor(state)].append(begin)
    return end

  def closure(self, final: int) -> Callable[[int], frozenset[int]]:
    """Returns a cached function from a state to its epsilon closure.

    The closure holds only `final` and states with byte edges. Other states
    affect neither the next bytes nor acceptance.
    """

    @functools.cache
    def closure_of(state: int) -> frozenset[int]:
      reached = {state}
      stack = [state]
      while stack:
        for follower in self.epsilon_edges[stack.pop()]:
          if follower not in reached:
            reached.add(follower)
            stack.append(follower)
      return frozenset(s for s in reached if self.byte_edges[s] or s == final)

    return closure_of


def check_size(size: int, limit: int, unit: str) -> None:
  """Raises ValueError if the automaton of a grammar exceeds a limit."""
  if size > limit:
    raise ValueError(
      f"`grammar` must compile to at most {limit} {unit}, got more; lower its "
      "counts of repeats, or make it less ambiguous."
    )
