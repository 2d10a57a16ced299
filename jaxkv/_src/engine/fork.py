"""Forks the samples of a prompt from the leader that computed the prompt."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import loops
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.verbs.fork import owed_copies
from jaxkv._src.cache.verbs.fork import share_prefix
from jaxkv._src.engine.given_log_probs import copy_recorded
from jaxkv._src.engine.memory import Memory
from jaxkv._src.engine.queue import Queue
from jaxkv._src.engine.queue import SequenceStatus
from jaxkv._src.engine.queue import set_status
from jaxkv._src.engine.slots import Slots
from jaxkv._src.engine.slots import prompt_rest
from jaxkv._src.kv.pools import Pools
from jaxkv._src.kv.pools import copy as copy_pages


def ready_forks(queue: Queue, slots: Slots, cache: CacheState) -> Array:
  """Returns bool[B], slots whose leader has computed all but one prompt token.

  Each sample computes the last prompt token itself, to get the logits from
  which its first token is sampled.
  """
  num_prompt_tokens = prompt_rest(queue, slots, cache)
  return indexing.take(num_prompt_tokens, slots.leader, fill=1) == 0


def share_full_pages(
  slots: Slots, cache: CacheState, is_ready: Array
) -> tuple[Slots, CacheState]:
  """Shares full pages of prompts with slots in `is_ready`, bool[B].

  These slots no longer have a leader.
  """
  slot = jnp.arange(slots.size, dtype=jnp.int32)

  def share(cache: CacheState) -> CacheState:
    return share_prefix(cache, slots.leader, slot, is_ready)

  # Most steps fork nothing. `lax.cond` would copy the cache; a loop does not.
  with jax.named_scope("rare/share"):
    cache = loops.at_most_once(jnp.any(is_ready), share, cache)
  leader = jnp.where(is_ready, slots.no_slot, slots.leader)
  return dataclasses.replace(slots, leader=leader), cache


def copy_partial_pages(
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


def count_forked(
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
