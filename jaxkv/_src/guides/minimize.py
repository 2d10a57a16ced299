"""States that accept the same, found by refining a partition.

The blocks of a partition are split until all states of a block go to the same
blocks (Moore, "Gedanken-experiments on sequential machines", 1956). It begins
with the shortest and the longest string that each state accepts, by which most
states differ already where something is counted.
"""

import numpy as np

DEAD = 0
"""The state from which nothing is accepted."""


def minimize(
  next: np.ndarray, accepts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """The smallest automaton that accepts the same strings.

  Args:
    next: int32[S, C], the state after a state and a class of bytes; it begins
      in state 0.
    accepts: bool[S].

  Returns:
    The same for the new states, of which state 0 is `DEAD`, and state 1 is the
    first one; the others follow in the order in which strings reach them. If
    nothing is accepted there is the dead state alone.
  """
  shortest = shortest_accepted(next, accepts)
  live = shortest >= 0
  if not live[0]:
    return np.zeros((1, next.shape[1]), np.int32), np.zeros(1, bool)
  # The dead states become one, which stands in front.
  number = np.where(live, np.cumsum(live), 0)
  table = np.zeros((int(live.sum()) + 1, next.shape[1]), np.int32)
  table[1:] = number[next[live]]
  ends = np.concatenate([[False], accepts[live]])
  shortest = np.concatenate([[-1], shortest[live]])
  longest = longest_accepted(table, ends)
  block = _blocks(np.stack([ends, shortest, longest], axis=1))
  block = _refined(table, block)
  return _quotient(table, ends, block)


def _refined(table: np.ndarray, origin: np.ndarray) -> np.ndarray:
  """The coarsest refinement of a partition that the automaton respects."""
  # Rows are told apart by random sums at first, which is quick, and at the end
  # entry by entry: sums may be equal by accident.
  random = np.random.default_rng(0)
  weights = random.integers(0, 2**63, table.shape[1] + 1, np.uint64) * 2 + 1
  block, exact = origin, False
  while True:
    if exact:
      columns = [origin[:, None], block[:, None], block[table]]
      finer = _blocks(np.concatenate(columns, axis=1))
    else:
      labels = random.integers(0, 2**63, len(block), np.uint64)[block]
      sums = labels * weights[0] + (labels[table] * weights[1:]).sum(axis=1)
      finer = np.unique(sums, return_inverse=True)[1].reshape(-1)
    stable = finer.max() == block.max()
    if stable and exact:
      return finer
    block, exact = finer, stable


def _blocks(rows: np.ndarray) -> np.ndarray:
  """int[S]: equal numbers for equal rows."""
  return np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1)


def _quotient(
  table: np.ndarray, ends: np.ndarray, block: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """The automaton of blocks, numbered as `minimize` says."""
  _, member = np.unique(block, return_index=True)
  merged = block[table[member]]
  dead, start = int(block[DEAD]), int(block[1])
  order, seen = [dead, start], {dead, start}
  for state in order:
    for follower in dict.fromkeys(merged[state].tolist()):
      if follower not in seen:
        seen.add(follower)
        order.append(follower)
  number = np.zeros(len(merged), np.int32)
  number[order] = np.arange(len(order), dtype=np.int32)
  return number[merged[order]], ends[member][order]


def shortest_accepted(next: np.ndarray, accepts: np.ndarray) -> np.ndarray:
  """int[S]: bytes of the shortest string that each state accepts, -1: none."""
  begin, end = _edges(next)
  order = np.argsort(end, kind="stable")
  begin, end = begin[order], end[order]
  first = np.searchsorted(end, np.arange(len(next) + 1))
  found = np.where(accepts, 0, -1)
  frontier = np.flatnonzero(accepts)
  steps = 0
  while len(frontier):
    steps += 1
    before = [begin[first[state] : first[state + 1]] for state in frontier]
    frontier = np.unique(np.concatenate(before))
    frontier = frontier[found[frontier] < 0]
    found[frontier] = steps
  return found


def longest_accepted(table: np.ndarray, ends: np.ndarray) -> np.ndarray:
  """int[S]: bytes of the longest string that each state accepts.

  -1 if there is none, 2**30 if there is no longest.

  Args:
    table: the states that follow; state 0 is dead, and no other.
    ends: bool[S].
  """
  begin, end = _edges(table)
  real = (begin != DEAD) & (end != DEAD)
  begin, end = begin[real], end[real]
  order = np.argsort(end, kind="stable")
  sources = begin[order]
  first = np.searchsorted(end[order], np.arange(len(table) + 1))
  left = np.bincount(begin, minlength=len(table))
  found = np.where(ends, 0, -1)
  ready = [state for state in np.flatnonzero(left == 0) if state != DEAD]
  done = np.zeros(len(table), bool)
  done[DEAD] = True
  for state in ready:
    done[state] = True
    for source in sources[first[state] : first[state + 1]]:
      found[source] = max(found[source], found[state] + 1)
      left[source] -= 1
      if left[source] == 0:
        ready.append(source)
  return np.where(done, found, 2**30)


def _edges(next: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """The pairs of states of which one follows the other, each pair once."""
  states = np.arange(len(next), dtype=np.int64)[:, None]
  pairs = np.unique(states * len(next) + next)
  return pairs // len(next), pairs % len(next)
