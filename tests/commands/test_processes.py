"""`python -m jaxkv rollout --processes`: equal texts, and deaths."""

import argparse
import json
import os
import re
import signal as signals
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from jaxkv._src.commands import processes
from tests.sharding.started import free_port
from tests.sharding.started import wait

_SECONDS = 300
_WORDS = ["--max-tokens", "16", "--samples", "2"]


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("host:1", "must be ADDRESS,N,ID, such as host:1234,2,0, not 'host:1'"),
    ("host:1,two,0", "must be ADDRESS,N,ID"),
    ("localhost,2,0", "must be ADDRESS,N,ID"),
    (",2,0", "must be ADDRESS,N,ID"),
    ("host:65536,2,0", "must have a port of 1 .. 65535: 'host:65536,2,0'"),
    ("host:1,2,2", "must have an ID of 0 .. N - 1, not 2 of 2"),
  ],
)
def test_arguments(text, message):
  with pytest.raises(argparse.ArgumentTypeError, match=message):
    processes.parse(text)


def test_parts_cover_all_prompts():
  for num_processes in (1, 2, 3, 5):
    prompts = list(range(10))
    parts = [
      prompts[processes.Processes("", num_processes, index).part_of(10)]
      for index in range(num_processes)
    ]
    assert sum(parts, []) == prompts


class _Service:
  """A coordination service whose other processes are slow, or gone."""

  def __init__(self, num_timeouts, error=None):
    self.keys, self.num_calls = [], 0
    self._num_timeouts, self._error = num_timeouts, error

  def key_value_set(self, key, value):
    self.keys.append(key)

  def blocking_key_value_get(self, key, milliseconds):
    self.num_calls += 1
    if self.num_calls > self._num_timeouts and self._error:
      raise jax.errors.JaxRuntimeError(self._error)
    if self.num_calls > self._num_timeouts or key in self.keys:
      return ""
    raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: timed out")


def test_processes_wait_for_the_slowest_without_a_limit():
  service = _Service(10_000)
  processes.wait_for_all(service, 3)
  assert len(service.keys) == 1 and service.num_calls == 10_002


def test_a_service_that_is_gone_is_an_error():
  service = _Service(5, "UNAVAILABLE: connection lost")
  with pytest.raises(jax.errors.JaxRuntimeError, match="connection lost"):
    processes.wait_for_all(service, 3)


@pytest.mark.deep
def test_a_process_may_have_more_work_than_another():
  """Collectives on CPUs fail after 30 s."""
  address = f"localhost:{free_port()}"
  program = "; ".join(
    [
      "import sys, time",
      "from jaxkv._src.commands import processes",
      "number = int(sys.argv[1])",
      "processes.start(processes.Processes(sys.argv[2], 2, number))",
      "time.sleep(number * float(sys.argv[3]))",
      "import numpy as np",
      "out = processes.gathered(np.full(2, number), {'generated': number + 1})",
      "assert out[0].tolist() == [0, 0, 1, 1] and out[1] == {'generated': 3}",
    ]
  )
  words = [sys.executable, "-c", program]
  wait(*(_run([*words, str(number), address, "45"]) for number in range(2)))


def _started(folder, *words):
  words = [sys.executable, "-m", "jaxkv", "rollout", *_WORDS, *words]
  return _run(words, JAXKV_CACHE=str(folder))


def _run(words, **environment):
  return subprocess.Popen(
    words,
    env={
      **os.environ,
      **environment,
      "JAX_PLATFORMS": "cpu",
      "PYTHONPATH": os.pathsep.join(sys.path),
    },
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    start_new_session=True,
  )


def _all_started(folder, count, *words):
  address = f"localhost:{free_port()}"
  return [
    _started(folder, "--processes", f"{address},{count},{index}", *words)
    for index in range(count)
  ]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
  """A folder with the trained model, and the texts of one process."""
  folder = tmp_path_factory.mktemp("alone")
  wait(_started(folder, "--json", str(folder / "alone.json")))
  return folder, json.loads((folder / "alone.json").read_text("utf-8"))


@pytest.mark.deep
@pytest.mark.parametrize("count", [2, 4])
def test_texts_are_those_of_one_process(count, one_process):
  folder, expected = one_process
  file = folder / f"{count}.json"
  start_time = time.monotonic()
  started = _all_started(folder, count, "--json", str(file))
  wait(*started)
  assert time.monotonic() - start_time < 90
  result = json.loads(file.read_text("utf-8"))
  assert len(result["texts"]) == len(expected["texts"])
  assert result["generated"] == expected["generated"]
  for text, target in zip(result["texts"], expected["texts"], strict=True):
    np.testing.assert_allclose(
      text.pop("log_probs"), target["log_probs"], rtol=0, atol=1e-4
    )
    assert text == {name: target[name] for name in text}


@pytest.mark.deep
@pytest.mark.parametrize("signal", ["SIGKILL", "SIGTERM"])
def test_surviving_processes_name_a_dead_one(signal, one_process):
  folder, _ = one_process
  started = _all_started(folder, 3)
  # All have joined when this one begins to compile.
  for line in started[2].stdout:
    if "compiling" in line:
      break
  started[2].send_signal(getattr(signals, signal))
  start_time = time.monotonic()
  started[2].communicate(timeout=_SECONDS)
  for process in started[:2]:
    text, _ = process.communicate(timeout=_SECONDS)
    assert process.returncode != 0, text
    assert re.search(r"tasks are unhealthy.*?\b2\b", text, re.DOTALL), text
  assert time.monotonic() - start_time < 30
