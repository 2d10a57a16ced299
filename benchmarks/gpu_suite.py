"""Runs all checks and benchmarks for a GPU, in resumable runs of 30 minutes.

| stage | contents |
|---|---|
| numerics | attention, shared prefixes, writes and 8-bit pages on the GPU:
  every backend against the float64 reference, over all shapes it supports |
| launches | kernels, host waits and time of the cache's loop for 1, 4, 8 and 16
  tokens a slot and step, with `launches.py`; on a GPU also with CUDA graphs |
| matrix | `attention.py`: bandwidth of a copy, every case, every side |
| transitions | the cache's verbs at 256 slots, with `transitions.py`; skipped
  with `--quick`, because they take minutes on a CPU |
| rollout | the rollout loop with a model of 360 M parameters: time per step and
  tokens per second with 1, 4, 8 and 16 `decode_steps`, with
  `rollout_device.py` |

Each stage writes its results to a file in the folder as it runs. A second run
of the same command continues, and does not repeat passed tests and finished
cases, parts and rows. It is an error if the folder has results of other code,
another jax version, another device or another value of `--quick`. The exit code
is 0 if everything has run and passed.

  python benchmarks/gpu_suite.py [--quick] [--minutes 29.5] [--out FOLDER]

`--quick` tests the suite with tiny sizes, without a GPU. The suite runs from a
checkout, without an installation of the project.
"""

import argparse
import contextlib
import hashlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from typing import Any
from typing import NamedTuple

import jax

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_BENCHMARKS = _ROOT / "benchmarks"
_PATH = [str(_ROOT), str(_ROOT / "kernels"), str(_BENCHMARKS)]
sys.path[:0] = _PATH

# The share of the remaining time that numerics may take.
_NUMERICS_SHARE = 0.4
# The limit of one part of numerics, and of launches, in seconds.
_LONGEST_PART = 150
# The most seconds that the last case of the matrix takes.
_LAST_CASE = 130
# The seconds that earlier stages leave to these stages if they are incomplete.
_RESERVED = {"transitions": 150, "rollout": 400}

# A bound, because each process has a GPU context of about half a GB.
_MAX_PROCESSES = 12
# Several processes share one GPU, so none may reserve most of its memory.
_GPU_VARIABLES = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


class Part(NamedTuple):
  """Tests that run together.

  Attributes:
    files: test files.
    keyword: pytest's `-k`. An empty string selects all tests.
    required: a class or parameter. At least one of its tests must pass.
  """

  files: tuple[str, ...]
  keyword: str = ""
  required: str = ""


def parts(quick: bool) -> dict[str, Part]:
  """Returns the parts of numerics by name, parts for kernels first."""
  attention = ("tests/kernels/test_paged_attention.py",)
  if quick:
    return {"xla": Part(attention, "TestNumerics and xla", "xla")}
  all_parts = {
    "many blocks": Part(
      ("tests/kernels/test_many_blocks.py",), "", "TestManyBlocks"
    ),
    "triton": Part(attention, "triton", "triton"),
    "mosaic_gpu": Part(attention, "mosaic_gpu", "mosaic_gpu"),
    "mosaic": Part(("tests/kernels/test_mosaic.py",), "", "TestKernels"),
    "prefix": Part(("tests/kernels/test_shared_prefix.py",)),
    "latent": Part(("tests/kernels/test_mla.py",)),
    "pages": Part(
      ("tests/kernels/test_quantized_pages.py", "tests/kernels/test_pages.py")
    ),
    "xla": Part(attention, "not triton and not mosaic_gpu", "xla"),
    "offload": Part(("tests/kv/test_offload_memory.py",)),
    "exact": Part(("tests/models/test_exact.py",), "change_no_bit", "llama"),
  }
  if getattr(jax.devices()[0], "compute_capability", "") != "9.0":
    del all_parts["mosaic_gpu"], all_parts["mosaic"]
  return all_parts


def numerics(path: pathlib.Path, seconds: float, quick: bool) -> bool:
  """Runs the kernels' tests on this device, part by part."""
  deadline = time.monotonic() + seconds * _NUMERICS_SHARE
  report = {"parts": {}, **_read(path)}
  entries = report["parts"]
  required = parts(quick)
  open_parts = [n for n in required if not entries.get(n, {}).get("ended")]
  # Parts that were never tried come before parts that a time limit stopped.
  for name in sorted(open_parts, key=lambda name: name in entries):
    seconds = min(deadline - time.monotonic(), _LONGEST_PART)
    if seconds < 10:
      print("no time left for", name)
      break
    entries[name] = run_part(
      required[name], entries.get(name, {}), seconds, quick
    )
    _write(path, report)
  for name, entry in entries.items():
    print(f"{name}: {entry['result']}", flush=True)
  return all(_complete(entries.get(name, {})) for name in required)


