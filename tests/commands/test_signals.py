"""SIGINT and SIGTERM end a command, whatever it is doing."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# A runner in the background may ignore interrupts, and so would its children.
_DEFAULT = "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
_COMMAND = (
  f"{_DEFAULT}import runpy\n"
  "runpy.run_module('jaxkv', run_name='__main__', alter_sys=True)"
)


def _started(folder, *words):
  return subprocess.Popen(
    [sys.executable, *words],
    cwd=folder,
    env={
      **os.environ,
      "PYTHONPATH": os.pathsep.join(sys.path),
      # An empty folder, so that the model is trained, which takes long.
      "JAXKV_CACHE": str(folder),
    },
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


@pytest.mark.slow
def test_signals_at_any_time(tmp_path, request):
  draw = random.Random(0)
  # Imports, a compilation, a loop: each a few times with `--deep`.
  for code in _SIGNALS * (5 if request.config.getoption("--deep") else 2):
    process = _started(tmp_path, "-c", _COMMAND, "rollout")
    time.sleep(draw.uniform(0.1, 12))
    process.send_signal(code)
    start_time = time.monotonic()
    process.communicate(timeout=60)
    assert time.monotonic() - start_time < 5
    assert process.returncode in (128 + code, -code)
