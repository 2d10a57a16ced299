"""Times transitions of the cache inside compiled loops.

| op          | one step of the loop                                         |
|-------------|--------------------------------------------------------------|
| decode_step | `recycle` if there are windows, `allocate` a token in every  |
|             | slot, `commit` it (1/16 of the slots take a page, 1/16 hash  |
|             | a page and enter it in the prefix index), `free` the         |
|             | sequences that end, and `admit` with all rows masked out     |
| allocate    | one more token in every slot, so 1/16 of them take a page    |
| match_4096  | `match` of one prompt of 4,096 tokens                        |
| admit_4096  | `admit` of one prompt of 4,096 tokens, hashing included      |
| free_16     | `free` of 16 sequences of 64 pages, all of them cached       |

Modes.
short: sequences end at 128 tokens (48 at 1,024 slots, to fit every pool). At
  256 slots, two sequences end in a step.
long: sequences end at 1,008 tokens. In most steps no sequence ends.
hybrid: one group of full attention and five with a sliding window of 1,024
  tokens, in one pool. 96 of 256 sequences have 1,024 to 1,536 tokens. Six of
  these 96 free pages in each step. The others end at 128 tokens.
pools: as `hybrid`, with one group for all windowed layers, in another pool.
all_hit: 255 of 256 pages are hits in the free queue. The page of the last token
  is never a hit, so it is taken.
none_hit, none_hit_evicting: no page is a hit, so `admit` takes 256 pages.
unsplit: compiled with `jaxkv.CPU_COMPILER_OPTIONS`, so that XLA:CPU does not
  hand small operations to other threads, which costs more than it saves.
All pages are cached beforehand, so taking a page evicts its contents.

Method. A timed call is one `fori_loop` whose trip count is an argument and
whose carry is the donated state. The time of the same program without trips is
subtracted (minimum from minimum, median from median), which removes the
dispatch. Every `admit` fills another slot with another prompt, and every `free`
frees other slots. The state is prepared between calls, which is not timed. All
sizes alternate in every round.

Not measured: dispatch from Python, compilation, K/V memory, the model, and
sweeps of the free queue's ring (after hits, at most one per `num_pages`
releases).

  python benchmarks/transitions.py [--quick] [--json FILE]

`gpu_suite.py` calls `by_row` instead, which writes each row at once.
"""

import json
import pathlib
import statistics
from typing import Any

import command
import jax
import jax.numpy as jnp
import numpy as np
import rows
import transition_ops as ops
from jax import lax

import jaxkv

SLOTS = (64, 256, 1024)
HYBRID = (256, 65536)  # slots and pages
COMPILER_OPTIONS = {
  "cpu": {"": None, "unsplit": jaxkv.CPU_COMPILER_OPTIONS},
  "gpu": {"": None},
  "tpu": {"": None},
}
"""Compiler options to time, by platform and mode."""


def compile_steps(step, options: dict[str, Any] | None):
  """Jits a loop of steps, `(state, inputs, count) -> (state, sum)`."""

  def run(state, inputs, count):
    def body(trip, carry):
      state, sum_ = carry
      state, value = step(state, inputs, trip)
      return state, sum_ + value

    return lax.fori_loop(jnp.int32(0), count, body, (state, jnp.int32(0)))

  return jax.jit(run, donate_argnums=0, compiler_options=options)


class Side:
  """One op at one size, with its program, state and samples (us per call)."""

  def __init__(self, config, op, run, state, rng):
    """Copies the state."""
    self.config, self.op, self.samples, self.idle = config, op, [], []
    self._run, self._rng = run, rng
    self._state = jax.tree.map(jnp.copy, state)

  def round(self, *, record: bool) -> None:
    """Prepares, times and checks one call."""
    state, inputs = self.op.prepare(self._state, self._rng)
    old_counts = int(state.stats.evicted_pages), int(state.stats.popped_pages)
    idle, _, (state, _) = rows.timed(self._run, state, inputs, jnp.int32(0))
    steps = jnp.int32(self.op.steps)
    full, _, (state, count) = rows.timed(self._run, state, inputs, steps)
    assert self.op.expected in (None, int(count)), (self.op.name, int(count))
    assert int(state.error) == 0
    evicted = int(state.stats.evicted_pages) - old_counts[0]
    assert evicted == int(state.stats.popped_pages) - old_counts[1]
    self._state = state
    if record:
      self.samples.append(full * 1e6)
      self.idle.append(idle * 1e6)

  def row(self) -> dict[str, Any]:
    """Returns the row of the report."""
    return {
      "op": self.op.name,
      "slots": self.config.num_slots,
      "pages": self.config.total_pages,
      "page_size": self.config.page_size,
      "mode": self.op.mode,
      **self.times(),
    }

  def times(self) -> dict[str, float]:
    """Returns the microseconds a step."""
    return {
      "us_median": self._per_step(statistics.median),
      "us_min": self._per_step(min),
    }

  def _per_step(self, pick) -> float:
    return (pick(self.samples) - pick(self.idle)) / self.op.steps


