"""SIGINT and SIGTERM end a command, whatever it is doing."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
# A runner in the background may ignore interrupts, and so would its children.
_DEFAULT = "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
_COMMAND = (
  f"{_DEFAULT}import runpy\n"
  "runpy.run_module('jaxkv', run_name='__main__', alter_sys=True)"
)
# The main thread is in a callback, which drops every exception.
_BUSY = f"""{_DEFAULT}
import gc, sys, time
from jaxkv._src.commands import output, signals
signals.install(output.remove_parts)

def callback(*_):
  print("ready", flush=True)
  while True:
    time.sleep(0.01)

with output.replacing(sys.argv[1]) as part:
  part.write_text("half")
  gc.callbacks.append(callback)
  gc.collect()
"""


def _started(folder, *words):
  return subprocess.Popen(
    [sys.executable, *words],
    cwd=folder,
    env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


@pytest.mark.parametrize("number", _SIGNALS)
def test_a_signal_in_a_callback(tmp_path, number):
  process = _started(tmp_path, "-c", _BUSY, str(tmp_path / "out.json"))
  assert process.stdout.readline() == "ready\n"
  process.send_signal(number)
  _, error = process.communicate(timeout=60)
  assert process.returncode == 128 + number
  assert error.strip() == f"error: {_WORDS[number]}; run it again"
  assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_signals_at_any_time(tmp_path):
  """While modules are imported, the system's handlers end the process."""
  draw = random.Random(0)
  for number in _SIGNALS * 5:
    process = _started(tmp_path, "-c", _COMMAND, "grpo", "--rounds", "99999")
    time.sleep(draw.uniform(0.1, 12))
    process.send_signal(number)
    begin = time.monotonic()
    process.communicate(timeout=60)
    assert time.monotonic() - begin < 5
    assert process.returncode in (128 + number, -number)
