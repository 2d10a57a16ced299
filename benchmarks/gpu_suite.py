"""All checks and benchmarks for a GPU, in one command, within ten minutes.

| stage | what it does |
|---|---|
| numerics | attention, shared prefixes, writes and 8-bit pages on the GPU:
  every backend against the float64 reference, over all shapes that it serves |
| launches | kernels in the body of a compiled loop of cache steps |
| matrix | `attention.py`: bandwidth of a copy, every case, every side |
| transitions | the cache's own verbs at 256 slots, with `transitions.py`; not
  with `--quick`, since on a CPU they take minutes |
| rollout | the rollout loop with a model of 360 M parameters: time a step and
  tokens a second, with `rollout_device.py` |

Each stage writes its results to a file in the folder as it goes. Passed tests
and finished cases and rows are not run again, so when the time is over, run the
same command again. Numerics take at most half of the time; the matrix and
transitions leave some for the stages after them. Parts that were stopped run
after parts that have not been tried. Failed parts are not tried again, since a
race might pass the second time. Results of other code, another jax or device,
or of `--quick` in the folder are an error. The exit code is 0 if everything has
run and passed.

  python benchmarks/gpu_suite.py [--quick] [--minutes 9.5] [--out FOLDER]

`--quick` tests the suite itself with tiny sizes, and needs no GPU. The project
need not be installed.
"""

import argparse
import contextlib
import hashlib
import importlib.metadata
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
from collections.abc import Callable
from typing import Any
from typing import NamedTuple

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_BENCHMARKS = _ROOT / "benchmarks"
_PATH = [str(_ROOT), str(_ROOT / "kernels"), str(_BENCHMARKS)]
sys.path[:0] = _PATH

# The share of the remaining time that numerics may take.
_FOR_NUMERICS = 0.5
# Seconds: the limit of one part of numerics; the longest that a last case of
# the matrix takes; what earlier stages leave for a stage until it is complete.
_LONGEST_PART = 150
_LAST_CASE = 130
_RESERVED = {"transitions": 150, "rollout": 100}

# Each process has a GPU context of about half a GB.
_MOST_PROCESSES = 12
# Several processes share one GPU.
_ROOM = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


class Stage(NamedTuple):
  """One part of the suite.

  Attributes:
    name: the stage's name; its results are in `name`.json.
    run: (file, seconds left, quick) -> whether it is complete and passed.
  """

  name: str
  run: Callable[[pathlib.Path, float, bool], bool]


class Part(NamedTuple):
  """Tests that run together.

  Attributes:
    files: of tests.
    keyword: pytest's `-k`; empty: all.
    wanted: a class or parameter with a test that must pass, not only skip.
  """

  files: tuple[str, ...]
  keyword: str = ""
  wanted: str = ""


def parts(quick: bool) -> dict[str, Part]:
  """The parts of numerics by name, those of the kernels first."""
  import jax

  attention = ("tests/kernels/test_paged_attention.py",)
  if quick:
    return {"xla": Part(attention, "TestNumerics and xla", "xla")}
  found = {
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
    "exact": Part(("tests/models/test_exact.py",), "change_no_bit", "llama"),
  }
  if getattr(jax.devices()[0], "compute_capability", "") != "9.0":
    del found["mosaic_gpu"], found["mosaic"]
  return found


def numerics(path: pathlib.Path, seconds: float, quick: bool) -> bool:
  """The kernels' tests on this device, part by part."""
  end = time.monotonic() + seconds * _FOR_NUMERICS
  report = {"parts": {}, **_read(path)}
  entries = report["parts"]
  wanted = parts(quick)
  left = [n for n in wanted if not entries.get(n, {}).get("ended")]
  for name in sorted(left, key=lambda name: name in entries):
    seconds = min(end - time.monotonic(), _LONGEST_PART)
    if seconds < 10:
      print("no time left for", name)
      break
    entries[name] = tried(wanted[name], entries.get(name, {}), seconds, quick)
    _write(path, report)
  for name, entry in entries.items():
    print(f"{name}: {entry['result']}", flush=True)
  return all(_complete(entries.get(name, {})) for name in wanted)