def sides_of(slots: int, pages: int) -> list[Side]:
  """Returns all ops at one size, except those that do not fit."""
  config = ops.config_of(slots, pages)
  decode_ops = [ops.decode_op(config, mode) for mode in ("short", "long")]
  other_ops = [ops.allocate_op(config), *ops.prompt_ops(config)]
  sides = sides_with(config, [*decode_ops, *other_ops, ops.free_op(config)])
  if (slots, pages) == HYBRID:
    for mode in ("hybrid", "pools"):
      config = ops.config_of(slots, pages, mode)
      sides += sides_with(config, [ops.decode_op(config, mode)])
  return sides


def sides_with(config: jaxkv.CacheConfig, all_ops: list[ops.Op]) -> list[Side]:
  """Returns sides of ops, with each of the platform's compiler options."""
  slots, pages = config.num_slots, config.total_pages
  rng = np.random.default_rng(slots + pages)
  state = ops.full_cache(config, rng)
  programs, sides = {}, []
  for op in all_ops:
    if op.steps < 2:
      print(f"skipped, pool too small: {op.name} {op.mode} {slots} {pages}")
      continue
    for way, options in COMPILER_OPTIONS[jax.default_backend()].items():
      mode = f"{op.mode} {way}".strip()
      run = compile_steps(op.step, options)
      # Ops with the same step share a program, so that it is compiled only
      # once.
      run = programs.setdefault((op.step, way), run)
      sides.append(Side(config, op._replace(mode=mode), run, state, rng))
  return sides


def by_row(name: str, rounds: int = 5) -> None:
  """Times 256 slots, and writes each row to a file that a new call resumes."""
  path = pathlib.Path(name)
  report: dict[str, Any] = {"rounds": rounds, "rows": []}
  if path.exists():
    report = json.loads(path.read_text("utf-8"))
  keys = ("op", "mode", "pages")
  done = {tuple(row[key] for key in keys) for row in report["rows"]}
  # Rows are in the order of their importance: all ops with 65,536 pages, then
  # decode_step with the smallest and the largest pool.
  for pages in (HYBRID[1], ops.PAGES[0], ops.PAGES[-1]):
    for side in sides_of(HYBRID[0], pages):
      op = side.op
      elsewhere = pages != HYBRID[1] and op.name != "decode_step"
      if elsewhere or (op.name, op.mode, pages) in done:
        continue
      for index in range(rounds + 1):
        side.round(record=index > 0)
      report["rows"].append(side.row())
      print_row(report["rows"][-1])
      command.write(path, report)
  command.write(path, {**report, "complete": True})


def measured(quick: bool, rounds: int) -> dict[str, Any]:
  """Measures and prints all rows."""
  print(
    f"\n{'op':12} {'mode':25} {'slots':>5} {'pages':>7} {'page':>4}"
    f" {'us min':>9} {'median':>9}"
  )
  table: list[dict[str, Any]] = []
  for slots in (256,) if quick else SLOTS:
    sides = [side for pages in ops.PAGES for side in sides_of(slots, pages)]
    for index in range(rounds + 1):
      for side in sides:
        side.round(record=index > 0)
    sides.sort(key=lambda side: (side.op.name, side.op.mode))
    for side in sides:
      table.append(side.row())
      print_row(table[-1])
  return {"rows": table}


def print_row(row: dict[str, Any]) -> None:
  print(
    f"{row['op']:12} {row['mode']:25} {row['slots']:5} {row['pages']:7}"
    f" {row['page_size']:4} {row['us_min']:9.1f}"
    f" {row['us_median']:9.1f}",
    flush=True,
  )


if __name__ == "__main__":
  command.run(
    __doc__,
    measured,
    rounds=15,
    quick_rounds=5,
    not_measured="dispatch, compilation, K/V memory, sweeps of the ring",
  )
