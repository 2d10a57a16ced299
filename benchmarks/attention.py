"""Paged decode attention on this device, beside others, and the memory's speed.

A timed call is some runs of a jitted loop of CALLS calls, each of which has the
result of the one before in its query and reads other pages, in a shuffled
order, until over 256 MB have been read: four times an H200's cache. A tiny
kernel that adds the result to the query counts. Rows are the median of some
rounds, in which sides take turns. A side has so many runs that its round takes
0.2 s at most; one whose first run takes longer has two rounds.

The host starts the kernels of a loop one after another, ahead of the GPU. Where
they take less time than to be started, a few microseconds each, that is what is
timed: in cases of some MB. In the XLA backend the host also waits for how often
an inner loop runs. torch's sides replay a CUDA graph, and have no such cost.

| column | what it is |
|---|---|
| us | microseconds a call |
| GB/s | K and V of all tokens, or latents, once, over that time; pages that
  rows share count once, whoever reads them more often |
| of copy | the same as a share of what a copy of 1 GB moves, reads and writes
  counted, in the same run |
| error | relative L2 distance from the XLA backend's result, after CALLS calls,
  before all rounds or after them, whichever is larger |

Sides: our backends, once more with shared pages read once where there are some,
and once more with a plan where one takes plans. In the cases that are `main`,
also: jax's own Pallas kernel with 1, 4 and 16 splits; cuDNN through jax, paged
where its wrapper allows and on a dense cache; XLA on a dense cache, and on one
gathered from pages on every call. With `--torch`, in the same run: torch's SDPA
on a dense cache, its FlexAttention on pages, and FlashInfer, where they are
installed. Plans of work and who shares what are made once, as for all layers of
a step, and not timed.

A side's `rotations` says how many caches it has in turn, a row's `bytes` how
large one is. A dense cache in jax is always the same: a small one stays in the
GPU's cache, which flatters that side.

Not measured: prefill, writes, allocation, a model around it.

  python benchmarks/attention.py [--quick] [--torch] [--minutes M] [--json FILE]

With `--json` a run goes on where an earlier one with the same file ended. What
is under way stands there too: a side that has twice ended the whole run, or
hung for LONGEST seconds, is passed over. The exit code is 1 if one of our
sides has failed or has an error over TOLERANCE.
"""

import argparse
import contextlib
import faulthandler
import json
import math
import pathlib
import platform
import statistics
import sys
import time
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import attention_cases
import attention_sides
import command
import jax
import jax.numpy as jnp
import numpy as np
from attention_cases import Case
from attention_sides import ROUNDS
from attention_sides import Timed
from jax import lax

import jaxkv_kernels as kernels
from jaxkv_kernels._src.attention import choose

LONGEST = 120  # seconds, to compile a side and run it once
COPY_BYTES = 2**30
# Both results are bfloat16, after CALLS calls each.
TOLERANCE = 2e-2

Report = dict[str, Any]
"""What is written as JSON: facts, `cases` by name, and what has `begun`."""
Watch = Callable[[str], contextlib.AbstractContextManager[None]]
"""`watched`, for a side that is named."""