def tried(
  part: Part, before: dict[str, Any], seconds: float, quick: bool
) -> dict[str, Any]:
  """Runs the tests of a part that have not passed before.

  Args:
    part: the tests.
    before: the result of the last try, or nothing.
    seconds: the time limit.
    quick: on a CPU, in one process.

  Returns:
    The report of the part: whether it has ended, and whether everything passed;
    the tests that passed, and those that ever failed.
  """
  command = [sys.executable, "-m", "pytest", "-v", "--color=no", *part.files]
  # The cache would stay in the checkout; pytest-benchmark warns about `-n`.
  command += ["-p", "no:cacheprovider", "-p", "no:benchmark"]
  # Most of the time goes into compiling, which the cores share.
  processes = 0 if quick else min(os.cpu_count() or 1, _MOST_PROCESSES)
  command += ["-n", str(processes), "-rs", "-k", part.keyword]
  # `--deselect` takes the beginning of a name; one that ends in "]" is exact.
  for test in before.get("tests", []):
    command += ["--deselect", test] if test.endswith("]") else []
  platform = "cpu" if quick else "cuda"
  with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
    code = _run(command, seconds, output, JAXKV_TEST_PLATFORM=platform)
    output.seek(0)
    text = output.read()
  passed = {*before.get("tests", []), *results(text, "PASSED")}
  failed = {*before.get("failed", []), *results(text, "(?:FAILED|ERROR)")}
  skipped = len(results(text, "SKIPPED"))
  result = f"{len(passed)} passed, {len(failed)} failed, {skipped} skipped"
  # Exit code 5: no test was left to run.
  fine = code == 0 or (code == 5 and bool(before))
  if code is None or not (fine or failed):
    result += f"; {'out of time' if code is None else f'exit code {code}'}"
  idle = part.wanted not in {w for t in passed for w in re.split(r"\W", t)}
  if part.wanted and idle:
    result += f"; none of {part.wanted}"
  lines = text.splitlines()[-200:]
  complete = fine and not failed and not (part.wanted and idle)
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
  """Tests with the outcome `word` in pytest's output, with or without `-n`."""
  many = re.findall(rf"^\[gw\d+\] \[ *\d+%\] {word} (.+?) *$", text, re.M)
  return many + re.findall(rf"^(tests/.+?) {word}\b", text, re.M)


def matrix(path: pathlib.Path, seconds: float, quick: bool) -> bool:
  """Times the attention matrix until it is complete or the time is over."""
  import attention_cases

  names = [case.name for case in attention_cases.cases(quick)]
  end = time.monotonic() + seconds
  if not quick:
    end -= _reserved(path, "transitions", "rollout")
  command = [sys.executable, "benchmarks/attention.py", "--json", str(path)]
  command += [*["--quick"] * quick, "--minutes"]
  code, report = None, _read(path)
  while (left := end - time.monotonic()) > 10:
    before = report
    minutes = max(left - _LAST_CASE, 0) / 60
    code = _run([*command, str(minutes)], left)
    report = _read(path)
    # If a side has crashed the run, its case is in `begun`: run the rest.
    if not report.get("begun") or report == before:
      break
  missing = [name for name in names if name not in report.get("cases", {})]
  if missing:
    print(f"{len(missing)} cases are left: {', '.join(missing[:4])} ...")
  return code == 0 and not missing


def transitions(path: pathlib.Path, seconds: float, quick: bool) -> bool:
  """Times transitions of the cache, row by row."""
  if quick or _complete(_read(path)):
    return True
  seconds -= _reserved(path, "rollout")
  if seconds < 10:
    print("no time left beside that of rollout")
    return False
  program = "import sys, transitions; transitions.by_row(sys.argv[1])"
  return _run([sys.executable, "-c", program, str(path)], seconds) == 0


def rollout(path: pathlib.Path, seconds: float, quick: bool) -> bool:
  """Times the rollout loop with a model, part by part."""
  if _complete(_read(path)):
    return True
  call = f"by_part(sys.argv[1], quick={quick})"
  program = f"import sys, rollout_device; rollout_device.{call}"
  return _run([sys.executable, "-c", program, str(path)], seconds) == 0


def _reserved(path: pathlib.Path, *stages: str) -> float:
  """Seconds for later stages that are not complete.

  Args:
    path: a file in the folder of the results.
    stages: their names.
  """
  return sum(
    _RESERVED[stage]
    for stage in stages
    if not _complete(_read(path.with_name(f"{stage}.json")))
  )


