"""Admits chosen sequences: attaches cached prefixes, and assigns slots.

A sequence enters only if enough pages are free for its next tokens and for the
running sequences, unless it forks from another sample of its prompt, its
leader. `grow` then reserves the pages. No sequence is admitted while a running
one lacks pages.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import loops
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import Status
from jaxkv._src.cache.state import is_empty
from jaxkv._src.cache.state import is_failure
from jaxkv._src.cache.steps.reserve import sum_by_pool
from jaxkv._src.cache.verbs.admit import admit_found
from jaxkv._src.engine.admission.admission_order import choose
from jaxkv._src.engine.admission.admission_order import first_candidates
from jaxkv._src.engine.config import RolloutConfig
from jaxkv._src.engine.pages.grow import groups_by_pool
from jaxkv._src.engine.pages.grow import needed_pages
from jaxkv._src.engine.pages.grow import pages_at_once
from jaxkv._src.engine.pages.grow import promised_pages
from jaxkv._src.engine.queue.queue import Queue
from jaxkv._src.engine.queue.queue import SequenceStatus
from jaxkv._src.engine.queue.queue import fail
from jaxkv._src.engine.queue.queue import first_of
from jaxkv._src.engine.queue.queue import set_status
from jaxkv._src.engine.slots import Slots
from jaxkv._src.engine.slots import chunk_size
from jaxkv._src.engine.slots import given_tokens
from jaxkv._src.engine.state import RolloutState
from jaxkv._src.engine.state import replaced


@jax.named_scope("admit")
def admit(state: RolloutState) -> RolloutState:
  """Admits waiting sequences, if a slot is empty and pages are free."""
  queue, slots, cache = state.queue, state.slots, state.memory.cache
  empty = empty_slots(queue, slots, cache)
  needed = needed_pages(queue, slots, cache, state.config)
  is_possible = jnp.any(queue.status == SequenceStatus.WAITING)
  is_possible &= jnp.any(empty) & jnp.all(needed <= cache.pool.queue.num_free)
  # Most steps admit nothing. `lax.cond` would copy the state; a loop does not.
  with jax.named_scope("rare/enter"):
    return loops.at_most_once(
      is_possible, lambda state: _admit_some(state, empty, needed), state
    )


def empty_slots(queue: Queue, slots: Slots, cache: CacheState) -> Array:
  """Returns bool[B], slots without a sequence and without pages."""
  # A `Memory` that `score` receives may have slots in use.
  slot = jnp.arange(slots.size, dtype=jnp.int32)
  return (slots.row == queue.no_row) & is_empty(cache, slot)


def _admit_some(
  state: RolloutState, empty: Array, needed: Array
) -> RolloutState:
  """Admits sequences to the slots `empty`, bool[B].

  `needed`, int32[P], are the pages that running sequences need in this step.
  """
  queue, slots, cache = state.queue, state.slots, state.memory.cache
  config = state.config
  waiting = first_candidates(queue, slots, cache, config)
  target_slots = first_of(empty, min(config.admissions, slots.size))
  chosen, leaders = choose(queue, waiting, target_slots, slots.no_slot, config)
  rows = indexing.take(waiting.rows, chosen, fill=queue.no_row)
  # Others hold no pages until they fork.
  computes = (rows < queue.no_row) & (leaders == target_slots)
  prefixes, shared_tokens = jax.tree.map(
    lambda values: values.at[chosen].get(mode="clip"),
    (waiting.found, waiting.shared_tokens),
  )
  runs = slots.row < queue.no_row
  length = given_tokens(queue, rows)
  at_once = jnp.minimum(length, chunk_size(cache.config, config))
  keep_free = promised_pages(queue, slots, cache, needed, config)[None]
  keep_free += _pages_of_entrants(
    cache.config,
    num_running=jnp.sum(runs, dtype=jnp.int32),
    computes=computes,
    length=length,
    first_length=jnp.minimum(prefixes.num_cached_tokens + at_once, length),
    config=config,
  )
  cache, admitted = admit_found(
    cache,
    target_slots,
    length,
    lambda _: prefixes,
    max_length=queue.width,
    skipped=~computes,
    pops=False,
    num_tokens=at_once,
    keep_free=keep_free,
    shared_tokens=shared_tokens,
  )
  # A sample that forks is admitted only if its leader is.
  is_running = indexing.put(runs, target_slots, values=admitted.ok)
  enters = indexing.take(is_running, leaders, fill=False)
  # A lack of pages is final only for the first chosen candidate while no
  # sequence runs, because this candidate could then use every page.
  is_final = ~jnp.any(is_running) & (chosen == chosen[0])
  is_final |= admitted.code != Status.OUT_OF_PAGES
  queue = set_status(queue, rows, enters, SequenceStatus.RUNNING)
  queue = _clear_stale_keys(queue, rows, enters, cache.epoch)
  queue = _count_overtaken(queue, waiting.rows, jnp.where(enters, chosen, -1))
  queue = fail(queue, rows, is_failure(admitted.code) & is_final, admitted.code)
  leaders = jnp.where(computes, slots.no_slot, leaders)
  target_slots = indexing.where_valid(enters, target_slots)
  slots = Slots(
    row=indexing.put(slots.row, target_slots, values=rows),
    leader=indexing.put(slots.leader, target_slots, values=leaders),
  )
  return replaced(state, queue=queue, slots=slots, cache=cache)


def _pages_of_entrants(
  cache_config: CacheConfig,
  *,
  num_running: Array,
  computes: Array,
  length: Array,
  first_length: Array,
  config: RolloutConfig,
) -> Array:
  """Returns int32[R, P]: the pages to keep free after each entrant's.

  The entrants in `computes`, bool[R], compute `first_length` of `length`
  tokens, int32[R] each, in their first step.
  """
  index = jnp.arange(length.shape[0], dtype=jnp.int32)
  # One page per group for each running or chosen sequence, unless it is alone.
  # If admission took the last pages, a sequence would soon be preempted.
  num_sequences = num_running + index + 1
  num_sequences = jnp.where(num_sequences > 1, num_sequences, 0)
  reserve = num_sequences[:, None] * groups_by_pool(cache_config)
  if not cache_config.skips_pages:
    return reserve
  later = pages_at_once(cache_config, length, config)
  later -= pages_at_once(cache_config, first_length, config)
  later = sum_by_pool(cache_config, later)
  later = jnp.where(computes[:, None], later, 0)
  return reserve + jnp.cumsum(later, axis=0, dtype=jnp.int32)


def _count_overtaken(queue: Queue, waiting: Array, entered: Array) -> Queue:
  """Counts the later sequences that overtake rows `waiting`, int32[X].

  `entered`, int32[R], are the indices of those that enter; -1 for none.
  """
  index = jnp.arange(waiting.shape[0], dtype=jnp.int32)[:, None]
  count = jnp.sum(entered[None] > index, axis=1, dtype=jnp.int32)
  stays = ~jnp.any(entered[None] == index, axis=1)
  target_rows = indexing.where_valid(stays, waiting)
  overtaken = indexing.add(queue.overtaken, target_rows, values=count)
  return dataclasses.replace(queue, overtaken=overtaken)


def _clear_stale_keys(
  queue: Queue, rows: Array, enters: Array, epoch: Array
) -> Queue:
  """Clears page keys of other epochs in rows that enter; sets their epochs."""
  is_stale = enters & (indexing.take(queue.epochs, rows) != epoch)
  keys = queue.page_keys
  if keys is not None:
    stale_rows = indexing.where_valid(is_stale, rows)
    keys = indexing.put(keys, stale_rows, values=jnp.uint32(0))
  target_rows = indexing.where_valid(enters, rows)
  epochs = indexing.put(queue.epochs, target_rows, values=epoch)
  return dataclasses.replace(queue, page_keys=keys, epochs=epochs)
