"""The worker of a pool, as a protocol."""

from typing import Any
from typing import NamedTuple
from typing import Protocol

import numpy as np

from jaxkv._src.engine.requests import Requests
from jaxkv._src.service.samples import PromptSamples
from jaxkv._src.transfer.exported import Exported


class Room(NamedTuple):
  """Room for further prompts on a worker.

  Attributes:
    prompts: the number of prompts that fit into its queue.
    needed: the number of further samples that keep all slots busy in `advance`,
      also after sequences have ended.
    slots: the number of samples that it computes at the same time.
  """

  prompts: int
  needed: int
  slots: int


class Worker(Protocol):
  """A rollout in this process, in another process, or on another machine.

  A pool calls a worker from one thread. If a call raises, the pool replaces the
  worker, and its prompts run again. But a ValueError of `submit` means that a
  prompt is not valid, and stops the pool.
  """

  def room(self) -> Room:
    """Returns how many more prompts the worker can take."""
    ...

  def match(self, requests: Requests) -> np.ndarray:
    """Returns the number of cached tokens of each prompt, int32[P].

    `requests` has only tokens, lengths and salts.
    """
    ...

  def submit(self, requests: Requests, ids: list[int]) -> list[bool]:
    """Adds prompts, see `jaxkv.rollout.submit`; returns True for each added."""
    ...

  def advance(self) -> list[PromptSamples]:
    """Generates tokens; removes and returns the prompts that have ended."""
    ...

  def update_weights(
    self, params: Any, version: int, max_age: int | None
  ) -> list[int]:
    """Replaces the weights.

    Args:
      params: the new weights.
      version: the version of the new weights, at least that of the old ones.
      max_age: prompts are removed if an unfinished sample has a token of a
        version before `version - max_age`; None to keep all.

    Returns:
      The ids of the prompts that were removed.
    """
    ...

  def export(self) -> Exported:
    """Removes and returns all sequences, see `jaxkv.rollout.export`."""
    ...

  def import_sequences(self, exported: Exported, ids: list[int]) -> list[int]:
    """Adds the sequences of some prompts.

    Args:
      exported: from `export` of another worker, with weights of the same
        version, or without `max_age` also of an earlier one.
      ids: the ids of the prompts to add; other prompts are ignored.

    Returns:
      The ids of the prompts that entered, with all of their samples.
    """
    ...

  def close(self) -> None:
    """Releases the worker's resources; is also called after a failure.

    It can be called twice, and by another thread during a call that does not
    return when the pool closes or leaves the worker behind.
    """
    ...
