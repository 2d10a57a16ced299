"""Counts the work of the rollout loop with a stub in place of the model."""

import functools
import math
from collections.abc import Iterator
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import rollout_ideal as ideal
import rows
from rollout_ideal import Workload
from rows import Row

import jaxkv
from jaxkv import rollout
from jaxkv._src.engine import schedule


class Run(NamedTuple):
  """A finished rollout.

  Attributes:
    work: the workload.
    pages: usable pages of the pool.
    end: the final state.
    seconds: the duration without compilation.
  """

  work: Workload
  pages: int
  end: rollout.RolloutState
  seconds: float

  def count(self, name: str) -> int:
    """Returns one of the loop's counters."""
    return int(getattr(self.end.counters, name))

  @property
  def busy(self) -> float:
    """The share of slots that draw a token, over all steps."""
    return self.count("generated") / (self.count("steps") * self.work.slots)

  @property
  def cost(self) -> int:
    """The roofline time in rows, at least `ideal.RIDGE` for each call."""
    widths = schedule.widths(self.end.config, records=False)
    calls = np.asarray(self.end.counters.calls).tolist()
    return sum(
      count * max(self.work.slots + width.columns, ideal.RIDGE)
      for count, width in zip(calls, widths, strict=True)
    )


def _model(
  stops: jax.Array, batch: jaxkv.kv.Batch, kv: Any
) -> tuple[jax.Array, None]:
  """A stub that repeats a prompt's last token until its answer ends."""
  del kv  # It writes nothing.
  tokens = forced_tokens(stops, batch)
  return jax.nn.one_hot(tokens, stops.shape[0] + 1, dtype=jnp.float32), None


def forced_tokens(stops: jax.Array, batch: jaxkv.kv.Batch) -> jax.Array:
  """Returns the next tokens, int32[X], that give every answer its length.

  The last token of a sequence is the index of its prompt. The next token
  repeats it, or is P, which ends the sequence. `stops` int32[P] has the last
  position to compute for the samples of each prompt.
  """
  prompt_index = batch.tokens[0].at[batch.columns].get(mode="clip")
  position = batch.positions[0].at[batch.columns].get(mode="clip")
  ends = position + 1 >= stops.at[prompt_index].get(mode="clip")
  return jnp.where(ends, stops.shape[0], prompt_index)


def last_positions(work: Workload) -> jax.Array:
  """Returns `stops` of `forced_tokens`."""
  return jnp.asarray(work.lengths + work.answers - 1, jnp.int32)


