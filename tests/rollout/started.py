"""Starts `recipe_process`, and waits for it, but not forever."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys

_SECONDS = 400
"""A process takes ten of them on a quiet machine."""


def start(*words: str) -> subprocess.Popen:
  """A process with two devices; it ends itself if the tests are killed."""
  flags = os.environ["XLA_FLAGS"]
  flags = re.sub(r"device_count=\d+", "device_count=2", flags)
  limit = []
  if shutil.which("timeout"):
    limit = ["timeout", "-k", "5", str(_SECONDS)]
  return subprocess.Popen(
    [*limit, sys.executable, "-m", "tests.rollout.recipe_process", *words],
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
  """Waits for all; when one fails or hangs, all are killed."""
  try:
    for process in processes:
      said, _ = process.communicate(timeout=_SECONDS + 20)
      assert process.returncode == 0, said
  finally:
    for process in processes:
      if process.poll() is None:
        # The whole group: a killed `timeout` would leave its command behind.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def free_port() -> int:
  """A port that nobody listens at."""
  with socket.socket() as some:
    some.bind(("localhost", 0))
    return some.getsockname()[1]
