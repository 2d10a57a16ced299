"""Times paged decode attention, other libraries' attention, and a copy.

A side is one implementation of attention. A run is a jitted loop of CALLS
calls. The result of a call is added to the query of the next call, and this
addition is timed, too. Successive calls read different pages, shuffled over 256
MB. Sides take turns. A round of a side takes about 0.2 s, and figures are
medians over the rounds.

In cases of a few MB, launching a kernel takes longer than the kernel, so the
figures are times of launches. With the XLA backend the host also waits for the
trip count of an inner loop.

| column | meaning |
|---|---|
| us | microseconds a call |
| GB/s | bytes of K and V, or of latents, divided by that time; a page that
  sequences share counts once |
| of copy | GB/s as a share of the bandwidth (reads and writes) of a 1 GB copy
  in the same benchmark |
| error | relative L2 distance from the XLA backend's result after CALLS calls,
  in the first or the last run, whichever is larger |

The sides are our backends, in cases with shared pages also with reading these
pages only once. Cases marked `main` add jax's own Pallas kernel with 1, 4 and
16 splits, and cuDNN and XLA on a dense cache. The search for shared pages is
not timed, because a decode step needs it only once for all layers.

A side's `rotations` is the number of caches that it reads in turn. A row's
`bytes` is the size of one cache. Sides with a dense cache always read the same
one. If it is small, it stays in the GPU's cache, and the side appears too fast.

Not measured: prefill, writes, allocation, the rest of a model.

  python benchmarks/attention.py [--quick] [--minutes M] [--json FILE]

With `--json` the benchmark resumes where an earlier one with the same file
ended. The file also records the side in progress. A side is skipped after it
has twice ended the benchmark, by a crash or by hanging for LONGEST seconds. The
exit code is 1 if one of our sides has failed or has an error over TOLERANCE.
"""

import argparse
import contextlib
import faulthandler
import functools
import json
import math
import pathlib
import platform
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
import rows
from attention_cases import Case
from attention_sides import ROUNDS
from attention_sides import Timed
from jax import lax

import jaxkv_kernels as kernels
from jaxkv_kernels._src.attention import choose

LONGEST = 120  # seconds, to compile a side and run it once
COPY_BYTES = 2**30
# The limit is large, because each of CALLS calls rounds the results of both
# compared sides to bfloat16.
TOLERANCE = 2e-2

Report = dict[str, Any]
"""Facts about the machine, `cases` by name, and the interrupted sides."""


