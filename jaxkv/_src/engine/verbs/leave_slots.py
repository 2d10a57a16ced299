"""Removes sequences from slots, between calls of `generate`."""

import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.cache.state import is_empty
from jaxkv._src.cache.verbs.free import free
from jaxkv._src.engine.expert_records import save_experts
from jaxkv._src.engine.pages.preempt import vacate
from jaxkv._src.engine.queue.queue import SequenceStatus
from jaxkv._src.engine.queue.queue import set_status
from jaxkv._src.engine.state import RolloutState
from jaxkv._src.engine.state import replaced


def leave_slots(state: RolloutState, leaving: Array) -> RolloutState:
  """Frees slots, bool[B], and puts their sequences back into the queue.

  Samples that wait to fork a prompt in these slots also return to the queue.
  """
  queue = state.queue
  slots = state.slots
  cache = state.memory.cache
  slot = jnp.arange(slots.size, dtype=jnp.int32)
  leaving |= indexing.take(leaving, slots.leader, fill=False)
  holds = leaving & ~is_empty(cache, slot)
  rows = jnp.where(holds, slots.row, queue.no_row)
  # The expert ids are stored in the pages that are freed below.
  queue = save_experts(queue, state.memory.kv, cache, rows)
  cache, _ = free(cache, mask=holds)
  queue = set_status(queue, slots.row, leaving, SequenceStatus.WAITING)
  slots = vacate(slots, leaving, queue.no_row)
  return replaced(state, queue=queue, slots=slots, cache=cache)