def copy_speed(size: int, rounds: int) -> float:
  """Bytes a second, read and written, of a large copy on the device."""

  def run(x):
    return lax.fori_loop(0, 16, lambda i, x: x ^ i, x)

  # Donated, or the loop would begin with one more copy.
  jitted = jax.jit(run, donate_argnums=0)
  x = jnp.arange(size // 4, dtype=jnp.int32)
  samples = []
  for _ in range(rounds + 1):
    jax.block_until_ready(x)
    begin = time.perf_counter()
    x = jax.block_until_ready(jitted(x))
    samples.append(time.perf_counter() - begin)
  return 16 * 2 * x.nbytes / statistics.median(samples[1:])


@contextlib.contextmanager
def watched(
  save: Callable[[], None],
  begun: dict[str, list[str]],
  reasons: dict[str, str],
  side: str,
) -> Iterator[None]:
  """Runs a part of a side, whose error becomes its reason.

  A side that kills the process or hangs leaves an entry in what has begun; so
  does one after which the device does not work, and it ends the run, or all
  sides after it would fail.

  Args:
    save: writes the report, of which `begun` is a part.
    begun: of this case: how earlier tries of a side ended, where it was badly.
    reasons: why a side has no figures; changed.
    side: the side.
  """
  tries = begun.setdefault(side, [])
  tries.append("did not come back")
  save()
  faulthandler.dump_traceback_later(LONGEST, exit=True, file=2)
  try:
    yield
  except Exception as error:
    # A refusal is a result, and a failure not the end of a run: `failures`.
    reasons[side] = tries[-1] = f"{type(error).__name__}: {error}"[:300]
    save()
    jax.block_until_ready(jnp.arange(8) + 1)
  finally:
    faulthandler.cancel_dump_traceback_later()
  # How earlier runs of it ended still counts: it may be its rounds that hang.
  tries.pop()
  if not tries:
    del begun[side]


def measured(
  case: Case, quick: bool, watch: Watch, reasons: dict[str, str]
) -> dict[str, Timed]:
  """Every side that can, after all rounds; for one that cannot, the reason."""
  timed: dict[str, Timed] = {}
  arrays = None
  with watch("arrays"):
    arrays = attention_cases.arrays(
      case, 2**16 if quick else attention_cases.COLD_BYTES
    )
  if arrays is None:
    return {}
  for name, side in attention_sides.sides(choose.platform(), case).items():
    if name not in reasons:
      with watch(name):
        timed[name] = Timed(side(case, arrays), arrays.q, quick)
  for number in range(ROUNDS):
    for name, side in timed.items():
      if name not in reasons and number < side.rounds:
        with watch(name):
          side.round()
  return {name: side for name, side in timed.items() if name not in reasons}


def row_of(
  case: Case,
  quick: bool,
  speed: float,
  with_torch: bool,
  report: Report,
  save: Callable[[], None],
) -> dict[str, Any]:
  """Every side's figures for a case; for one that cannot, the reason."""
  start = time.monotonic()
  begun = report["begun"].setdefault(case.name, {})
  reasons = gone(begun)

  def watch(side: str):
    return watched(save, begun, reasons, side)

  results = {}
  if "arrays" not in reasons:
    results = results_of(case, quick, speed, watch, reasons)
  if with_torch and case.main:
    import attention_torch

    for name, side in attention_torch.SIDES.items():
      if name not in reasons:
        with watch(name):
          results[name] = figures(case, speed, *side(case))
  return {
    "bytes": case.bytes_read(),
    "copy GB/s": speed / 1e9,
    "seconds": time.monotonic() - start,
    "sides": results,
    "not timed": reasons,
  }


def results_of(
  case: Case, quick: bool, speed: float, watch: Watch, reasons: dict[str, str]
) -> dict[str, Any]:
  """Figures of all sides in jax that have some."""
  timed = measured(case, quick, watch, reasons)
  results = {}
  for name, side in timed.items():
    results[name] = figures(case, speed, side.seconds(), side.rotations)
    # With other rotations the last call has read another cache.
    if "xla" in timed and side.rotations == timed["xla"].rotations:
      results[name]["error"] = distance(side.outs, timed["xla"].outs[0])
  return results


def gone(begun: dict[str, list[str]]) -> dict[str, str]:
  """The sides not to be tried again, with how their last try ended."""
  return {
    side: f"twice ended the run: {tries[-1]}"
    for side, tries in begun.items()
    if len(tries) > 1
  }


def distance(outs: list[np.ndarray], wanted: np.ndarray) -> float | None:
  """Relative L2 distance of the farthest; None if it is not a number."""
  size = np.linalg.norm(wanted)
  far = [float(np.linalg.norm(out - wanted) / size) for out in outs]
  return max(far) if all(map(math.isfinite, far)) else None


def figures(
  case: Case, speed: float, seconds: float, rotations: int
) -> dict[str, Any]:
  """What is written of one side."""
  rate = case.bytes_read() / seconds
  return {
    "us": seconds * 1e6,
    "GB/s": rate / 1e9,
    "share of copy": rate / speed,
    "rotations": rotations,
    "error": None,
  }


def facts(quick: bool) -> dict[str, Any]:
  """Where and how this was measured."""
  return {
    "device": jax.devices()[0].device_kind,
    "jax": jax.__version__,
    "python": platform.python_version(),
    "quick": quick,
  }


def failures(report: Report) -> list[str]:
  """Cases in which a backend of ours is wrong, or fails but by refusing."""
  failed = []
  for case, row in report["cases"].items():
    failed += [
      f"{case}, {side}: {reason}"
      for side, reason in row["not timed"].items()
      if (is_ours(side) or side == "arrays")
      and not reason.startswith("NotImplementedError")
    ]
    failed += [
      f"{case}, {side}: error {values['error']}"
      for side, values in row["sides"].items()
      if is_ours(side)
      and (values["error"] is None or values["error"] > TOLERANCE)
    ]
  return failed


def is_ours(side: str) -> bool:
  """Not "xla dense", say."""
  backend = side.removesuffix(" shared").removesuffix(" planned")
  return backend in kernels.BACKENDS


def print_case(name: str, row: dict[str, Any]) -> None:
  print(f"{name}: {row['bytes'] / 1e6:.1f} MB, in {row['seconds']:.0f} s")
  for side, values in row["sides"].items():
    error = values["error"]
    print(
      f"  {side:18} {values['us']:10.1f} us {values['GB/s']:8.1f} GB/s"
      f" {values['share of copy']:6.1%} of copy"
      f"  error {'-' if error is None else f'{error:.1e}'}"
    )
  for side, reason in row["not timed"].items():
    print(f"  {side:18} {reason[:90].splitlines()[0]}", flush=True)


def save(path: pathlib.Path | None, report: Report) -> None:
  """Writes all so far, if there is a file for it."""
  if path is not None:
    command.write(path, report)


def earlier(path: pathlib.Path | None, quick: bool) -> Report:
  """What an earlier run of the same kind wrote, or a new report."""
  report = {"facts": facts(quick), "copy GB/s": None, "cases": {}, "begun": {}}
  if path is None or not path.exists():
    return report
  old = json.loads(path.read_text("utf-8"))
  if old["facts"] != report["facts"]:
    sys.exit(f"{path} is of {old['facts']}; name a new file")
  return old


def measure(
  path: pathlib.Path | None, quick: bool, minutes: float, with_torch: bool
) -> Report:
  """Times what the file does not yet hold, until the time is over."""
  end = time.monotonic() + minutes * 60
  report = earlier(path, quick)
  speed = copy_speed(2**20 if quick else COPY_BYTES, 2 if quick else 9)
  report["copy GB/s"] = speed / 1e9
  save(path, report)
  print(f"{facts(quick)}\ncopy {speed / 1e9:.1f} GB/s, read and written")
  for case in attention_cases.cases(quick):
    if case.name in report["cases"]:
      continue
    if time.monotonic() > end:
      print("the time is over; run it again to go on")
      break
    row = row_of(
      case, quick, speed, with_torch, report, lambda: save(path, report)
    )
    report["cases"][case.name] = row
    del report["begun"][case.name]
    save(path, report)
    print_case(case.name, row)
  return report


def main() -> None:
  parser = argparse.ArgumentParser(description="decode attention, timed")
  parser.add_argument("--quick", action="store_true", help="tiny sizes")
  parser.add_argument("--torch", action="store_true", help="torch, FlashInfer")
  parser.add_argument("--minutes", type=float, default=60)
  parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
  arguments = parser.parse_args()
  report = measure(
    arguments.json, arguments.quick, arguments.minutes, arguments.torch
  )
  failed = failures(report)
  if failed:
    raise SystemExit("\n".join(["failed:", *failed]))


if __name__ == "__main__":
  main()
