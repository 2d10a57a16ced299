"""The rollout loop: what it computes, and what it takes, beside bounds.

Counted on a model that costs nothing; `rollout_ideal.py` has the workloads and
what is possible. "Before" is the loop that computed prompts in calls of their
own.

| metric             | what                                   | bound | before |
|--------------------|----------------------------------------|-------|--------|
| rows a useful row  | tokens that the model is called with,  | 1.25  | 9.8    |
|                    | for each needed: drawn, or of a prompt |       |        |
|                    | and computed for the first time        |       |        |
| roofline time      | bfloat16 calls, max(rows, 295) each,   | 1.2   | 5.8    |
|                    | against ideal mixed batches            |       |        |
| busy               | slots that draw a token, of all slots  | -1 %  |        |
|                    | in all steps; against both ideals      |       |        |
| 35 % of need: busy | in a small pool                        | 58 %  | 59.8 % |
| and recomputed     | tokens computed again                  | 30 k  | 225 k  |
| same_batch: prompt | tokens of prompts that were computed   | 176   | 1,136  |
| grpo: prompt       | likewise; the least: equal pages once  | +5 %  |        |
| families: hit rate | tokens found, of those looked up;      | 0.55  | 0.12   |
|                    | chosen from 32 that wait, or from all  | 0.69  |        |
| overtaken          | the most sequences that entered before | as    |        |
|                    | one that waited                        | asked |        |
| longest wait       | steps in which a sequence that decodes | 1     |        |
|                    | in a slot draws nothing                |       |        |

The need of a small pool is what its slots would reserve: room for a mean prompt
and the longest answer each.

One bound on rows cannot be kept. `families` has one slot, and computes tails of
8 to 32 tokens in calls of 65 columns at least. That takes no time on an
accelerator, where a call costs 295 rows or more.

Timed, beside the counts:

| metric                | what                                     | bound |
|-----------------------|------------------------------------------|-------|
| step, 2 tokens        | of 64 slots that decode, greedy, without | 110   |
|                       | a model, microseconds                    |       |
| step, 513 tokens      | likewise, with tokens drawn              | 400   |

With `--device`, nothing but the lengths workload on the GPU or TPU at hand, see
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

# Microseconds of a step without a model: greedy of 2 tokens, drawn of 513.
STEP = 110
STEP_WITH_SAMPLER = 400

SLOTS = 64
SHORT, LONG = 8, 248


def timed(call: Callable[..., Any], *inputs: Any) -> tuple[float, Any]:
  """Seconds of a call with inputs that are ready, and its result."""
  jax.block_until_ready(inputs)
  begin = time.perf_counter()
  result = jax.block_until_ready(call(*inputs))
  return time.perf_counter() - begin, result


def stepped(quick: bool, rounds: int) -> Iterator[Row]:
  """The rows that are times."""
  if not quick:
    yield from step(0.0, 2, STEP, rounds)
  yield from step(1.0, 513, STEP_WITH_SAMPLER, rounds)


def stub(
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


def step(
  temperature: float, vocabulary: int, bound: float, rounds: int
) -> Iterator[Row]:
  """A step of the loop in which all slots decode, and nothing else happens."""
  state = decoding(rollout.Sampling(temperature=temperature))
  params = jax.random.normal(jax.random.key(1), (SLOTS, vocabulary))
  program = jax.jit(
    functools.partial(rollout.generate, model=stub),
    donate_argnums=1,
    compiler_options=jaxkv.CPU_COMPILER_OPTIONS,
  )
  _, state = timed(program, params, state, rollout.Until(steps=SHORT))

  def span(steps: int) -> float:
    mine = jax.tree.map(jnp.copy, state)
    before = int(mine.counters.generated)
    seconds, end = timed(program, params, mine, rollout.Until(steps=steps))
    assert int(end.counters.generated) - before == SLOTS * steps
    return seconds

  for steps in (SHORT, LONG):
    span(steps)
  samples = [(span(SHORT), span(LONG)) for _ in range(rounds)]
  short, long = zip(*samples, strict=True)
  name = f"step, {SLOTS} slots, {vocabulary} tokens"
  for metric, pick in (("us, minimum", min), ("us, median", statistics.median)):
    us = (pick(long) - pick(short)) * 1e6 / (LONG - SHORT)
    yield at_most(name, metric, us, bound)


def decoding(sampling: rollout.Sampling) -> rollout.RolloutState:
  """A rollout of random prompts, one a slot, that never end."""
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
    jnp.asarray(rng.integers(0, 2**31 - 1, (SLOTS, 4)), jnp.int32),
    jnp.full((SLOTS,), 4, jnp.int32),
    jax.random.key(0),
    rollout.RolloutConfig(max_new_tokens=longest, admissions=SLOTS),
    sampling=sampling,
  )


def counted(quick: bool) -> Iterator[Row]:
  """The rows that are counts."""
  yield from counts.stall(quick)
  yield from counts.small(quick)
  yield from counts.long(quick)


def measured(quick: bool, rounds: int, device: bool) -> dict[str, Any]:
  """All rows, printed as they come."""
  print(f"\n{'workload':26} {'metric':42} {'value':>10} {'bound':>20}")
  if device:
    return {"rows": rollout_device.by_part("", quick)}
  rows = show(stepped(quick, rounds))
  rows += show(counted(quick))
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