def copy_speed(num_bytes: int, rounds: int) -> float:
  """Returns the bytes a second, read and written, of a large device copy."""

  def run(x):
    return lax.fori_loop(0, 16, lambda i, x: x ^ i, x)

  # `x` is donated, because otherwise the loop would begin with one more copy.
  jitted = jax.jit(run, donate_argnums=0)
  x = jnp.arange(num_bytes // 4, dtype=jnp.int32)
  samples, _ = rows.alternated({"copy": (jitted, x)}, rounds)
  return 16 * 2 * x.nbytes / float(np.median(samples["copy"][:, 0]))


@contextlib.contextmanager
def watched(
  save: Callable[[], None],
  open_tries: dict[str, list[str]],
  reasons: dict[str, str],
  side: str,
) -> Iterator[None]:
  """Runs a part of a side. If the part raises, adds the error to `reasons`.

  A side that kills the process, hangs or breaks the device leaves an entry in
  `open_tries`, which `save` writes. A broken device also ends the benchmark,
  because all later sides would fail.
  """
  tries = open_tries.setdefault(side, [])
  tries.append("did not come back")
  save()
  faulthandler.dump_traceback_later(LONGEST, exit=True, file=2)
  try:
    yield
  except Exception as error:
    # An error does not end the benchmark, because a side may refuse a case.
    reasons[side] = tries[-1] = f"{type(error).__name__}: {error}"[:300]
    save()
    # Raises if the side has broken the device.
    jax.block_until_ready(jnp.arange(8) + 1)
  finally:
    faulthandler.cancel_dump_traceback_later()
  # This try has come back, so it is removed. Earlier tries that did not come
  # back stay in the list.
  tries.pop()
  if not tries:
    del open_tries[side]


def measured(
  case: Case,
  quick: bool,
  watch: Callable[[str], contextlib.AbstractContextManager[None]],
  reasons: dict[str, str],
) -> dict[str, Timed]:
  """Times the sides of a case, and adds failed ones to `reasons`."""
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
  for index in range(ROUNDS):
    for name, side in timed.items():
      if name not in reasons and index < side.rounds:
        with watch(name):
          side.round()
  return {name: side for name, side in timed.items() if name not in reasons}


def row_of(
  case: Case,
  quick: bool,
  speed: float,
  report: Report,
  save: Callable[[], None],
) -> dict[str, Any]:
  """Returns the row of a case, with the figures or the failure of sides."""
  start = time.monotonic()
  open_tries = report["begun"].setdefault(case.name, {})
  reasons = gone(open_tries)
  watch = functools.partial(watched, save, open_tries, reasons)
  timed = {}
  if "arrays" not in reasons:
    timed = measured(case, quick, watch, reasons)
  return {
    "bytes": case.bytes_read(),
    "copy GB/s": speed / 1e9,
    "seconds": time.monotonic() - start,
    "sides": {
      name: figures(case, speed, side, timed.get("xla"))
      for name, side in timed.items()
    },
    "not timed": reasons,
  }


def gone(open_tries: dict[str, list[str]]) -> dict[str, str]:
  """Returns the sides that are not tried again, with their last failure."""
  return {
    side: f"twice ended the run: {tries[-1]}"
    for side, tries in open_tries.items()
    if len(tries) > 1
  }


def distance(outs: list[np.ndarray], expected: np.ndarray) -> float | None:
  """Returns the largest relative L2 distance; None if one is not finite."""
  norm = np.linalg.norm(expected)
  distances = [float(np.linalg.norm(out - expected) / norm) for out in outs]
  return max(distances) if all(map(math.isfinite, distances)) else None


def figures(
  case: Case, speed: float, side: Timed, xla: Timed | None
) -> dict[str, Any]:
  """Returns the reported figures of one side."""
  rate, error = case.bytes_read() / side.seconds(), None
  # Only equal rotations are compared, because otherwise the last calls read
  # different caches.
  if xla is not None and side.rotations == xla.rotations:
    error = distance(side.outs, xla.outs[0])
  return {
    "us": side.seconds() * 1e6,
    "GB/s": rate / 1e9,
    "share of copy": rate / speed,
    "rotations": side.rotations,
    "error": error,
  }


def facts(quick: bool) -> dict[str, Any]:
  """Returns the device and the versions of the measurement."""
  return {
    "device": jax.devices()[0].device_kind,
    "jax": jax.__version__,
    "python": platform.python_version(),
    "quick": quick,
  }


def failures(report: Report) -> list[str]:
  """Lists our sides with wrong results, or with errors other than a refusal."""
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
  """Returns True if a side is one of our backends, unlike "xla dense"."""
  return side.removesuffix(" shared") in kernels.BACKENDS


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


def earlier(path: pathlib.Path | None, quick: bool) -> Report:
  """Reads the report of an earlier run of the same kind, or makes a new one."""
  report = {"facts": facts(quick), "copy GB/s": None, "cases": {}, "begun": {}}
  if path is None or not path.exists():
    return report
  loaded = json.loads(path.read_text("utf-8"))
  if loaded["facts"] != report["facts"]:
    sys.exit(f"{path} has results of {loaded['facts']}; name a new file")
  return loaded


def measure(path: pathlib.Path | None, quick: bool, minutes: float) -> Report:
  """Times the cases that the file lacks, until the time is over."""
  deadline = time.monotonic() + minutes * 60
  report = earlier(path, quick)
  speed = copy_speed(2**20 if quick else COPY_BYTES, 2 if quick else 9)
  report["copy GB/s"] = speed / 1e9
  save = functools.partial(command.write, path, report)
  save()
  print(f"{facts(quick)}\ncopy {speed / 1e9:.1f} GB/s, read and written")
  for case in attention_cases.cases(quick):
    if case.name in report["cases"]:
      continue
    if time.monotonic() > deadline:
      print("the time is over; run it again to continue")
      break
    row = row_of(case, quick, speed, report, save)
    report["cases"][case.name] = row
    del report["begun"][case.name]
    save()
    print_case(case.name, row)
  return report


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--quick", action="store_true", help="tiny sizes")
  parser.add_argument("--minutes", type=float, default=60)
  parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
  arguments = parser.parse_args()
  report = measure(arguments.json, arguments.quick, arguments.minutes)
  failed = failures(report)
  if failed:
    raise SystemExit("\n".join(["failed:", *failed]))


if __name__ == "__main__":
  main()
