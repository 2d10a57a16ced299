"""Times the lengths workload with a real model, on an accelerator.

The model has the sizes of SmolLM2-360M, with random bfloat16 weights. To give
every answer the length that the workload prescribes, a large number is added to
the logit of the token to draw.

| part  | measures                                                          |
|-------|-------------------------------------------------------------------|
| steps | the first steps of the job, each in one call of the loop:         |
|       | milliseconds per step with dispatch, by number of prompt columns  |
| whole | the whole job in one call: tokens per second, drawn and computed, |
|       | a part for each number of `decode_steps`                          |

Parts with the same `decode_steps` use one compiled program.
"""

import functools
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rollout_counts as counts
import rollout_ideal as ideal
import rows
from groups import small_llama
from rows import Row

import jaxkv
from jaxkv import models
from jaxkv import rollout
from jaxkv._src.engine import schedule

MODEL = models.llama(
  vocab_size=49_152,
  num_layers=32,
  embed_dim=960,
  num_heads=15,
  num_kv_heads=5,
  head_dim=64,
  mlp_dim=2560,
  dtype=jnp.bfloat16,
)
QUICK_MODEL = small_llama(512, 72, jnp.bfloat16)
DECODE_STEPS = (1, 4, 8, 16)
_SINGLE_STEPS = 400
_ALL_STEPS = 2**31 - 1
_FORCE = 1e6


def by_part(name: str, quick: bool = False) -> list[dict[str, Any]]:
  """Runs the parts that a file lacks, and writes each one when it ends."""

  # Only the latest job is kept, because each has weights of its own.
  @functools.lru_cache(maxsize=1)
  def job(decode_steps: int) -> Job:
    return Job(quick, decode_steps)

  parts = {"steps": lambda: job(1).steps()}
  for k in DECODE_STEPS:
    parts[f"whole, decode_steps = {k}"] = lambda k=k: job(k).whole()
  return rows.by_part(name, parts)


class Job:
  """The workload, the model, and the compiled loop."""

  def __init__(self, quick: bool, decode_steps: int):
    """Makes the weights and compiles the loop."""
    small = {"count": 12, "slots": 4, "scale": 32} if quick else {}
    self.model = QUICK_MODEL if quick else MODEL
    options = {"decode_steps": decode_steps}
    self.work = ideal.lengths(**small)._replace(options=options)
    self._single_steps = 8 if quick else _SINGLE_STEPS
    # Enough pages for all slots at their longest, so nothing is preempted.
    self.pages = 400 if quick else 6000
    params = models.init_params(jax.random.key(0), self.model)
    self._inputs = params, counts.last_positions(self.work)
    program = jax.jit(
      functools.partial(rollout.generate, model=self._call), donate_argnums=1
    )
    start_time = time.perf_counter()
    state = self._initial_state()
    inputs = self._inputs, state, rollout.Until(steps=0)
    self._compiled = program.lower(*inputs).compile()
    # Freed, because memory may not have room for a second pool.
    del state, inputs
    self.compiling = time.perf_counter() - start_time
    num_params = sum(leaf.size for leaf in jax.tree.leaves(params))
    self.name = f"device, {num_params / 1e6:.1f} M, k = {decode_steps}"

  def _call(
    self, inputs: Any, batch: jaxkv.kv.Batch, kv: Any
  ) -> tuple[jax.Array, Any]:
    """Calls the model, with logits that force `counts.forced_tokens`."""
    params, stops = inputs
    logits, kv = models.forward(params, batch, kv, config=self.model)
    tokens = counts.forced_tokens(stops, batch)
    forced = jax.nn.one_hot(tokens, logits.shape[1], dtype=logits.dtype)
    return logits + forced * _FORCE, kv

  def _initial_state(self) -> rollout.RolloutState:
    kv = models.init_kv(self.model, counts.sizes_of(self.work, self.pages))
    return counts.initial_state(self.work, self.pages, kv, temperature=1.0)

  def _run(
    self, state: rollout.RolloutState, steps: int
  ) -> tuple[float, rollout.RolloutState]:
    """Returns the seconds of some steps, and the state after them."""
    until = rollout.Until(steps=jnp.int32(steps))
    seconds, _, state = rows.timed(self._compiled, self._inputs, state, until)
    return seconds, state

  def steps(self) -> Iterator[Row]:
    """Times single steps, by number of columns."""
    state = self._initial_state()
    widths = schedule.widths(state.config, records=False)
    old_calls = np.asarray(state.counters.calls)
    samples: dict[schedule.Width, list[float]] = {width: [] for width in widths}
    for _ in range(self._single_steps):
      seconds, state = self._run(state, 1)
      calls = np.asarray(state.counters.calls)
      samples[widths[int(np.argmax(calls - old_calls))]].append(seconds)
      old_calls = calls
    yield Row(self.name, "seconds to compile", self.compiling)
    for width, seconds in samples.items():
      metric = f"step, {self.work.slots} + {width.prompts} columns"
      yield Row(self.name, f"{metric}, count", len(seconds))
      if seconds:
        ms = statistics.median(seconds) * 1e3
        yield Row(self.name, f"{metric}, ms, median", ms)
        yield Row(self.name, f"{metric}, ms, minimum", min(seconds) * 1e3)

  def whole(self) -> Iterator[Row]:
    """Times the whole job."""
    _, state = self._run(self._initial_state(), 4)  # Warms up.
    # Freed, because memory may not have room for a second pool.
    del state
    seconds, final_state = self._run(self._initial_state(), _ALL_STEPS)
    counts.check_answers(self.work, final_state)
    steps = int(final_state.counters.steps)
    num_drawn = int(final_state.counters.generated)
    computed = num_drawn + int(final_state.counters.prefilled)
    yield Row(self.name, "seconds", seconds)
    yield Row(self.name, "steps", steps)
    yield Row(self.name, "ms a step, mean", seconds * 1e3 / steps)
    yield Row(self.name, "tokens drawn a second", num_drawn / seconds)
    yield Row(self.name, "tokens computed a second", computed / seconds)
