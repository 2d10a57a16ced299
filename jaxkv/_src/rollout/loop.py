"""The loop: admit, prefill, fork, decode, sample, release, until all are done.

The parts of a step, in order; a part with nothing to do costs almost nothing:

| part    | what happens                                                      |
|---------|-------------------------------------------------------------------|
| admit   | waiting sequences take empty slots; cached prefixes are attached  |
| prefill | their other tokens except the last are computed, in chunks        |
| fork    | further samples of a prompt share the pages of the first one      |
| decode  | every running slot computes its last token and draws the next one |
| release | ended sequences give their pages back                             |

When the pool is empty, the youngest running sequence is preempted: it gives its
slot back and waits. Its generated tokens are kept, its pages stay cached until
they are evicted, and it resumes later with the same draws.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv import kv as kv_memory
from jaxkv._src.cache import ops
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import Status
from jaxkv._src.cache.state import is_failure
from jaxkv._src.cache.verbs.admit import admit
from jaxkv._src.cache.verbs.allocate import allocate
from jaxkv._src.cache.verbs.commit import commit
from jaxkv._src.cache.verbs.fork import fork
from jaxkv._src.cache.verbs.free import free
from jaxkv._src.rollout import sampling
from jaxkv._src.rollout import sequences as queue
from jaxkv._src.rollout.arguments import as_max_steps
from jaxkv._src.rollout.arguments import as_temperature
from jaxkv._src.rollout.arguments import last_logits
from jaxkv._src.rollout.config import RolloutConfig
from jaxkv._src.rollout.sequences import Sequences
from jaxkv._src.rollout.state import Counters
from jaxkv._src.rollout.state import RolloutState
from jaxkv._src.rollout.state import is_done
from jaxkv.kv import KVPages
from jaxkv.kv import View

Model = Callable[..., tuple[Array, KVPages]]
"""`(params, tokens int32[B, T], positions int32[B, T], kv, view) -> (logits,
kv)`: stores the K/V of the tokens and attends through `jaxkv.kv`. Logits are
[B, X, V], floats of any width, which are sampled from in float32; those at
X - 1 are for each row's last token when T is 1."""


def generate(
  params: Any,
  state: RolloutState,
  temperature: Array,
  max_steps: Array,
  *,
  model: Model,
) -> RolloutState:
  """Runs until every sequence is done, or for `max_steps` steps.

  One `while_loop` without a host round trip. Jit it with the state donated, as
  `jax.jit(functools.partial(generate, model=model), donate_argnums=1)`, so that
  the K/V memory is updated in place.

  The generated tokens are `tokens[q, prompt_length[q] : length[q]]` of the
  state's sequences. A sequence that can never run, because other holders leave
  it too few pages, is given up: its status is FAILED and its `code` says why.

  Args:
    params: the model's.
    state: from `init`, or from an earlier call that stopped at `max_steps`.
    temperature: float32[], 0 for greedy.
    max_steps: int32[], steps of this call; 0 for no limit.
    model: see `Model`.

  Returns:
    The state; `is_done` tells whether all sequences are done.

  Raises:
    TypeError: `temperature` is not a number, `max_steps` not an integer, or the
      model's logits are not floats.
    ValueError: `temperature` is negative or not finite, `max_steps` is
      negative, or the model's logits have another shape. Traced numbers are not
      checked: a temperature of NaN makes log-probabilities NaN, and a negative
      `max_steps` runs no step.
  """
  params, state, temperature, max_steps = ops.alike(
    (params, state, as_temperature(temperature), as_max_steps(max_steps))
  )
  begin = state.counters.steps

  def unfinished(state: RolloutState) -> Array:
    within = (max_steps == 0) | (state.counters.steps - begin < max_steps)
    return within & ~is_done(state)

  def step(state: RolloutState) -> RolloutState:
    state = _admit_waiting(params, state, model=model)
    return _decode(params, state, temperature, model=model)

  return lax.while_loop(unfinished, step, state)


