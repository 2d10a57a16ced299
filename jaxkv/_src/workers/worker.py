"""The worker of a pool, as a protocol."""

from collections.abc import Sequence
from typing import Any
from typing import Protocol

import numpy as np

from jaxkv._src.engine.queue.requests import Requests
from jaxkv._src.service.samples import PromptSamples
from jaxkv._src.service.samples import Room
from jaxkv._src.transfer.exported import Exported


class Worker(Protocol):
  """The methods of a `jaxkv.rollout.Engine` that a pool calls.

  The engine may be in this process, in another process, or on another machine.
  A pool calls a worker from one thread. If a call raises, the pool replaces the
  worker, and its prompts run again. But a ValueError of `submit` means that a
  prompt is not valid, and stops the pool.
  """

  def room(self) -> Room:
    """Returns the room for further prompts."""
    ...

  def match(self, prompts: Requests) -> np.ndarray:
    """Returns the number of cached tokens of each prompt, int32[P].

    `prompts` has only tokens, lengths and salts.
    """
    ...

  def submit(self, prompts: Requests, *, ids: Sequence[int]) -> np.ndarray:
    """Adds prompts; returns the id of each, or -1 if there was no room."""
    ...

  def step(self, steps: int | None = None) -> int:
    """Generates tokens with at most `steps` calls of the model."""
    ...

  def harvest(self) -> list[PromptSamples]:
    """Removes and returns the prompts that have ended."""
    ...

  def weights_digest(self) -> tuple[int, ...]:
    """Returns a digest of the weights."""
    ...

  def update_weights(
    self, params: Any, *, version: int, max_age: int | None
  ) -> list[int]:
    """Replaces the weights; returns the ids of removed prompts."""
    ...

  def export(self) -> Exported:
    """Removes and returns all sequences."""
    ...

  def import_sequences(
    self, exported: Exported, ids: Sequence[int]
  ) -> list[int]:
    """Adds the sequences of prompts; returns the ids of those that entered."""
    ...

  def close(self) -> None:
    """Releases the worker's resources.

    Is also called after a failure; twice; and by another thread during a call
    that does not return.
    """
    ...
