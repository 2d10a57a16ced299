"""Scheduler: forks, admits, grows and preempts sequences in slots.

These parts of a step run before the model is called. Forks and admitted
sequences share cached pages; `grow` takes fresh pages for all slots at once.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import elementwise
from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import loops
from jaxkv._src.cache.pool import recurrent
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import Status
from jaxkv._src.cache.state import is_empty
from jaxkv._src.cache.state import is_failure
from jaxkv._src.cache.state import rows_of
from jaxkv._src.cache.steps.find import Prefix
from jaxkv._src.cache.verbs.admit import admit_found
from jaxkv._src.cache.verbs.allocate import make_room
from jaxkv._src.cache.verbs.fork import owed_copies
from jaxkv._src.cache.verbs.fork import share_prefix
from jaxkv._src.cache.verbs.free import recycle
from jaxkv._src.kv.pools import Pools
from jaxkv._src.kv.pools import copy as copy_pages
from jaxkv._src.rollout import admission
from jaxkv._src.rollout import sequences as queue
from jaxkv._src.rollout.checks import most_pages
from jaxkv._src.rollout.state import RolloutState


def computing(state: RolloutState) -> Array:
  """Returns bool[B], slots with a sequence that does not wait to fork."""
  slots, none = state.running.shape[0], state.sequences.length.shape[0]
  return (state.running < none) & (state.leader == slots)


def lengths(state: RolloutState) -> Array:
  """Returns the length of the sequence in each slot, 0 for none, int32[B]."""
  return indexing.take(state.sequences.length, state.running)


def missing_tokens(state: RolloutState) -> Array:
  """Returns the number of tokens that each slot must compute, int32[B]."""
  missing = lengths(state) - state.cache.length
  return jnp.where(computing(state), missing, 0)


def turns(state: RolloutState) -> Array:
  """Returns the place of each slot's sequence in the queue, int32[B]."""
  return indexing.take(state.place, state.running)


def tokens_at_once(state: RolloutState) -> int:
  """Returns the maximum number of tokens of a sequence in a step.

  With sliding windows, chunks bound the number of pages that a sequence holds.
  Otherwise it reserves pages for all its tokens at the start.
  """
  sizes = state.cache.config
  if recurrent.has_states(sizes):
    return min(state.config.prefill_chunk, sizes.page_size)
  return state.config.prefill_chunk if sizes.skips_pages else sizes.slot_tokens


def tokens_now(state: RolloutState, missing: Array) -> Array:
  """Returns how many of the missing tokens a step may compute, int32[B].

  Recurrent groups stop at the end of a page, where the state is kept.
  """
  tokens, sizes = (
    jnp.minimum(missing, tokens_at_once(state)),
    state.cache.config,
  )
  if not recurrent.has_states(sizes):
    return tokens
  begun = elementwise.remainder(state.cache.length, sizes.page_size)
  return jnp.minimum(tokens, sizes.page_size - begun)


class Forks(NamedTuple):
  """Samples that fork from the prompt of another sample.

  Attributes:
    ready: bool[B], the slots that fork in this step.
    sources: int32[B], the slots whose pages they share.
  """

  ready: Array
  sources: Array


def share_prompts(state: RolloutState) -> tuple[RolloutState, Forks]:
  """Shares full pages of computed prompts with the samples that wait."""
  slots = state.running.shape[0]
  forks = Forks(
    ready=(state.leader < slots)
    & (indexing.take(state.cache.length, state.leader) == lengths(state) - 1),
    sources=state.leader,
  )
  if state.config.num_samples == 1:
    return state, forks
  own = jnp.arange(slots, dtype=jnp.int32)

  def some(cache: CacheState) -> CacheState:
    return share_prefix(cache, forks.sources, own, forks.ready)

  cache = loops.at_most_once(jnp.any(forks.ready), some, state.cache)
  leader = jnp.where(forks.ready, slots, state.leader)
  return dataclasses.replace(state, cache=cache, leader=leader), forks


def recycle_windows(state: RolloutState) -> RolloutState:
  """Frees pages behind sliding windows."""
  if not state.cache.config.skips_pages:
    return state
  return dataclasses.replace(state, cache=recycle(state.cache)[0])