def run_part(
  part: Part, previous: dict[str, Any], seconds: float, quick: bool
) -> dict[str, Any]:
  """Runs the tests of a part that have not passed before, within a time limit.

  Args:
    part: the tests.
    previous: the report of the last try, or an empty one.
    seconds: the time limit.
    quick: True to run on a CPU, in one process.

  Returns:
    The report, with bools `ended` and `complete` (everything passed).
  """
  command = [sys.executable, "-m", "pytest", "-v", "--color=no", *part.files]
  # pytest's cache would stay in the checkout. pytest-benchmark warns of `-n`.
  command += ["-p", "no:cacheprovider", "-p", "no:benchmark"]
  # Tests run in parallel, because most of the time is compilation on the host.
  processes = 0 if quick else min(os.cpu_count() or 1, _MAX_PROCESSES)
  command += ["-n", str(processes), "-rs", "-k", part.keyword]
  # On a GPU, the tests of all tiers run.
  command += ["--all"] * (not quick)
  # `--deselect` takes the beginning of a name. A name that ends in "]" is
  # whole, so it deselects no other test.
  for test in previous.get("tests", []):
    command += ["--deselect", test] if test.endswith("]") else []
  platform = "cpu" if quick else "cuda"
  with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
    code = _run(command, seconds, output, JAXKV_TEST_PLATFORM=platform)
    output.seek(0)
    text = output.read()
  passed = {*previous.get("tests", []), *results(text, "PASSED")}
  failed = {*previous.get("failed", []), *results(text, "(?:FAILED|ERROR)")}
  skipped = len(results(text, "SKIPPED"))
  result = f"{len(passed)} passed, {len(failed)} failed, {skipped} skipped"
  # Failed tests count even if a second try passes, because a race may pass by
  # chance. Exit code 5 means that no test was left to run.
  fine = code == 0 or (code == 5 and bool(previous))
  if code is None or not (fine or failed):
    result += f"; {'out of time' if code is None else f'exit code {code}'}"
  words = {word for test in passed for word in re.split(r"\W", test)}
  is_missing = part.required not in words
  if part.required and is_missing:
    result += f"; none of {part.required}"
  lines = text.splitlines()[-200:]
  complete = fine and not failed and not (part.required and is_missing)
  if not complete:
    print("\n".join(lines[-60:]))
  return {
    "complete": complete,
    "ended": fine or code == 1,
    "result": result,
    "tests": sorted(passed),
    "failed": sorted(failed),
    "output": lines,
  }


def results(text: str, word: str) -> list[str]:
  """Finds tests of an outcome in pytest's output, with or without `-n`."""
  parallel = re.findall(rf"^\[gw\d+\] \[ *\d+%\] {word} (.+?) *$", text, re.M)
  return parallel + re.findall(rf"^(tests/.+?) {word}\b", text, re.M)


def matrix(path: pathlib.Path, seconds: float, quick: bool) -> bool:
  """Times the attention matrix until it is complete or the time is over."""
  import attention_cases

  names = [case.name for case in attention_cases.cases(quick)]
  deadline = time.monotonic() + seconds
  if not quick:
    deadline -= _reserved(path, "transitions", "rollout")
  command = [sys.executable, "benchmarks/attention.py", "--json", str(path)]
  command += [*["--quick"] * quick, "--minutes"]
  code, report = None, _read(path)
  while (left := deadline - time.monotonic()) > 10:
    old_report = report
    minutes = max(left - _LAST_CASE, 0) / 60
    code = _run([*command, str(minutes)], left)
    report = _read(path)
    # If a side has crashed the run, its case is in `begun`, and the next run
    # does the other sides.
    if not report.get("begun") or report == old_report:
      break
  missing = [name for name in names if name not in report.get("cases", {})]
  if missing:
    print(f"{len(missing)} cases are left: {', '.join(missing[:4])} ...")
  return code == 0 and not missing


def launches(path: pathlib.Path, seconds: float, quick: bool) -> bool:
  """Counts the launches of the cache's loop and times it, part by part."""
  call = f"launches.by_part(sys.argv[1], quick={quick})"
  # The limit is for a graph that hangs.
  return _call(path, min(seconds, _LONGEST_PART), call)


def transitions(path: pathlib.Path, seconds: float, quick: bool) -> bool:
  """Times the transitions of the cache, row by row."""
  seconds -= _reserved(path, "rollout")
  return quick or _call(path, seconds, "transitions.by_row(sys.argv[1])")


