"""The state of a worker of a pool: its prompts, weights and failures."""

import collections
import contextlib
import threading
from collections.abc import Callable

from jaxkv._src.transfer.exported import Exported
from jaxkv._src.workers.prompts import BLOCK
from jaxkv._src.workers.prompts import Prompt
from jaxkv._src.workers.worker import Worker


class WorkerState:
  """The state of a place in the pool, which has one worker at a time.

  Attributes:
    place: the number of the place.
    thread: the thread that calls the worker.
    worker: the worker; None until there is work, and after a failure.
    version: the version of the worker's weights.
    prompts: the prompts that run on the worker, by id.
    cached: the number of cached tokens of waiting prompts, by id.
    num_failures: the failures of this place since a prompt last ended there.
    leaves: True after `remove` and after too many failures; the sequences then
      move to other workers.
    is_left_behind: True if the worker has lost its prompts, because it did not
      export them in time.
  """

  def __init__(self, place: int, serve: Callable[["WorkerState"], None]):
    self.place = place
    self.thread = threading.Thread(target=serve, args=(self,), daemon=True)
    self.worker: Worker | None = None
    self.version = 0
    self.prompts: dict[int, Prompt] = {}
    self.cached: dict[int, int] = {}
    self.num_failures = 0
    self.leaves = False
    self.is_left_behind = False
    # The number of the worker's prompts with each hash of `Prompt.prefixes`.
    self._running: collections.Counter[int] = collections.Counter()

  @property
  def num_samples(self) -> int:
    """The number of samples of the prompts that run on the worker."""
    return sum(prompt.num_samples for prompt in self.prompts.values())

  @property
  def takes_prompts(self) -> bool:
    """True if the place has a worker for new prompts, or is about to get one.

    A place without a worker after a failure may not get one for a long time.
    """
    is_failed = self.worker is None and self.num_failures > 0
    return not self.leaves and not is_failed

  def may_continue(self, exported: Exported, max_age: int | None) -> bool:
    """Returns True if the worker may continue moved sequences."""
    age = self.version - int(exported.version)
    # Under newer weights, tokens could exceed `max_age`. No sequence goes back
    # to older weights.
    return age == 0 or (age > 0 and max_age is None)

  def pause(self, first: float, longest: float) -> float:
    """Returns the seconds to wait, which double with each failure."""
    # Beyond 64 doublings, a float could overflow.
    doublings = min(max(self.num_failures - 1, 0), 64)
    return min(first * 2.0**doublings, longest)

  def add(self, prompt: Prompt) -> None:
    """Adds a prompt, which will run on the worker."""
    self.prompts[prompt.id] = prompt
    self._running.update(prompt.prefixes)

  def pop(self, number: int) -> Prompt:
    """Removes and returns the prompt of an id."""
    prompt = self.prompts.pop(number)
    for prefix in prompt.prefixes:
      self._running[prefix] -= 1
      if not self._running[prefix]:
        del self._running[prefix]
    return prompt

  def num_shared(self, prompt: Prompt) -> int:
    """Returns the number of the prompt's tokens that are or will be cached."""
    count = 0
    for prefix in prompt.prefixes:
      if prefix not in self._running:
        break
      count += BLOCK
    return max(count, self.cached.get(prompt.id, 0))

  def close(self, timeout: float | None = None) -> None:
    """Closes the worker, which may have failed already, or not answer.

    Returns after `timeout` seconds at the latest; None for no limit.
    """
    worker = self.worker
    self.worker = None
    if worker is None:
      return

    def close() -> None:
      with contextlib.suppress(BaseException):
        worker.close()

    thread = threading.Thread(target=close, daemon=True)
    thread.start()
    thread.join(timeout)
