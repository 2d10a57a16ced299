"""Generation loop: share, admit, grow, compute, commit, sample, free.

Each step has these parts, in order; a part without work costs almost nothing:

| part     | action                                                         |
|----------|----------------------------------------------------------------|
| share    | further samples of a prompt share the pages of the first one   |
| admit    | waiting sequences take empty slots and cached prefixes         |
| grow     | reserves pages for the next tokens of all slots                |
| compute  | one call of the model: the next token of each sequence that    |
|          | decodes, and tokens of prompts                                 |
| commit   | the tokens become final; full pages are cached                 |
| sample   | sequences whose tokens are all computed sample the next one    |
| free     | ended sequences return their pages                             |

When the pool is empty, the running sequence with the fewest tokens is
preempted: it returns to the queue and later resumes with the same samples. Its
pages stay cached until they are evicted. Admission keeps a page free for each
running sequence, so preemption is rare, and admits none while a running
sequence lacks a page, so the longest sequence always makes progress.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv._src.arrays import elementwise
from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import sharding
from jaxkv._src.cache.pool import recurrent
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.verbs.commit import commit
from jaxkv._src.cache.verbs.free import free
from jaxkv._src.rollout import drafts
from jaxkv._src.rollout import packing
from jaxkv._src.rollout import slots
from jaxkv._src.rollout import timeline
from jaxkv._src.rollout.drafts import Draft
from jaxkv._src.rollout.drawing import Seen
from jaxkv._src.rollout.drawing import Steps
from jaxkv._src.rollout.drawing import draw
from jaxkv._src.rollout.drawing import looked_at
from jaxkv._src.rollout.drawing import nothing_seen
from jaxkv._src.rollout.guessing import Guesses
from jaxkv._src.rollout.guessing import guess
from jaxkv._src.rollout.model import Model
from jaxkv._src.rollout.model import call
from jaxkv._src.rollout.model import check_numerics
from jaxkv._src.rollout.model import room_for_drafts
from jaxkv._src.rollout.model import shape_of_logits
from jaxkv._src.rollout.packing import Width
from jaxkv._src.rollout.packing import Work
from jaxkv._src.rollout.routing import with_experts
from jaxkv._src.rollout.rows import Process
from jaxkv._src.rollout.state import RolloutState
from jaxkv._src.rollout.until import Until
from jaxkv._src.rollout.until import as_until
from jaxkv._src.rollout.until import goes_on
from jaxkv._src.sampling import penalties

_Loop = tuple[RolloutState, Seen | None, Array | None]


def generate(
  params: Any,
  state: RolloutState,
  until: Until | None = None,
  *,
  model: Model,
  process: Process | None = None,
  draft: Draft | None = None,
) -> RolloutState:
  """Generates tokens until all sequences have ended, or until `until`.

  One `while_loop` without host round trips. Jit it with the state donated, as
  `jax.jit(functools.partial(generate, model=model), donate_argnums=1)`, so that
  the K/V memory is updated in place.

  A sequence that can never run, because other holders leave it too few pages,
  is FAILED, with the reason in its `code`. A sequence without finite logits to
  sample from fails with BAD_LOGITS and keeps its earlier tokens.

  Args:
    params: the model's parameters.
    state: from `init`, or from an earlier call, which it resumes.
    until: when to return; None for the end of all sequences.
    model: such as `functools.partial(models.forward, config=config)`; see
      `Model`.
    process: changes logits before a token is sampled, see `Process`.
    draft: proposes tokens, see `Draft`; None for n-gram matches. Used only if
      `RolloutConfig.draft_tokens` is positive.

  Returns:
    The state. `is_done` tests for the end; `generated` returns the tokens.

  Raises:
    TypeError: `until` is not an `Until`, or the logits are not floats.
    ValueError: a number of `until` is negative, logits have the wrong shape, or
      a `functools.partial` of a model has other numerics than the rollout.
  """
  check_numerics(state.config, model)
  limits, seen = as_until(until), None
  if penalties.needs_seen(state.sampling):
    shape = shape_of_logits(params, state, model=model)
    seen = nothing_seen(state, shape.shape[1])
  room = room_for_drafts(params, state, model=model)
  params, state, limits, seen, room = sharding.match_varying_axes(
    (params, state, limits, seen, room)
  )
  begin = state.counters.steps

  def step(loop: _Loop) -> _Loop:
    state, seen, room = loop
    state = slots.recycle_windows(state)
    with jax.named_scope("fork"):
      state, forks = slots.share_prompts(state)
    with jax.named_scope("admit"):
      state = slots.admit_waiting(state)
    with jax.named_scope("draft"):
      guesses = guess(params, state, draft)
    counts = None if guesses is None else guesses.counts
    with jax.named_scope("grow"):
      state, starved, preempted = slots.grow(state, forks, counts)
    seen = looked_at(state, seen)
    return _compute(
      params,
      state,
      guesses,
      seen,
      room,
      starved,
      preempted,
      model=model,
      process=process,
    )

  def unfinished(loop: _Loop) -> Array:
    return goes_on(limits, loop[0], begin)

  return lax.while_loop(unfinished, step, (state, seen, room))[0]


def _compute(
  params: Any,
  state: RolloutState,
  guesses: Guesses | None,
  seen: Seen | None,
  room: Array | None,
  starved: Array,
  preempted: Array,
  *,
  model: Model,
  process: Process | None,
) -> _Loop:
  """Computes, commits and samples the tokens of a step, and frees slots."""
  none, before, numbers = state.sequences.length.shape[0], state, state.running
  missing = jnp.where(starved, 0, slots.missing_tokens(state))
  followed = slots.followed(state)
  sizes = packing.widths(state.config)
  work = packing.schedule(
    slots.tokens_now(state, missing - followed.astype(jnp.int32)),
    (missing > 1) | followed,
    slots.turns(state),
    sizes,
    None if guesses is None else guesses.counts,
    one_part=recurrent.has_states(state.cache.config),
  )
  tokens = None if guesses is None else guesses.tokens
  draws = (work.counts > 0) & (work.counts == missing)
  with jax.named_scope("model"):
    kv, logits, records = call(
      params, state, work, tokens, sizes, room, model=model
    )
  state = dataclasses.replace(
    state, sequences=dataclasses.replace(state.sequences, records=records)
  )
  read = jnp.zeros((), jnp.int32)
  counts = work.counts
  if guesses is None:
    cache, page_keys = _commit(state, counts)
    read = _read(cache)
    steps = draw(state, work, draws, logits, tokens, seen, read, process)
  else:
    steps = draw(state, work, draws, logits, tokens, seen, read, process)
    counts = jnp.maximum(counts, steps.counts)
    state = dataclasses.replace(state, sequences=steps.sequences)
    cache, page_keys = _commit(state, counts)
  log = timeline.record(before, counts, draws, preempted)
  state = _count(before, cache, work, steps, counts, sizes)
  state = _learn(state, work, guesses, steps)
  leaving = jnp.where(steps.ended, numbers, preempted)
  sequences = with_experts(steps.sequences, kv, cache, leaving)
  cache, _ = free(cache, mask=leaving < none)
  state = dataclasses.replace(
    state,
    cache=cache,
    kv=kv,
    sequences=sequences,
    user=steps.user,
    page_keys=page_keys,
    running=jnp.where(steps.ended, none, numbers),
    log=log,
  )
  return state, steps.seen, logits.drafts


def _read(cache: CacheState) -> Array:
  """Returns a non-negative int32[] that depends on a step's tokens."""
  if cache.hashes is None:
    return jnp.zeros((), jnp.int32)
  return jnp.max(cache.hashes.tail) & jnp.int32(2**31 - 1)


