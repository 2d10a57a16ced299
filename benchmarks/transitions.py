"""What a transition of the cache costs inside a compiled loop.

| op          | one step of the loop                                         |
|-------------|--------------------------------------------------------------|
| decode_step | `allocate` a token in every slot, `commit` it (1/16 of the   |
|             | slots take a page, as many hash and publish one), `free` the |
|             | sequences that end, `admit` with all rows masked out         |
| allocate    | one more token in every slot, 1/16 of them take a page       |
| match_4096  | `match`, one prompt of 4,096 tokens                          |
| admit_4096  | `admit`, one prompt of 4,096 tokens, hashing included        |
| free_16     | `free`, 16 sequences of 64 pages, all of them cached         |
| growth      | no time: decode_step short, largest pool over smallest one   |

Modes. short: sequences end at 128 tokens (48 at 1,024 slots, so that every pool
holds them), at 256 slots two in a step. long: at 1,008 tokens, so that in most
steps none ends. all_hit: 255 of 256 pages are found, standing in the free
queue, and one is taken (the last token is never found). none_hit: nothing is
found. none_hit_evicting: 256 pages are taken. All pages of a pool are cached
before anything is timed, so that every page taken evicts one, in every op.
unsplit: compiled without the pass of XLA:CPU that splits a small gather or
scatter over threads because the array behind it is large, which costs more.

How. A timed call is one `fori_loop` whose trip count is an argument, the state
its donated carry; the same program with no trips is timed next to it and
subtracted (minimum from minimum, median from median), so that dispatch does not
count. No step undoes another one's work: every `admit` fills a slot of its own
with a prompt of its own, every `free` takes other slots, and the state is made
ready between calls, untimed. Where a pool is small there are fewer steps. All
sizes alternate in every round.

Not measured: dispatch from Python, compilation, K/V memory and the model,
sweeps of the free queue's ring (after hits, once in at least as many releases
as there are pages), an accelerator unless jax runs on one.

  python benchmarks/transitions.py [--quick] [--json FILE]
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax import lax

import jaxkv

PAGE_SIZE = 16
PROMPT = 4096
SLOTS = (64, 256, 1024)
PAGES = (4096, 65536, 262144)
STEPS = 512
SHORT, LONG = 128, 1008  # tokens of a sequence in decode_step
UNSPLIT = {"xla_disable_hlo_passes": "cpu-parallel-task-assigner"}
FREED = 16
FREED_PAGES = 64


class Op(NamedTuple):
  """A transition to be timed at one size.

  Attributes:
    name: the row's `op`.
    mode: the row's `mode`.
    steps: trips of a timed call.
    prepare: (state, rng) -> (state, inputs), untimed.
    step: (state, inputs, trip number) -> (state, int32[]); the numbers are
      added up.
    expected: what they add up to; None where it varies.
  """

  name: str
  mode: str
  steps: int
  prepare: Callable[..., tuple[jaxkv.CacheState, Any]]
  step: Callable[..., tuple[jaxkv.CacheState, Array]]
  expected: int | None


def random_tokens(rng, shape) -> Array:
  return jnp.asarray(rng.integers(0, 2**31 - 1, shape, np.int32))


def filled(state, tokens, lengths):
  """The state with new sequences of those lengths in its first slots."""
  counts = np.zeros(state.config.num_slots, np.int32)
  counts[: len(lengths)] = lengths
  state, allocated = jaxkv.allocate(state, jnp.asarray(counts))
  state, committed = jaxkv.commit(state, tokens, jnp.asarray(counts))
  assert allocated.ok.all() and committed.ok.all()
  return state


def released(state, rng):
  """The state with all slots empty and every page they had cached."""
  room = state.num_pages[0] * state.config.page_size - state.length
  tokens = random_tokens(rng, (state.config.num_slots, PROMPT))
  state, committed = jaxkv.commit(state, tokens, room)
  assert committed.ok.all()
  return jaxkv.free(state, state.num_pages[0] > 0)[0]


def aged(config: jaxkv.CacheConfig, rng) -> jaxkv.CacheState:
  """A cache in which every page is cached and free."""
  state = jaxkv.init(config)
  left = config.num_pages - 1
  while left > 0:
    lengths = []
    while left > 0 and len(lengths) < config.num_slots:
      lengths.append(min(left, config.pages_per_slot) * config.page_size)
      left -= lengths[-1] // config.page_size
    tokens = random_tokens(rng, (config.num_slots, PROMPT))
    state = released(filled(state, tokens, lengths), rng)
  assert len(jaxkv.cached_pages(state)) == config.num_pages - 1
  return state


def decode_op(config: jaxkv.CacheConfig, mode: str) -> Op:
  """Short sequences are equally long in every pool; long ones may not fit."""
  slots, size = config.num_slots, config.page_size
  longest = min(SHORT, (PAGES[0] - 1) // slots * size)
  longest = LONG if mode == "long" else longest
  steps = STEPS if slots * longest < config.num_pages * size else 0
  nobody = jnp.zeros((4,), jnp.int32)

  def prepare(state, rng):
    lengths = np.arange(slots) % size
    lengths += size * rng.integers(0, longest // size, slots)
    tokens = random_tokens(rng, (slots, PROMPT))
    return filled(released(state, rng), tokens, lengths), tokens[:, 0]

  def step(state, first, trip):
    tokens = first * (2 * trip + 1)
    state, allocated = jaxkv.allocate(state, jnp.ones((slots,), jnp.int32))
    state, _ = jaxkv.commit(
      state, tokens[:, None], allocated.ok.astype(jnp.int32)
    )
    state, _ = jaxkv.free(state, state.length >= longest)
    state, _ = jaxkv.admit(
      state,
      nobody,
      jnp.zeros((4, 256), jnp.int32),
      nobody,
      mask=jnp.zeros((4,), bool),
    )
    return state, jnp.sum(allocated.ok, dtype=jnp.int32)

  return Op("decode_step", mode, steps, prepare, step, steps * slots)


def allocate_op(config: jaxkv.CacheConfig) -> Op:
  slots, size = config.num_slots, config.page_size
  free = config.num_pages - 1 - slots
  steps = min(STEPS, free * size // slots - size)

  def prepare(state, rng):
    state, _ = jaxkv.allocate(
      released(state, rng), jnp.ones((slots,), jnp.int32)
    )
    lengths = jnp.arange(slots, dtype=jnp.int32) % size
    tokens = random_tokens(rng, (slots, PROMPT))
    return jaxkv.commit(state, tokens, lengths)[0], ()

  def step(state, _, trip):
    state, out = jaxkv.allocate(state, jnp.full((slots,), trip + 1, jnp.int32))
    return state, jnp.sum(out.ok, dtype=jnp.int32)

  return Op("allocate", "", steps, prepare, step, steps * slots)


def prompt_ops(config: jaxkv.CacheConfig) -> list[Op]:
  """Match and admit, with prompts that are cached and others that are not."""
  slots = config.num_slots
  columns = PROMPT // config.page_size
  steps = min(slots, (config.num_pages - 1) // (columns + 1), 64)

  def cached(state, rng):
    state = released(state, rng)
    tokens = random_tokens(rng, (slots, PROMPT))
    state = filled(state, tokens, [PROMPT] * steps)
    return released(state, rng), tokens[:steps, None]

  def unknown(state, rng):
    return released(state, rng), random_tokens(rng, (steps, 1, PROMPT))

  def match(state, prompts, trip):
    out = jaxkv.match(state, prompts[trip], jnp.full((1,), PROMPT, jnp.int32))
    # Without a use of the pages, finding them would be compiled away.
    used = jnp.sum(out.pages < 0, dtype=jnp.int32)
    return state, out.num_cached[0] + used

  def admit(state, prompts, trip):
    length = jnp.full((1,), PROMPT, jnp.int32)
    state, out = jaxkv.admit(state, trip[None], prompts[trip], length)
    return state, out.num_cached[0] - (~out.ok[0]).astype(jnp.int32)

  hits = steps * (PROMPT - config.page_size)
  return [
    Op("match_4096", "all_hit", steps, cached, match, hits),
    Op("match_4096", "none_hit", steps, unknown, match, 0),
    Op("admit_4096", "all_hit", steps, cached, admit, hits),
    Op("admit_4096", "none_hit_evicting", steps, unknown, admit, 0),
  ]


def free_op(config: jaxkv.CacheConfig) -> Op:
  held = min(config.num_slots, (config.num_pages - 1) // FREED_PAGES)
  steps = held // FREED

  def prepare(state, rng):
    tokens = random_tokens(rng, (config.num_slots, PROMPT))
    lengths = [FREED_PAGES * config.page_size] * (steps * FREED)
    return filled(released(state, rng), tokens, lengths), ()

  def step(state, _, trip):
    slots = trip * FREED + jnp.arange(FREED, dtype=jnp.int32)
    state, out = jaxkv.free(state, slots)
    return state, jnp.sum(out.ok, dtype=jnp.int32)

  return Op("free_16", "cached", steps, prepare, step, steps * FREED)


def compiled(step, options: dict[str, str] | None):
  """A timed call: so many steps over a donated state."""

  def run(state, inputs, count):
    def body(trip, carry):
      state, total = carry
      state, number = step(state, inputs, trip)
      return state, total + number

    return lax.fori_loop(jnp.int32(0), count, body, (state, jnp.int32(0)))

  return jax.jit(run, donate_argnums=0, compiler_options=options)


class Side:
  """One op at one size: its program, its state, its samples (us a call)."""

  def __init__(self, config, op, run, state, rng):
    """Takes a copy of the state."""
    self.config, self.op, self.samples, self.idle = config, op, [], []
    self._run, self._rng = run, rng
    self._state = jax.tree.map(jnp.copy, state)

  def round(self, *, record: bool) -> None:
    """Prepares, times, checks."""
    state, inputs = self.op.prepare(self._state, self._rng)
    state, inputs = jax.block_until_ready((state, inputs))
    before = int(state.stats.evicted), int(state.stats.popped)
    state, empty, _ = timed(self._run, state, inputs, 0)
    state, full, total = timed(self._run, state, inputs, self.op.steps)
    assert self.op.expected in (None, int(total)), (self.op.name, int(total))
    assert int(state.error) == 0
    evicted = int(state.stats.evicted) - before[0]
    assert evicted == int(state.stats.popped) - before[1]
    self._state = state
    if record:
      self.samples.append(full * 1e6)
      self.idle.append(empty * 1e6)

  def row(self) -> dict[str, Any]:
    """The result."""
    return {
      "op": self.op.name,
      "slots": self.config.num_slots,
      "pages": self.config.num_pages,
      "page_size": self.config.page_size,
      "mode": self.op.mode,
      "us_median": self._per_step(statistics.median),
      "us_min": self._per_step(min),
    }

  def _per_step(self, pick) -> float:
    return (pick(self.samples) - pick(self.idle)) / self.op.steps


def timed(run, state, inputs, count):
  count, begin = jnp.int32(count), time.perf_counter()
  state, total = jax.block_until_ready(run(state, inputs, count))
  return state, time.perf_counter() - begin, total


def sides_of(slots: int, pages: int) -> list[Side]:
  """All ops at one size; those that do not fit are named and left out."""
  config = jaxkv.CacheConfig(
    num_pages=pages,
    page_size=PAGE_SIZE,
    num_slots=slots,
    pages_per_slot=PROMPT // PAGE_SIZE,
  )
  rng = np.random.default_rng(slots + pages)
  state = aged(config, rng)
  ops = [decode_op(config, "short"), decode_op(config, "long")]
  ops += [allocate_op(config), *prompt_ops(config), free_op(config)]
  programs, sides = {}, []
  for op in ops:
    if op.steps < 2:
      print(f"skipped, pool too small: {op.name} {op.mode} {slots} {pages}")
      continue
    on_cpu = jax.default_backend() == "cpu"
    for options in (None, UNSPLIT) if on_cpu else (None,):
      mode = f"{op.mode} unsplit".strip() if options else op.mode
      run = compiled(op.step, options)
      run = programs.setdefault((op.step, options is None), run)
      sides.append(Side(config, op._replace(mode=mode), run, state, rng))
  return sides


def growth_row(rows, slots: int, mode: str) -> dict[str, Any]:
  """decode_step at the largest pool over that at the smallest."""
  wanted = ("decode_step", mode, slots)
  times = {
    row["pages"]: row
    for row in rows
    if (row["op"], row["mode"], row["slots"]) == wanted
  }
  small, large = times[min(times)], times[max(times)]
  ratios = {key: large[key] / small[key] for key in ("us_median", "us_min")}
  return {**large, "op": "growth", **ratios}


def measured(all_slots, rounds: int) -> list[dict[str, Any]]:
  """All rows, printed as they come."""
  print(
    f"\n{'op':12} {'mode':25} {'slots':>5} {'pages':>7} {'page':>4}"
    f" {'us min':>9} {'median':>9}"
  )
  rows: list[dict[str, Any]] = []
  for slots in all_slots:
    sides = [side for pages in PAGES for side in sides_of(slots, pages)]
    for number in range(rounds + 1):
      for side in sides:
        side.round(record=number > 0)
    new = sorted(
      (side.row() for side in sides),
      key=lambda row: (row["op"], row["mode"]),
    )
    modes = {row["mode"] for row in new} & {"short", "short unsplit"}
    new += [growth_row(new, slots, mode) for mode in sorted(modes)]
    for row in new:
      digits = 2 if row["op"] == "growth" else 1
      print(
        f"{row['op']:12} {row['mode']:25} {row['slots']:5} {row['pages']:7}"
        f" {row['page_size']:4} {row['us_min']:9.{digits}f}"
        f" {row['us_median']:9.{digits}f}",
        flush=True,
      )
    rows += new
  return rows


def main() -> None:
  """Runs all, prints a table, writes JSON if asked to."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--json", metavar="FILE", help="also write rows here")
  parser.add_argument(
    "--quick", action="store_true", help="256 slots only, fewer rounds"
  )
  options = parser.parse_args()
  rounds = 5 if options.quick else 15
  device = jax.devices()[0]
  before = os.getloadavg()
  print(
    f"{device.device_kind} ({device.platform}), {platform.machine()},"
    f" {os.cpu_count()} cores, jax {jax.__version__}, {rounds} rounds, load"
    f" average {before[0]:.1f}"
  )
  rows = measured((256,) if options.quick else SLOTS, rounds)
  after = os.getloadavg()
  print(
    f"\nload average now {after[0]:.1f}"
    "\nnot measured: dispatch, compilation, K/V memory, sweeps of the ring,"
    " accelerators"
  )
  if options.json:
    result = {
      "device": device.device_kind,
      "jax": jax.__version__,
      "rounds": rounds,
      "load_average": [before, after],
      "rows": rows,
    }
    with open(options.json, "w") as file:
      json.dump(result, file, indent=1)


if __name__ == "__main__":
  main()
