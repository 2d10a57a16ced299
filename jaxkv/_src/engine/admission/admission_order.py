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

import jax
import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv._src.arrays import elementwise
from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import sharding
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.steps.longest_hit import Prefix
from jaxkv._src.cache.steps.longest_hit import find_prefix
from jaxkv._src.engine.admission.shared_states import shared_states
from jaxkv._src.engine.config import RolloutConfig
from jaxkv._src.engine.queue.queue import Queue
from jaxkv._src.engine.queue.queue import SequenceStatus
from jaxkv._src.engine.queue.queue import first_of
from jaxkv._src.engine.slots import Slots
from jaxkv._src.engine.slots import are_computing
from jaxkv._src.engine.slots import given_tokens
from jaxkv._src.engine.slots import prompt_rest


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
    leaders: int32[X], a slot from which each can fork; B for none.
    shared_tokens: int32[X, 2], see `jaxkv.admit`.
  """

  rows: Array
  found: Prefix
  is_blocked: Array
  needs_page_of: Array
  siblings: Array
  leaders: Array
  shared_tokens: Array


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
  no_pair = jnp.zeros((window, window), bool)
  siblings, leaders = no_pair, jnp.full_like(rows, slots.no_slot)
  if config.num_samples > 1:
    siblings, leaders = _siblings(queue, slots, cache, rows, config)
  max_hit, shared_tokens = _limits(queue, rows)
  # Page keys of another epoch match no cached page.
  is_hashed = indexing.take(queue.epochs, rows) == cache.epoch
  max_hit = jnp.where(is_hashed, max_hit, 0)
  salts, page_keys = jax.tree.map(
    lambda array: indexing.take(array, rows), (queue.salts, queue.page_keys)
  )
  prefixes = find_prefix(
    cache,
    indexing.take(queue.tokens, rows),
    max_hit,
    is_hashed,
    salts,
    page_keys,
  )
  is_blocked, needs_page_of = sharding.zeros_like(is_hashed), no_pair
  if page_keys is not None and page_keys.shape[1]:
    num_cached = prefixes.num_cached_tokens
    if cache.config.state_retention is None:
      is_blocked, needs_page_of = _shared_work(
        queue, slots, cache, rows, num_cached, max_hit
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
    leaders=leaders,
    shared_tokens=shared_tokens,
  )


def _limits(queue: Queue, rows: Array) -> tuple[Array, Array]:
  """Returns the bounds of the hits of rows int32[X], and `shared_tokens`.

  The bounds, int32[X], are exclusive: a hit has fewer tokens.
  """
  max_hit = given_tokens(queue, rows)
  shared_tokens = jnp.zeros((rows.shape[0], 2), jnp.int32)
  if queue.log_probs_from is None:
    return max_hit, shared_tokens
  # A cached token has no logits. So a hit ends before the first token whose
  # logits give a log-prob that is not recorded yet.
  first_recorded = indexing.take(queue.log_probs_from, rows)
  num_computed = indexing.take(queue.computed, rows)
  max_hit = jnp.minimum(max_hit, jnp.maximum(num_computed + 1, first_recorded))
  # The state before this token is kept, for a later call that scores others.
  is_recorded = first_recorded < indexing.take(queue.length, rows)
  head = jnp.where(is_recorded, jnp.maximum(max_hit - 1, 0), 0)
  return max_hit, shared_tokens + head[:, None]


def _shared_work(
  queue: Queue,
  slots: Slots,
  cache: CacheState,
  candidates: Array,
  num_cached: Array,
  max_hit: Array,
) -> tuple[Array, Array]:
  """Returns `is_blocked` and `needs_page_of` of rows `candidates`, int32[X].

  `num_cached`, int32[X], is the number of their cached tokens, and `max_hit`,
  int32[X], an exclusive bound of it; 0 if the page keys are of another epoch.
  """
  keys = queue.page_keys
  assert keys is not None  # See `first_candidates`.
  # The first position after the hit at which all groups end a page.
  stop_column = num_cached + cache.config.alignment
  page = elementwise.quotient(stop_column, cache.config.page_size) - 1
  needs_page = (stop_column < max_hit) & (page < keys.shape[1])
  # Row j computes the page if it has it before its `start`.
  rows = jnp.concatenate([slots.row, candidates])
  key = indexing.take(keys, candidates, page)[:, None]
  has_page = indexing.take(keys, rows[None], page[:, None]) == key
  computes = jnp.all(has_page, axis=-1) & needs_page[:, None]
  computes &= stop_column[:, None] <= indexing.take(queue.start, rows)[None]
  in_slots, needs_page_of = jnp.split(computes, [slots.size], axis=1)
  in_slots &= are_computing(queue, slots)[None]
  in_slots &= cache.length[None] < stop_column[:, None]
  return jnp.any(in_slots, axis=1), needs_page_of


def _siblings(
  queue: Queue,
  slots: Slots,
  cache: CacheState,
  candidates: Array,
  config: RolloutConfig,
) -> tuple[Array, Array]:
  """Returns `siblings` and `leaders` of rows `candidates`, int32[X].

  A sample is fresh until its first token is sampled. A prompt of one token has
  no token that forks can share. Samples that end with their prompt do not fork,
  because their leader would leave its slot before.
  """
  rows = jnp.concatenate([slots.row, candidates])
  prompt_length = indexing.take(queue.prompt_length, rows)  # 0 for none
  is_fresh = given_tokens(queue, rows) == prompt_length
  is_fresh &= prompt_length > 1
  prompt = elementwise.quotient(rows, config.num_samples)
  is_same = prompt[slots.size :, None] == prompt[None]
  if queue.salts is not None:
    salts = indexing.take(queue.salts, rows)
    is_same &= jnp.all(salts[slots.size :, None] == salts[None], axis=-1)
  is_same &= is_fresh[slots.size :, None] & is_fresh[None]
  leads, siblings = jnp.split(is_same, [slots.size], axis=1)
  # A slot cannot lead if older weights computed its pages, or if it has already
  # computed the last token of the prompt, which each fork computes itself.
  can_lead = indexing.take(queue.epochs, slots.row) == cache.epoch
  can_lead &= are_computing(queue, slots)
  can_lead &= prompt_rest(queue, slots, cache) >= 0
  leads &= can_lead[None]
  leaders = jnp.argmax(leads, axis=1).astype(jnp.int32)
  return siblings, jnp.where(jnp.any(leads, axis=1), leaders, slots.no_slot)


def choose(
  queue: Queue,
  waiting: Candidates,
  empty: Array,
  no_slot: int,
  config: RolloutConfig,
) -> tuple[Array, Array]:
  """Chooses up to R candidates to admit in this step, for slots `empty`.

  `empty`, int32[R], are the slots that they get, in order; B, `no_slot`, for
  none.

  Returns:
    int32[R], the index of each candidate, in admission order; X for none. And
    int32[R], the slot that computes the prompt of each: the candidate's own, or
    that of its leader, from which it will fork; B for none.
  """
  window = waiting.rows.shape[0]
  position = jnp.arange(window, dtype=jnp.int32)
  num_cached = waiting.found.num_cached_tokens
  exists = waiting.rows < queue.no_row
  priorities = queue.priority
  if priorities is not None:
    priorities = indexing.take(priorities, waiting.rows)

  def choose_one(carry, slot):
    remaining, overtaken, is_blocked, leaders = carry
    # The first candidate that was overtaken too often is chosen next, even if
    # it is blocked. It is the step's last choice, as a later one might overtake
    # it.
    is_overdue = exists & (overtaken >= config.max_overtaken)
    overdue = remaining & is_overdue
    has_leader = leaders < no_slot
    eligible = remaining & (~is_blocked | has_leader)
    eligible = jnp.where(jnp.any(overdue), overdue, eligible)
    if priorities is not None:
      priority = jnp.where(eligible, priorities, jnp.int32(2**31 - 1))
      eligible &= priority == jnp.min(priority)
    is_first = has_leader | overdue
    score = jnp.where(is_first, jnp.int32(indexing.NOWHERE), num_cached)
    pick = jnp.argmax(jnp.where(eligible, score, -1)).astype(jnp.int32)
    # A chosen candidate that finds too few free pages stays in the queue. Later
    # choices may overtake it, so the step ends its choices once it is overdue.
    enters = jnp.any(eligible) & (slot < no_slot)
    enters &= ~jnp.any(is_overdue & ~remaining)
    is_pick = position == pick
    # The pick and its siblings follow its leader, or the pick if it has none.
    leader = leaders.at[pick].get(mode="clip")
    leader = jnp.where(leader < no_slot, leader, slot)
    follows = (waiting.siblings[:, pick] | is_pick) & ~has_leader
    leaders = jnp.where(enters & follows, leader, leaders)
    remaining &= ~(enters & is_pick) & ~jnp.any(overdue)
    overtaken += (enters & (position < pick)).astype(jnp.int32)
    is_blocked |= enters & waiting.needs_page_of[:, pick]
    carry = remaining, overtaken, is_blocked, leaders
    return carry, jnp.where(enters, pick, window)

  overtaken = indexing.take(queue.overtaken, waiting.rows)
  start = exists, overtaken, waiting.is_blocked, waiting.leaders
  start, empty = sharding.match_varying_axes((start, empty))
  # One choice at a time, because each changes which candidates are eligible.
  (_, _, _, leaders), chosen = lax.scan(choose_one, start, empty)
  return chosen, indexing.take(leaders, chosen, fill=no_slot)
