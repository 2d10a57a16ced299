"""Times the schedulers of vLLM and eSurge over two cache managers each.

| load     | requests                                                          |
|----------|-------------------------------------------------------------------|
| steady   | 64, each with 600 tokens to generate                              |
| arrivals | 64 at a time, each with 50 to 450 tokens; one that ends is        |
|          | replaced by another in the next step                              |

A step is `add_request` for new requests, `schedule` and `update_from_output`.
A prompt has one of four prefixes of 128 to 768 tokens, then 1 to 128 tokens of
its own. Pages have 16 tokens, and the pool never runs out. full: one group of
full attention. hybrid: three more groups with a sliding window of 256 tokens.

Method. A scheduler runs 500 steps over its own manager and over that of
`jaxkv.host.vllm` or `jaxkv.host.esurge`, in turns of one step, with the garbage
collector's heap frozen. Both must give the same output in every step. Times are
milliseconds per run, the mean over the runs of a row.

A scheduler that cannot be imported is skipped. vLLM's is in its package, see
`peers.py`. eSurge's needs a checkout of EasyDeL at the path JAXKV_EASYDEL.

  python benchmarks/schedulers.py [--quick] [--json FILE]
"""

import contextlib
import dataclasses
import gc
import pathlib
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import command

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

PAGE_SIZE = 16
RUNNING = 64
LONGEST = 2048
STEPS = 500
WINDOWS = {"full": (), "hybrid": (256,) * 3}
NUM_PAGES = {"full": 8192, "hybrid": 32768}
# The range of a request's number of tokens to generate.
LOADS = {"steady": (600, 600), "arrivals": (50, 450)}


@dataclasses.dataclass
class Side:
  """A scheduler with one of the managers.

  Attributes:
    add: `(name, prompt, max_tokens)`, adds a request.
    schedule: `() -> output`.
    update: `(output, tokens of each request)`.
    requests: the scheduler's requests by name.
    plain: converts an output to data that can be compared.
  """

  add: Callable[..., None]
  schedule: Callable[[], Any]
  update: Callable[..., Any]
  requests: dict[str, Any]
  plain: Callable[[Any], Any]


def vllm_sides(mode: str, stack: contextlib.ExitStack) -> list[Side]:
  """Returns vLLM's scheduler over its own manager and over jaxkv's."""
  import vllm.v1.core.sched.scheduler  # noqa: F401  # pyright: ignore

  from tests.host.vllm import schedulers

  folder = stack.enter_context(schedulers.model_folder())
  setup = schedulers.Setup(
    specs=(
      schedulers.full(PAGE_SIZE),
      *(schedulers.window(window, PAGE_SIZE) for window in WINDOWS[mode]),
    ),
    num_blocks=NUM_PAGES[mode],
    hash_block_size=PAGE_SIZE,
    max_model_len=LONGEST,
    max_num_seqs=RUNNING,
    max_num_batched_tokens=LONGEST,
    events=False,
  )
  return [
    Side(
      lambda *request, side=side: side.add(*request, priority=0),
      side.scheduler.schedule,
      side.update,
      side.scheduler.requests,
      schedulers.as_data,
    )
    for side in schedulers.both_sides(setup, folder)
  ]


def esurge_sides(mode: str, stack: contextlib.ExitStack) -> list[Side]:
  """Returns eSurge's scheduler over its own manager and over jaxkv's."""
  from jaxkv.host import esurge
  from tests.host.esurge import easydel
  from tests.host.esurge import schedulers

  if easydel.sources() is None:
    raise ImportError(f"{easydel.VARIABLE} is not set")
  load = schedulers.Load(
    lambda: [
      schedulers.full(page_size=PAGE_SIZE),
      *(schedulers.window(n, page_size=PAGE_SIZE) for n in WINDOWS[mode]),
    ],
    num_pages=NUM_PAGES[mode],
    page_size=PAGE_SIZE,
    max_model_len=LONGEST,
    max_num_seqs=RUNNING,
    max_num_batched_tokens=LONGEST,
    longest_chunk=None,
  )
  runs = [
    schedulers.Run(load, manager) for manager in (None, esurge.CacheManager)
  ]
  return [
    Side(
      lambda name, prompt, most, run=run: run.add(
        name, prompt, max_tokens=most
      ),
      run.schedule,
      run.update,
      run.scheduler.requests,
      schedulers.plain,
    )
    for run in runs
  ]


SCHEDULERS = {"vllm": vllm_sides, "esurge": esurge_sides}


def run(sides: list[Side], load: str, seed: int, steps: int) -> list[float]:
  """Runs the schedulers side by side; returns the seconds of each."""
  rng = random.Random(seed)

  def tokens(count: int) -> list[int]:
    return [rng.randrange(2, 100) for _ in range(count)]

  prefixes = [tokens(count) for count in (128, 320, 512, 768)]
  took, num_requests = [0.0 for _ in sides], 0
  gc.collect()
  gc.freeze()
  for step in range(steps):
    new = []
    for _ in range(RUNNING - len(sides[0].requests)):
      num_requests += 1
      prompt = rng.choice(prefixes) + tokens(rng.randint(1, 128))
      new.append((str(num_requests), prompt, rng.randint(*LOADS[load])))
    # The side that runs first can have an advantage, so they alternate.
    order = [*range(len(sides))][:: 1 if step % 2 else -1]
    outputs: list[Any] = [None] * len(sides)
    for index in order:
      side, begin = sides[index], time.perf_counter()
      for name, prompt, max_tokens in new:
        side.add(name, prompt[:], max_tokens)
      outputs[index] = side.schedule()
      took[index] += time.perf_counter() - begin
    plain = [side.plain(out) for side, out in zip(sides, outputs, strict=True)]
    assert plain[0] == plain[1]
    sampled = {}
    for name in outputs[0].num_scheduled_tokens:
      request = sides[0].requests[name]
      ends = request.num_computed_tokens >= request.num_tokens
      sampled[name] = tokens(1) if ends else []
    for index in order:
      begin = time.perf_counter()
      sides[index].update(outputs[index], sampled)
      took[index] += time.perf_counter() - begin
  return took


def measured(quick: bool, rounds: int) -> list[dict[str, Any]]:
  """Measures and prints all rows."""
  print(f"\n{'scheduler':10} {'load':16} {'own ms':>8} {'jaxkv ms':>9} ratio")
  rows = []
  for scheduler, make in SCHEDULERS.items():
    try:
      for mode in WINDOWS:
        for load in LOADS:
          samples = []
          for seed in range(rounds):
            with contextlib.ExitStack() as stack:
              steps = STEPS // 5 if quick else STEPS
              samples.append(run(make(mode, stack), load, seed, steps))
          columns = zip(*samples, strict=True)
          own_ms, ours = (1e3 * statistics.mean(column) for column in columns)
          row = {
            "scheduler": scheduler,
            "load": f"{mode} {load}",
            "own_ms": own_ms,
            "jaxkv_ms": ours,
            "ratio": ours / own_ms,
          }
          rows.append(row)
          print(
            f"{scheduler:10} {row['load']:16} {own_ms:8.1f} {ours:9.1f}"
            f" {row['ratio']:.3f}",
            flush=True,
          )
    except ImportError as error:
      print(f"{scheduler} is skipped: {error}")
  return rows


if __name__ == "__main__":
  command.run(
    __doc__,
    lambda quick, rounds: {"rows": measured(quick, rounds)},
    rounds=5,
    quick_rounds=1,
    not_measured="K/V memory, the model",
  )
