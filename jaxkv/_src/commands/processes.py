"""`--processes`: splits the prompts of a command over several JAX processes."""

import argparse
import pickle
import re
from typing import Any
from typing import NamedTuple

import jax
import numpy as np

# jax has no public name for the client of its coordination service.
from jax._src import distributed
from jax.experimental import multihost_utils

from jaxkv import rollout
from jaxkv._src.commands.output import CommandError

_HEARTBEAT_SECONDS = 10
"""Time without a heartbeat after which jax considers a process dead."""
_START_SECONDS = 120
_POLL_MILLISECONDS = 1000
_KEY = "jaxkv/has-generated/{}"
"""The key that process {} stores when it has generated its samples."""
_EQUAL_OR_LARGEST = {
  "compile_seconds",
  "largest_difference",
  "page_bytes",
  "page_size",
  "seconds",
  "steps",
}
"""Figures of which `gathered` takes the maximum, not the sum."""


class Processes(NamedTuple):
  """A group of processes that share prompts, and the index of this one."""

  address: str  # of process 0
  num_processes: int
  process_index: int

  def part_of(self, num_prompts: int) -> slice:
    """Returns the part of `num_prompts` prompts that this process computes."""
    return slice(
      self.process_index * num_prompts // self.num_processes,
      (self.process_index + 1) * num_prompts // self.num_processes,
    )


def parse(text: str) -> Processes:
  """Parses ADDRESS,N,ID, as the `type` of an argument of `argparse`."""
  # jax does not check that the address has a port.
  match = re.fullmatch(r"([^,]+:(\d+)),(\d+),(\d+)", text)
  if match is None:
    raise argparse.ArgumentTypeError(
      f"must be ADDRESS,N,ID, such as host:1234,2,0, not {text!r}"
    )
  port, num_processes, index = map(int, match.groups()[1:])
  if not 1 <= port < 2**16:
    raise argparse.ArgumentTypeError(
      f"must have a port of 1 .. 65535: {text!r}"
    )
  if not 0 <= index < num_processes:
    raise argparse.ArgumentTypeError(
      f"must have an ID of 0 .. N - 1, not {index} of {num_processes}"
    )
  return Processes(match[1], num_processes, index)


def start(processes: Processes) -> None:
  """Connects this process to the others.

  If a process dies, is stopped or cannot be reached, jax ends all others within
  30 s. The message names that process, or the coordination service if it is
  process 0. SIGTERM ends a process, as without `--processes`. A process that
  raises an error waits for the others, and ends them after five minutes.

  Raises:
    CommandError: jax cannot connect the processes.
  """
  # Otherwise jax would catch SIGTERM, for programs that save their state.
  jax.config.update("jax_enable_preemption_service", False)
  try:
    jax.distributed.initialize(
      *processes,
      heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
      initialization_timeout=_START_SECONDS,
    )
  except RuntimeError as error:
    raise CommandError(f"--processes: {error}") from error


def wait_for_all(client: Any, total: int) -> None:
  """Waits until all `total` processes have called this function, once."""
  client.key_value_set(_KEY.format(jax.process_index()), "")
  for number in range(total):
    while not _has_key(client, _KEY.format(number)):
      pass


def _has_key(client: Any, key: str) -> bool:
  """Waits a short time for a key of the coordination service."""
  # Between the calls, Python handles signals such as that of Ctrl-C.
  try:
    client.blocking_key_value_get(key, _POLL_MILLISECONDS)
  except jax.errors.JaxRuntimeError as error:
    if "DEADLINE_EXCEEDED" in str(error):
      return False
    raise
  return True


def gathered(
  results: rollout.Generated, metrics: dict[str, Any]
) -> tuple[rollout.Generated, dict[str, Any]]:
  """Gathers the samples of all processes, in order, and combines the metrics.

  The samples of all processes must have equal widths. Waits for the slowest
  process without a limit; a process that dies ends all others, see `start`.
  """
  # Collectives on CPUs fail if another process joins 30 s later.
  wait_for_all(distributed.global_state.client, jax.process_count())
  # As bytes, because jax gathers arrays of equal shapes, and converts 64-bit
  # numbers to 32 bits. The processes run one command, and trust each other.
  data = pickle.dumps((jax.device_get(results), metrics))
  max_bytes = np.max(multihost_utils.process_allgather(np.int32(len(data))))
  padded = np.frombuffer(data.ljust(int(max_bytes)), np.uint8)
  parts = [
    # `loads` ignores the padding after a pickle.
    pickle.loads(row.tobytes())
    for row in np.asarray(multihost_utils.process_allgather(padded))
  ]
  samples, all_metrics = zip(*parts, strict=True)
  results = jax.tree.map(lambda *rows: np.concatenate(rows), *samples)
  totals = {}
  for name in metrics:
    of_all = np.max if name in _EQUAL_OR_LARGEST else np.sum
    # Counts by pool are added pool by pool.
    totals[name] = of_all([part[name] for part in all_metrics], axis=0).tolist()
  return results, totals
