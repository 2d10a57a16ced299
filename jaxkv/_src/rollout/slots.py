"""The slots of a rollout: forks, growth, victims and newcomers.

What happens in a step before the model is called.
"""

import dataclasses

import jax.numpy as jnp
from jax import Array

from jaxkv import kv as kv_memory
from jaxkv._src.cache import ops
from jaxkv._src.cache.state import Status
from jaxkv._src.cache.state import is_failure
from jaxkv._src.cache.verbs.admit import admit
from jaxkv._src.cache.verbs.allocate import allocate
from jaxkv._src.cache.verbs.fork import fork
from jaxkv._src.rollout import admission
from jaxkv._src.rollout import sequences as queue
from jaxkv._src.rollout.state import RolloutState


def computing(state: RolloutState) -> Array:
  """bool[B]: slots with a sequence, except those that wait to fork."""
  slots, none = state.running.shape[0], state.sequences.length.shape[0]
  return (state.running < none) & (state.leader == slots)


def lengths(state: RolloutState) -> Array:
  """int32[B]: tokens of the sequence in each slot, 0 for none."""
  return ops.take(state.sequences.length, state.running)


def fork_ready(state: RolloutState) -> RolloutState:
  """Samples whose prompt is computed share its pages."""
  if state.config.num_samples == 1:
    return state
  slots = state.running.shape[0]
  length = lengths(state)
  ready = (state.leader < slots) & (
    ops.take(state.cache.length, state.leader) == length - 1
  )

  def some(state: RolloutState) -> RolloutState:
    own = jnp.arange(slots, dtype=jnp.int32)
    cache, forked = fork(state.cache, state.leader, own, mask=ready)
    # One that found no page waits again; its prompt is cached.
    refused = ready & ~forked.ok
    sequences = queue.with_status(
      state.sequences, state.running, refused, queue.WAITING
    )
    none = state.sequences.length.shape[0]
    place = ops.where_valid(forked.ok, state.running)
    return dataclasses.replace(
      state,
      cache=cache,
      kv=kv_memory.copy(state.kv, *forked.copies),
      sequences=sequences,
      running=jnp.where(refused, none, state.running),
      leader=jnp.where(ready, slots, state.leader),
      computed=ops.put(state.computed, place, values=length - 1),
      counters=dataclasses.replace(
        state.counters,
        forked=state.counters.forked + jnp.sum(forked.ok, dtype=jnp.int32),
      ),
    )

  return ops.at_most_once(jnp.any(ready), some, state)


def grow(state: RolloutState) -> tuple[RolloutState, Array, Array]:
  """Room for the tokens of running sequences; a victim if there is too little.

  Returns:
    The state; bool[B], slots that got no page; bool[B], the slot that is freed
    at the step's end.
  """
  missing = jnp.where(computing(state), lengths(state) - state.cache.length, 0)
  cache, allocated = allocate(state.cache, missing)
  state = dataclasses.replace(state, cache=cache)
  starved = (missing > 0) & ~allocated.ok
  state, victim = _preempt(state, starved)
  return state, starved, victim


def _preempt(state: RolloutState, starved: Array) -> tuple[RolloutState, Array]:
  """Preempts the sequence with the fewest tokens if a slot got no page.

  Of equal ones the youngest. A sequence that runs alone cannot get more pages,
  so it is given up. Samples that wait for the prompt of a victim wait again.
  """
  none, slots = state.sequences.length.shape[0], state.running.shape[0]
  holders = computing(state)
  length = jnp.where(holders, state.cache.length, ops.NOWHERE)
  fewest = holders & (length == jnp.min(length))
  age = jnp.where(fewest, state.running, -1)
  slot = jnp.arange(slots, dtype=jnp.int32)
  chosen = jnp.argmax(age).astype(jnp.int32)
  victim = jnp.any(starved) & (slot == chosen) & fewest
  alone = jnp.sum(holders, dtype=jnp.int32) == 1
  leaves = victim | (jnp.any(victim) & (state.leader == chosen))
  sequences = queue.with_status(
    state.sequences, state.running, leaves, queue.WAITING
  )
  code = jnp.full_like(slot, Status.OUT_OF_PAGES)
  count = jnp.sum(victim & ~alone, dtype=jnp.int32)
  state = dataclasses.replace(
    state,
    sequences=queue.fail(sequences, state.running, victim & alone, code),
    running=jnp.where(leaves, none, state.running),
    leader=jnp.where(leaves, slots, state.leader),
    counters=dataclasses.replace(
      state.counters, preempted=state.counters.preempted + count
    ),
  )
  return state, victim


