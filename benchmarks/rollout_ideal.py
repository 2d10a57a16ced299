"""The workloads of `rollout.py`, and a simulation of ideal schedulers.

| workload     | contents                                                     |
|--------------|--------------------------------------------------------------|
| lengths      | 512 sequences in 64 slots, pages of 16: prompts of 200 to    |
|              | 2,000 tokens (mean 650), answers lognormal (median 200,      |
|              | sigma 1, at most 2,048)                                      |
| same_batch   | 16 prompts of 64 common and 8 distinct tokens, pages of 8,   |
|              | into an empty cache                                          |
| grpo         | 32 prompts of 100 to 400 tokens with 64 common ones, 8       |
|              | samples each, 64 slots, pages of 16                          |
| families     | 200 prompts of 20 families in random order, one slot, pages  |
|              | of 8: prefixes of 6 to 14 pages, tails of 1 to 4             |

Ideal schedulers are simulated on the host, in plain Python.

| ideal          | rows of a step                                             |
|----------------|------------------------------------------------------------|
| mixed batches  | one for each decoding sequence, and prompt tokens up to    |
|                | 295 rows in total, but at least 1 prompt token             |
| equal columns  | one for each decoding sequence, and prompt tokens up to    |
|                | the columns of the loop, which are `prefill_chunk` and one |
|                | for each slot                                              |

Both take sequences in the order of the queue, fill a slot in the step after it
becomes empty, and compute only needed rows. A prompt's last row draws the first
token. If sequences do not fit into the pool, the earliest ones in the slots run
and the others pause, without losing their K/V. With a small pool another order
can be faster.

A step costs max(rows, 295), because a bfloat16 call on an accelerator reads the
weights in the time in which it computes 295 rows.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import numpy as np

RIDGE = 295
"""The rows of a bfloat16 call that take as long as reading the weights."""


class Workload(NamedTuple):
  """Prompts and the lengths of their answers.

  Attributes:
    prompts: int32[P, L]. The last token of each prompt is its index.
    lengths: int32[P].
    answers: int32[P], the tokens of each sample.
    page_size: S.
    slots: B.
    samples: the number of samples of each prompt.
    options: further fields of `RolloutConfig`.
  """

  prompts: np.ndarray
  lengths: np.ndarray
  answers: np.ndarray
  page_size: int
  slots: int
  samples: int = 1
  options: dict[str, int] | None = None


def _workload_of(
  rows: list[np.ndarray], answers: Any, **sizes: Any
) -> Workload:
  """Makes a workload of prompts of different lengths."""
  lengths = np.array([len(row) for row in rows], np.int32)
  prompts = np.zeros((len(rows), lengths.max()), np.int32)
  for index, row in enumerate(rows):
    prompts[index, : len(row)] = row
    prompts[index, len(row) - 1] = index
  answers = np.broadcast_to(np.asarray(answers, np.int32), lengths.shape)
  return Workload(prompts, lengths, answers, **sizes)


def lengths(count: int = 512, slots: int = 64, scale: int = 1) -> Workload:
  """Makes the workload "lengths", with all lengths divided by `scale`."""
  rng = np.random.default_rng(0)
  prompts = np.clip(rng.lognormal(np.log(666) - 0.18, 0.6, count), 200, 2000)
  answers = np.clip(rng.lognormal(np.log(200), 1.0, count), 1, 2048)
  answers = np.maximum(answers // scale, 1).astype(np.int32)
  rows = [rng.integers(0, count, int(length / scale)) for length in prompts]
  return _workload_of(rows, answers, page_size=16, slots=slots)


def same_batch() -> Workload:
  """Makes the workload "same_batch" of the table."""
  rng = np.random.default_rng(0)
  common = rng.integers(0, 16, 64)
  rows = [np.concatenate([common, rng.integers(0, 16, 8)]) for _ in range(16)]
  return _workload_of(rows, 4, page_size=8, slots=16)


def grpo() -> Workload:
  """Makes the workload "grpo" of the table."""
  rng = np.random.default_rng(0)
  common = rng.integers(0, 32, 64)
  rows = [
    np.concatenate([common, rng.integers(0, 32, rng.integers(36, 337))])
    for _ in range(32)
  ]
  return _workload_of(rows, 60, page_size=16, slots=64, samples=8)


def families(window: int) -> Workload:
  """Makes the workload "families" for a queue window of `window` sequences."""
  rng = np.random.default_rng(1)
  prefixes = [rng.integers(0, 200, rng.integers(6, 15) * 8) for _ in range(20)]
  order = np.repeat(np.arange(20), 10)
  rng.shuffle(order)
  rows = [
    np.concatenate([prefixes[n], rng.integers(0, 200, rng.integers(1, 5) * 8)])
    for n in order
  ]
  bound = {"window": window, "max_overtaken": max(window, 32)}
  return _workload_of(rows, 1, page_size=8, slots=1, options=bound)


class Schedule(NamedTuple):
  """The result of an ideal scheduler.

  Attributes:
    steps: the number of model calls.
    cost: the sum of rows over all calls, each with at least `RIDGE` rows.
    busy: the share of slots that draw a token, over all steps.
  """

  steps: int
  cost: int
  busy: float


@dataclasses.dataclass
class _Running:
  """A running sequence."""

  compute: int  # Tokens to compute.
  draw: int  # Tokens to draw.
  held: int  # Tokens in pages.


def mixed_room(decoding: int) -> int:
  """Returns the prompt tokens of a step with mixed batches."""
  return max(RIDGE - decoding, 1)


def loop_room(slots: int, chunk: int = 256) -> Callable[[int], int]:
  """Returns a function that gives a step's prompt tokens in the loop."""
  return lambda decoding: chunk + slots - decoding


