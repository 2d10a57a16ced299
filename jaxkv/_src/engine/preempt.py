"""Preempts one running sequence if any of them got no page."""

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
    is_victim: bool[B], at most one slot.
    leaves: bool[B], the victim, and the samples that wait for its prompt.
    is_alone: bool[], True if no other sequence holds pages. More pages can then
      never become free, so the victim fails.
  """

  is_victim: Array
  leaves: Array
  is_alone: Array


def choose_victim(
  queue: Queue, slots: Slots, cache: CacheState, starved: Array
) -> Victims:
  """Chooses a victim if a slot in `starved`, bool[B], got no page.

  The victim has the lowest priority, then the fewest computed tokens, then the
  last place in the queue.
  """
  computing = are_computing(queue, slots)
  candidates = computing
  if queue.priority is not None:
    priority = indexing.take(queue.priority, slots.row)
    priority = jnp.where(candidates, priority, jnp.int32(-(2**31)))
    candidates &= priority == jnp.max(priority)
  # This choice minimizes the tokens to compute again.
  length = jnp.where(candidates, cache.length, indexing.NOWHERE)
  candidates &= length == jnp.min(length)
  place = jnp.where(candidates, places(queue, slots), -1)
  # Of equal sequences the last one leaves, so the first one always advances.
  slot = jnp.arange(slots.size, dtype=jnp.int32)
  chosen = jnp.argmax(place).astype(jnp.int32)
  is_victim = jnp.any(starved) & (slot == chosen) & candidates
  return Victims(
    is_victim=is_victim,
    leaves=is_victim | (jnp.any(is_victim) & (slots.leader == chosen)),
    is_alone=jnp.sum(computing, dtype=jnp.int32) == 1,
  )


def requeue_victims(queue: Queue, slots: Slots, victims: Victims) -> Queue:
  """Puts victims back into the queue; a victim that is alone fails instead."""
  rows = slots.row
  queue = set_status(queue, rows, victims.leaves, SequenceStatus.WAITING)
  code = jnp.full_like(rows, Status.OUT_OF_PAGES)
  return fail(queue, rows, victims.is_victim & victims.is_alone, code)


def vacate(slots: Slots, leaves: Array, no_row: int) -> Slots:
  """Removes the sequences of slots bool[B]; the caller frees their pages."""
  return dataclasses.replace(
    slots,
    row=jnp.where(leaves, no_row, slots.row),
    leader=jnp.where(leaves, slots.no_slot, slots.leader),
  )
