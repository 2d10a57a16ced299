"""Times `rollout.score` of completions that share a prompt.

| side   | computes                                                           |
|--------|--------------------------------------------------------------------|
| group  | `rollout.score` of a prompt and its 8 completions, nothing cached  |
| cached | the same with the prompt cached, as after a rollout                |
| whole  | `rollout.score` of 8 groups of one completion, without sharing     |

Rows are the tokens that the model computes. With P prompt tokens and G
completions of R tokens, `group` computes P - 1 + G R rows, and `whole` computes
G (P - 1 + R). Seconds are medians of calls that take turns, in wall time and in
CPU time of all threads. The float32 model has SmolLM2-135M's width of 576 with
9 heads, 3 K/V heads of 64 and an MLP of 1,536, but 4 layers and a vocabulary of
1,024. Chunks have 256 tokens.

  python benchmarks/score.py [--quick] [--json FILE]
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import command
import jax
import jax.numpy as jnp
import numpy as np
from rows import Row
from rows import at_least
from rows import at_most
from rows import report

import jaxkv
from jaxkv import models
from jaxkv import rollout

_VOCABULARY = 1024
_MODEL = models.llama(
  vocab_size=_VOCABULARY,
  num_layers=4,
  embed_dim=576,
  num_heads=9,
  num_kv_heads=3,
  head_dim=64,
  mlp_dim=1536,
)
_SAMPLES, _PAGE = 8, 16


@dataclasses.dataclass(frozen=True)
class Size:
  """Tokens of a prompt and of each completion."""

  prompt: int
  completion: int

  def __str__(self) -> str:
    return f"{self.prompt} + {_SAMPLES} x {self.completion}"


SIZES = (Size(2048, 128), Size(512, 512))
QUICK = (Size(64, 8),)


def _groups(size: Size, ones: bool) -> tuple[jax.Array, ...]:
  """Returns one group for `score`, or with `ones` a group per completion."""
  rng = np.random.default_rng(0)
  prompt = rng.integers(0, _VOCABULARY, (1, size.prompt))
  shape = (1, _SAMPLES, size.completion)
  completions = rng.integers(0, _VOCABULARY, shape)
  if ones:
    prompt = np.repeat(prompt, _SAMPLES, axis=0)
    completions = completions.reshape(_SAMPLES, 1, -1)
  groups, samples = completions.shape[:2]
  return tuple(
    jnp.asarray(array, jnp.int32)
    for array in (
      prompt,
      np.full((groups,), size.prompt),
      completions,
      np.full((groups, samples), size.completion),
    )
  )


def _empty_state(size: Size, shares: bool) -> rollout.Memory:
  pages = -(-(size.prompt + size.completion) // _PAGE)
  sizes = jaxkv.CacheConfig(
    num_pages=(_SAMPLES + 1) * pages,
    page_size=_PAGE,
    num_slots=_SAMPLES,
    pages_per_slot=pages,
    prefix_caching=shares,
  )
  cache = jaxkv.init(sizes, jax.random.key(0))
  return rollout.Memory(cache=cache, kv=models.init_kv(_MODEL, sizes))


class _Score:
  """Runs `rollout.score` with a donated state."""

  def __init__(self, size: Size, params: Any, *, shares: bool, warm: bool):
    self._params, self._shares, self._warm = params, shares, warm
    self._groups = _groups(size, ones=not shares)
    self._state = _empty_state(size, shares)
    model = functools.partial(models.forward, config=_MODEL)
    self._score = jax.jit(
      functools.partial(rollout.score, model=model),
      donate_argnums=1,
      compiler_options=jaxkv.CPU_COMPILER_OPTIONS,
    )

  def __call__(self) -> rollout.Scored:
    state, scored = self._score(self._params, self._state, *self._groups)
    self._state = jax.block_until_ready(state)
    return scored

  def reset(self) -> None:
    """Drops the cached prompt, unless this side times the cached prompt."""
    if self._shares and not self._warm:
      cache, _ = jaxkv.new_epoch(self._state.cache)
      self._state = dataclasses.replace(self._state, cache=cache)


def _timed(call: Callable[[], Any]) -> tuple[float, float]:
  wall, processor = time.perf_counter(), time.process_time()
  call()
  return time.perf_counter() - wall, time.process_time() - processor


def _sides(size: Size) -> dict[str, Any]:
  params = models.init_params(jax.random.key(0), _MODEL)
  return {
    "group": _Score(size, params, shares=True, warm=False),
    "cached": _Score(size, params, shares=True, warm=True),
    "whole": _Score(size, params, shares=False, warm=False),
  }


def _count_rows(size: Size, sides: dict[str, Any]) -> Iterator[Row]:
  """Calls every side once, and yields the rows that each one computes."""
  name, new = str(size), _SAMPLES * size.completion
  # Only the second call hits the prompt in the cache.
  sides["cached"]()
  rows = {
    side: int(score().computed_tokens.sum()) for side, score in sides.items()
  }
  bound = size.prompt - 1 + new
  yield at_most(name, "group: rows, P - 1 + G R", rows["group"], bound)
  bound = _PAGE + new
  yield at_most(name, "cached: rows, a page and G R", rows["cached"], bound)
  yield Row(name, "whole: rows, G (P - 1 + R)", rows["whole"])


def _timings(
  sides: dict[str, Any], rounds: int
) -> dict[str, tuple[float, float]]:
  """Returns the median seconds and CPU seconds of each side."""
  samples: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
  for _ in range(rounds):
    for name, side in sides.items():
      side.reset()
      samples[name].append(_timed(side))
  return {
    name: tuple(map(statistics.median, zip(*timings, strict=True)))
    for name, timings in samples.items()
  }


def _rows_of(size: Size, rounds: int) -> Iterator[Row]:
  sides, name = _sides(size), str(size)
  yield from _count_rows(size, sides)
  medians = _timings(sides, rounds)
  for index, kind in enumerate(("seconds", "CPU seconds")):
    group_median = medians["group"][index]
    for side, median in medians.items():
      yield Row(name, f"{side}: {kind}", median[index])
    whole = medians["whole"][index] / group_median
    if size == SIZES[0]:
      yield at_least(name, f"whole / group, {kind}", whole, 4)
    else:
      yield Row(name, f"whole / group, {kind}", whole)


def measured(quick: bool, rounds: int) -> dict[str, Any]:
  """Measures and prints all rows."""
  return report(
    row
    for size in (QUICK if quick else SIZES)
    for row in _rows_of(size, rounds)
  )


if __name__ == "__main__":
  command.run(
    __doc__,
    measured,
    rounds=3,
    quick_rounds=1,
    not_measured="accelerators, other models, compilation",
  )