def followed(state: RolloutState) -> Array:
  """Returns bool[B], slots whose prompt another slot waits for."""
  slots = state.running.shape[0]
  some = jnp.zeros((slots + 1,), bool)
  return some.at[state.leader].set(True)[:slots]


def grow(
  state: RolloutState, forks: Forks, drafts: Array | None
) -> tuple[RolloutState, Array, Array]:
  """Reserves pages for the next tokens; preempts a sequence if too few.

  Args:
    state: the rollout.
    forks: the samples that fork in this step.
    drafts: int32[B], guessed tokens of each slot; None without speculation.

  Returns:
    The state; bool[B], slots without pages; int32[B], the sequence that leaves
    each slot, Q for none: its pages are freed at the step's end.
  """
  missing = missing_tokens(state)
  rows = rows_of(state.cache, None, None)
  tokens = tokens_now(state, missing)
  if drafts is not None:
    tokens += drafts
  cache, room = make_room(state.cache, rows, tokens)
  state = dataclasses.replace(state, cache=cache)
  starved = (missing > 0) & ~room.ok
  state, refused = _finish_forks(state, forks, starved)
  state, preempted = _preempt(state, starved & ~forks.ready)
  return state, starved, jnp.minimum(preempted, refused)


def _finish_forks(
  state: RolloutState, forks: Forks, starved: Array
) -> tuple[RolloutState, Array]:
  """Copies the partly full page to forks with pages; requeues the others.

  Returns:
    The state; int32[B], the sequence that leaves each slot, Q for none.
  """
  none, slots = state.sequences.length.shape[0], state.running.shape[0]
  if state.config.num_samples == 1:
    return state, jnp.full_like(state.running, none)
  forked, refused = forks.ready & ~starved, forks.ready & starved
  own = jnp.arange(slots, dtype=jnp.int32)

  def some(kv: Pools) -> Pools:
    owed = owed_copies(state.cache, forks.sources, own, forked)
    return copy_pages(kv, *owed)

  place = indexing.where_valid(forked, state.running)
  cache, running = state.cache, state.running
  state = _with_prompt_records(state, forks, place)
  state = dataclasses.replace(
    state,
    cache=dataclasses.replace(
      cache, length=jnp.where(refused, 0, cache.length)
    ),
    kv=loops.at_most_once(jnp.any(forked), some, state.kv),
    sequences=queue.with_status(
      state.sequences, running, refused, queue.SequenceStatus.WAITING
    ),
    running=jnp.where(refused, none, running),
    computed=indexing.put(state.computed, place, values=cache.length),
    counters=dataclasses.replace(
      state.counters,
      forked=state.counters.forked + jnp.sum(forked, dtype=jnp.int32),
    ),
  )
  holds = refused & ~is_empty(cache, own)
  return state, jnp.where(holds, running, none)


def _with_prompt_records(
  state: RolloutState, forks: Forks, place: Array
) -> RolloutState:
  """Copies the log-probs of a prompt to its forks, int32[B]."""
  records = state.sequences.records
  raw = records.raw_log_probs
  if raw is None or not state.config.prompt_log_probs:
    return state
  source = indexing.take(state.running, forks.sources)
  raw = indexing.put(raw, place, values=indexing.take(raw, source))
  records = dataclasses.replace(records, raw_log_probs=raw)
  sequences = dataclasses.replace(state.sequences, records=records)
  return dataclasses.replace(state, sequences=sequences)


