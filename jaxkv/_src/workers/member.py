"""The places of a pool, and what moves between them."""

import contextlib
from typing import NamedTuple

from jaxkv._src.transfer.exported import Exported
from jaxkv._src.workers.prompts import Prompt
from jaxkv._src.workers.routing import Seen
from jaxkv._src.workers.worker import Worker


class MovingPrompts(NamedTuple):
  """Sequences of a worker that was removed.

  Attributes:
    exported: the sequences.
    prompts: their prompts, by id.
    version: the version of the worker's weights.
  """

  exported: Exported
  prompts: dict[int, Prompt]
  version: int


class Member:
  """A place in the pool, which has one worker at a time.

  Attributes:
    worker: the worker; None until there is work, and after a failure.
    seen: the prefixes of the worker.
    prompts: the prompts that run on the worker, by id.
    version: the version of the worker's weights.
    num_failures: the failures of this place since a group last ended there.
    leaves: True after `remove`; the sequences then move to other workers.
  """

  def __init__(self) -> None:
    self.worker: Worker | None = None
    self.seen = Seen()
    self.prompts: dict[int, Prompt] = {}
    self.version = 0
    self.num_failures = 0
    self.leaves = False

  def close(self) -> None:
    """Closes the worker, which may have failed already."""
    worker, self.worker = self.worker, None
    if worker is not None:
      with contextlib.suppress(BaseException):
        worker.close()
