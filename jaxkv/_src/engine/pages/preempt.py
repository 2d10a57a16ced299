"""Preempts a running sequence if a slot got no page for its next tokens."""

import dataclasses

import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.cache.state import Status
from jaxkv._src.engine.queue.queue import SequenceStatus
from jaxkv._src.engine.queue.queue import fail
from jaxkv._src.engine.queue.queue import set_status
from jaxkv._src.engine.slots import Slots
from jaxkv._src.engine.slots import are_computing
from jaxkv._src.engine.state import RolloutState
from jaxkv._src.engine.state import replaced


def preempt(state: RolloutState, starved: Array) -> tuple[RolloutState, Array]:
  """Preempts one sequence if `starved`, bool[B], is True for any slot.

  The victim has the highest number in `Queue.priority`; among equals, the
  fewest computed tokens; among these, the last in the queue. It returns
  to the queue, with the samples that wait to fork from it. If all other slots
  are empty or wait to fork, no page can become free, and the victim fails.

  Returns:
    The state; int32[B], the row of the victim in its slot, whose pages are
    still to be freed, and Q elsewhere.
  """
  queue, slots, cache = state.queue, state.slots, state.memory.cache
  computing = are_computing(queue, slots)
  candidates = computing
  if queue.priority is not None:
    priority = indexing.take(queue.priority, slots.row)
    priority = jnp.where(candidates, priority, jnp.int32(-(2**31)))
    candidates &= priority == jnp.max(priority)
  length = jnp.where(candidates, cache.length, indexing.NOWHERE)
  candidates &= length == jnp.min(length)
  queue_position = jnp.where(
    candidates, indexing.take(queue.place, slots.row), -1
  )
  # The last sequence in the queue is preempted, so that the first advances.
  slot = jnp.arange(slots.size, dtype=jnp.int32)
  chosen = jnp.argmax(queue_position).astype(jnp.int32)
  is_victim = jnp.any(starved) & (slot == chosen) & candidates
  leaves = is_victim | (jnp.any(is_victim) & (slots.leader == chosen))
  is_alone = jnp.sum(computing, dtype=jnp.int32) == 1
  queue = set_status(queue, slots.row, leaves, SequenceStatus.WAITING)
  code = jnp.full_like(slots.row, Status.OUT_OF_PAGES)
  queue = fail(queue, slots.row, is_victim & is_alone, code)
  row = jnp.where(is_victim, slots.row, queue.no_row)
  # A victim that fails is not counted.
  num_preempted = jnp.sum(is_victim & ~is_alone, dtype=jnp.int32)
  counters = state.counters
  counters = dataclasses.replace(
    counters, preempted=counters.preempted + num_preempted
  )
  slots = vacate(slots, leaves, queue.no_row)
  state = replaced(state, queue=queue, slots=slots, counters=counters)
  return state, row


def vacate(slots: Slots, leaves: Array, no_row: int) -> Slots:
  """Empties slots where `leaves`, bool[B], is True; frees no pages."""
  return dataclasses.replace(
    slots,
    row=jnp.where(leaves, no_row, slots.row),
    leader=jnp.where(leaves, slots.no_slot, slots.leader),
  )
