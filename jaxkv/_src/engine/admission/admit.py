"""Admits chosen sequences: attaches cached prefixes, and assigns slots.

A sequence enters only if enough pages are free for its next tokens and for the
running sequences, unless it forks from another sample of its prompt, its
leader. `grow` then reserves the pages. No sequence is admitted while a running
one lacks pages.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import loops
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.pool import recurrent
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import Status
from jaxkv._src.cache.state import is_empty
from jaxkv._src.cache.state import is_failure
from jaxkv._src.cache.steps.longest_hit import Prefix
from jaxkv._src.cache.steps.reserve import sum_by_pool
from jaxkv._src.cache.verbs.admit import admit_found
from jaxkv._src.engine.admission.admission_order import choose
from jaxkv._src.engine.admission.admission_order import first_candidates
from jaxkv._src.engine.config import RolloutConfig
from jaxkv._src.engine.queue.queue import Queue
from jaxkv._src.engine.queue.queue import SequenceStatus
from jaxkv._src.engine.queue.queue import fail
from jaxkv._src.engine.queue.queue import first_of
from jaxkv._src.engine.queue.queue import set_status
from jaxkv._src.engine.slots.grow import needed_pages
from jaxkv._src.engine.slots.slots import Slots
from jaxkv._src.engine.slots.slots import are_computing
from jaxkv._src.engine.slots.slots import chunk_size
from jaxkv._src.engine.slots.slots import given_tokens
from jaxkv._src.engine.slots.slots import missing_tokens
from jaxkv._src.engine.state import RolloutState
from jaxkv._src.engine.state import replaced


class Entrants(NamedTuple):
  """The outcome of admission for up to R chosen candidates.

  Attributes:
    rows: int32[R], the row of each in the queue; Q for none.
    slots: int32[R], the empty slot for each; B for none.
    leaders: int32[R], the slot from which each will fork; B for none.
    enters: bool[R], True if the sequence is admitted.
    is_hopeless: bool[R], True if it can never run, for the reason in `code`.
    code: int32[R], the `Status` of the admission.
    candidates: int32[R], the index of each among the waiting candidates.
    waiting: int32[C], the rows of the waiting candidates.
  """

  rows: Array
  slots: Array
  leaders: Array
  enters: Array
  is_hopeless: Array
  code: Array
  candidates: Array
  waiting: Array


def empty_slots(queue: Queue, slots: Slots, cache: CacheState) -> Array:
  """Returns bool[B], slots without a sequence and without pages."""
  # A `Memory` that `score` receives may have slots in use.
  slot = jnp.arange(slots.size, dtype=jnp.int32)
  return (slots.row == queue.no_row) & is_empty(cache, slot)


@jax.named_scope("admit")
def admit(state: RolloutState) -> RolloutState:
  """Admits waiting sequences, if a slot is empty and pages are free."""
  config = state.config

  def admit_some(state: RolloutState) -> RolloutState:
    queue, slots, cache = state.queue, state.slots, state.memory.cache
    cache, entrants = _attach_prefixes(queue, slots, cache, config)
    queue, slots = _enter(queue, slots, entrants, cache.epoch)
    return replaced(state, queue=queue, slots=slots, cache=cache)

  # Most steps admit nothing. `lax.cond` would copy the state; a loop does not.
  is_possible = _can_admit(state.queue, state.slots, state.memory.cache, config)
  with jax.named_scope("rare/enter"):
    return loops.at_most_once(is_possible, admit_some, state)


def _can_admit(
  queue: Queue, slots: Slots, cache: CacheState, config: RolloutConfig
) -> Array:
  """Returns bool[], False if no sequence can be admitted in this step."""
  waits = jnp.any(queue.status == SequenceStatus.WAITING)
  needed = needed_pages(queue, slots, cache, config)
  fits = jnp.all(needed <= cache.pool.queue.num_free)
  return fits & waits & jnp.any(empty_slots(queue, slots, cache))


def _attach_prefixes(
  queue: Queue,
  slots: Slots,
  cache: CacheState,
  config: RolloutConfig,
) -> tuple[CacheState, Entrants]:
  """Attaches the cached prefixes of candidates that get enough pages."""
  waiting = first_candidates(queue, slots, cache, config)
  empty = empty_slots(queue, slots, cache)
  num_empty = jnp.sum(empty, dtype=jnp.int32)
  chosen = choose(queue, waiting, slots.size, num_empty, config)
  row = jnp.arange(chosen.candidates.shape[0], dtype=jnp.int32)
  target_slots = first_of(empty, row.shape[0])
  rows = indexing.take(waiting.rows, chosen.candidates, fill=queue.no_row)
  exists = (rows < queue.no_row) & (target_slots < slots.no_slot)
  follows_slot = exists & (chosen.slot_of_leader < slots.no_slot)
  is_leader = exists & ~follows_slot & (chosen.row_of_leader == row)
  prefix = Prefix(*(indexing.take(x, chosen.candidates) for x in waiting.found))
  length = given_tokens(queue, rows)
  at_once = jnp.minimum(length, chunk_size(cache.config, config))
  num_running = jnp.sum(slots.row < queue.no_row, dtype=jnp.int32)
  # The reserve is one page per group for each running or chosen sequence. If
  # admission took the last pages, a sequence would soon be preempted.
  num_sequences = num_running + jnp.cumsum(exists, dtype=jnp.int32)
  reserve = num_sequences[:, None] * groups_by_pool(cache.config)
  reserve = jnp.where((num_running + row > 0)[:, None], reserve, 0)
  promised = promised_pages(queue, slots, cache, config)[None]
  later = _pages_after_chunk(cache.config, length, prefix, at_once, config)
  later = jnp.where(is_leader[:, None], later, 0)
  later = jnp.cumsum(later, axis=0, dtype=jnp.int32)
  cache, admitted = admit_found(
    cache,
    target_slots,
    length,
    lambda _: prefix,
    max_length=queue.width,
    skipped=~is_leader,
    pops=False,
    num_tokens=at_once,
    keep_free=promised + later + reserve,
    shared_tokens=indexing.take(waiting.shared_tokens, chosen.candidates),
  )
  # A sample is admitted only if its leader is.
  follows = exists & ~follows_slot & (chosen.row_of_leader != row)
  follows &= indexing.take(admitted.ok, chosen.row_of_leader)
  leader = jnp.where(follows_slot, chosen.slot_of_leader, slots.no_slot)
  leader = jnp.where(
    follows, indexing.take(target_slots, chosen.row_of_leader), leader
  )
  enters = admitted.ok | follows | follows_slot
  # A lack of pages is final only for the first chosen candidate while no
  # sequence runs, because this candidate could then use every page.
  is_alone = ~jnp.any(enters) & (num_running == 0) & (row == 0)
  is_hopeless = is_failure(admitted.code) & (
    is_alone | (admitted.code != Status.OUT_OF_PAGES)
  )
  return cache, Entrants(
    rows=rows,
    slots=target_slots,
    leaders=leader,
    enters=enters,
    is_hopeless=is_hopeless,
    code=admitted.code,
    candidates=chosen.candidates,
    waiting=waiting.rows,
  )


def _enter(
  queue: Queue, slots: Slots, entrants: Entrants, epoch: Array
) -> tuple[Queue, Slots]:
  """Seats entrants, counts whom they overtake, and fails hopeless rows."""
  rows, enters = entrants.rows, entrants.enters
  # The status comes first: `overtaken` changes only in rows that still wait.
  queue = set_status(queue, rows, enters, SequenceStatus.RUNNING)
  queue = _clear_stale_keys(queue, rows, enters, epoch)
  entered = jnp.where(enters, entrants.candidates, -1)
  position = jnp.arange(entrants.waiting.shape[0], dtype=jnp.int32)
  passed = jnp.sum(entered[None] > position[:, None], axis=1, dtype=jnp.int32)
  status = indexing.take(
    queue.status, entrants.waiting, fill=SequenceStatus.DONE
  )
  is_waiting = status == SequenceStatus.WAITING
  target_rows = indexing.where_valid(is_waiting, entrants.waiting)
  overtaken = indexing.add(queue.overtaken, target_rows, values=passed)
  queue = dataclasses.replace(queue, overtaken=overtaken)
  queue = fail(queue, rows, entrants.is_hopeless, entrants.code)
  target_slots = indexing.where_valid(enters, entrants.slots)
  slots = Slots(
    row=indexing.put(slots.row, target_slots, values=rows),
    leader=indexing.put(slots.leader, target_slots, values=entrants.leaders),
  )
  return queue, slots


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


def promised_pages(
  queue: Queue, slots: Slots, cache: CacheState, config: RolloutConfig
) -> Array:
  """Returns int32[P]: the pages to keep free for running sequences."""
  in_step = needed_pages(queue, slots, cache, config)
  if not cache.config.skips_pages:
    return in_step
  length = indexing.take(queue.length, slots.row)
  needed = pages_at_once(cache.config, length, config)
  # A sequence whose prompt is computed never has a chunk in flight again.
  in_decode = max(config.decode_steps, 1 + config.draft_tokens)
  is_decoding = missing_tokens(queue, slots, cache) <= 1
  needed = jnp.where(
    is_decoding[:, None],
    jnp.minimum(needed, _most_pages(cache.config, in_decode)),
    needed,
  )
  needed = jnp.where(are_computing(queue, slots)[:, None], needed, 0)
  num_held_pages = held_pages(cache)
  later = jnp.maximum(needed - num_held_pages, 0)
  later = jnp.sum(sum_by_pool(cache.config, later), axis=0, dtype=jnp.int32)
  return jnp.maximum(in_step, later)


def held_pages(cache: CacheState) -> Array:
  """Returns int32[B, G]: the pages of each slot, without null pages."""
  # Columns behind a window hold the null page, which is not allocated.
  num_columns = cache.num_pages - cache.num_skipped_pages
  if not recurrent.has_states(cache.config):
    return num_columns
  # Between the last state at a page end and the running state, too.
  holds_states = recurrent.holds_states(cache.config)
  return jnp.where(holds_states, jnp.minimum(num_columns, 2), num_columns)


def groups_by_pool(cache_config: CacheConfig) -> Array:
  """Returns int32[1, P]: the number of groups of each pool."""
  counts = [len(groups) for groups in cache_config.groups_of_pools]
  return jnp.asarray([counts], jnp.int32)


def _pages_after_chunk(
  cache_config: CacheConfig,
  length: Array,
  prefix: Prefix,
  at_once: Array,
  config: RolloutConfig,
) -> Array:
  """Returns int32[R, P]: the pages to keep free for later chunks."""
  if not cache_config.skips_pages:
    return jnp.zeros((*length.shape, cache_config.num_pools), jnp.int32)
  first_length = jnp.minimum(prefix.num_cached_tokens + at_once, length)
  later = pages_at_once(cache_config, length, config)
  later -= pages_at_once(cache_config, first_length, config)
  return sum_by_pool(cache_config, later)


def pages_at_once(
  cache_config: CacheConfig, length: Array, config: RolloutConfig
) -> Array:
  """Returns the most pages that sequences of a length hold, int32[R, G]."""
  columns = cache_config.sizes.columns_for(length)
  most_in_flight = chunk_size(cache_config, config) + config.decode_steps - 1
  return jnp.minimum(columns, _most_pages(cache_config, most_in_flight))


def _most_pages(cache_config: CacheConfig, in_flight: int) -> Array:
  """Returns the most pages of a sequence with tokens in flight, int32[1, G]."""
  limits = cache_config.sizes.max_pages(in_flight, cache_config.slot_tokens)
  return jnp.asarray(limits, jnp.int32)[None]
