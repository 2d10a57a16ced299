"""All that is to be shown on a GPU, in one command, within ten minutes.

| stage | what it does |
|---|---|
| numerics | attention, shared prefixes, writes and 8-bit pages on the GPU:
  every backend that serves it against the float64 definition, over all shapes |
| launches | kernels in the body of a compiled loop of cache steps |
| matrix | `attention.py --torch`: bandwidth of a copy, every case, every side |
| small | `transitions.py --quick`: the cache's own verbs; not with `--quick`,
  since on a CPU they take minutes |

Each stage writes its results to the folder, and one that is already there is
not run again; the matrix goes on where it ended. So when the time is over, run
the same command again. Results of other code or another jax are not mixed with:
that is an error. The exit code is 0 when all has been done and passed.

  python benchmarks/gpu_suite.py [--quick] [--minutes 10] [--out FOLDER]

With `--quick`, and no GPU, it runs itself through on a CPU with tiny sizes.
"""

import argparse
import hashlib
import importlib.metadata
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import NamedTuple
from xml.etree import ElementTree

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_BENCHMARKS = _ROOT / "benchmarks"
_NUMERICS = (
  "tests/test_paged_attention.py",
  "tests/test_shared_prefix.py",
  "tests/test_quantized_pages.py",
  "tests/test_pages.py",
  "tests/test_latent.py",
)
_NOT_PASSED = ("error", "failure", "skipped")

# Seconds that the matrix leaves to the stage after it.
_FOR_TRANSITIONS = 150

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


def numerics(path: pathlib.Path, seconds: float, quick: bool) -> bool:
  """The kernels' tests on this device; a backend that only skips has failed."""
  platform = "cpu" if quick else "cuda"
  command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
  command += ["-n", "0", "-rs", *_NUMERICS]
  if quick:
    command += ["-k", "TestNumerics and xla"]
  with tempfile.TemporaryDirectory() as folder:
    results = pathlib.Path(folder) / "results.xml"
    command += [f"--junitxml={results}"]
    done = _output(command, seconds, JAXKV_TEST_PLATFORM=platform)
    if done is None:
      return False
    text = results.read_text("utf-8") if results.exists() else ""
  counts = passed_of_backends(text)
  wanted = {"xla"} if quick else {"triton", "xla"}
  idle = sorted((wanted | counts.keys()) - {n for n in counts if counts[n]})
  passed = done.returncode == 0 and not idle
  lines = done.stdout.splitlines()
  print("\n".join(lines[-1:] if passed else lines[-60:]))
  print(f"tests passed: {counts}; none of: {', '.join(idle) or '-'}")
  report = {"passed": passed, "tests": counts, "output": lines[-200:]}
  # A failure is kept beside, so that the next run tries again.
  kept = path if passed else path.with_suffix(".failed.json")
  kept.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
  return passed


def passed_of_backends(text: str) -> dict[str, int]:
  """How many tests each attention backend passed.

  Args:
    text: pytest's results as XML, or nothing.

  Returns:
    The number by name, 0 for a backend whose tests failed or were skipped.
  """
  from jaxkv_kernels import BACKENDS

  counts: dict[str, int] = {}
  cases = ElementTree.fromstring(text).iter("testcase") if text else ()
  for case in cases:
    parts = re.split(r"[\[\]-]", case.get("name", ""))
    bad = any(case.find(kind) is not None for kind in _NOT_PASSED)
    for name in set(parts) & set(BACKENDS):
      counts[name] = counts.get(name, 0) + (not bad)
  return counts


def small(path: pathlib.Path, seconds: float, quick: bool) -> bool:
  """Transitions of the cache, in their own quick sizes."""
  if quick:
    return True
  command = [sys.executable, "benchmarks/transitions.py", "--quick"]
  done = _output([*command, "--json", str(path)], seconds)
  if done is None:
    return False
  print(done.stdout if done.returncode == 0 else done.stderr[-3000:])
  return done.returncode == 0


def matrix(path: pathlib.Path, seconds: float, quick: bool) -> bool:
  """The attention matrix, as far as it comes."""
  command = [sys.executable, "benchmarks/attention.py", "--json", str(path)]
  command += ["--quick"] if quick else ["--torch"]
  if not quick:
    seconds -= _FOR_TRANSITIONS
  # One case may be under way when its time is over.
  command += ["--minutes", str(max(seconds - 30, 5) / 60)]
  # A side that hangs must not take the time of all that follows.
  try:
    done = subprocess.run(
      command, cwd=_ROOT, env=_environment(), timeout=max(seconds, 60)
    )
  except subprocess.TimeoutExpired as error:
    print(f"stopped after {error.timeout:.0f} s, in the case after the last")
    return False
  return done.returncode == 0 and _complete(path, quick)


