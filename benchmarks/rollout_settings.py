"""What the settings of sequences cost: a step of the loop without a model."""

import functools
import statistics
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rollout_rows import Row
from rollout_rows import at_most
from rollout_times import alternated
from rollout_times import timed

import jaxkv
from jaxkv import rollout

# All settings of all sequences, against a temperature alone.
ALL = 1.25

_SLOTS, _VOCABULARY = 64, 513
_SHORT, _LONG = 8, 248

_GROUPS = {
  "top-k, top-p, min-p": ("top_k", "top_p", "min_p"),
  "penalties": (
    "presence_penalty", "frequency_penalty", "repetition_penalty",
  ),
  "biases, bad words, fewest tokens": (
    "logit_bias", "bad_words", "min_tokens", "stop_tokens",
  ),
  "stop strings": ("stop_strings",),
}  # fmt: skip


def _every() -> dict[str, Any]:
  """All settings, other ones for each sequence; none of them ends one."""
  rng = np.random.default_rng(0)
  tokens = [bytes([number % 256, number // 256]) for number in range(513)]
  strings = rollout.stop_strings(
    [["no such string"]] * _SLOTS, rollout.token_bytes(tokens)
  )
  return {
    "temperature": rng.uniform(0.5, 1.5, _SLOTS),
    "top_k": rng.integers(5, 60, _SLOTS),
    "top_p": rng.uniform(0.7, 0.99, _SLOTS),
    "min_p": rng.uniform(0, 0.1, _SLOTS),
    "presence_penalty": rng.uniform(-0.5, 0.5, _SLOTS),
    "frequency_penalty": rng.uniform(-0.1, 0.1, _SLOTS),
    "repetition_penalty": rng.uniform(0.9, 1.1, _SLOTS),
    "min_tokens": rng.integers(1, 9, _SLOTS),
    "stop_tokens": np.full((_SLOTS, 2), _VOCABULARY),
    "stop_strings": strings,
    "logit_bias": {1: 0.5, 2: -0.5},
    "bad_words": [[3, 4], [5]],
  }


def _model(
  params: jax.Array,
  tokens: Any,
  positions: Any,
  kv: Any,
  views: Any,
  at: Any,
  rows: Any,
) -> tuple[jax.Array, Any]:
  """Logits that a compiler cannot know before the step."""
  del tokens, views, rows
  position = positions[0].at[at].get(mode="clip").astype(jnp.float32)
  return params + position[:, None] * 1e-3, kv


def _begun(sampling: rollout.Sampling) -> rollout.RolloutState:
  longest = _SHORT + _LONG + 8
  sizes = jaxkv.CacheConfig(
    num_pages=1 + _SLOTS * (2 + longest // 16),
    page_size=16,
    num_slots=_SLOTS,
    pages_per_slot=2 + longest // 16,
  )
  rng = np.random.default_rng(0)
  return rollout.init(
    jaxkv.init(sizes),
    jaxkv.kv.init(sizes, num_layers=1, num_kv_heads=1, head_dim=1),
    jnp.asarray(rng.integers(0, _VOCABULARY, (_SLOTS, 4)), jnp.int32),
    jnp.full((_SLOTS,), 4, jnp.int32),
    jax.random.key(0),
    rollout.RolloutConfig(max_new_tokens=longest, admissions=_SLOTS),
    sampling=sampling,
  )


def all_rows(quick: bool, rounds: int) -> Iterator[Row]:
  """A step with all settings, with those of each kind, and with none."""
  every = _every()
  cases = {
    "nothing": rollout.Sampling(),
    "a temperature": rollout.Sampling(temperature=1.0),
    "all settings": rollout.Sampling(**every),
  }
  if not quick:
    for name, fields in _GROUPS.items():
      some = {field: every[field] for field in fields}
      cases[name] = rollout.Sampling(temperature=every["temperature"], **some)
  params = jax.random.normal(jax.random.key(1), (_SLOTS, _VOCABULARY))
  program = jax.jit(
    functools.partial(rollout.generate, model=_model),
    donate_argnums=1,
    compiler_options=jaxkv.CPU_COMPILER_OPTIONS,
  )
  calls = {}
  for name, sampling in cases.items():
    _, state = timed(
      program, params, _begun(sampling), rollout.Until(steps=_SHORT)
    )

    def span(steps: int, state: rollout.RolloutState = state) -> float:
      mine = jax.tree.map(jnp.copy, state)
      seconds, end = timed(program, params, mine, rollout.Until(steps=steps))
      drawn = int(end.counters.generated) - int(state.counters.generated)
      assert drawn == _SLOTS * steps
      return seconds

    calls[f"{name} {_SHORT}"] = functools.partial(span, _SHORT)
    calls[f"{name} {_LONG}"] = functools.partial(span, _LONG)
  samples = alternated(calls, rounds)
  title = f"settings, {_SLOTS} slots, {_VOCABULARY} tokens"
  for metric, pick in (("minimum", min), ("median", statistics.median)):
    us = {
      name: (
        pick(samples[f"{name} {_LONG}"]) - pick(samples[f"{name} {_SHORT}"])
      )
      * 1e6
      / (_LONG - _SHORT)
      for name in cases
    }
    for name, value in us.items():
      yield Row(title, f"{name}: us a step, {metric}", value)
    ratio = us["all settings"] / us["a temperature"]
    yield at_most(title, f"all against a temperature, {metric}", ratio, ALL)
