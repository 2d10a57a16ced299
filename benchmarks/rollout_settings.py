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
from rollout_times import LONG
from rollout_times import SHORT
from rollout_times import SLOTS
from rollout_times import alternated
from rollout_times import decoding
from rollout_times import stub
from rollout_times import timed

import jaxkv
from jaxkv import rollout

# All settings of all sequences, against a temperature alone.
ALL = 1.25

_VOCABULARY = 513

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
    [["no such string"]] * SLOTS, rollout.token_bytes(tokens)
  )
  return {
    "temperature": rng.uniform(0.5, 1.5, SLOTS),
    "top_k": rng.integers(5, 60, SLOTS),
    "top_p": rng.uniform(0.7, 0.99, SLOTS),
    "min_p": rng.uniform(0, 0.1, SLOTS),
    "presence_penalty": rng.uniform(-0.5, 0.5, SLOTS),
    "frequency_penalty": rng.uniform(-0.1, 0.1, SLOTS),
    "repetition_penalty": rng.uniform(0.9, 1.1, SLOTS),
    "min_tokens": rng.integers(1, 9, SLOTS),
    "stop_tokens": np.full((SLOTS, 2), _VOCABULARY),
    "stop_strings": strings,
    "logit_bias": {1: 0.5, 2: -0.5},
    "bad_words": [[3, 4], [5]],
  }


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
  params = jax.random.normal(jax.random.key(1), (SLOTS, _VOCABULARY))
  program = jax.jit(
    functools.partial(rollout.generate, model=stub),
    donate_argnums=1,
    compiler_options=jaxkv.CPU_COMPILER_OPTIONS,
  )
  calls = {}
  for name, sampling in cases.items():
    _, state = timed(
      program,
      params,
      decoding(sampling, _VOCABULARY),
      rollout.Until(steps=SHORT),
    )

    def span(steps: int, state: rollout.RolloutState = state) -> float:
      mine = jax.tree.map(jnp.copy, state)
      seconds, end = timed(program, params, mine, rollout.Until(steps=steps))
      drawn = int(end.counters.generated) - int(state.counters.generated)
      assert drawn == SLOTS * steps
      return seconds

    calls[f"{name} {SHORT}"] = functools.partial(span, SHORT)
    calls[f"{name} {LONG}"] = functools.partial(span, LONG)
  samples = alternated(calls, rounds)
  title = f"settings, {SLOTS} slots, {_VOCABULARY} tokens"
  for metric, pick in (("minimum", min), ("median", statistics.median)):
    us = {
      name: (pick(samples[f"{name} {LONG}"]) - pick(samples[f"{name} {SHORT}"]))
      * 1e6
      / (LONG - SHORT)
      for name in cases
    }
    for name, value in us.items():
      yield Row(title, f"{name}: us a step, {metric}", value)
    ratio = us["all settings"] / us["a temperature"]
    yield at_most(title, f"all against a temperature, {metric}", ratio, ALL)
