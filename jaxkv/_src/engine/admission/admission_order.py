"""Ranks waiting sequences and chooses those that are admitted in a step.

Waiting sequences are sorted by priority, then by id. In a window at the front
of the queue, sequences of equal priority are admitted by the length of their
cached prefixes, longest first, because prefixes may be evicted. Two exceptions:

- A sequence stays in the queue while another sequence computes its next page.
- A sequence that was overtaken `max_overtaken` times precedes all others.

Samples of a prompt enter free slots together. One of them, the leader, computes
the prompt. The others hold no pages until they fork from it.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv._src.arrays import elementwise
from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import sharding
from jaxkv._src.cache.prefix import hashing
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import roots
from jaxkv._src.cache.steps.longest_hit import Prefix
from jaxkv._src.cache.steps.longest_hit import find_prefix
from jaxkv._src.engine.admission.shared_states import shared_states
from jaxkv._src.engine.config import RolloutConfig
from jaxkv._src.engine.queue.queue import Queue
from jaxkv._src.engine.queue.queue import SequenceStatus
from jaxkv._src.engine.queue.queue import first_of
from jaxkv._src.engine.slots.slots import Slots
from jaxkv._src.engine.slots.slots import are_computing
from jaxkv._src.engine.slots.slots import given_tokens
from jaxkv._src.engine.slots.slots import prompt_rest


class Candidates(NamedTuple):
  """The first X <= `RolloutConfig.window` waiting sequences, in queue order.

  Attributes:
    rows: int32[X], the row of each in the queue; Q for none.
    found: the cached prefix of each.
    is_blocked: bool[X], True if a slot computes the candidate's next page.
    needs_page_of: bool[X, X], True if candidate j would compute the next page
      of candidate i.
    siblings: bool[X, X], True if candidates i and j are fresh samples of one
      prompt, see `_siblings`.
    slot_of_leader: int32[X], a slot from which each can fork; B for none.
    shared_tokens: int32[X, 2], see `jaxkv.admit`.
  """

  rows: Array
  found: Prefix
  is_blocked: Array
  needs_page_of: Array
  siblings: Array
  slot_of_leader: Array
  shared_tokens: Array


class Chosen(NamedTuple):
  """Up to R candidates, in admission order; see `choose`.

  Attributes:
    candidates: int32[R], the index of each in `Candidates`; X for none.
    row_of_leader: int32[R], the index in `candidates` of the leader of each;
      the index of the entry itself if no other chosen candidate leads it.
    slot_of_leader: int32[R], the slot of a running leader; B for none.
  """

  candidates: Array
  row_of_leader: Array
  slot_of_leader: Array


def first_candidates(
  queue: Queue,
  slots: Slots,
  cache: CacheState,
  config: RolloutConfig,
) -> Candidates:
  """Returns the first waiting sequences and their cached prefixes."""
  window = min(config.window, queue.size)
  waits = queue.status == SequenceStatus.WAITING
  positions = first_of(waits[queue.order], window)
  rows = indexing.take(queue.order, positions, fill=queue.no_row)
  valid = rows < queue.no_row
  no_pair = jnp.zeros((window, window), bool)
  siblings = no_pair
  leader = jnp.full_like(rows, slots.no_slot)
  if config.num_samples > 1:
    siblings, leader = _siblings(queue, slots, cache, rows, config)
  # Page keys of another epoch match no cached page.
  is_hashed = valid & (indexing.take(queue.epochs, rows) == cache.epoch)
  max_hit = given_tokens(queue, rows)
  shared_tokens = jnp.zeros((window, 2), jnp.int32)
  if queue.log_probs_from is not None:
    # A cached token has no logits. So a hit ends before the first token whose
    # logits give a log-prob that is not recorded yet.
    first_recorded = indexing.take(queue.log_probs_from, rows)
    num_computed = indexing.take(queue.computed, rows)
    max_hit = jnp.minimum(
      max_hit, jnp.maximum(num_computed + 1, first_recorded)
    )
    # The state before this token is kept, for a later call that scores others.
    is_recorded = first_recorded < indexing.take(queue.length, rows)
    head = jnp.where(is_recorded, jnp.maximum(max_hit - 1, 0), 0)
    shared_tokens += head[:, None]
  salts = queue.salts
  if salts is not None:
    salts = indexing.take(salts, rows)
  root = jnp.broadcast_to(roots(cache, salts), (window, hashing.KEY_WORDS))
  keys = queue.page_keys
  page_keys = None if keys is None else indexing.take(keys, rows)
  prefixes = find_prefix(
    cache,
    indexing.take(queue.tokens, rows),
    max_hit,
    is_hashed,
    hashed=None if page_keys is None else (root, page_keys),
  )
  is_blocked = jnp.zeros_like(valid)
  needs_page_of = no_pair
  if page_keys is not None and page_keys.shape[1]:
    max_hit = jnp.where(is_hashed, max_hit, 0)
    num_cached = prefixes.num_cached_tokens
    if cache.config.state_retention is None:
      is_blocked, needs_page_of = _shared_work(
        queue, slots, cache, rows, num_cached, page_keys, max_hit
      )
    else:
      is_blocked, needs_page_of, common_heads = shared_states(
        queue, slots, cache, rows, num_cached, max_hit, siblings
      )
      shared_tokens = jnp.maximum(shared_tokens, common_heads)
  return Candidates(
    rows=rows,
    found=prefixes,
    is_blocked=is_blocked,
    needs_page_of=needs_page_of,
    siblings=siblings,
    slot_of_leader=leader,
    shared_tokens=shared_tokens,
  )


def _shared_work(
  queue: Queue,
  slots: Slots,
  cache: CacheState,
  candidates: Array,
  num_cached: Array,
  page_keys: Array,
  max_hit: Array,
) -> tuple[Array, Array]:
  """Returns `is_blocked` and `needs_page_of` of rows `candidates`, int32[X].

  `page_keys` are the `Queue.page_keys` of the candidates. `num_cached`,
  int32[X], is the number of their cached tokens, and `max_hit`, int32[X], an
  exclusive bound of it; 0 if the page keys are of another epoch.
  """
  all_keys = queue.page_keys
  assert all_keys is not None  # See `first_candidates`.
  # The first position after the hit at which all groups end a page.
  stop_column = num_cached + cache.config.alignment
  page = elementwise.quotient(stop_column, cache.config.page_size) - 1
  columns = page_keys.shape[1]
  needs_page = (stop_column < max_hit) & (page < columns)
  key = jnp.take_along_axis(
    page_keys, jnp.minimum(page, columns - 1)[:, None, None], axis=1
  )

  def computes(rows: Array) -> Array:
    """Returns bool[X, Y], True if rows[j] has i's next page before `start`."""
    other_key = indexing.take(all_keys, rows[None], page[:, None])
    prompt_length = indexing.take(queue.start, rows)
    is_inside = stop_column[:, None] <= prompt_length[None]
    return jnp.all(other_key == key, axis=-1) & is_inside

  is_blocked = computes(slots.row) & are_computing(queue, slots)[None]
  is_blocked &= cache.length[None] < stop_column[:, None]
  is_blocked = jnp.any(is_blocked, axis=1) & needs_page
  return is_blocked, computes(candidates) & needs_page[:, None]


