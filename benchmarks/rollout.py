"""Counts the work of the rollout loop, and times its steps.

Each figure has a bound. A stub replaces the model. `rollout_ideal.py` has the
workloads and simulates ideal schedulers. "Before" is an earlier loop that
computed prompts in separate calls. A row is one column of a model call, for a
token or for padding.

| metric             | meaning                                | bound | before |
|--------------------|----------------------------------------|-------|--------|
| rows a useful row  | rows of all model calls per useful     | 1.25  | 9.8    |
|                    | row, which is a drawn token or a first |       |        |
|                    | computation of a prompt token          |       |        |
| roofline time      | sum of max(rows, 295) over the calls,  | 1.2   | 5.8    |
|                    | relative to ideal mixed batches        |       |        |
| busy               | share of slots that draw a token, over | -1 %  |        |
|                    | all steps, relative to both ideals     |       |        |
| 35 % of need: busy | the same in a small pool               | 58 %  | 59.8 % |
| and recomputed     | tokens computed again                  | 30 k  | 225 k  |
| same_batch: prompt | prompt tokens computed                 | 176   | 1,136  |
| grpo: prompt       | the same, relative to one computation  | +5 %  |        |
|                    | of each page                           |       |        |
| families: hit rate | share of prompt tokens hit, with a     | 0.55  | 0.12   |
|                    | window of 32, or of the whole queue    | 0.69  |        |
| overtaken          | the most sequences that entered a slot | its   |        |
|                    | before one that came earlier           | limit |        |
| longest wait       | steps in which a decoding sequence in  | 1     |        |
|                    | a slot draws nothing                   |       |        |

The need is the number of pages that a cache without paging would reserve: for
each slot, a mean prompt and the longest answer. A small pool has 35 % of it.

One bound on rows cannot be met. `families` has one slot, and computes tails of
8 to 32 tokens in calls of at least 65 columns. On an accelerator these columns
cost nothing, because a call costs at least as much as 295 rows.

Timed metrics:

| metric                | meaning                                  | bound |
|-----------------------|------------------------------------------|-------|
| step, 2 tokens        | microseconds of a greedy decode step of  | 110   |
|                       | 64 slots, vocabulary 2, without a model  |       |
| step, 513 tokens      | the same with sampling, vocabulary 513   | 400   |

`--device` runs only the lengths workload with a model on a GPU or TPU, see
`rollout_device.py`.

Not measured: compilation, and without `--device` an accelerator.

  python benchmarks/rollout.py [--quick] [--json FILE] [--device]
"""

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
import rollout_counts as counts
import rollout_device
from rows import Row
from rows import at_most
from rows import show
from rows import summary

import jaxkv
from jaxkv import rollout

# Bounds in microseconds of a step without a model.
STEP = 110
STEP_WITH_SAMPLER = 400

SLOTS = 64
SHORT, LONG = 8, 248


def timed(call: Callable[..., Any], *inputs: Any) -> tuple[float, Any]:
  """Returns the seconds of a call and its result."""
  # Waits for the calls that compute the inputs, because they must not be timed.
  jax.block_until_ready(inputs)
  begin = time.perf_counter()
  result = jax.block_until_ready(call(*inputs))
  return time.perf_counter() - begin, result


def step_rows(quick: bool, rounds: int) -> Iterator[Row]:
  """Yields the timed rows."""
  if not quick:
    yield from step(0.0, 2, STEP, rounds)
  yield from step(1.0, 513, STEP_WITH_SAMPLER, rounds)


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
  """Times a step of the loop in which all slots decode."""
  state = decoding_state(rollout.Sampling(temperature=temperature))
  params = jax.random.normal(jax.random.key(1), (SLOTS, vocabulary))
  program = jax.jit(
    functools.partial(rollout.generate, model=stub),
    donate_argnums=1,
    compiler_options=jaxkv.CPU_COMPILER_OPTIONS,
  )
  _, state = timed(program, params, state, rollout.Until(steps=SHORT))

  def span(steps: int) -> float:
    copied = jax.tree.map(jnp.copy, state)
    generated_before = int(copied.counters.generated)
    seconds, end = timed(program, params, copied, rollout.Until(steps=steps))
    assert int(end.counters.generated) - generated_before == SLOTS * steps
    return seconds

  # The difference between a long and a short span excludes the cost of a call.
  for steps in (SHORT, LONG):
    span(steps)
  samples = [(span(SHORT), span(LONG)) for _ in range(rounds)]
  short, long = zip(*samples, strict=True)
  name = f"step, {SLOTS} slots, {vocabulary} tokens"
  for metric, pick in (("us, minimum", min), ("us, median", statistics.median)):
    us = (pick(long) - pick(short)) * 1e6 / (LONG - SHORT)
    yield at_most(name, metric, us, bound)


def decoding_state(
  sampling: rollout.Sampling, decode_steps: int = 1
) -> rollout.RolloutState:
  """Makes a rollout with one random prompt per slot and no stop token."""
  longest = SHORT + LONG + 8
  sizes = jaxkv.CacheConfig(
    num_pages=1 + SLOTS * (2 + longest // 16),
    page_size=16,
    num_slots=SLOTS,
    pages_per_slot=2 + longest // 16,
  )
  rng = np.random.default_rng(0)
  return rollout.init(
    jaxkv.init(sizes),
    jaxkv.kv.init(sizes, num_layers=1, num_kv_heads=1, head_dim=1),
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


def count_rows(quick: bool) -> Iterator[Row]:
  """Yields the counted rows."""
  yield from counts.stall(quick)
  yield from counts.small(quick)
  yield from counts.long(quick)


def measured(quick: bool, rounds: int, device: bool) -> dict[str, Any]:
  """Measures and prints all rows."""
  print(f"\n{'workload':26} {'metric':42} {'value':>10} {'bound':>20}")
  if device:
    return {"rows": rollout_device.by_part("", quick)}
  rows = show(step_rows(quick, rounds))
  rows += show(count_rows(quick))
  print(f"\n{summary(rows)}")
  return {"rows": [row.as_json() for row in rows]}


def main() -> None:
  command.run(
    __doc__,
    measured,
    rounds=7,
    quick_rounds=1,
    not_measured="compilation, accelerators without --device",
    arguments={
      "--device": {"action": "store_true", "help": "a GPU or TPU, alone"},
    },
  )


if __name__ == "__main__":
  main()