def admit_waiting(state: RolloutState, allowed: Array) -> RolloutState:
  """Waiting sequences enter empty slots, see `admission`."""
  none = state.sequences.length.shape[0]
  # A victim's slot holds its pages until the end of the step.
  empty = (state.running == none) & (state.cache.num_pages[:, 0] == 0)
  waits = jnp.any(state.sequences.status == queue.WAITING)

  def some(state: RolloutState) -> RolloutState:
    return _enter(state, empty)

  return ops.at_most_once(allowed & waits & jnp.any(empty), some, state)


def _enter(state: RolloutState, empty: Array) -> RolloutState:
  sequences, cache, config = state.sequences, state.cache, state.config
  none, num_slots = sequences.length.shape[0], empty.shape[0]
  waiting = admission.candidates(
    cache,
    sequences,
    state.running,
    computing(state),
    state.prompt_keys,
    config,
  )
  chosen = admission.choose(
    waiting,
    ops.take(state.overtaken, waiting.numbers),
    num_slots,
    jnp.sum(empty, dtype=jnp.int32),
    config,
  )
  rows = chosen.candidates.shape[0]
  row = jnp.arange(rows, dtype=jnp.int32)
  slots = queue.first_of(empty, rows)
  numbers = ops.take(waiting.numbers, chosen.candidates, fill=none)
  pairs = (numbers < none) & (slots < num_slots)
  follows_slot = pairs & (chosen.leader < num_slots)
  leads = pairs & ~follows_slot & (chosen.leads == row)
  length = ops.take(sequences.length, numbers)
  runners = jnp.sum(state.running < none, dtype=jnp.int32)
  reserve = (runners + jnp.cumsum(pairs, dtype=jnp.int32)) // 2
  cache, admitted = admit(
    cache,
    slots,
    ops.take(sequences.tokens, numbers),
    length,
    mask=leads,
    keep_free=jnp.where(runners + row > 0, reserve, 0),
  )
  follows = pairs & ~follows_slot & (chosen.leads != row)
  follows &= ops.take(admitted.ok, chosen.leads)
  leader = jnp.where(follows_slot, chosen.leader, num_slots)
  leader = jnp.where(follows, ops.take(slots, chosen.leads), leader)
  enters = admitted.ok | follows | follows_slot
  idle = ~jnp.any(enters) & (runners == 0)
  hopeless = is_failure(admitted.code) & (
    idle | (admitted.code != Status.OUT_OF_PAGES)
  )
  place = ops.where_valid(enters, slots)
  sequences = queue.with_status(sequences, numbers, enters, queue.RUNNING)
  # Those before the last one that enters, and that stay, are overtaken.
  entered = jnp.where(enters, numbers, -1)
  later = jnp.sum(
    entered[None] > waiting.numbers[:, None], axis=1, dtype=jnp.int32
  )
  stays = ops.take(sequences.status, waiting.numbers, fill=queue.DONE)
  stays = ops.where_valid(stays == queue.WAITING, waiting.numbers)
  return dataclasses.replace(
    state,
    cache=cache,
    sequences=queue.fail(sequences, numbers, hopeless, admitted.code),
    running=ops.put(state.running, place, values=numbers),
    leader=ops.put(state.leader, place, values=leader),
    overtaken=ops.add(state.overtaken, stays, values=later),
  )
