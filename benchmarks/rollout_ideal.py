"""What is possible, computed on the host in plain Python.

| ideal          | rows of a step                                             |
|----------------|------------------------------------------------------------|
| mixed batches  | one for each decoding sequence, and as many prompt tokens  |
|                | as fit 295 rows in all, at least 1                         |
| equal columns  | one for each decoding sequence, and as many prompt tokens  |
|                | as the loop has columns for: `prefill_chunk` and those of  |
|                | the slots that do not decode                               |

Both take sequences in the order of the queue, fill a slot in the step after it
became empty, serve prompts in the order of entry, and compute no row that is
not needed. A prompt's last row draws the first token. Sequences that do not fit
into the pool stay in their slots and lose nothing: those that entered first
have their pages, the others pause until pages are free, and what they hold is
kept elsewhere. With a small pool this is a yardstick and no limit: other orders
may do better.

The cost of a step is that of a bfloat16 call on an accelerator: reading the
weights takes as long as computing 295 rows, so it costs max(rows, 295).
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from rollout_workloads import Workload

RIDGE = 295
"""Rows at which a call in bfloat16 takes as long as reading the weights."""


class Schedule(NamedTuple):
  """What an ideal scheduler does with a workload.

  Attributes:
    steps: model calls.
    cost: rows, where a call costs at least `RIDGE`.
    busy: slots that draw a token, of all, in all steps.
    most_pages: in use at once.
    pages_a_sequence: mean of a running sequence, over all steps.
    pages_at_most: mean of a running sequence when most pages are in use.
  """

  steps: int
  cost: int
  busy: float
  most_pages: int
  pages_a_sequence: float
  pages_at_most: float


class _Running:
  """A sequence in a slot: tokens to compute and to draw, and tokens held."""

  def __init__(self, compute: int, draw: int, held: int):
    self.compute, self.draw, self.held = compute, draw, held


def mixed_room(decoding: int) -> int:
  """Prompt tokens of a step of mixed batches."""
  return max(RIDGE - decoding, 1)


def loop_room(slots: int, chunk: int = 256) -> Callable[[int], int]:
  """Prompt tokens of a step with the loop's columns."""
  return lambda decoding: chunk + slots - decoding


def schedule(
  work: Workload, room: Callable[[int], int], pages: float = math.inf
) -> Schedule:
  """Simulates an ideal scheduler.

  Pages that begin several prompts are computed once, by the first of them, and
  each sequence is counted with all its pages.

  Args:
    work: its sequences, one sample each.
    room: (decoding sequences) -> prompt tokens that a step may compute.
    pages: of the pool.
  """
  queue = [
    _Running(*sequence)
    for sequence in zip(
      (new_tokens(work) + 1).tolist(),
      work.answers.tolist(),
      work.lengths.tolist(),
      strict=True,
    )
  ]
  queue.reverse()
  slots: list[_Running] = []
  steps = cost = drawn = 0
  used: list[tuple[int, int]] = []
  while queue or slots:
    while queue and len(slots) < work.slots:
      slots.append(queue.pop())
    active, in_use = _fitting(slots, pages, work.page_size)
    used.append((len(active), in_use))
    rows, draws = _step(active, room)
    slots = [one for one in slots if one.draw]
    steps, cost, drawn = steps + 1, cost + max(rows, RIDGE), drawn + draws
  running, most = max(used, key=lambda pair: pair[1])
  return Schedule(
    steps=steps,
    cost=cost,
    busy=drawn / (steps * work.slots),
    most_pages=most,
    pages_a_sequence=sum(n for _, n in used) / sum(n for n, _ in used),
    pages_at_most=most / running,
  )


def _fitting(
  slots: list[_Running], pages: float, page_size: int
) -> tuple[list[_Running], int]:
  """The first sequences that fit into the pool, and their pages."""
  active, in_use = [], 0
  for one in slots:
    in_use_then = in_use - (-one.held // page_size)
    if in_use_then > pages:
      break
    in_use = in_use_then
    active.append(one)
  return active, in_use


def _step(
  active: list[_Running], room: Callable[[int], int]
) -> tuple[int, int]:
  """Advances sequences by a step; the rows computed and the tokens drawn."""
  decoding = sum(one.compute == 0 for one in active)
  left, rows, draws = room(decoding), decoding, 0
  for one in active:
    prefills = one.compute > 0
    if prefills:
      now = min(one.compute, left)
      one.compute, left, rows = one.compute - now, left - now, rows + now
    if one.compute == 0:
      one.draw, one.held, draws = one.draw - 1, one.held + 1, draws + 1
  return rows, draws


def new_tokens(work: Workload) -> np.ndarray:
  """int64[P]: tokens of each prompt, without the last one, to be computed.

  A page is computed once if it and all pages before it are equal. The tokens
  behind a prompt's last full page belong to it alone.
  """
  seen: dict[tuple[int, bytes], int] = {}
  counts, size = [], work.page_size
  for row, length in zip(work.prompts, work.lengths, strict=True):
    node, needed = 0, length - 1
    for begin in range(0, (length - 1) // size * size, size):
      key = node, row[begin : begin + size].tobytes()
      needed -= size * (key in seen)
      node = seen.setdefault(key, len(seen) + 1)
    counts.append(needed)
  return np.asarray(counts)


def reserved_pages(work: Workload) -> float:
  """Pages of all slots if each answer had its room from the beginning.

  A slot has room for a mean prompt and the longest answer that a sequence may
  draw, as in a cache that reserves what a sequence might need.
  """
  most = -(-(work.lengths + work.answers.max()) // work.page_size)
  return float(work.slots * most.mean())


def best_eviction(work: Workload, pages: int) -> float:
  """The hit rate of Belady's MIN, one sequence after the other in their order.

  Pages leave whose next use is farthest away, of one prefix the last page
  first. The pages of the running sequence stay.

  Args:
    work: sequences for one slot.
    pages: of the pool.
  """
  keys = [_page_keys(work, number) for number in range(len(work.lengths))]
  uses: dict[bytes, list[int]] = {}
  for number, row in enumerate(keys):
    for key in row:
      uses.setdefault(key, []).append(number)
  cached: dict[bytes, int] = {}
  hits = 0
  for number, row in enumerate(keys):
    most = (work.lengths[number] - 1) // work.page_size
    found = 0
    while found < most and row[found] in cached:
      found += 1
    hits += found
    others = {key: at for key, at in cached.items() if key not in row}
    last = work.lengths[number] + work.answers[number] - 1
    needed = -(-last // work.page_size)

    def next_use(key: bytes, now: int = number) -> float:
      return next((use for use in uses[key] if use > now), math.inf)

    order = sorted(others, key=lambda key: (next_use(key), len(key)))
    kept = [*order[: max(pages - needed, 0)], *row]
    cached = {key: 1 for key in kept if next_use(key) < math.inf}
  return hits * work.page_size / int(work.lengths.sum())


def _page_keys(work: Workload, number: int) -> list[bytes]:
  """For each full page of a prompt all tokens up to its end."""
  row, size = work.prompts[number], work.page_size
  ends = range(size, int(work.lengths[number]) + 1, size)
  return [row[:end].tobytes() for end in ends]
