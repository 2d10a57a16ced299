"""Scoring completions that share a prompt, beside scoring each one whole.

| side   | what it does                                                       |
|--------|--------------------------------------------------------------------|
| group  | `rollout.score` of a prompt and its 8 completions, nothing cached  |
| cached | the same with the prompt cached, as after a rollout                |
| whole  | `rollout.score` of 8 groups of one, in a cache that shares nothing |
| dense  | `models.forward_uncached` of the 8 sequences, one after another,   |
|        | with logits for the completions' tokens alone                      |

Rows are the tokens that the model computes: P - 1 + G R for the group, and
G (P - 1 + R) for the others. Seconds are medians of calls that take turns: by
the clock, and of the processor in all threads. The model has the width of
SmolLM2 (135M), 4 layers and 1,024 tokens: 576 wide, 9 heads, 3 K/V heads of 64,
an MLP of 1,536; float32, chunks of 256.

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
from rollout_rows import Row
from rollout_rows import at_least
from rollout_rows import at_most
from rollout_rows import report

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
  """What `score` is given: one group, or a group for each completion."""
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


def _fresh(size: Size, shares: bool) -> rollout.ScoreState:
  pages = -(-(size.prompt + size.completion) // _PAGE)
  sizes = jaxkv.CacheConfig(
    num_pages=(_SAMPLES + 1) * pages,
    page_size=_PAGE,
    num_slots=_SAMPLES,
    pages_per_slot=pages,
    prefix_caching=shares,
  )
  cache = jaxkv.init(sizes, jax.random.key(0))
  return rollout.ScoreState(cache=cache, kv=models.init_kv(_MODEL, sizes))


class _Score:
  """`rollout.score`, in place."""

  def __init__(self, size: Size, params: Any, *, shares: bool, warm: bool):
    self._params, self._shares, self._warm = params, shares, warm
    self._groups = _groups(size, ones=not shares)
    self._state = _fresh(size, shares)
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
    """Forgets the prompt, if it is not to be cached."""
    if self._shares and not self._warm:
      cache, _ = jaxkv.new_epoch(self._state.cache)
      self._state = dataclasses.replace(self._state, cache=cache)


class _Dense:
  """A forward pass of each sequence, without a cache."""

  def __init__(self, size: Size, params: Any):
    self._params, self._size = params, size
    prompts, _, completions, _ = _groups(size, ones=True)
    self._tokens = jnp.concatenate([prompts, completions[:, 0]], axis=1)
    self._run = jax.jit(self._scored)

  def _scored(self, params: Any, tokens: jax.Array) -> jax.Array:
    size = self._size
    positions = jnp.arange(tokens.shape[1] - 1, dtype=jnp.int32)[None]

    def one(row: jax.Array) -> jax.Array:
      logits = models.forward_uncached(
        params, row[None, :-1], positions, config=_MODEL
      )
      scores = jax.nn.log_softmax(logits[0, size.prompt - 1 :])
      own = row[size.prompt :, None]
      return jnp.take_along_axis(scores, own, axis=1)[:, 0]

    return jax.lax.map(one, tokens)

  def __call__(self) -> jax.Array:
    return jax.block_until_ready(self._run(self._params, self._tokens))

  def reset(self) -> None:
    """Nothing is kept."""


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
    "dense": _Dense(size, params),
  }


def _checked(size: Size, sides: dict[str, Any]) -> Iterator[Row]:
  """First calls: what they give, and how many rows they compute."""
  name, new = str(size), _SAMPLES * size.completion
  dense = np.asarray(sides["dense"]())
  found = {side: sides[side]() for side in ("group", "whole", "cached")}
  # Only the second call finds the prompt.
  found["cached"] = sides["cached"]()
  for side, scored in found.items():
    log_probs = np.asarray(scored.log_probs).reshape(dense.shape)
    gap = 1e6 * float(np.abs(log_probs - dense).max())
    yield at_most(name, f"{side}: gap to dense, 1e-6 nats", gap, 100)
  rows = {
    side: int(scored.computed_tokens.sum()) for side, scored in found.items()
  }
  bound = size.prompt - 1 + new
  yield at_most(name, "group: rows, P - 1 + G R", rows["group"], bound)
  bound = _PAGE + new
  yield at_most(name, "cached: rows, a page and G R", rows["cached"], bound)
  yield Row(name, "whole: rows, G (P - 1 + R)", rows["whole"])


def _timings(
  sides: dict[str, Any], rounds: int
) -> dict[str, tuple[float, float]]:
  """Seconds and CPU seconds of each side, medians of rounds."""
  samples: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
  for _ in range(rounds):
    for name, side in sides.items():
      side.reset()
      samples[name].append(_timed(side))
  return {
    name: tuple(map(statistics.median, zip(*taken, strict=True)))
    for name, taken in samples.items()
  }


def _rows_of(size: Size, rounds: int) -> Iterator[Row]:
  sides, name = _sides(size), str(size)
  yield from _checked(size, sides)
  medians = _timings(sides, rounds)
  for number, kind in enumerate(("seconds", "CPU seconds")):
    own = medians["group"][number]
    for side, median in medians.items():
      yield Row(name, f"{side}: {kind}", median[number])
    whole = medians["whole"][number] / own
    if size == SIZES[0]:
      yield at_least(name, f"whole / group, {kind}", whole, 4)
    else:
      yield Row(name, f"whole / group, {kind}", whole)
    yield Row(name, f"dense / group, {kind}", medians["dense"][number] / own)


def measured(quick: bool, rounds: int) -> dict[str, Any]:
  """All rows, printed as they come."""
  return report(
    row
    for size in (QUICK if quick else SIZES)
    for row in _rows_of(size, rounds)
  )


def main() -> None:
  command.run(
    __doc__,
    measured,
    rounds=3,
    quick_rounds=1,
    not_measured="accelerators, other models, compilation",
  )


if __name__ == "__main__":
  main()
