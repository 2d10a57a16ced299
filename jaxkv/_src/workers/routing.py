"""Chooses the prompts that a worker takes."""

import collections
import dataclasses
import math

from jaxkv._src.workers.prompts import BLOCK
from jaxkv._src.workers.prompts import Prompt
from jaxkv._src.workers.worker import Room


@dataclasses.dataclass
class Seen:
  """The prefixes that a worker has, as far as the pool knows.

  Attributes:
    cached: the number of cached tokens of waiting prompts, by the prompt's id.
    running: the number of the worker's prompts with each hash of
      `Prompt.prefixes`.
  """

  cached: dict[int, int] = dataclasses.field(default_factory=dict)
  running: collections.Counter[int] = dataclasses.field(
    default_factory=collections.Counter
  )

  def forget(self, prompt: Prompt) -> None:
    """Removes a prompt from `running`."""
    self.running.subtract(prompt.prefixes)
    for prefix in prompt.prefixes:
      if not self.running[prefix]:
        del self.running[prefix]

  def num_shared(self, prompt: Prompt) -> int:
    """Returns the number of the prompt's tokens that are or will be cached."""
    count = 0
    for prefix in prompt.prefixes:
      if not self.running[prefix]:
        break
      count += BLOCK
    return max(count, self.cached.get(prompt.id, 0))


def choose(
  waiting: list[Prompt], room: Room, seen: Seen, others: list[Seen]
) -> list[Prompt]:
  """Returns the prompts that a worker takes, and counts them as running.

  The worker first takes prompts of which no other worker has a longer prefix,
  then those with the smallest difference to the longest prefix. If there are
  other workers, it stops at `Room.needed` samples, so that each gets a share.
  """
  chosen, later = [], []
  needed = room.needed if others else math.inf
  for prompt in waiting:
    if len(chosen) == room.prompts or needed <= 0:
      return chosen
    own = seen.num_shared(prompt)
    best = max((other.num_shared(prompt) for other in others), default=0)
    if own >= best:
      chosen.append(prompt)
      seen.running.update(prompt.prefixes)
      needed -= prompt.num_samples
    else:
      later.append((best - own, prompt))
  # The sort is stable, so ties stay in the order of their arrival.
  later.sort(key=lambda pair: pair[0])
  for _, prompt in later:
    if len(chosen) == room.prompts or needed <= 0:
      break
    chosen.append(prompt)
    seen.running.update(prompt.prefixes)
    needed -= prompt.num_samples
  return chosen
