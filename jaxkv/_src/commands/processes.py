"""`--processes`: splits the prompts of a command over processes of jax."""

import argparse
from typing import Any
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxkv import rollout
from jaxkv._src.commands.errors import CommandError

_HEARTBEAT_SECONDS = 10
"""After this time without a sign of life, jax counts a process as dead."""
_START_SECONDS = 120
_EQUAL_OR_LARGEST = {
  "compile_seconds",
  "largest_difference",
  "page_bytes",
  "page_size",
  "seconds",
  "steps",
}
"""Figures that are not added up over processes."""


class Processes(NamedTuple):
  """The address of process 0, the number of processes, this one's number."""

  address: str
  total: int
  number: int

  def share_of(self, size: int) -> int:
    """Returns the most of `size` prompts that a process computes."""
    return -(-size // self.total)

  def part_of(self, size: int) -> slice:
    """Returns the part of `size` prompts that this process computes."""
    return slice(
      self.number * size // self.total, (self.number + 1) * size // self.total
    )


def parse(text: str) -> Processes:
  """Parses ADDRESS,N,ID; for `argparse`."""
  address, *numbers = text.split(",")
  try:
    total, number = map(int, numbers)
  except ValueError:
    raise argparse.ArgumentTypeError(
      f"must be ADDRESS,N,ID, such as host:1234,2,0, not {text!r}"
    ) from None
  if not 0 <= number < total:
    raise argparse.ArgumentTypeError(
      f"must have an ID of 0 .. N - 1, not {number} of {total}"
    )
  return Processes(address, total, number)


def start(processes: Processes) -> None:
  """Joins the other processes.

  If a process dies or stops, jax ends the others within 30 s with a message
  that names it. If process 0 dies, the message names the coordination service.

  Raises:
    CommandError: the others did not come.
  """
  try:
    jax.distributed.initialize(
      *processes,
      heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
      initialization_timeout=_START_SECONDS,
    )
  except RuntimeError as error:
    raise CommandError(f"--processes: {error}") from error


def gathered(
  results: rollout.Generated, figures: dict[str, Any], share: int
) -> tuple[rollout.Generated, dict[str, Any]]:
  """Returns the results of all processes, in order, and their figures.

  Args:
    results: the samples of this process, of the same width everywhere.
    figures: the numbers of this process.
    share: the most samples of a process.
  """

  def padded(array: Any) -> np.ndarray:
    array = np.asarray(array)
    rows = ((0, share - len(array)),) + ((0, 0),) * (array.ndim - 1)
    return np.pad(array, rows)

  numbers = {
    name: np.asarray(number, np.float32 if type(number) is float else np.int32)
    for name, number in figures.items()
  }
  results, numbers = multihost_utils.process_allgather(
    (jax.tree.map(padded, results), numbers)
  )
  results = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), results)
  exists = np.asarray(results.valid)
  results = jax.tree.map(lambda x: np.asarray(x)[exists], results)
  totals = {}
  for name, values in numbers.items():
    of_all = np.max if name in _EQUAL_OR_LARGEST else np.sum
    totals[name] = type(figures[name])(of_all(np.asarray(values)))
  return results, totals