def sizes_of(work: Workload, pages: int) -> jaxkv.CacheConfig:
  """Returns the config of a cache with `pages` pages and the null page."""
  width = work.prompts.shape[1] + int(work.answers.max())
  return jaxkv.CacheConfig(
    num_pages=pages + 1,
    page_size=work.page_size,
    num_slots=work.slots,
    pages_per_slot=-(-width // work.page_size),
  )


def initial_state(
  work: Workload,
  pages: int,
  kv: jaxkv.kv.KVPages,
  timeline: int = 0,
  temperature: float = 0.0,
) -> rollout.RolloutState:
  """Makes a workload's rollout before its first step."""
  options: dict[str, Any] = work.options or {}
  config = rollout.RolloutConfig(
    num_samples=work.samples,
    max_new_tokens=int(work.answers.max()),
    stop_token=len(work.lengths),
    timeline=timeline,
    **options,
  )
  return rollout.init(
    jaxkv.init(sizes_of(work, pages)),
    kv,
    rollout.Requests(
      jnp.asarray(work.prompts),
      jnp.asarray(work.lengths),
      sampling=rollout.Sampling(temperature=temperature),
    ),
    jax.random.key(0),
    config,
  )


def check_answers(work: Workload, state: rollout.RolloutState) -> None:
  """Checks that every answer has its length."""
  assert bool(rollout.is_done(state))
  num_drawn = np.asarray(state.queue.length - state.queue.prompt_length)
  assert np.array_equal(num_drawn, np.repeat(work.answers, work.samples))


def run_workload(work: Workload, pages: int, timeline: int = 0) -> Run:
  """Runs a workload with the stub."""
  cache_config = sizes_of(work, pages)
  kv = jaxkv.kv.init(cache_config, num_layers=1, num_kv_heads=1, head_dim=1)
  state = initial_state(work, pages, kv, timeline)
  program = jax.jit(
    functools.partial(rollout.generate, model=_model),
    donate_argnums=1,
    compiler_options=jaxkv.CPU_COMPILER_OPTIONS,
  )
  inputs = (last_positions(work), state)
  compiled = program.lower(*inputs).compile()
  seconds, _, final_state = rows.timed(compiled, *inputs)
  check_answers(work, final_state)
  return Run(work, pages, final_state, seconds)


def common(name: str, run: Run) -> Iterator[Row]:
  """Yields the rows that are reported for every workload."""
  useful = run.count("generated") + run.count("prefilled")
  stats, limit = run.end.memory.cache.stats, run.end.config.max_overtaken
  hits = int(stats.hit_tokens) / max(int(stats.queried_tokens), 1)
  steps = run.count("steps")
  yield rows.at_most(
    name, "rows a useful row", run.count("rows") / useful, 1.25
  )
  yield Row(name, "pages", run.pages)
  yield Row(name, "most pages in use", run.count("peak_pages"))
  yield Row(name, "steps", steps)
  yield Row(name, "hit rate", hits)
  yield rows.at_most(
    name, "overtaken", int(run.end.queue.overtaken.max()), limit
  )
  yield Row(name, "us a step without a model", run.seconds * 1e6 / steps)


def small(quick: bool) -> Iterator[Row]:
  """Yields the rows of same_batch, grpo and families."""
  work = ideal.same_batch()
  run = run_workload(work, 400)
  yield from common("same_batch", run)
  yield rows.at_most("same_batch", "prompt tokens", run.count("prefilled"), 176)
  fewest = int(ideal.new_tokens(work).sum())
  yield Row("same_batch", "least prompt tokens", fewest)
  if quick:
    return

  work = ideal.grpo()
  run = run_workload(work, 4000)
  yield from common("grpo", run)
  fewest = int(ideal.new_tokens(work).sum())
  tokens = run.count("prefilled")
  yield rows.at_most("grpo", "prompt tokens", tokens, fewest * 1.05)
  yield Row("grpo", "least prompt tokens", fewest)

  for pages in (40, 80, 120, 200):
    for window, hits in ((32, 0.55), (200, 0.69)):
      work = ideal.families(window)
      name = f"families {window}, {pages}"
      for row in common(name, run_workload(work, pages)):
        # With a window of the whole queue, all pools have the same bound. With
        # the small window, only the smallest pool has a bound.
        if row.metric == "hit rate" and (pages == 40 or window > 32):
          row = rows.at_least(name, row.metric, row.value, hits)
        yield row


def long(quick: bool) -> Iterator[Row]:
  """Yields the rows of lengths, with an eighth of all sizes if `quick`."""
  work = ideal.lengths(64, 8, 8) if quick else ideal.lengths()
  name, time = "lengths", "roofline time against ideal mixed batches"
  run = run_workload(work, 20_000)
  mixed, equal = _ideals(work)
  yield from common(name, run)
  yield Row(name, "roofline time in rows", run.cost)
  yield Row(name, "roofline time, ideal mixed batches", mixed.cost)
  yield Row(name, "roofline time, ideal equal columns", equal.cost)
  yield rows.at_most(name, time, run.cost / mixed.cost, 1.2)
  yield Row(name, "roofline time against equal columns", run.cost / equal.cost)
  yield Row(name, "busy", run.busy)
  yield Row(name, "busy, ideal mixed batches", mixed.busy)
  yield Row(name, "busy, ideal equal columns", equal.busy)
  for batching, best in (("mixed batches", mixed), ("equal columns", equal)):
    share = run.busy / best.busy
    yield rows.at_least(name, f"busy against ideal {batching}", share, 0.99)

  need = ideal.reserved_pages(work)
  name, pages = "lengths, 35 % of need", int(need * 0.35)
  run = run_workload(work, pages)
  mixed, equal = _ideals(work, pages)
  yield from common(name, run)
  yield Row(name, "pages of the need", need)
  yield rows.at_least(name, "busy", run.busy, 0.58)
  yield Row(name, "busy, ideal mixed batches", mixed.busy)
  yield Row(name, "busy, ideal equal columns", equal.busy)
  yield rows.at_most(name, "recomputed", run.count("recomputed"), 30_000)
  yield Row(name, time, run.cost / mixed.cost)
  yield Row(name, "preempted", run.count("preempted"))


def _ideals(
  work: Workload, pages: float = math.inf
) -> tuple[ideal.Schedule, ideal.Schedule]:
  """Returns the ideal schedules with mixed batches and with equal columns."""
  return (
    ideal.schedule(work, ideal.mixed_room, pages),
    ideal.schedule(work, ideal.loop_room(work.slots), pages),
  )


def stall(quick: bool) -> Iterator[Row]:
  """Yields the longest wait of a decoding sequence for its next token."""
  work = ideal.lengths(48, slots=8, scale=8)
  pools = {"stall, few pages": 40, "stall": 400}
  for name, pages in list(pools.items())[: 1 if quick else None]:
    run = run_workload(work, pages, timeline=1 << 12)
    wait = longest_wait(rollout.timeline(run.end))
    yield rows.at_most(name, "longest wait in steps", wait, 1)
    yield Row(name, "preempted", run.count("preempted"))


def longest_wait(timeline: rollout.Timeline) -> int:
  """Returns the most consecutive steps in which a decoding sequence idles."""
  longest, waited, decoding = 0, 0, None
  for span in timeline.spans():
    sequence = span.slot, span.sequence
    if span.kind == "decode":
      decoding, waited = sequence, 0
    elif sequence != decoding or span.kind == "preempt":
      decoding = None
    else:
      waited += span.stop - span.start
      longest = max(longest, waited)
  return longest
