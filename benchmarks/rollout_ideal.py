"""The workloads of `rollout.py`, and what an ideal scheduler does with them.

| workload     | what                                                         |
|--------------|--------------------------------------------------------------|
| lengths      | 512 sequences in 64 slots, pages of 16: prompts of 200 to    |
|              | 2,000 tokens (mean 650), answers lognormal (median 200,      |
|              | sigma 1, at most 2,048)                                      |
| same_batch   | 16 prompts of 64 common tokens and 8 of their own, pages of  |
|              | 8, into an empty cache                                       |
| grpo         | 32 prompts of 100 to 400 tokens with 64 common ones, 8       |
|              | samples each, 64 slots, pages of 16                          |
| families     | 200 prompts of 20 families in random order, one slot, pages  |
|              | of 8: prefixes of 6 to 14 pages, tails of 1 to 4             |

Ideal schedulers are simulated on the host, in plain Python.

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
from typing import Any
from typing import NamedTuple

import numpy as np

RIDGE = 295
"""Rows at which a call in bfloat16 takes as long as reading the weights."""


class Workload(NamedTuple):
  """Prompts and the lengths of their answers.

  Attributes:
    prompts: int32[P, L]. The last token of each is its number.
    lengths: int32[P].
    answers: int32[P], tokens drawn by each sample.
    page_size: S.
    slots: B.
    samples: of each prompt.
    options: of `RolloutConfig`.
  """

  prompts: np.ndarray
  lengths: np.ndarray
  answers: np.ndarray
  page_size: int
  slots: int
  samples: int = 1
  options: dict[str, int] | None = None


def _of(rows: list[np.ndarray], answers: Any, **sizes: Any) -> Workload:
  """A workload of prompts of different lengths."""
  lengths = np.array([len(row) for row in rows], np.int32)
  prompts = np.zeros((len(rows), lengths.max()), np.int32)
  for number, row in enumerate(rows):
    prompts[number, : len(row)] = row
    prompts[number, len(row) - 1] = number
  answers = np.broadcast_to(np.asarray(answers, np.int32), lengths.shape)
  return Workload(prompts, lengths, answers, **sizes)


def lengths(count: int = 512, slots: int = 64, scale: int = 1) -> Workload:
  """See the table.

  Args:
    count: sequences.
    slots: B.
    scale: all lengths are divided by this number.
  """
  rng = np.random.default_rng(0)
  prompts = np.clip(rng.lognormal(np.log(666) - 0.18, 0.6, count), 200, 2000)
  answers = np.clip(rng.lognormal(np.log(200), 1.0, count), 1, 2048)
  answers = np.maximum(answers // scale, 1).astype(np.int32)
  rows = [rng.integers(0, count, int(length / scale)) for length in prompts]
  return _of(rows, answers, page_size=16, slots=slots)


def same_batch() -> Workload:
  """See the table."""
  rng = np.random.default_rng(0)
  common = rng.integers(0, 16, 64)
  rows = [np.concatenate([common, rng.integers(0, 16, 8)]) for _ in range(16)]
  return _of(rows, 4, page_size=8, slots=16)


def grpo() -> Workload:
  """See the table."""
  rng = np.random.default_rng(0)
  common = rng.integers(0, 32, 64)
  rows = [
    np.concatenate([common, rng.integers(0, 32, rng.integers(36, 337))])
    for _ in range(32)
  ]
  return _of(rows, 60, page_size=16, slots=64, samples=8)


def families(window: int) -> Workload:
  """See the table; sequences are chosen from `window` that wait."""
  rng = np.random.default_rng(1)
  begins = [rng.integers(0, 200, rng.integers(6, 15) * 8) for _ in range(20)]
  order = np.repeat(np.arange(20), 10)
  rng.shuffle(order)
  rows = [
    np.concatenate([begins[n], rng.integers(0, 200, rng.integers(1, 5) * 8)])
    for n in order
  ]
  bound = {"window": window, "max_overtaken": max(window, 32)}
  return _of(rows, 1, page_size=8, slots=1, options=bound)


class Schedule(NamedTuple):
  """What an ideal scheduler does with a workload.

  Attributes:
    steps: model calls.
    cost: rows, where a call costs at least `RIDGE`.
    busy: slots that draw a token, of all, in all steps.
    most_pages: in use at once.
  """

  steps: int
  cost: int
  busy: float
  most_pages: int


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
  steps = cost = drawn = most_pages = 0
  while queue or slots:
    while queue and len(slots) < work.slots:
      slots.append(queue.pop())
    active, in_use = _fitting(slots, pages, work.page_size)
    most_pages = max(most_pages, in_use)
    rows, draws = _step(active, room)
    slots = [one for one in slots if one.draw]
    steps, cost, drawn = steps + 1, cost + max(rows, RIDGE), drawn + draws
  return Schedule(
    steps=steps,
    cost=cost,
    busy=drawn / (steps * work.slots),
    most_pages=most_pages,
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
