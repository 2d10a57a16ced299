"""Forks the samples of a prompt from the leader that computed the prompt."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import loops
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import is_empty
from jaxkv._src.cache.verbs.fork import owed_copies
from jaxkv._src.cache.verbs.fork import share_prefix
from jaxkv._src.engine.memory import Memory
from jaxkv._src.engine.queue.queue import Queue
from jaxkv._src.engine.queue.queue import SequenceStatus
from jaxkv._src.engine.queue.queue import copy_recorded
from jaxkv._src.engine.queue.queue import set_status
from jaxkv._src.engine.slots import Slots
from jaxkv._src.engine.slots import prompt_rest
from jaxkv._src.engine.state import RolloutState
from jaxkv._src.engine.state import replaced
from jaxkv._src.kv.pools import Pools
from jaxkv._src.kv.pools import copy as copy_pages


class Forks(NamedTuple):
  """The slots that fork in a step.

  Attributes:
    mask: bool[B], True for a slot that forks.
    leaders: int32[B], the slot from which each forks; B for none.
  """

  mask: Array
  leaders: Array


@jax.named_scope("fork")
def share_full_pages(state: RolloutState) -> tuple[RolloutState, Forks]:
  """Shares full pages of prompts with slots whose leader has computed them.

  Each sample computes the last prompt token itself, to get the logits from
  which its first token is sampled. Slots that fork no longer have a leader.
  """
  queue, slots, cache = state.queue, state.slots, state.memory.cache
  if state.config.num_samples == 1:
    never = jnp.zeros(slots.row.shape, bool)
    return state, Forks(never, slots.leader)
  num_left = prompt_rest(queue, slots, cache)
  is_ready = indexing.take(num_left, slots.leader, fill=1) == 0
  slot = jnp.arange(slots.size, dtype=jnp.int32)

  def share(cache: CacheState) -> CacheState:
    return share_prefix(cache, slots.leader, slot, is_ready)

  # Most steps fork nothing. `lax.cond` would copy the cache; a loop does not.
  with jax.named_scope("rare/share"):
    cache = loops.at_most_once(jnp.any(is_ready), share, cache)
  leader = jnp.where(is_ready, slots.no_slot, slots.leader)
  forked_slots = dataclasses.replace(slots, leader=leader)
  state = replaced(state, slots=forked_slots, cache=cache)
  return state, Forks(is_ready, slots.leader)


def complete_forks(
  state: RolloutState, forks: Forks, starved: Array
) -> tuple[RolloutState, Array]:
  """Completes the forks with pages; the others return to the queue.

  Slots in `starved`, bool[B], got no page.

  Returns:
    The state; bool[B], slots that are emptied and still hold pages.
  """
  if state.config.num_samples == 1:
    return state, jnp.zeros_like(starved)
  queue, slots, memory = state.queue, state.slots, state.memory
  forked = forks.mask & ~starved
  refused = forks.mask & starved
  slot = jnp.arange(slots.size, dtype=jnp.int32)
  holds_pages = refused & ~is_empty(memory.cache, slot)
  queue = _count_forked(
    queue, slots, memory.cache, forks.leaders, forked, refused
  )
  memory = _copy_partial_pages(memory, forks.leaders, forked, refused)
  row = jnp.where(refused, queue.no_row, slots.row)
  num_forked = jnp.sum(forked, dtype=jnp.int32)
  counters = state.counters
  state = replaced(
    state,
    queue=queue,
    slots=dataclasses.replace(slots, row=row),
    memory=memory,
    counters=dataclasses.replace(counters, forked=counters.forked + num_forked),
  )
  return state, holds_pages


def _copy_partial_pages(
  memory: Memory, leaders: Array, forked: Array, refused: Array
) -> Memory:
  """Copies the partly full page of a prompt to the slots in `forked`, bool[B].

  `leaders`, int32[B], are the slots that they forked from. Slots in `refused`,
  bool[B], get the length 0.
  """
  cache = memory.cache
  slot = jnp.arange(cache.config.num_slots, dtype=jnp.int32)

  def copy(kv: Pools) -> Pools:
    return copy_pages(kv, *owed_copies(cache, leaders, slot, forked))

  with jax.named_scope("rare/copy"):
    kv = loops.at_most_once(jnp.any(forked), copy, memory.kv)
  # `share_prefix` set the length of every fork. A refused fork leaves its slot,
  # and an empty slot must have length 0.
  cache = dataclasses.replace(cache, length=jnp.where(refused, 0, cache.length))
  return dataclasses.replace(memory, cache=cache, kv=kv)


def _count_forked(
  queue: Queue,
  slots: Slots,
  cache: CacheState,
  leaders: Array,
  forked: Array,
  refused: Array,
) -> Queue:
  """Records the shared tokens in the rows of forks; requeues refused forks.

  Slots in `forked`, bool[B], forked from `leaders`, int32[B]. Those in
  `refused`, bool[B], got no page.
  """
  target_rows = indexing.where_valid(forked, slots.row)
  source_rows = indexing.take(slots.row, leaders, fill=queue.no_row)
  queue = copy_recorded(queue, target_rows, source_rows)
  # If a fork is preempted and resumes, shared tokens then count as recomputed.
  computed = indexing.put(queue.computed, target_rows, values=cache.length)
  queue = dataclasses.replace(queue, computed=computed)
  return set_status(queue, slots.row, refused, SequenceStatus.WAITING)