def _preempt(state: RolloutState, starved: Array) -> tuple[RolloutState, Array]:
  """Preempts a sequence if a slot got no page.

  The victim has the lowest priority, then the fewest computed tokens, then the
  last place. A sequence that runs alone fails instead, because no more pages
  can become free. Samples that wait for the victim's prompt return to the
  queue.
  """
  none, slots = state.sequences.length.shape[0], state.running.shape[0]
  holders = computing(state)
  last = holders
  if state.sequences.priority is not None:
    priority = indexing.take(state.sequences.priority, state.running)
    priority = jnp.where(holders, priority, jnp.int32(-(2**31)))
    last &= priority == jnp.max(priority)
  length = jnp.where(last, state.cache.length, indexing.NOWHERE)
  fewest = last & (length == jnp.min(length))
  age = jnp.where(fewest, turns(state), -1)
  slot = jnp.arange(slots, dtype=jnp.int32)
  chosen = jnp.argmax(age).astype(jnp.int32)
  victim = jnp.any(starved) & (slot == chosen) & fewest
  alone = jnp.sum(holders, dtype=jnp.int32) == 1
  leaves = victim | (jnp.any(victim) & (state.leader == chosen))
  sequences = queue.with_status(
    state.sequences, state.running, leaves, queue.SequenceStatus.WAITING
  )
  code = jnp.full_like(slot, Status.OUT_OF_PAGES)
  count = jnp.sum(victim & ~alone, dtype=jnp.int32)
  preempted = jnp.where(victim, state.running, none)
  state = dataclasses.replace(
    state,
    sequences=queue.fail(sequences, state.running, victim & alone, code),
    running=jnp.where(leaves, none, state.running),
    leader=jnp.where(leaves, slots, state.leader),
    counters=dataclasses.replace(
      state.counters, preempted=state.counters.preempted + count
    ),
  )
  return state, preempted


def admit_waiting(state: RolloutState) -> RolloutState:
  """Admits waiting sequences to empty slots, see `admission`.

  They share the pages of cached prefixes; `grow` takes the others from the
  pages that running sequences leave free. None enters if the running sequences
  lack pages.
  """
  none = state.sequences.length.shape[0]
  # A victim's slot holds its pages until the end of the step.
  slot = jnp.arange(state.running.shape[0], dtype=jnp.int32)
  empty = (state.running == none) & is_empty(state.cache, slot)
  waits = jnp.any(state.sequences.status == queue.SequenceStatus.WAITING)
  needed = needed_now(state)
  allowed = needed <= state.cache.pool.queue.num_free

  def some(state: RolloutState) -> RolloutState:
    return _enter(state, empty, needed)

  return loops.at_most_once(allowed & waits & jnp.any(empty), some, state)


def needed_now(state: RolloutState) -> Array:
  """Returns the number of pages that `grow` takes for the slots, int32[]."""
  sizes, cache = state.cache.config.sizes, state.cache
  tokens = tokens_now(state, missing_tokens(state))
  stop = sizes.columns_for(cache.length + tokens, jnp.zeros_like(tokens))
  more = jnp.where(tokens[:, None] > 0, stop - cache.num_pages, 0)
  return jnp.sum(jnp.maximum(more, 0), dtype=jnp.int32)


