"""Chooses the prompts that a worker takes."""

import math

from jaxkv._src.workers.member import Member
from jaxkv._src.workers.prompts import Prompt
from jaxkv._src.workers.worker import Room


def choose(
  waiting: list[Prompt], room: Room, member: Member, peers: list[Member]
) -> list[Prompt]:
  """Returns the prompts that the worker of `member` takes, moved ones first.

  The worker first takes prompts of which no peer has a longer prefix, then
  those with the smallest difference to the longest prefix. If there are peers,
  it stops at `Room.needed` samples, so that each gets a share.
  """

  def rank(prompt: Prompt) -> tuple[bool, int]:
    longest = max((peer.num_shared(prompt) for peer in peers), default=0)
    missing = max(longest - member.num_shared(prompt), 0)
    return prompt.exported is None, missing

  chosen, needed = [], room.needed if peers else math.inf
  # The sort is stable, so ties stay in the order of their arrival.
  for prompt in sorted(waiting, key=rank):
    is_enough = needed <= 0 and prompt.exported is None
    if len(chosen) == room.prompts or is_enough:
      break
    chosen.append(prompt)
    needed -= int(prompt.requests.num_samples[0])
  return chosen
