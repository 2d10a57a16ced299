"""The commands as users start them: signals and output, in other processes.

All processes are started at once: each loads jax, which takes seconds.
"""

import json
import os
import signal
import subprocess
import sys

import pytest

_LINE = json.dumps(
  {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}
)
# A runner in the background may ignore interrupts, and so would its children.
_PROGRAM = (
  "import runpy, signal;"
  "signal.signal(signal.SIGINT, signal.default_int_handler);"
  "runpy.run_module('jaxkv', run_name='__main__', alter_sys=True)"
)
_SIGNALS = {"interrupted": signal.SIGINT, "terminated": signal.SIGTERM}
_OUTPUTS = {"closed": ">&-", "full": ">/dev/full", "no reader": ""}


def _started(folder, output) -> subprocess.Popen:
  """`python -m jaxkv replay`; without `output` into a pipe without reader."""
  words = ["replay", "trace", "--pages", "3", "--json", "out.json"]
  program = [sys.executable, "-c", _PROGRAM]
  reader, writer = os.pipe()
  os.close(reader)
  try:
    return subprocess.Popen(
      ["sh", "-c", f'exec "$@" {output}', "sh", *program, *words],
      cwd=folder,
      env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
      stdout=writer,
      stderr=subprocess.PIPE,
      text=True,
    )
  finally:
    os.close(writer)


def _told(process) -> str:
  """What the process printed beside its progress, until its end."""
  _, text = process.communicate(timeout=120)
  lines = [line for line in text.splitlines() if "replay: " not in line]
  return "\n".join(filter(None, lines))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
  """For each name the process, its folder, and what it told."""
  started = {}
  for name in (*_SIGNALS, *_OUTPUTS):
    folder = tmp_path_factory.mktemp("run")
    (folder / "out.json").write_text("old")
    if name in _SIGNALS:
      os.mkfifo(folder / "trace")
    else:
      (folder / "trace").write_text(_LINE)
    process = _started(folder, _OUTPUTS.get(name, ">/dev/null"))
    started[name] = process, folder
  for name, number in _SIGNALS.items():
    process, folder = started[name]
    # Opens when the command has opened the other end, and so is at work.
    with open(folder / "trace", "wb"):
      process.send_signal(number)
      process.wait(60)
  return {
    name: (process, folder, _told(process))
    for name, (process, folder) in started.items()
  }


@pytest.mark.parametrize(
  ("name", "code"), [("interrupted", 130), ("terminated", 143)]
)
def test_signals(runs, name, code):
  process, folder, told = runs[name]
  assert told == f"error: {name}; run it again"
  assert process.returncode == code
  assert sorted(os.listdir(folder)) == ["out.json", "trace"]
  assert (folder / "out.json").read_text() == "old"


@pytest.mark.parametrize(
  ("name", "reason"),
  [
    ("closed", "standard output is closed"),
    ("full", "No space left on device"),
    ("no reader", "Broken pipe"),
  ],
)
def test_output_that_cannot_be_written(runs, name, reason):
  if name == "full" and not os.path.exists("/dev/full"):
    pytest.skip("no /dev/full")
  process, folder, told = runs[name]
  assert told.startswith(f"error: cannot print the result: {reason}; ")
  assert len(told.splitlines()) == 1
  assert process.returncode == 2
  # What has been computed is kept; a closed output is told before.
  kept = (folder / "out.json").read_text()
  assert kept == "old" if name == "closed" else json.loads(kept)
  assert sorted(os.listdir(folder)) == ["out.json", "trace"]
