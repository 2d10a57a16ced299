"""Chooses the prompts that a worker takes."""

import math

from jaxkv._src.service.samples import Room
from jaxkv._src.workers.prompts import Prompt
from jaxkv._src.workers.worker_state import WorkerState


def choose(
  waiting: list[Prompt],
  room: Room,
  state: WorkerState,
  peers: list[WorkerState],
) -> list[Prompt]:
  """Returns the prompts that the worker of `state` takes, moved ones first.

  The worker first takes prompts of which no peer has a longer prefix, then
  those with the smallest difference to the longest prefix. If there are peers,
  it takes at most `Room.needed` samples, and for more than its free slots only
  those that remain when the free slots of all peers are filled.
  """

  def rank(prompt: Prompt) -> tuple[bool, int]:
    longest = max((peer.num_shared(prompt) for peer in peers), default=0)
    return prompt.exported is None, max(longest - state.num_shared(prompt), 0)

  chosen = []
  needed = math.inf
  if peers:
    # All workers usually have the same number of slots.
    free = sum(max(room.slots - peer.num_samples, 0) for peer in peers)
    remaining = sum(prompt.num_samples for prompt in waiting) - free
    needed = min(room.needed, max(room.needed - room.slots, remaining))
  # The sort is stable, so ties stay in the order of their arrival.
  for prompt in sorted(waiting, key=rank):
    is_enough = needed <= 0 and prompt.exported is None
    if len(chosen) == room.prompts or is_enough:
      break
    chosen.append(prompt)
    needed -= prompt.num_samples
  return chosen
