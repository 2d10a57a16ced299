"""Minimizes a DFA by partition refinement (Moore's algorithm).

A partition divides the states into blocks. Each iteration splits the blocks
whose states lead to different blocks (Moore, "Gedanken-experiments on
sequential machines", 1956). The initial partition already separates states by
the lengths of the shortest and the longest string that they accept. Otherwise,
a repeat such as `a{1000}` would take 1,000 iterations.
"""

import numpy as np

DEAD = 0
"""The state from which no accepting state can be reached."""


class Numbering:
  """Numbers distinct arrays from 0 on. Equal arrays get the same number."""

  def __init__(self):
    self._numbers: dict[bytes, int] = {}

  def of(self, array: np.ndarray) -> int:
    return self._numbers.setdefault(array.tobytes(), len(self._numbers))


def minimize(
  next: np.ndarray, accepts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the minimal DFA that accepts the same strings.

  `next`, int32[S, C], is the state after a state and a byte class; the start is
  state 0. `accepts` is bool[S]. In the minimal DFA, state 0 is `DEAD`, state 1
  is the start, and other states follow in breadth-first order. A DFA that
  accepts no string has only the dead state.
  """
  shortest = shortest_accepted(next, accepts)
  live = shortest >= 0
  if not live[0]:
    return np.zeros((1, next.shape[1]), np.int32), np.zeros(1, bool)
  # All dead states become state 0, and live states are numbered from 1.
  new_number = np.where(live, np.cumsum(live), 0)
  table = np.zeros((int(live.sum()) + 1, next.shape[1]), np.int32)
  table[1:] = new_number[next[live]]
  ends = np.concatenate([[False], accepts[live]])
  shortest = np.concatenate([[-1], shortest[live]])
  longest = longest_accepted(table, ends)
  block = _blocks(np.stack([ends, shortest, longest], axis=1))
  block = _refine(table, block)
  return _quotient(table, ends, block)


def _refine(table: np.ndarray, block: np.ndarray) -> np.ndarray:
  """Splits blocks until all states of a block lead to the same blocks."""
  while True:
    refined = _blocks(np.concatenate([block[:, None], block[table]], axis=1))
    if refined.max() == block.max():
      return refined
    block = refined


def _blocks(rows: np.ndarray) -> np.ndarray:
  """Numbers the rows of a matrix, so that equal rows get equal numbers."""
  # Takes less time than `np.unique`, which sorts the rows.
  numbering = Numbering()
  return np.array([numbering.of(row) for row in rows], np.int32)


def _quotient(
  table: np.ndarray, ends: np.ndarray, block: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Merges the states of each block, and renumbers states breadth-first."""
  _, member = np.unique(block, return_index=True)
  merged = block[table[member]]
  dead_block = int(block[DEAD])
  start_block = int(block[1])
  order = [dead_block, start_block]
  reached = {dead_block, start_block}
  for state in order:
    for follower in dict.fromkeys(merged[state].tolist()):
      if follower not in reached:
        reached.add(follower)
        order.append(follower)
  new_number = np.zeros(len(merged), np.int32)
  new_number[order] = np.arange(len(order), dtype=np.int32)
  return new_number[merged[order]], ends[member][order]


def shortest_accepted(next: np.ndarray, accepts: np.ndarray) -> np.ndarray:
  """Returns the length of each state's shortest string; -1 if it has none."""
  # A breadth-first search, backwards from the accepting states.
  begin, end = _edges(next)
  order = np.argsort(end, kind="stable")
  begin = begin[order]
  end = end[order]
  first = np.searchsorted(end, np.arange(len(next) + 1))
  lengths = np.where(accepts, 0, -1)
  frontier = np.flatnonzero(accepts)
  steps = 0
  while len(frontier):
    steps += 1
    sources = [begin[first[state] : first[state + 1]] for state in frontier]
    frontier = np.unique(np.concatenate(sources))
    frontier = frontier[lengths[frontier] < 0]
    lengths[frontier] = steps
  return lengths


def longest_accepted(table: np.ndarray, ends: np.ndarray) -> np.ndarray:
  """Returns the length of each state's longest accepted string, int[S].

  The length is in bytes, -1 for the dead state, and 2**30 for a state whose
  strings are unbounded. State 0 must be the only dead state.
  """
  begin, end = _edges(table)
  is_live = (begin != DEAD) & (end != DEAD)
  begin = begin[is_live]
  end = end[is_live]
  order = np.argsort(end, kind="stable")
  sources = begin[order]
  first = np.searchsorted(end[order], np.arange(len(table) + 1))
  open_edges = np.bincount(begin, minlength=len(table))
  lengths = np.where(ends, 0, -1)
  # A state enters the queue after all its live next states. A state with a path
  # to a cycle never enters the queue, and its strings are unbounded.
  leaves = np.flatnonzero(open_edges == 0)
  queue = [state for state in leaves if state != DEAD]
  is_finite = np.zeros(len(table), bool)
  is_finite[DEAD] = True
  for state in queue:
    is_finite[state] = True
    for source in sources[first[state] : first[state + 1]]:
      lengths[source] = max(lengths[source], lengths[state] + 1)
      open_edges[source] -= 1
      if open_edges[source] == 0:
        queue.append(source)
  return np.where(is_finite, lengths, 2**30)


def _edges(next: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns the distinct pairs of a state and its next state."""
  states = np.arange(len(next), dtype=np.int64)[:, None]
  pairs = np.unique(states * len(next) + next)
  return pairs // len(next), pairs % len(next)
