"""Starts `recipe_process`, and waits for it with a time limit."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys

_SECONDS = 400
"""The time limit of a process; it takes ten seconds on an idle machine."""


def start(*words: str, devices: int = 2) -> subprocess.Popen:
  """Starts a process, which ends if the tests are killed."""
  flags = os.environ["XLA_FLAGS"]
  flags = re.sub(r"device_count=\d+", f"device_count={devices}", flags)
  limit = []
  if shutil.which("timeout"):
    limit = ["timeout", "-k", "5", str(_SECONDS)]
  return subprocess.Popen(
    [*limit, sys.executable, "-m", "tests.sharding.recipe_process", *words],
    env={
      **os.environ,
      "JAX_PLATFORMS": "cpu",
      "PYTHONPATH": os.pathsep.join(sys.path),
      "XLA_FLAGS": flags,
    },
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    start_new_session=True,
  )


def wait(*processes: subprocess.Popen) -> None:
  """Waits for all processes; kills all if one fails or hangs."""
  try:
    for process in processes:
      text, _ = process.communicate(timeout=_SECONDS + 20)
      assert process.returncode == 0, text
  finally:
    for process in processes:
      if process.poll() is None:
        # The whole group: a killed `timeout` would leave its command behind.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def free_port() -> int:
  """Returns a port that no process listens at."""
  with socket.socket() as listener:
    listener.bind(("localhost", 0))
    return listener.getsockname()[1]
