"""The prompts and answers that `rollout.py` runs.

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
| conversation | 1,024 requests of a trace in 64 slots, pages of 16: a 16th   |
|              | of their tokens, prompts cut at 2,000; equal blocks of the   |
|              | trace are equal tokens                                       |

The trace is a file in the format that `python -m jaxkv replay` reads, such as
the conversation trace of Mooncake. It is not part of the project.
"""

from typing import Any
from typing import NamedTuple

import numpy as np

from jaxkv._src.commands import replay

_TRACE_SCALE = 16
_TRACE_LONGEST = 2000


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


def conversation(path: str, count: int = 1024) -> Workload:
  """See the table.

  Args:
    path: the trace.
    count: its first requests.
  """
  requests = replay.read_trace(path)[:count]
  block = replay.BLOCK_TOKENS // _TRACE_SCALE
  tokens: dict[int, np.ndarray] = {}

  def prompt(request: replay.TraceRequest) -> np.ndarray:
    for name in request.hash_ids:
      rng = np.random.default_rng(name)
      tokens.setdefault(name, rng.integers(0, 2**31 - 1, block))
    length = min(request.input_length // _TRACE_SCALE, _TRACE_LONGEST)
    blocks = [tokens[name] for name in request.hash_ids]
    return np.concatenate(blocks)[: max(length, 1)]

  answers = [max(r.output_length // _TRACE_SCALE, 1) for r in requests]
  rows = [prompt(request) for request in requests]
  return _of(rows, answers, page_size=16, slots=64)