def _siblings(
  queue: Queue,
  slots: Slots,
  cache: CacheState,
  rows: Array,
  config: RolloutConfig,
) -> tuple[Array, Array]:
  """Returns `Candidates.siblings` and `slot_of_leader` of rows int32[X].

  A sample is fresh until its first token is sampled. A prompt of one token has
  no token that forks can share. Samples that end with their prompt do not fork,
  because their leader would leave its slot before.
  """
  samples = config.num_samples

  def is_fresh(indices: Array) -> Array:
    prompt_length = indexing.take(queue.prompt_length, indices)  # 0 for none
    in_prompt = given_tokens(queue, indices) == prompt_length
    return (prompt_length > 1) & in_prompt

  def have_one_prompt(indices: Array) -> Array:
    """Returns bool[X, Y], True for samples of one prompt with equal salts."""
    is_same = (rows // samples)[:, None] == (indices // samples)[None]
    if queue.salts is None:
      return is_same
    salts, other_salts = (
      indexing.take(queue.salts, index) for index in (rows, indices)
    )
    return is_same & jnp.all(salts[:, None] == other_salts[None], axis=-1)

  fresh = is_fresh(rows)[:, None]
  siblings = fresh & is_fresh(rows)[None] & have_one_prompt(rows)
  # A slot cannot lead if older weights computed its pages, or if it has already
  # computed the last token of the prompt, which each fork computes itself.
  can_lead = are_computing(queue, slots) & is_fresh(slots.row)
  can_lead &= indexing.take(queue.epochs, slots.row) == cache.epoch
  can_lead &= prompt_rest(queue, slots, cache) >= 0
  leads = have_one_prompt(slots.row) & fresh & can_lead[None]
  leader_slot = jnp.argmax(leads, axis=1).astype(jnp.int32)
  leader = jnp.where(jnp.any(leads, axis=1), leader_slot, slots.no_slot)
  return siblings, leader


def choose(
  queue: Queue,
  waiting: Candidates,
  num_slots: int,
  num_empty: Array,
  config: RolloutConfig,
) -> Chosen:
  """Chooses up to R candidates to admit in this step.

  R is `RolloutConfig.admissions`, or the number of slots if that is less.
  """
  window = waiting.rows.shape[0]
  rows = min(config.admissions, num_slots)
  position = jnp.arange(window, dtype=jnp.int32)
  # The number of a leader is 0 .. R - 1 for a chosen candidate, R .. R + B - 1
  # for a slot, and R + B for none.
  no_leader = rows + num_slots
  num_cached = waiting.found.num_cached_tokens
  exists = waiting.rows < queue.no_row
  priorities = queue.priority
  if priorities is not None:
    priorities = indexing.take(priorities, waiting.rows)

  def choose_one(row, carry):
    chosen, remaining, overtaken, is_blocked, leader = carry
    # A candidate that was overtaken too often is chosen next, even if it is
    # blocked. It is the step's last choice, as a later one might overtake it.
    is_overdue = exists & (overtaken >= config.max_overtaken)
    overdue = remaining & is_overdue
    is_first = overdue & (position == jnp.argmax(overdue).astype(jnp.int32))
    has_leader = leader < no_leader
    eligible = jnp.where(
      jnp.any(overdue), is_first, remaining & (~is_blocked | has_leader)
    )
    if priorities is not None:
      priority = jnp.where(eligible, priorities, jnp.int32(2**31 - 1))
      eligible &= priority == jnp.min(priority)
    score = jnp.where(has_leader, jnp.int32(indexing.NOWHERE), num_cached)
    pick = jnp.argmax(jnp.where(eligible, score, -1)).astype(jnp.int32)
    # A chosen candidate that finds too few free pages stays in the queue. Later
    # choices may overtake it, so the step ends its choices once it is overdue.
    enters = jnp.any(eligible) & (row < num_empty)
    enters &= ~jnp.any(is_overdue & ~remaining)
    # Siblings follow the leader of the pick, or the pick if it has no leader.
    leader_of_pick = leader.at[pick].get(mode="clip")
    follows = enters & waiting.siblings[:, pick] & ~has_leader
    leader_of_pick = jnp.where(leader_of_pick < no_leader, leader_of_pick, row)
    leader = jnp.where(follows, leader_of_pick, leader)
    chosen = chosen.at[row].set(jnp.where(enters, pick, window))
    remaining &= ~(enters & (position == pick)) & ~jnp.any(overdue)
    overtaken += (enters & (position < pick)).astype(jnp.int32)
    is_blocked |= enters & waiting.needs_page_of[:, pick]
    return chosen, remaining, overtaken, is_blocked, leader

  leader = jnp.where(
    waiting.slot_of_leader < num_slots, rows + waiting.slot_of_leader, no_leader
  )
  start = (
    jnp.full((rows,), window, jnp.int32),
    exists,
    indexing.take(queue.overtaken, waiting.rows),
    waiting.is_blocked,
    leader.astype(jnp.int32),
  )
  # One choice at a time, because each changes which candidates are eligible.
  chosen, _, _, _, leader = lax.fori_loop(
    0, rows, choose_one, sharding.match_varying_axes(start)
  )
  leader = indexing.take(leader, chosen, fill=no_leader)
  row = jnp.arange(rows, dtype=jnp.int32)
  return Chosen(
    candidates=chosen,
    row_of_leader=jnp.where(leader < rows, leader, row),
    slot_of_leader=jnp.where(leader >= rows, leader - rows, num_slots),
  )