def rollout(path: pathlib.Path, seconds: float, quick: bool) -> bool:
  """Times the rollout loop with a model, part by part."""
  call = f"rollout_device.by_part(sys.argv[1], quick={quick})"
  return _call(path, seconds, call)


def _call(path: pathlib.Path, seconds: float, call: str) -> bool:
  """Calls a benchmark's function in a process, to complete a file."""
  if _complete(_read(path)):
    return True
  if seconds < 10:
    print("no time left beside that of later stages")
    return False
  program = f"import sys, {call.split('.')[0]}; {call}"
  return _run([sys.executable, "-c", program, str(path)], seconds) == 0


def _reserved(path: pathlib.Path, *stages: str) -> float:
  """Returns the seconds to reserve for the incomplete ones among stages."""
  return sum(
    _RESERVED[stage]
    for stage in stages
    if not _complete(_read(path.with_name(f"{stage}.json")))
  )


STAGES = {
  "numerics": numerics,
  "launches": launches,
  "matrix": matrix,
  "transitions": transitions,
  "rollout": rollout,
}
"""For each file of results, `(file, seconds left, quick) -> complete`."""


def _run(
  command: list[str], seconds: float, output: Any = None, **environment: str
) -> int | None:
  """Runs a command, and returns its exit code, or None if it takes too long."""
  path = [*_PATH, os.environ.get("PYTHONPATH", "")]
  joined = os.pathsep.join(part for part in path if part)
  variables = {"PYTHONPATH": joined, "PYTHONUNBUFFERED": "1"}
  process = subprocess.Popen(
    command,
    cwd=_ROOT,
    env={**os.environ, **_GPU_VARIABLES, **variables, **environment},
    stdout=output,
    stderr=subprocess.STDOUT if output else None,
    process_group=0,
  )
  try:
    return process.wait(seconds)
  except subprocess.TimeoutExpired:
    print(f"stopped after {seconds:.0f} s: {' '.join(command)[:200]}")
    return None
  finally:
    # The whole group is killed, because child processes would keep using the
    # GPU.
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read(path: pathlib.Path) -> dict[str, Any]:
  return json.loads(path.read_text("utf-8")) if path.exists() else {}


def _write(path: pathlib.Path, report: dict[str, Any]) -> None:
  # The import is here, because the checkout was not on Python's path before.
  import command

  command.write(path, report)


def _complete(report: dict[str, Any]) -> bool:
  return report.get("complete", False)


def check_same(path: pathlib.Path, quick: bool) -> None:
  """Writes the code, jax version and device, or exits if the file differs."""
  digest = hashlib.sha256()
  for folder in ("kernels", "jaxkv", "benchmarks", "tests"):
    for file in sorted((_ROOT / folder).rglob("*.py")):
      digest.update(file.read_bytes())
  facts = {
    "code": digest.hexdigest()[:16],
    "jax": jax.__version__,
    "device": jax.devices()[0].device_kind,
    "quick": quick,
  }
  earlier = _read(path)
  if earlier not in ({}, facts):
    sys.exit(
      f"{path.parent} has results of {earlier}, and this is {facts}; name a new"
      " folder with --out"
    )
  _write(path, facts)


def run(out: pathlib.Path, minutes: float, quick: bool) -> bool:
  """Runs all incomplete stages, and returns True if all stages have passed."""
  deadline = time.monotonic() + minutes * 60
  out.mkdir(parents=True, exist_ok=True)
  check_same(out / "tested.json", quick)
  complete = True
  for name, stage in STAGES.items():
    left = deadline - time.monotonic()
    if left < 10:
      print(f"[{name}] no time left")
      complete = False
      continue
    print(f"[{name}] {left:.0f} s left", flush=True)
    try:
      complete &= stage(out / f"{name}.json", left, quick)
    except Exception:
      traceback.print_exc(file=sys.stdout)
      complete = False
  return complete


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--quick", action="store_true", help="tiny sizes")
  parser.add_argument("--minutes", type=float, default=29.5)
  folder = _BENCHMARKS / "results" / "gpu"
  parser.add_argument("--out", type=pathlib.Path, default=folder)
  arguments = parser.parse_args()
  # jax reads the variables when it first uses a device.
  os.environ.update(_GPU_VARIABLES)
  if not arguments.quick and jax.default_backend() != "gpu":
    sys.exit("jax sees no GPU; --quick needs none")
  out = arguments.out.resolve()
  sys.exit(0 if run(out, arguments.minutes, arguments.quick) else 1)


if __name__ == "__main__":
  main()