def _admit_waiting(
  params: Any, state: RolloutState, *, model: Model
) -> RolloutState:
  """Admits waiting sequences, prefills them and forks their siblings."""
  sequences, cache, config = state.sequences, state.cache, state.config
  none = sequences.length.shape[0]
  rows = min(config.admissions, cache.config.num_slots)
  numbers = queue.first_of(sequences.status == queue.WAITING, rows)
  slots = queue.first_of(state.running == none, rows)
  pairs = (numbers < none) & (slots < cache.config.num_slots) & ~state.paused
  leader = _leaders(sequences, numbers, pairs, config)
  leads = pairs & (leader == jnp.arange(rows, dtype=jnp.int32))
  length = ops.take(sequences.length, numbers)
  tokens = ops.take(sequences.tokens, numbers)
  cache, admitted = admit(cache, slots, tokens, length, mask=leads)
  target = jnp.where(admitted.ok, length - 1, 0)
  cache, kv, prefilled = _prefill(
    params, cache, state.kv, slots, tokens, target, model=model, config=config
  )
  follows = pairs & ~leads & ops.take(admitted.ok, leader)
  cache, forked = fork(cache, slots[leader], slots, mask=follows)
  kv = kv_memory.copy(kv, *forked.copies)
  enters = admitted.ok | forked.ok
  idle = ~jnp.any(enters) & jnp.all(state.running == none)
  hopeless = is_failure(admitted.code) & (
    idle | (admitted.code != Status.OUT_OF_PAGES)
  )
  sequences = queue.with_status(sequences, numbers, enters, queue.RUNNING)
  return dataclasses.replace(
    state,
    cache=cache,
    kv=kv,
    sequences=queue.fail(sequences, numbers, hopeless, admitted.code),
    running=ops.put(
      state.running, ops.where_valid(enters, slots), values=numbers
    ),
    counters=dataclasses.replace(
      state.counters,
      prefilled=state.counters.prefilled + prefilled,
      forked=state.counters.forked + jnp.sum(forked.ok, dtype=jnp.int32),
    ),
  )


def _leaders(
  sequences: Sequences, numbers: Array, pairs: Array, config: RolloutConfig
) -> Array:
  """int32[R]: the first row with the same fresh prompt, or the row itself.

  A prompt of one token has nothing to prefill, and a preempted sequence is no
  longer a bare prompt. Such rows are their own leaders.
  """
  fresh = ops.take(queue.num_generated(sequences), numbers) == 0
  fresh &= pairs & (ops.take(sequences.length, numbers) > 1)
  prompt = numbers // config.num_samples
  same = (prompt[:, None] == prompt[None]) & fresh[:, None] & fresh[None]
  same |= jnp.eye(numbers.shape[0], dtype=bool)
  return jnp.argmax(same, axis=1).astype(jnp.int32)


def _prefill(
  params: Any,
  cache: CacheState,
  kv: KVPages,
  slots: Array,
  tokens: Array,
  target: Array,
  *,
  model: Model,
  config: RolloutConfig,
) -> tuple[CacheState, KVPages, Array]:
  """Computes and commits tokens in chunks until each slot holds `target`.

  Args:
    params: the model's.
    cache: the cache, with the slots admitted.
    kv: the K/V memory.
    slots: int32[R].
    tokens: int32[R, W], the sequences in the slots.
    target: int32[R], tokens that each slot is to hold; 0 for an unused row.
    model: see `Model`.
    config: the chunk's size.

  Returns:
    The cache, the memory, and int32[]: tokens computed.
  """
  column = jnp.arange(config.prefill_chunk, dtype=jnp.int32)[None]
  row = jnp.arange(slots.shape[0], dtype=jnp.int32)[:, None]
  missing = jnp.maximum(target - ops.take(cache.length, slots), 0)

  def chunk(loop):
    cache, kv, missing = loop
    counts = jnp.minimum(missing, config.prefill_chunk)
    starts = ops.take(cache.length, slots)
    positions = starts[:, None] + column
    place = ops.where_valid(column < counts[:, None], positions)
    chunk_tokens = ops.take(tokens, row, place)
    table = ops.take(cache.page_table[:, 0], slots, fill=cache.config.no_page)
    view = View(page_table=table, starts=starts, counts=counts)
    _, kv = model(params, chunk_tokens, positions, kv, view)
    cache, _ = commit(cache, chunk_tokens, counts, slots=slots, mask=counts > 0)
    return cache, kv, missing - counts

  total = jnp.sum(missing, dtype=jnp.int32)
  cache, kv, _ = lax.while_loop(
    lambda loop: jnp.any(loop[2] > 0), chunk, (cache, kv, missing)
  )
  return cache, kv, total