def _enter(state: RolloutState, empty: Array, needed: Array) -> RolloutState:
  sequences, cache, config = state.sequences, state.cache, state.config
  none, num_slots = sequences.length.shape[0], empty.shape[0]
  waiting = admission.candidates(state, computing(state))
  chosen = admission.choose(
    waiting,
    indexing.take(state.overtaken, waiting.numbers),
    num_slots,
    jnp.sum(empty, dtype=jnp.int32),
    config,
  )
  rows = chosen.candidates.shape[0]
  row = jnp.arange(rows, dtype=jnp.int32)
  slots = queue.first_of(empty, rows)
  numbers = indexing.take(waiting.numbers, chosen.candidates, fill=none)
  pairs = (numbers < none) & (slots < num_slots)
  follows_slot = pairs & (chosen.leader < num_slots)
  leads = pairs & ~follows_slot & (chosen.leads == row)
  length = indexing.take(sequences.length, numbers)
  runners = jnp.sum(state.running < none, dtype=jnp.int32)
  # A page to grow for each sequence, newcomers included.
  groups = len(cache.config.groups)
  reserve = groups * (runners + jnp.cumsum(pairs, dtype=jnp.int32))
  found = Prefix(*(indexing.take(x, chosen.candidates) for x in waiting.found))
  at_once = jnp.minimum(length, tokens_at_once(state))
  later = jnp.maximum(needed, _promised(state)) + jnp.cumsum(
    jnp.where(leads, _pages_later(state, numbers, found, at_once), 0),
    dtype=jnp.int32,
  )
  cache, admitted = admit_found(
    cache,
    slots,
    length,
    lambda _: found,
    max_length=sequences.tokens.shape[1],
    skipped=~leads,
    pops=False,
    num_tokens=at_once,
    keep_free=later + jnp.where(runners + row > 0, reserve, 0),
  )
  follows = pairs & ~follows_slot & (chosen.leads != row)
  follows &= indexing.take(admitted.ok, chosen.leads)
  leader = jnp.where(follows_slot, chosen.leader, num_slots)
  leader = jnp.where(follows, indexing.take(slots, chosen.leads), leader)
  enters = admitted.ok | follows | follows_slot
  # Only the first candidate may use all free pages, so only it can be hopeless.
  alone = ~jnp.any(enters) & (runners == 0) & (row == 0)
  hopeless = is_failure(admitted.code) & (
    alone | (admitted.code != Status.OUT_OF_PAGES)
  )
  place = indexing.where_valid(enters, slots)
  sequences = queue.with_status(
    sequences, numbers, enters, queue.SequenceStatus.RUNNING
  )
  # A waiting sequence is overtaken when a later one enters first.
  entered = jnp.where(enters, chosen.candidates, -1)
  position = jnp.arange(waiting.numbers.shape[0], dtype=jnp.int32)
  passed = jnp.sum(entered[None] > position[:, None], axis=1, dtype=jnp.int32)
  stays = indexing.take(
    sequences.status, waiting.numbers, fill=queue.SequenceStatus.DONE
  )
  stays = indexing.where_valid(
    stays == queue.SequenceStatus.WAITING, waiting.numbers
  )
  state = _begin_anew(state, numbers, enters)
  return dataclasses.replace(
    state,
    cache=cache,
    sequences=queue.fail(sequences, numbers, hopeless, admitted.code),
    running=indexing.put(state.running, place, values=numbers),
    leader=indexing.put(state.leader, place, values=leader),
    overtaken=indexing.add(state.overtaken, stays, values=passed),
  )


def _begin_anew(
  state: RolloutState, numbers: Array, enters: Array
) -> RolloutState:
  """Clears keys of other epochs of the admitted sequences, int32[R]."""
  epoch = state.cache.epoch
  stale = enters & (indexing.take(state.epochs, numbers) != epoch)
  keys = state.page_keys
  if keys is not None:
    keys = indexing.put(
      keys, indexing.where_valid(stale, numbers), values=jnp.uint32(0)
    )
  place = indexing.where_valid(enters, numbers)
  return dataclasses.replace(
    state,
    page_keys=keys,
    epochs=indexing.put(state.epochs, place, values=epoch),
  )


def _promised(state: RolloutState) -> Array:
  """Returns the pages that running sequences still need, int32[]."""
  cache = state.cache
  if not cache.config.skips_pages:
    return jnp.zeros((), jnp.int32)
  most = jnp.where(
    computing(state)[:, None],
    _most_pages(state, state.running, lengths(state)),
    0,
  )
  held = cache.num_pages - cache.num_skipped_pages
  return jnp.sum(jnp.maximum(most - held, 0), dtype=jnp.int32)


def _pages_later(
  state: RolloutState, numbers: Array, found: Prefix, at_once: Array
) -> Array:
  """Returns the pages that follow those of the first tokens, int32[R]."""
  length = indexing.take(state.sequences.length, numbers)
  if not state.cache.config.skips_pages:
    return jnp.zeros_like(length)
  first = jnp.minimum(found.num_cached_tokens + at_once, length)
  more = _most_pages(state, numbers, length)
  more -= _most_pages(state, numbers, first)
  return jnp.sum(more, axis=1, dtype=jnp.int32)


def _most_pages(state: RolloutState, numbers: Array, length: Array) -> Array:
  """Returns the maximum number of pages that sequences hold, int32[R, G]."""
  config, chunk = state.cache.config, tokens_at_once(state)
  columns = config.sizes.columns_for(length, jnp.zeros_like(length))
  most = most_pages(config, chunk, config.slot_tokens)
  return jnp.minimum(columns, jnp.asarray(most, jnp.int32)[None])
