"""All that is to be shown on a GPU, in one command, within ten minutes.

| stage | what it does |
|---|---|
| numerics | attention, shared prefixes, writes and 8-bit pages on the GPU:
  every backend that serves it against the float64 definition, over all shapes |
| launches | kernels in the body of a compiled loop of cache steps |
| matrix | `attention.py --torch`: bandwidth of a copy, every case, every side |
| transitions | the cache's own verbs at 256 slots, with `transitions.py`; not
  with `--quick`, since on a CPU they take minutes |

Each stage writes to its file in the folder as it goes: tests that passed, cases
and rows are not run again. So when the time is over, run the same command
again. Numerics take half of it at most, and the matrix leaves some to
transitions. What was stopped comes after what has not been tried; what failed
is not tried again, or a race might pass. Results of other code, another jax or
device, or of `--quick`, are not mixed with: that is an error. The exit code is
0 when all has been done and passed.

  python benchmarks/gpu_suite.py [--quick] [--minutes 9.5] [--out FOLDER]

With `--quick`, and no GPU, it runs itself through on a CPU with tiny sizes. The
project need not be installed.
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

# Of the time left to the suite, what numerics may take.
_FOR_NUMERICS = 0.5
# Seconds: for one part of them; that the matrix leaves to transitions while
# they are not done; in which a case ends that was begun.
_LONGEST_PART = 150
_FOR_TRANSITIONS = 150
_LAST_CASE = 130

# Each has a context on the GPU, of about half a GB.
_MOST_PROCESSES = 12
# Several processes take turns on one GPU, and torch needs room beside jax.
_ROOM = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


class Stage(NamedTuple):
  """One part of the suite.

  Attributes:
    name: of it and of its file of results, `name`.json.
    run: (file, seconds left, quick) -> whether it is complete and passed.
  """

  name: str
  run: Callable[[pathlib.Path, float, bool], bool]


class Part(NamedTuple):
  """Tests that run together.

  Attributes:
    files: of tests.
    keyword: pytest's `-k`; empty: all.
    wanted: a class or parameter of which a test must pass, and not only skip.
  """

  files: tuple[str, ...]
  keyword: str = ""
  wanted: str = ""


def parts(quick: bool) -> dict[str, Part]:
  """Numerics by name, the kernels' own first."""
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
    seconds: after which it is stopped.
    quick: on a CPU, in one process.

  Returns:
    What is written: whether it came to an end, and passed altogether; the
    tests that passed, and those that ever failed.
  """
  command = [sys.executable, "-m", "pytest", "-v", "--color=no", *part.files]
  # The cache would stay in the checkout; benchmarks warn about `-n`.
  command += ["-p", "no:cacheprovider", "-p", "no:benchmark"]
  # Most of the time goes into compiling, which the cores share.
  processes = 0 if quick else min(os.cpu_count() or 1, _MOST_PROCESSES)
  command += ["-n", str(processes), "-rs", "-k", part.keyword]
  # What it is told is the beginning of a name: a parameter's end is safe.
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
  # 5: none was left to run.
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
  """The tests of which pytest's output says so, with or without `-n`."""
  many = re.findall(rf"^\[gw\d+\] \[ *\d+%\] {word} (.+?) *$", text, re.M)
  return many + re.findall(rf"^(tests/.+?) {word}\b", text, re.M)


def matrix(path: pathlib.Path, seconds: float, quick: bool) -> bool:
  """The attention matrix, as far as it comes."""
  import attention_cases

  names = [case.name for case in attention_cases.cases(quick)]
  end = time.monotonic() + seconds
  if not quick and not _complete(_read(path.with_name("transitions.json"))):
    end -= _FOR_TRANSITIONS
  command = [sys.executable, "benchmarks/attention.py", "--json", str(path)]
  command += ["--quick" if quick else "--torch", "--minutes"]
  code, report = None, _read(path)
  while (left := end - time.monotonic()) > 10:
    before = report
    minutes = max(left - _LAST_CASE, 0) / 60
    code = _run([*command, str(minutes)], left)
    report = _read(path)
    # A case is under way if a side has ended the run: go on beside it.
    if not report.get("begun") or report == before:
      break
  missing = [name for name in names if name not in report.get("cases", {})]
  if missing:
    print(f"{len(missing)} cases are left: {', '.join(missing[:4])} ...")
  return code == 0 and not missing


def transitions(path: pathlib.Path, seconds: float, quick: bool) -> bool:
  """Transitions of the cache, row by row."""
  if quick or _complete(_read(path)):
    return True
  program = "import sys, transitions; transitions.by_row(sys.argv[1])"
  return _run([sys.executable, "-c", program, str(path)], seconds) == 0


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
)


def _run(
  command: list[str], seconds: float, output: Any = None, **environment: str
) -> int | None:
  """Runs a command to its end, for its exit code; None if it takes too long."""
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
    # What it has started itself, too: it would go on using the GPU.
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read(path: pathlib.Path) -> dict[str, Any]:
  return json.loads(path.read_text("utf-8")) if path.exists() else {}


def _write(path: pathlib.Path, report: dict[str, Any]) -> None:
  # Not above: it can be found only after the checkout is on Python's path.
  import command

  command.write(path, report)


def _complete(report: dict[str, Any]) -> bool:
  return report.get("complete", False)


def tested(quick: bool) -> dict[str, Any]:
  """What results are about: the code, by a hash of it, and where it ran."""
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
  """Leaves `tested` in a new folder; exits where another's results are."""
  mine, there = tested(quick), _read(path)
  if there not in ({}, mine):
    sys.exit(
      f"{path.parent} has results of {there}, and this is {mine}; name a new"
      " folder with --out"
    )
  _write(path, mine)


def run(out: pathlib.Path, minutes: float, quick: bool) -> bool:
  """Runs what has no results yet; whether all are there and passed."""
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
    description="numerics, bandwidth, matrix, transitions"
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
  # Before this process has a device.
  os.environ.update(_ROOM)
  import jax

  if not arguments.quick and jax.default_backend() != "gpu":
    sys.exit("jax sees no GPU; --quick needs none")
  out = arguments.out.resolve()
  sys.exit(0 if run(out, arguments.minutes, arguments.quick) else 1)


if __name__ == "__main__":
  main()