def _complete(path: pathlib.Path, quick: bool) -> bool:
  import attention_cases

  cases = (
    attention_cases.quick_cases() if quick else attention_cases.all_cases()
  )
  report = json.loads(path.read_text("utf-8"))
  missing = [case.name for case in cases if case.name not in report["cases"]]
  if missing:
    print(f"{len(missing)} cases are left: {', '.join(missing[:4])} ...")
  return not missing


def launches(path: pathlib.Path, seconds: float, quick: bool) -> bool:
  """Counts kernels of a decode step of the cache in its compiled text."""
  del seconds
  os.environ.update(_ROOM)
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
    state, _ = jaxkv.free(state, tokens == 7)
    return state, None

  program = jax.jit(
    lambda state, tokens: jax.lax.scan(step, state, tokens)[0],
    donate_argnums=0,
  )
  tokens = jnp.zeros((4, slots), jnp.int32)
  text = program.lower(jaxkv.init(config), tokens).compile().as_text() or ""
  counts = in_largest_loop(text)
  print(f"{counts} in a step of {slots} slots")
  path.write_text(json.dumps({"slots": slots, **counts._asdict()}) + "\n")
  return True


STAGES = (
  Stage("numerics", numerics),
  Stage("launches", launches),
  Stage("matrix", matrix),
  Stage("small", small),
)


def _environment(**more: str) -> dict[str, str]:
  """This process's, with the checkout on Python's path."""
  path = [str(_ROOT), str(_ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
  joined = os.pathsep.join(part for part in path if part)
  return {**os.environ, **_ROOM, "PYTHONPATH": joined, **more}


def _output(
  command: list[str], seconds: float, **environment: str
) -> subprocess.CompletedProcess[str] | None:
  """Runs a command to its end; None, after saying so, if it takes too long."""
  try:
    return subprocess.run(
      command,
      cwd=_ROOT,
      env=_environment(**environment),
      capture_output=True,
      text=True,
      timeout=seconds,
    )
  except subprocess.TimeoutExpired:
    print(f"stopped after {seconds:.0f} s: {' '.join(command)}")
    return None


def tested() -> dict[str, str]:
  """What results are about: the code, by a hash of it, and jax's version."""
  digest = hashlib.sha256()
  for folder in ("kernels", "jaxkv", "benchmarks", "tests"):
    for path in sorted((_ROOT / folder).rglob("*.py")):
      digest.update(path.read_bytes())
  version = importlib.metadata.version("jax")
  return {"code": digest.hexdigest()[:16], "jax": version}


def check_same(path: pathlib.Path) -> None:
  """Leaves `tested` in a new folder; exits where another's results are."""
  text = json.dumps(tested(), indent=1) + "\n"
  if not path.exists():
    path.write_text(text, "utf-8")
  elif path.read_text("utf-8") != text:
    sys.exit(
      f"{path.parent} has results of other code or another jax; name a new"
      " folder with --out"
    )


def run(out: pathlib.Path, minutes: float, quick: bool) -> bool:
  """Runs what has no results yet; whether all are there and passed."""
  out.mkdir(parents=True, exist_ok=True)
  check_same(out / "tested.json")
  end = time.monotonic() + minutes * 60
  complete = True
  for stage in STAGES:
    path = out / f"{stage.name}.json"
    left = end - time.monotonic()
    if stage.run is not matrix and path.exists():
      print(f"[{stage.name}] done before")
      continue
    if left < 10:
      print(f"[{stage.name}] no time left")
      complete = False
      continue
    print(f"[{stage.name}] {left:.0f} s left", flush=True)
    complete &= stage.run(path, left, quick)
  return complete


def main() -> None:
  parser = argparse.ArgumentParser(
    description="numerics, bandwidth, matrix, transitions"
  )
  parser.add_argument(
    "--quick", action="store_true", help="tiny, on any device"
  )
  parser.add_argument("--minutes", type=float, default=10)
  parser.add_argument(
    "--out",
    type=pathlib.Path,
    default=_BENCHMARKS / "results" / "gpu",
    metavar="FOLDER",
  )
  arguments = parser.parse_args()
  out = arguments.out.resolve()
  sys.exit(0 if run(out, arguments.minutes, arguments.quick) else 1)


if __name__ == "__main__":
  main()
