"""What the rollout loop computes, counted on a model that costs nothing.

| workload   | what                                                           |
|------------|----------------------------------------------------------------|
| lengths    | 512 sequences in 64 slots, pages of 16: prompts of 200 to      |
|            | 2,000 tokens (mean 650), answers lognormal (median 200, sigma  |
|            | 1, at most 2,048); pools of 100 %, 50 % and 35 % of the pages  |
|            | that the loop uses when it has all that it asks for            |
| same_batch | 16 prompts of 64 common tokens and 8 of their own, pages of 8, |
|            | into an empty cache                                            |
| grpo       | 32 prompts of 100 to 400 tokens with 64 common ones, 8 samples |
|            | each, 64 slots, pages of 16                                    |
| families   | 200 prompts of 20 families in random order, one slot, pages of |
|            | 8: prefixes of 6 to 14 pages, tails of 1 to 4; pools of 40 to  |
|            | 200 pages; sequences are chosen from 32 that wait, or from all |

| metric         | what                                                       |
|----------------|------------------------------------------------------------|
| rows a useful  | tokens that the model is called with, for each that is     |
|                | needed: drawn, or of a prompt and computed at first        |
| prompt tokens  | computed, of all prompts, without their last ones          |
| recomputed     | tokens computed again after a preemption                   |
| busy           | slots that draw a token, of all, in all steps              |
| hit rate       | tokens found in the cache, of those looked up              |
| overtaken      | the most sequences that entered before one that waited     |
| us a step      | wall time of the loop without a model                      |

All but the last are counted by the loop's own state. The stub draws the token
that ends a sequence at the position that the workload says.

Not measured: a model, an accelerator unless jax runs on one.

  python benchmarks/rollout.py [--quick] [--json FILE]
"""

import dataclasses
import functools
import time
from typing import Any
from typing import NamedTuple

import command
import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv import rollout


class Workload(NamedTuple):
  """Prompts and the lengths of their answers.

  Attributes:
    prompts: int32[P, L]. The last token of each is its number.
    lengths: int32[P].
    answers: int32[P], tokens drawn by each sample.
    page_size: S.
    slots: B.
    samples: of each prompt.
    options: of `RolloutConfig`.
  """

  prompts: np.ndarray
  lengths: np.ndarray
  answers: np.ndarray
  page_size: int
  slots: int
  samples: int = 1
  options: dict[str, int] | None = None


def _of(rows: list[np.ndarray], answers: Any, **sizes: Any) -> Workload:
  """A workload of prompts of different lengths."""
  lengths = np.array([len(row) for row in rows], np.int32)
  prompts = np.zeros((len(rows), lengths.max()), np.int32)
  for number, row in enumerate(rows):
    prompts[number, : len(row)] = row
    prompts[number, len(row) - 1] = number
  answers = np.broadcast_to(np.asarray(answers, np.int32), lengths.shape)
  return Workload(prompts, lengths, answers, **sizes)


def lengths(count: int) -> Workload:
  """See the table."""
  rng = np.random.default_rng(0)
  prompts = np.clip(rng.lognormal(np.log(666) - 0.18, 0.6, count), 200, 2000)
  answers = np.clip(rng.lognormal(np.log(200), 1.0, count), 1, 2048)
  rows = [rng.integers(0, count, int(length)) for length in prompts]
  return _of(rows, answers.astype(np.int32), page_size=16, slots=64)


def same_batch() -> Workload:
  """See the table."""
  rng = np.random.default_rng(0)
  common = rng.integers(0, 16, 64)
  rows = [np.concatenate([common, rng.integers(0, 16, 8)]) for _ in range(16)]
  return _of(rows, 4, page_size=8, slots=16)


def grpo() -> Workload:
  """See the table."""
  rng = np.random.default_rng(0)
  common = rng.integers(0, 32, 64)
  rows = [
    np.concatenate([common, rng.integers(0, 32, rng.integers(36, 337))])
    for _ in range(32)
  ]
  return _of(rows, 60, page_size=16, slots=64, samples=8)


def families(window: int) -> Workload:
  """See the table."""
  rng = np.random.default_rng(1)
  begins = [rng.integers(0, 200, rng.integers(6, 15) * 8) for _ in range(20)]
  order = np.repeat(np.arange(20), 10)
  rng.shuffle(order)
  rows = [
    np.concatenate([begins[n], rng.integers(0, 200, rng.integers(1, 5) * 8)])
    for n in order
  ]
  bound = {"window": window, "max_overtaken": max(window, 32)}
  return _of(rows, 1, page_size=8, slots=1, options=bound)


