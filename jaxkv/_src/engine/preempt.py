"""Preempts a running sequence if a slot got no page for its next tokens."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import Status
from jaxkv._src.engine.queue import Queue
from jaxkv._src.engine.queue import SequenceStatus
from jaxkv._src.engine.queue import fail
from jaxkv._src.engine.queue import set_status
from jaxkv._src.engine.slots import Slots
from jaxkv._src.engine.slots import are_computing
from jaxkv._src.engine.slots import places


class Victims(NamedTuple):
  """The sequence to preempt, and the samples that wait to fork from it.

  Attributes:
    is_victim: bool[B], True for the victim's slot; at most one is True.
    leaves: bool[B], True for the victim's slot, and for the slots of samples
      that wait to fork from the victim.
    is_alone: bool[], True if no other sequence of the rollout holds pages. The
      victim then fails, because no page can become free for it.
  """

  is_victim: Array
  leaves: Array
  is_alone: Array


def choose_victim(
  queue: Queue, slots: Slots, cache: CacheState, starved: Array
) -> Victims:
  """Chooses a victim if `starved`, bool[B], is True for any slot.

  The victim has the highest number in `Queue.priority`; among equals, the
  fewest computed tokens; among these, the last place in the queue.
  """
  computing = are_computing(queue, slots)
  candidates = computing
  if queue.priority is not None:
    priority = indexing.take(queue.priority, slots.row)
    priority = jnp.where(candidates, priority, jnp.int32(-(2**31)))
    candidates &= priority == jnp.max(priority)
  length = jnp.where(candidates, cache.length, indexing.NOWHERE)
  candidates &= length == jnp.min(length)
  place = jnp.where(candidates, places(queue, slots), -1)
  # The last sequence in the queue is preempted, so that the first advances.
  slot = jnp.arange(slots.size, dtype=jnp.int32)
  chosen = jnp.argmax(place).astype(jnp.int32)
  is_victim = jnp.any(starved) & (slot == chosen) & candidates
  return Victims(
    is_victim=is_victim,
    leaves=is_victim | (jnp.any(is_victim) & (slots.leader == chosen)),
    is_alone=jnp.sum(computing, dtype=jnp.int32) == 1,
  )


def requeue_victims(queue: Queue, slots: Slots, victims: Victims) -> Queue:
  """Sets sequences that leave to WAITING, or a lone victim to FAILED."""
  rows = slots.row
  queue = set_status(queue, rows, victims.leaves, SequenceStatus.WAITING)
  code = jnp.full_like(rows, Status.OUT_OF_PAGES)
  return fail(queue, rows, victims.is_victim & victims.is_alone, code)


def vacate(slots: Slots, leaves: Array, no_row: int) -> Slots:
  """Empties slots where `leaves`, bool[B], is True; frees no pages."""
  return dataclasses.replace(
    slots,
    row=jnp.where(leaves, no_row, slots.row),
    leader=jnp.where(leaves, slots.no_slot, slots.leader),
  )