def _learn(
  state: RolloutState, work: Work, guesses: Guesses | None, steps: Steps
) -> RolloutState:
  """Updates the n-gram tables and acceptance rates with the sampled tokens."""
  known, config = state.drafts, state.config
  if known is None or guesses is None or work.drafts is None:
    return state
  length = slots.lengths(state)
  known = drafts.with_tokens(
    known,
    steps.sequences,
    state.running,
    length,
    length + steps.counts,
    config,
    config.draft_tokens + 1,
  )
  right = jnp.maximum(steps.counts - 1, 0)
  known = drafts.learn(known, state.running, guesses.found, work.drafts, right)
  return dataclasses.replace(state, drafts=known)


def _commit(
  state: RolloutState, counts: Array
) -> tuple[CacheState, Array | None]:
  """Commits each slot's next tokens, one page in each iteration.

  Returns:
    The cache, and `RolloutState.page_keys` with the keys of the pages filled.
  """
  size, aligned = state.cache.config.page_size, state.cache.config.alignment
  column = jnp.arange(size, dtype=jnp.int32)[None]
  numbers = state.running[:, None]

  def trip(
    loop: tuple[CacheState, Array | None, Array],
  ) -> tuple[CacheState, Array | None, Array]:
    cache, keys, left = loop
    now, before = (
      jnp.minimum(left, size),
      elementwise.quotient(cache.length, aligned),
    )
    tokens = indexing.take(
      state.sequences.tokens, numbers, cache.length[:, None] + column
    )
    cache, _ = commit(cache, tokens, now)
    if keys is not None and cache.hashes is not None:
      # `chain` is the key after the last page at which all groups end one.
      after = elementwise.quotient(cache.length, aligned)
      place = indexing.where_valid(after > before, state.running)
      last = after * (aligned // size) - 1
      keys = indexing.put(keys, place, last, values=cache.hashes.chain)
    return cache, keys, left - now

  cache, keys, _ = lax.while_loop(
    lambda loop: jnp.any(loop[2] > 0),
    trip,
    (state.cache, state.page_keys, counts),
  )
  return cache, keys


def _count(
  state: RolloutState,
  cache: CacheState,
  work: Work,
  steps: Steps,
  counts: Array,
  sizes: tuple[Width, ...],
) -> RolloutState:
  before, numbers = state.counters, state.running
  columns = jnp.asarray([sum(size) for size in sizes], jnp.int32)
  widths = jnp.arange(len(sizes), dtype=jnp.int32)
  rows = numbers.shape[0] + columns[work.width]
  in_use = cache.config.num_pages - 1 - cache.pool.queue.num_free
  held = cache.num_pages - cache.num_skipped_pages
  shared = jnp.sum(held, dtype=jnp.int32) - in_use
  place = indexing.where_valid(counts > 0, numbers)
  known = indexing.take(state.computed, place)
  again = jnp.clip(known - state.cache.length, 0, counts)
  last = jnp.minimum(steps.counts, counts - again)
  drafted, accepted = before.drafted, before.accepted
  if work.drafts is not None:
    drafted += jnp.sum(work.drafts, dtype=jnp.int32)
    accepted += jnp.sum(jnp.maximum(steps.counts - 1, 0), dtype=jnp.int32)
  counters = dataclasses.replace(
    before,
    steps=before.steps + jnp.int32(1),
    calls=before.calls + (widths == work.width).astype(jnp.int32),
    rows=before.rows + rows,
    generated=before.generated + jnp.sum(steps.counts, dtype=jnp.int32),
    prefilled=before.prefilled
    + jnp.sum(counts - again - last, dtype=jnp.int32),
    recomputed=before.recomputed + jnp.sum(again, dtype=jnp.int32),
    drafted=drafted,
    accepted=accepted,
    peak_pages=jnp.maximum(before.peak_pages, in_use),
    peak_shared=jnp.maximum(before.peak_shared, shared),
  )
  computed = jnp.maximum(known, state.cache.length + counts)
  return dataclasses.replace(
    state,
    counters=counters,
    computed=indexing.put(state.computed, place, values=computed),
  )