def _model(
  stops: jax.Array, tokens: Any, positions: Any, kv: Any, views: Any, at: Any
) -> tuple[jax.Array, Any]:
  """Repeats a prompt's last token, its number, until its answer ends."""
  del views
  number = tokens[0].at[at].get(mode="clip")
  position = positions[0].at[at].get(mode="clip")
  ends = position + 1 >= stops.at[number].get(mode="clip")
  drawn = jnp.where(ends, stops.shape[0], number)
  return jax.nn.one_hot(drawn, stops.shape[0] + 1, dtype=jnp.float32), kv


def ran(work: Workload, pages: int) -> tuple[rollout.RolloutState, float]:
  """The end of a workload's rollout, and microseconds a step."""
  count, width = work.prompts.shape
  new = int(work.answers.max())
  sizes = jaxkv.CacheConfig(
    num_pages=pages + 1,
    page_size=work.page_size,
    num_slots=work.slots,
    pages_per_slot=-(-(width + new) // work.page_size),
  )
  kv = jaxkv.kv.init(sizes, num_layers=1, num_kv_heads=1, head_dim=1)
  config = rollout.RolloutConfig(
    num_samples=work.samples,
    max_new_tokens=new,
    stop_token=count,
    **(work.options or {}),
  )
  state = rollout.init(
    jaxkv.init(sizes),
    kv,
    jnp.asarray(work.prompts),
    jnp.asarray(work.lengths),
    jax.random.key(0),
    config,
  )
  stops = jnp.asarray(work.lengths + work.answers - 1, jnp.int32)
  program = jax.jit(
    functools.partial(rollout.generate, model=_model),
    donate_argnums=1,
    compiler_options=jaxkv.CPU_COMPILER_OPTIONS,
  )
  inputs = (stops, state, jnp.float32(0), jnp.int32(0))
  compiled = program.lower(*inputs).compile()
  begin = time.perf_counter()
  end = jax.block_until_ready(compiled(*inputs))
  seconds = time.perf_counter() - begin
  assert bool(rollout.is_done(end))
  found = np.asarray(end.sequences.length - end.sequences.prompt_length)
  assert np.array_equal(found, np.repeat(work.answers, work.samples))
  return end, seconds * 1e6 / int(end.counters.steps)


def figures(name: str, work: Workload, pages: int) -> dict[str, Any]:
  """One row; prints it."""
  end, us = ran(work, pages)
  done = jax.tree.map(int, dataclasses.asdict(end.counters))
  stats = end.cache.stats
  useful = done["generated"] + done["prefilled"]
  row = {
    "workload": name,
    "pages": pages,
    "steps": done["steps"],
    "rows_a_useful": done["rows"] / useful,
    "prompt_tokens": done["prefilled"],
    "of_prompt_tokens": int(work.lengths.sum() - len(work.lengths))
    * work.samples,
    "recomputed": done["recomputed"],
    "preempted": done["preempted"],
    "busy": done["generated"] / (done["steps"] * work.slots),
    "hit_rate": int(stats.hit_tokens) / max(int(stats.queried_tokens), 1),
    "overtaken": int(end.overtaken.max()),
    "peak_pages": done["peak_pages"],
    "us_a_step": us,
  }
  print(
    f"{name:14} {pages:6} {row['steps']:6} {row['rows_a_useful']:6.2f}"
    f" {row['prompt_tokens']:8} {row['of_prompt_tokens']:8}"
    f" {row['recomputed']:8} {row['preempted']:6} {row['busy']:6.1%}"
    f" {row['hit_rate']:6.2f} {row['overtaken']:5} {us:8.0f}",
    flush=True,
  )
  return row


def measured(quick: bool) -> list[dict[str, Any]]:
  """All rows."""
  print(
    f"\n{'workload':14} {'pages':>6} {'steps':>6} {'rows':>6} {'prompt':>8}"
    f" {'of':>8} {'again':>8} {'victim':>6} {'busy':>6} {'hits':>6}"
    f" {'over':>5} {'us/step':>8}"
  )
  rows = [figures("same_batch", same_batch(), 400)]
  rows.append(figures("grpo", grpo(), 4000))
  for pages in (40,) if quick else (40, 80, 120, 200):
    for window in (32, 200):
      work = families(window)
      rows.append(figures(f"families {window}", work, pages))
  work = lengths(64 if quick else 512)
  rows.append(figures("lengths", work, 20000))
  most = rows[-1]["peak_pages"]
  for part in (0.5, 0.35):
    rows.append(figures(f"lengths {part:.0%}", work, int(most * part)))
  return rows


if __name__ == "__main__":
  command.run(
    __doc__,
    lambda quick, rounds: {"rows": measured(quick)},
    rounds=1,
    quick_rounds=1,
    not_measured="a model, accelerators",
  )