def launches(path: pathlib.Path, seconds: float, quick: bool) -> bool:
  """Counts kernels of a decode step of the cache in its compiled text."""
  del seconds
  if path.exists():
    print("done before")
    return True
  import jax
  import jax.numpy as jnp
  from launches import in_largest_loop

  import jaxkv

  slots = 8 if quick else 256
  config = jaxkv.CacheConfig(
    num_pages=64 * slots, page_size=16, num_slots=slots, pages_per_slot=64
  )

  def step(state, tokens):
    ones = jnp.ones((slots,), jnp.int32)
    state, _ = jaxkv.allocate(state, ones)
    state, _ = jaxkv.commit(state, tokens[:, None], ones)
    state, _ = jaxkv.free(state, mask=tokens == 7)
    return state, None

  program = jax.jit(
    lambda state, tokens: jax.lax.scan(step, state, tokens)[0],
    donate_argnums=0,
  )
  tokens = jnp.zeros((4, slots), jnp.int32)
  text = program.lower(jaxkv.init(config), tokens).compile().as_text() or ""
  counts = in_largest_loop(text)
  print(f"{counts} in a step of {slots} slots")
  _write(path, {"slots": slots, **counts._asdict()})
  return True


STAGES = (
  Stage("numerics", numerics),
  Stage("launches", launches),
  Stage("matrix", matrix),
  Stage("transitions", transitions),
  Stage("rollout", rollout),
)


def _run(
  command: list[str], seconds: float, output: Any = None, **environment: str
) -> int | None:
  """Runs a command; returns its exit code, or None if it takes too long."""
  path = [*_PATH, os.environ.get("PYTHONPATH", "")]
  joined = os.pathsep.join(part for part in path if part)
  mine = {"PYTHONPATH": joined, "PYTHONUNBUFFERED": "1"}
  process = subprocess.Popen(
    command,
    cwd=_ROOT,
    env={**os.environ, **_ROOM, **mine, **environment},
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
    # The whole group: child processes would go on using the GPU.
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read(path: pathlib.Path) -> dict[str, Any]:
  return json.loads(path.read_text("utf-8")) if path.exists() else {}


def _write(path: pathlib.Path, report: dict[str, Any]) -> None:
  # Imported here, because the checkout must be on Python's path first.
  import command

  command.write(path, report)


def _complete(report: dict[str, Any]) -> bool:
  return report.get("complete", False)


def tested(quick: bool) -> dict[str, Any]:
  """What the results belong to: a hash of the code, and where it ran."""
  import jax

  digest = hashlib.sha256()
  for folder in ("kernels", "jaxkv", "benchmarks", "tests"):
    for path in sorted((_ROOT / folder).rglob("*.py")):
      digest.update(path.read_bytes())
  return {
    "code": digest.hexdigest()[:16],
    "jax": importlib.metadata.version("jax"),
    "device": jax.devices()[0].device_kind,
    "quick": quick,
  }


def check_same(path: pathlib.Path, quick: bool) -> None:
  """Writes `tested` to a new folder; exits if the folder has other results."""
  mine, there = tested(quick), _read(path)
  if there not in ({}, mine):
    sys.exit(
      f"{path.parent} has results of {there}, and this is {mine}; name a new"
      " folder with --out"
    )
  _write(path, mine)


def run(out: pathlib.Path, minutes: float, quick: bool) -> bool:
  """Runs what has no results yet; returns whether everything has passed."""
  end = time.monotonic() + minutes * 60
  out.mkdir(parents=True, exist_ok=True)
  check_same(out / "tested.json", quick)
  complete = True
  for stage in STAGES:
    left = end - time.monotonic()
    if left < 10:
      print(f"[{stage.name}] no time left")
      complete = False
      continue
    print(f"[{stage.name}] {left:.0f} s left", flush=True)
    try:
      complete &= stage.run(out / f"{stage.name}.json", left, quick)
    except Exception:
      traceback.print_exc(file=sys.stdout)
      complete = False
  return complete


def main() -> None:
  parser = argparse.ArgumentParser(
    description="numerics, bandwidth, matrix, transitions, rollout"
  )
  parser.add_argument(
    "--quick", action="store_true", help="tiny, on any device"
  )
  parser.add_argument("--minutes", type=float, default=9.5)
  parser.add_argument(
    "--out",
    type=pathlib.Path,
    default=_BENCHMARKS / "results" / "gpu",
    metavar="FOLDER",
  )
  arguments = parser.parse_args()
  # Before jax takes a device.
  os.environ.update(_ROOM)
  import jax

  if not arguments.quick and jax.default_backend() != "gpu":
    sys.exit("jax sees no GPU; --quick needs none")
  out = arguments.out.resolve()
  sys.exit(0 if run(out, arguments.minutes, arguments.quick) else 1)


if __name__ == "__main__":
  main()
