"""Counts the work of the rollout loop, and times its steps.

A stub replaces the model. `rollout_ideal.py` has the workloads and simulates
ideal schedulers. A row is one column of a model call, for a token or for
padding.

| metric                | meaning                                  | bound |
|-----------------------|------------------------------------------|-------|
| rows a useful row     | rows of all model calls per useful row,  | 1.25  |
|                       | which is a drawn token or a first        |       |
|                       | computation of a prompt token            |       |
| roofline time         | sum of max(rows, 295) over the calls,    | 1.2   |
|                       | relative to ideal mixed batches          |       |
| busy                  | share of slots that draw a token, over   | -1 %  |
|                       | all steps, relative to both ideals       |       |
| 35 % of need: busy    | the same in a small pool                 | 58 %  |
| 35 %: recomputed      | tokens computed again                    | 30 k  |
| same_batch: prompt    | prompt tokens computed                   | 176   |
| grpo: prompt          | the same, relative to one computation of | +5 %  |
|                       | each page                                |       |
| families: hit rate    | share of prompt tokens hit, with a       | 0.55  |
|                       | window of 32, or of the whole queue      | 0.69  |
| overtaken             | the most sequences that entered a slot   | its   |
|                       | before one that came earlier             | limit |
| longest wait          | steps in which a decoding sequence in a  | 1     |
|                       | slot draws nothing                       |       |
| step, 2 tokens        | microseconds of a greedy decode step of  | 110   |
|                       | 64 slots, vocabulary 2, without a model  |       |
| step, 513 tokens      | the same with sampling, vocabulary 513   | 400   |

The need is the number of pages that a cache without paging would reserve: for
each slot, a mean prompt and the longest answer. A small pool has 35 % of it.

One bound on rows cannot be met. `families` has one slot, and computes tails of
8 to 32 tokens in calls of at least 65 columns. On an accelerator these columns
cost nothing, because a call costs at least as much as 295 rows.

Not measured: compilation and accelerators. `gpu_suite.py` times the lengths
workload with a model on a GPU, see `rollout_device.py`.

  python benchmarks/rollout.py [--quick] [--json FILE]
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rollout_counts as counts
import rows
from rows import Row

import jaxkv
from jaxkv import rollout

SLOTS = 64
SHORT, LONG = 8, 248


def stub(
  params: jax.Array, batch: jaxkv.kv.Batch, kv: Any
) -> tuple[jax.Array, None]:
  """A model whose logits depend on positions, so that XLA computes them."""
  del kv  # It writes nothing.
  position = batch.positions[0].at[batch.columns].get(mode="clip")
  return params + position.astype(jnp.float32)[:, None] * 1e-3, None


def step(
  temperature: float, vocabulary: int, bound: float, rounds: int
) -> Iterator[Row]:
  """Times a step in which all slots decode, in at most `bound` us."""
  state = decoding_state(rollout.Sampling(temperature=temperature))
  params = jax.random.normal(jax.random.key(1), (SLOTS, vocabulary))
  program = jax.jit(
    functools.partial(rollout.generate, model=stub),
    donate_argnums=1,
    compiler_options=jaxkv.CPU_COMPILER_OPTIONS,
  )
  state = program(params, state, rollout.Until(steps=jnp.int32(SHORT)))
  generated_before = int(state.counters.generated)
  # The difference between a long and a short span excludes the cost of a call.
  calls = {
    steps: (program, params, state, rollout.Until(steps=jnp.int32(steps)))
    for steps in (SHORT, LONG)
  }
  samples, ends = rows.alternated(calls, rounds)
  for steps, state in ends.items():
    assert int(state.counters.generated) - generated_before == SLOTS * steps
  short, long = (samples[steps][:, 0] * 1e6 for steps in calls)
  name = f"step, {SLOTS} slots, {vocabulary} tokens"
  for metric, pick in (("us, minimum", np.min), ("us, median", np.median)):
    us = float(pick(long) - pick(short)) / (LONG - SHORT)
    yield rows.at_most(name, metric, us, bound)


def decoding_state(
  sampling: rollout.Sampling, decode_steps: int = 1
) -> rollout.RolloutState:
  """Makes a rollout with one random prompt per slot and no stop token."""
  longest = SHORT + LONG + 8
  cache_config = jaxkv.CacheConfig(
    num_pages=1 + SLOTS * (2 + longest // 16),
    page_size=16,
    num_slots=SLOTS,
    pages_per_slot=2 + longest // 16,
  )
  rng = np.random.default_rng(0)
  return rollout.init(
    jaxkv.init(cache_config),
    jaxkv.kv.init(cache_config, num_layers=1, num_kv_heads=1, head_dim=1),
    rollout.Requests(
      jnp.asarray(rng.integers(0, 2**31 - 1, (SLOTS, 4)), jnp.int32),
      jnp.full((SLOTS,), 4, jnp.int32),
      sampling=sampling,
    ),
    jax.random.key(0),
    rollout.RolloutConfig(
      max_new_tokens=longest, admissions=SLOTS, decode_steps=decode_steps
    ),
  )


def rows_of(quick: bool, rounds: int) -> Iterator[Row]:
  """Yields the timed rows, then the counted ones."""
  if not quick:
    yield from step(0.0, 2, 110, rounds)
  yield from step(1.0, 513, 400, rounds)
  yield from counts.stall(quick)
  yield from counts.small(quick)
  yield from counts.long(quick)


def main() -> None:
  rows.run(
    __doc__,
    rows_of,
    rounds=7,
    quick_rounds=1,
    not_measured="compilation, accelerators",
  )


if __name__ == "__main__":
  main()