def _decode(
  params: Any,
  state: RolloutState,
  temperature: Array,
  *,
  model: Model,
) -> RolloutState:
  """One token for every running slot that has room for it."""
  none = state.sequences.length.shape[0]
  active = state.running < none
  cache, allocated = allocate(state.cache, active.astype(jnp.int32))
  state = dataclasses.replace(state, cache=cache)
  state, victim = _preempt(state, active & ~allocated.ok)
  sequences, numbers = state.sequences, state.running
  runs = (numbers < none) & allocated.ok
  last = ops.take(sequences.length, numbers) - 1
  tokens = ops.take(sequences.tokens, numbers, last)[:, None]
  view = View(
    page_table=state.cache.page_table[:, 0],
    starts=state.cache.length,
    counts=runs.astype(jnp.int32),
  )
  slots, samples = active.shape[0], state.config.num_samples
  if samples > 1:
    # Forks of a prompt read its pages once, where that pays.
    view = kv_memory.share(
      state.kv, view, num_clusters=-(-slots // samples), cluster_size=samples
    )
  logits, kv = model(
    params, tokens, state.cache.length[:, None], state.kv, view
  )
  drawn, log_probs = sampling.sample(
    sequences.keys[jnp.minimum(numbers, none - 1)],
    ops.take(queue.num_generated(sequences), numbers),
    last_logits(logits, slots),
    temperature,
  )
  cache, _ = commit(state.cache, tokens, view.counts)
  sequences, ended = queue.append(
    sequences, numbers, runs, drawn, log_probs, state.config
  )
  counters = _count(state.counters, cache, runs)
  cache, _ = free(cache, mask=ended | victim)
  running = jnp.where(ended, none, numbers)
  return dataclasses.replace(
    state,
    cache=cache,
    kv=kv,
    sequences=sequences,
    running=running,
    paused=state.paused & ~jnp.any(ended) & jnp.any(running < none),
    counters=counters,
  )


def _preempt(state: RolloutState, starved: Array) -> tuple[RolloutState, Array]:
  """Preempts the youngest sequence if a slot got no page.

  A sequence that runs alone cannot get more pages, so it is given up.

  Returns:
    The state, and bool[B]: the slot that the caller frees at the step's end.
  """
  none = state.sequences.length.shape[0]
  age = jnp.where(state.running < none, state.running, -1)
  slots = jnp.arange(age.shape[0], dtype=jnp.int32)
  victim = jnp.any(starved) & (slots == jnp.argmax(age)) & (age >= 0)
  alone = jnp.sum(age >= 0, dtype=jnp.int32) == 1
  sequences = queue.with_status(
    state.sequences, state.running, victim, queue.WAITING
  )
  code = jnp.full_like(slots, Status.OUT_OF_PAGES)
  count = jnp.sum(victim & ~alone, dtype=jnp.int32)
  state = dataclasses.replace(
    state,
    sequences=queue.fail(sequences, state.running, victim & alone, code),
    running=jnp.where(victim, none, state.running),
    paused=state.paused | (count > 0),
    counters=dataclasses.replace(
      state.counters, preempted=state.counters.preempted + count
    ),
  )
  return state, victim


def _count(counters: Counters, cache: CacheState, runs: Array) -> Counters:
  in_use = cache.config.num_pages - 1 - cache.pool.queue.num_free
  shared = jnp.sum(cache.num_pages, dtype=jnp.int32) - in_use
  return dataclasses.replace(
    counters,
    steps=counters.steps + 1,
    generated=counters.generated + jnp.sum(runs, dtype=jnp.int32),
    peak_pages=jnp.maximum(counters.peak_pages, in_use),
    peak_shared=jnp.maximum(counters.peak_shared, shared),
  )
