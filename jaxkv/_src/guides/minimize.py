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


def minimize(
  next: np.ndarray, accepts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the minimal DFA that accepts the same strings.

  Args:
    next: int32[S, C], the state after a state and a byte class. The start is
      state 0.
    accepts: bool[S], True for accepting states.

  Returns:
    `next` and `accepts` of the minimal DFA. State 0 is `DEAD`, state 1 is the
    start, and other states follow in breadth-first order. A DFA that accepts
    no string has only the dead state.
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


def _refine(table: np.ndarray, origin: np.ndarray) -> np.ndarray:
  """Splits blocks until all states of a block lead to the same blocks."""
  # Each block gets a random label. The hash of a state is a weighted sum of the
  # labels of the state's block and of the blocks to which it leads. Iterations
  # compare hashes, which is fast, until the blocks are stable. Hashes can
  # collide, so the last iteration compares the blocks themselves.
  random = np.random.default_rng(0)
  # Weights are odd, because a product with an even weight would lose bits.
  weights = random.integers(0, 2**63, table.shape[1] + 1, np.uint64) * 2 + 1
  block, exact = origin, False
  while True:
    if exact:
      columns = [origin[:, None], block[:, None], block[table]]
      refined = _blocks(np.concatenate(columns, axis=1))
    else:
      labels = random.integers(0, 2**63, len(block), np.uint64)[block]
      sums = labels * weights[0] + (labels[table] * weights[1:]).sum(axis=1)
      refined = np.unique(sums, return_inverse=True)[1].reshape(-1)
    stable = refined.max() == block.max()
    if stable and exact:
      return refined
    block, exact = refined, stable


def _blocks(rows: np.ndarray) -> np.ndarray:
  """Numbers the rows of a matrix, so that equal rows get equal numbers."""
  return np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1)


def _quotient(
  table: np.ndarray, ends: np.ndarray, block: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Merges the states of each block, and renumbers states breadth-first."""
  _, member = np.unique(block, return_index=True)
  merged = block[table[member]]
  dead_block, start_block = int(block[DEAD]), int(block[1])
  order, reached = [dead_block, start_block], {dead_block, start_block}
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
  begin, end = begin[order], end[order]
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
  begin, end = begin[is_live], end[is_live]
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
