"""Paged decode attention on this device, beside others, and the memory's speed.

A timed call is one jitted loop of CALLS calls, each of which has the result of
the one before in its query and reads other pages, in a shuffled order, until
more than four times a GPU's cache has been read. So neither dispatch nor the
cache counts, and a tiny kernel that adds the result to the query does. Rows are
the median of some rounds, in which sides take turns.

| column | what it is |
|---|---|
| us | microseconds a call |
| GB/s | K and V of all tokens, or latents, once, over that time; pages that
  rows share count once, whoever reads them more often |
| of copy | the same as a share of what a copy of 1 GB moves, reads and writes
  counted, in the same run |
| error | relative L2 distance from the XLA backend's result, same case |

Sides: our backends, once more with shared pages read once where there are some;
jax's own Pallas kernel with 1, 4 and 16 splits; cuDNN through jax, paged where
its wrapper allows and on a dense cache; XLA on a dense cache, and on one
gathered from pages on every call. With `--torch`, in the same run: torch's SDPA
on a dense cache, its FlexAttention on pages, and FlashInfer, where they are
installed. Plans of work and who shares what are made once, as for all layers of
a step, and not timed.

Not measured: prefill, writes, allocation, a model around it.

  python benchmarks/attention.py [--quick] [--torch] [--minutes M] [--json FILE]

With `--json` a run goes on where an earlier one with the same file ended.
"""

import argparse
import functools
import json
import pathlib
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import attention_cases
import attention_sides
import jax
import jax.numpy as jnp
import numpy as np
from attention_cases import Case
from jax import lax

import jaxkv_kernels as kernels
from jaxkv_kernels.attention import backends

CALLS = 48
ROUNDS = 7
COPY_BYTES = 2**30


def looped(function, calls: int, rotations: int):
  """So many calls as one jitted function of `(q, *inputs)`."""

  def run(q, *inputs):
    def body(index, q):
      out = function(q, lax.rem(index, jnp.int32(rotations)), *inputs)
      return (q + out.astype(q.dtype) * jnp.asarray(0.01, q.dtype)) * (
        jnp.asarray(0.99, q.dtype)
      )

    return lax.fori_loop(jnp.int32(0), jnp.int32(calls), body, q)

  return jax.jit(run)


def median_seconds(
  calls: dict[str, Callable[[], Any]], rounds: int
) -> dict[str, float]:
  """Of calls that have been made before, which take turns."""
  samples: dict[str, list[float]] = {name: [] for name in calls}
  for _ in range(rounds):
    for name, call in calls.items():
      begin = time.perf_counter()
      jax.block_until_ready(call())
      samples[name].append(time.perf_counter() - begin)
  return {name: statistics.median(taken) for name, taken in samples.items()}


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


def rows_of(case: Case, quick: bool, speed: float) -> dict[str, Any]:
  """Every side's figures for a case; for one that cannot, the reason."""
  calls, rounds = (2, 2) if quick else (CALLS, ROUNDS)
  arrays = attention_cases.arrays(
    case, 2**16 if quick else attention_cases.COLD_BYTES
  )
  rotations = arrays.tables.shape[0]
  sides = attention_sides.sides(backends.platform())
  outs, timed, reasons = {}, {}, {}
  for name, side in sides.items():
    try:
      call = side(case, arrays)
      once = jax.jit(call.function)
      outs[name] = np.asarray(once(arrays.q, 0, *call.inputs), np.float32)
      run = looped(call.function, calls, rotations)
      jax.block_until_ready(run(arrays.q, *call.inputs))
    except Exception as error:
      # A refusal is a result, and a failure not the end of a run: `failures`.
      reasons[name] = f"{type(error).__name__}: {error}"[:300]
      continue
    timed[name] = functools.partial(run, arrays.q, *call.inputs)
  results = {}
  for name, taken in median_seconds(timed, rounds).items():
    results[name] = figures(case, taken / calls, speed)
    results[name]["error"] = distance(outs[name], outs.get("xla"))
  return {"sides": results, "not timed": reasons, "rotations": rotations}


def distance(out: np.ndarray, wanted: np.ndarray | None) -> float:
  """Relative L2 distance; NaN where there is nothing to compare with."""
  if wanted is None:
    return float("nan")
  return float(np.linalg.norm(out - wanted) / np.linalg.norm(wanted))


def figures(case: Case, seconds: float, speed: float) -> dict[str, float]:
  """What is written of one side."""
  rate = case.bytes_read() / seconds
  return {
    "us": seconds * 1e6,
    "GB/s": rate / 1e9,
    "share of copy": rate / speed,
  }


def facts() -> dict[str, str]:
  """Where this was measured."""
  return {
    "device": jax.devices()[0].device_kind,
    "jax": jax.__version__,
    "python": platform.python_version(),
  }


def failures(report: dict[str, Any]) -> list[str]:
  """Cases in which a backend of ours fails other than by refusing."""
  return [
    f"{case}, {side}: {reason}"
    for case, row in report["cases"].items()
    for side, reason in row["not timed"].items()
    if side.removesuffix(" shared") in kernels.BACKENDS
    and not reason.startswith("NotImplementedError")
  ]


def print_case(name: str, row: dict[str, Any]) -> None:
  print(name)
  for side, values in row["sides"].items():
    print(
      f"  {side:14} {values['us']:10.1f} us {values['GB/s']:8.1f} GB/s"
      f" {values['share of copy']:6.1%} of copy  error {values['error']:.1e}"
    )
  for side, reason in row["not timed"].items():
    print(f"  {side:14} {reason.splitlines()[0][:90]}")


def save(path: pathlib.Path | None, report: dict[str, Any]) -> None:
  """Writes all so far; never half a file."""
  if path is None:
    return
  beside = path.with_suffix(".part")
  beside.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
  beside.replace(path)


def earlier(path: pathlib.Path | None) -> dict[str, Any]:
  """What an earlier run on the same device wrote, or a new report."""
  if path is not None and path.exists():
    report = json.loads(path.read_text("utf-8"))
    if report["facts"] == facts():
      return report
  return {"facts": facts(), "copy GB/s": None, "cases": {}}


def measure(
  path: pathlib.Path | None, quick: bool, minutes: float, with_torch: bool
) -> dict[str, Any]:
  """Times what the file does not yet hold, until the time is over."""
  end = time.monotonic() + minutes * 60
  report = earlier(path)
  rounds = 2 if quick else 9
  speed = copy_speed(2**20 if quick else COPY_BYTES, rounds)
  report["copy GB/s"] = speed / 1e9
  print(f"{facts()}\ncopy {speed / 1e9:.1f} GB/s, read and written")
  if quick:
    cases = attention_cases.quick_cases()
  else:
    cases = attention_cases.all_cases()
  for case in cases:
    if case.name in report["cases"]:
      continue
    if time.monotonic() > end:
      print("the time is over; run it again to go on")
      break
    row = rows_of(case, quick, speed)
    if with_torch:
      import attention_torch

      attention_torch.add(case, row, speed)
    report["cases"][case.name] = row
    print_case(case.name, row)
    save(path, report)
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
