"""A worker without a model: a sequence samples numbers from its id."""

import collections
import random
from collections.abc import Callable
from collections.abc import Mapping
from typing import Any
from typing import NamedTuple

import numpy as np

from jaxkv import rollout
from jaxkv import workers

BLOCK = 16
CONFIG = rollout.RolloutConfig(max_new_tokens=12)


def tokens_of(prompt_id: int, version: int) -> list[tuple[int, int]]:
  """Returns the tokens of a prompt, each with the version of the weights."""
  rng = random.Random(prompt_id)
  return [(rng.randrange(1000), version) for _ in range(rng.randint(1, 12))]


class _Running:
  def __init__(self, prompt_id: int, blocks: list[bytes]):
    self.number, self.blocks = prompt_id, blocks
    self.tokens: list[tuple[int, int]] = []


class _Exported(NamedTuple):
  version: int
  running: list[_Running]


class StubWorker:
  """Computes a token of each running prompt in a step; prefixes are cached.

  Attributes:
    hits: cached blocks that prompts found when they began.
    num_steps: steps so far.
    idle_steps: steps in which a slot was empty while `has_prompts()`.
  """

  def __init__(
    self,
    slots=4,
    rows=8,
    capacity=10**6,
    steps=2,
    has_prompts=lambda: False,
  ):
    self._slots, self._rows, self._capacity = slots, rows, capacity
    self._steps, self._has_prompts = steps, has_prompts
    self._cache: collections.OrderedDict = collections.OrderedDict()
    self._waiting: list[_Running] = []
    self._running: list[_Running] = []
    self._ended: list[workers.PromptSamples] = []
    self.version = self.hits = self.num_steps = self.idle_steps = 0
    self.is_closed = False

  def room(self) -> workers.Room:
    count = len(self._waiting) + len(self._running)
    needed = max(2 * self._slots - count, 0)
    return workers.Room(self._rows - count, needed, self._slots)

  def match(self, prompts) -> np.ndarray:
    rows = zip(prompts.tokens, prompts.lengths, strict=True)
    lengths = [self._num_cached(_blocks(row[:length])) for row, length in rows]
    return np.asarray(lengths, np.int32) * BLOCK

  def _num_cached(self, blocks) -> int:
    is_missing = [block not in self._cache for block in blocks] + [True]
    return is_missing.index(True)

  def submit(self, prompts, *, ids) -> np.ndarray:
    rows = zip(prompts.tokens, prompts.lengths, ids, strict=True)
    for row, length, prompt_id in rows:
      self._waiting.append(_Running(prompt_id, _blocks(row[:length])))
    assert self.room().prompts >= 0
    return np.asarray(ids)

  def step(self, steps=None) -> int:
    for _ in range(steps or self._steps):
      while self._waiting and len(self._running) < self._slots:
        self._running.append(self._begun(self._waiting.pop(0)))
      self.num_steps += 1
      is_full = len(self._running) == self._slots
      self.idle_steps += not is_full and self._has_prompts()
      for seq in list(self._running):
        tokens = tokens_of(seq.number, self.version)
        seq.tokens.append(tokens[len(seq.tokens)])
        if len(seq.tokens) == len(tokens):
          self._running.remove(seq)
          self._ended.append(workers.PromptSamples(seq.number, seq.tokens))
    return len(self._running) + len(self._waiting)

  def harvest(self) -> list[workers.PromptSamples]:
    ended, self._ended = self._ended, []
    return ended

  def _begun(self, seq: _Running) -> _Running:
    self.hits += self._num_cached(seq.blocks)
    for block in reversed(seq.blocks):
      self._cache[block] = None
      self._cache.move_to_end(block)
    while len(self._cache) > self._capacity:
      self._cache.popitem(last=False)
    return seq

  def weights_digest(self) -> tuple[int, ...]:
    return (0,)

  def update_weights(self, params, *, version, max_age) -> list[int]:
    assert params == f"weights {version}"
    self.version = version
    self._cache.clear()
    if max_age is None:
      return []
    expired = [
      seq
      for seq in self._running + self._waiting
      if seq.tokens and min(v for _, v in seq.tokens) < version - max_age
    ]
    self._running = [seq for seq in self._running if seq not in expired]
    self._waiting = [seq for seq in self._waiting if seq not in expired]
    return [seq.number for seq in expired]

  def export(self):
    moved, self._running, self._waiting = self._running + self._waiting, [], []
    return _Exported(self.version, moved)

  def import_sequences(self, exported, ids) -> list[int]:
    entered = [seq for seq in exported.running if seq.number in ids]
    entered = entered[: self.room().prompts]
    self._waiting = entered + self._waiting
    return [seq.number for seq in entered]

  def close(self) -> None:
    self.is_closed = True


class FailingWorker(StubWorker):
  """Fails after a number of calls of `step`."""

  def __init__(self, num_calls: int, **options):
    super().__init__(**options)
    self._left = num_calls

  def step(self, steps=None) -> int:
    self._left -= 1
    if self._left < 0:
      raise OSError("the machine was taken away")
    return super().step(steps)


class Maker:
  """Makes the workers of a pool.

  Attributes:
    made: the workers, in the order in which they were made.
  """

  def __init__(self, make: Callable[[int], Any]):
    self._make, self.made = make, []

  def __call__(self, place: int) -> Any:
    self.made.append(self._make(place))
    return self.made[-1]


def _blocks(row) -> list[bytes]:
  return [row[:stop].tobytes() for stop in range(BLOCK, len(row), BLOCK)]


def random_prompts(count, length=5):
  rng = random.Random(1)
  return [[rng.randrange(9) for _ in range(length)] for _ in range(count)]


def results_of(pool, actions: Mapping[int, Callable[[], Any]] | None = None):
  """The results of a pool by id, each of which comes once.

  Args:
    pool: the pool.
    actions: what is done after so many results.
  """
  results = {}
  for samples in pool.results():
    assert samples.id not in results
    results[samples.id] = samples.results
    if actions and len(results) in actions:
      actions[len(results)]()
  return results


def expected_of(ids, version=0) -> dict:
  return {prompt_id: tokens_of(prompt_id, version) for prompt_id in ids}