def schedule(
  work: Workload, room: Callable[[int], int], pages: float = math.inf
) -> Schedule:
  """Simulates an ideal scheduler for one sample of each prompt.

  The first of several prompts that share pages computes these pages. Whether
  sequences fit into `pages` is decided without sharing. `room` maps the number
  of decoding sequences to the number of prompt tokens that a step may compute.
  """
  sequences = zip(new_tokens(work) + 1, work.answers, work.lengths, strict=True)
  queue = [_Running(*map(int, sequence)) for sequence in sequences][::-1]
  slots: list[_Running] = []
  steps = cost = num_drawn = 0
  while queue or slots:
    while queue and len(slots) < work.slots:
      slots.append(queue.pop())
    rows, draws = _step(_fitting(slots, pages, work.page_size), room)
    slots = [running for running in slots if running.draw]
    steps += 1
    cost += max(rows, RIDGE)
    num_drawn += draws
  return Schedule(steps, cost, busy=num_drawn / (steps * work.slots))


def _fitting(
  slots: list[_Running], pages: float, page_size: int
) -> list[_Running]:
  """Returns the first sequences that fit into the pool."""
  active, in_use = [], 0
  for running in slots:
    in_use += -(-running.held // page_size)
    if in_use > pages:
      break
    active.append(running)
  return active


def _step(
  active: list[_Running], room: Callable[[int], int]
) -> tuple[int, int]:
  """Runs a step, and returns the rows computed and the tokens drawn."""
  decoding = sum(running.compute == 0 for running in active)
  remaining, rows, draws = room(decoding), decoding, 0
  for running in active:
    num_computed = min(running.compute, remaining)
    running.compute -= num_computed
    remaining -= num_computed
    rows += num_computed
    # The last row of a prompt draws the first token in the same step.
    if running.compute == 0:
      running.draw -= 1
      running.held += 1
      draws += 1
  return rows, draws


def new_tokens(work: Workload) -> np.ndarray:
  """Counts the tokens to compute for each prompt, int64[P].

  The last token of a prompt is not counted. Equal prefixes of full pages are
  computed once. Partial pages are not shared.
  """
  # A trie of pages, in which each node is the number of a page prefix.
  nodes: dict[tuple[int, bytes], int] = {}
  counts, page_size = [], work.page_size
  for row, length in zip(work.prompts, work.lengths, strict=True):
    node, needed = 0, length - 1
    for start in range(0, (length - 1) // page_size * page_size, page_size):
      key = node, row[start : start + page_size].tobytes()
      needed -= page_size * (key in nodes)
      node = nodes.setdefault(key, len(nodes) + 1)
    counts.append(needed)
  return np.asarray(counts)


def reserved_pages(work: Workload) -> float:
  """Returns the pages that all slots reserve, each for the longest answer."""
  pages_per_slot = -(-(work.lengths + work.answers.max()) // work.page_size)
  return float(work.slots * pages_per_slot.mean())
