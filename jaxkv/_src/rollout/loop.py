"""The loop: share, admit, grow, compute, commit, sample, free.

The parts of a step, in order; a part with nothing to do costs almost nothing:

| part     | what happens                                                     |
|----------|------------------------------------------------------------------|
| share    | further samples of a prompt share the pages of the first one     |
| admit    | waiting sequences take empty slots; cached prefixes are attached |
| grow     | all of them get pages for their next tokens                      |
| compute  | one call of the model: the next token of every sequence that     |
|          | decodes, and tokens of prompts                                   |
| commit   | the tokens become final; full pages are cached                   |
| sample   | sequences without missing tokens draw the next one               |
| free     | ended sequences give their pages back                            |

When the pool is empty, the running sequence with the fewest tokens is
preempted: it gives its slot back and waits. Its generated tokens are kept, its
pages stay cached until they are evicted, and it resumes later with the same
draws. Newcomers leave a page free for each running sequence, so this is rare;
and none enters while a running sequence lacks a page, so the longest one always
gets further.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv import kv as kv_memory
from jaxkv._src.cache import ops
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.verbs.commit import commit
from jaxkv._src.cache.verbs.free import free
from jaxkv._src.kv.view import packed_positions
from jaxkv._src.rollout import packing
from jaxkv._src.rollout import sampling
from jaxkv._src.rollout import sequences as queue
from jaxkv._src.rollout import slots
from jaxkv._src.rollout import timeline
from jaxkv._src.rollout.arguments import as_max_steps
from jaxkv._src.rollout.arguments import as_temperature
from jaxkv._src.rollout.arguments import check_all_logits
from jaxkv._src.rollout.arguments import check_logits
from jaxkv._src.rollout.packing import Work
from jaxkv._src.rollout.state import RolloutState
from jaxkv._src.rollout.state import is_done
from jaxkv.kv import KVPages

Model = Callable[..., tuple[Array, KVPages]]
"""`(params, tokens int32[1, C], positions int32[1, C], kv, views, columns
int32[X]) -> (logits [X, V], kv)`: stores the K/V of the tokens, attends through
`jaxkv.kv`, and gives the logits of some columns. `views` has a `PackedView` for
each layer group. Logits are floats of any width, which are sampled from in
float32. `all_logits` makes one of a model that gives logits for all tokens."""


def all_logits(model: Callable[..., tuple[Array, KVPages]]) -> Model:
  """A `Model` of one that gives logits for all tokens, [1, C, V].

  Args:
    model: `(params, tokens int32[1, C], positions int32[1, C], kv, views) ->
      (logits [1, C, V], kv)`.

  Raises:
    ValueError: when the model is called, if its logits have another shape.
  """

  def call(
    params: Any,
    tokens: Array,
    positions: Array,
    kv: KVPages,
    views: Any,
    columns: Array,
  ) -> tuple[Array, KVPages]:
    logits, kv = model(params, tokens, positions, kv, views)
    check_all_logits(logits, tokens.shape[1])
    return logits[0].at[columns].get(mode="clip"), kv

  return call


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
    state = slots.recycle_windows(state)
    state, forks = slots.share_prompts(state)
    state = slots.admit_waiting(state)
    state, starved, preempted = slots.grow(state, forks)
    return _compute(params, state, starved, preempted, temperature, model=model)

  return lax.while_loop(unfinished, step, state)


def _compute(
  params: Any,
  state: RolloutState,
  starved: Array,
  preempted: Array,
  temperature: Array,
  *,
  model: Model,
) -> RolloutState:
  """The tokens of a step, and what follows from them."""
  none, num_slots = state.sequences.length.shape[0], state.running.shape[0]
  numbers = state.running
  missing = jnp.where(starved, 0, slots.missing_tokens(state))
  followed = jnp.zeros((num_slots + 1,), bool)
  followed = followed.at[state.leader].set(True)[:num_slots]
  sizes = packing.widths(state.config)
  work = packing.schedule(
    jnp.minimum(
      missing - followed.astype(jnp.int32), slots.tokens_at_once(state)
    ),
    (missing > 1) | followed,
    slots.turns(state),
    sizes,
  )
  draws = (work.counts > 0) & (work.counts == missing)
  kv, logits = _call(params, state, work, sizes, model=model)
  cache, page_keys = _commit(state, work.counts)
  sequences = state.sequences
  drawn, log_probs = sampling.sample(
    sequences.keys[jnp.minimum(numbers, none - 1)],
    ops.take(queue.num_generated(sequences), numbers),
    logits,
    temperature,
  )
  sequences, ended = queue.append(
    sequences,
    ops.read_before(_read(cache, drawn), numbers),
    draws,
    drawn,
    log_probs,
    state.config,
  )
  log = timeline.record(state, work.counts, draws, preempted)
  state = _count(state, cache, work, draws, sizes)
  cache, _ = free(cache, mask=ended | (preempted < none))
  return dataclasses.replace(
    state,
    cache=cache,
    kv=kv,
    sequences=sequences,
    page_keys=page_keys,
    running=jnp.where(ended, none, numbers),
    log=log,
  )


def _read(cache: CacheState, drawn: Array) -> Array:
  """int32[], not negative: from tokens that a step has read; `read_before`."""
  read = jnp.max(drawn)
  if cache.hashes is not None:
    read = jnp.maximum(read, jnp.max(cache.hashes.tail))
  return read & jnp.int32(2**31 - 1)


def _call(
  params: Any,
  state: RolloutState,
  work: Work,
  sizes: tuple[int, ...],
  *,
  model: Model,
) -> tuple[KVPages, Array]:
  """Calls the model with the tokens of a step, in the width that was chosen.

  Returns:
    The memory, and the logits of each slot's last token, [B, V].
  """
  num_slots, samples = state.running.shape[0], state.config.num_samples
  cache = state.cache
  single = packing.single_views(cache, work)
  starts = single[0].starts
  if samples > 1:
    # Forks of a prompt read its pages once, where that pays.
    single = tuple(
      one
      if kind.skips_pages
      else kv_memory.share(
        state.kv,
        one,
        num_clusters=-(-num_slots // samples),
        cluster_size=samples,
      )
      for kind, one in zip(cache.config.groups, single, strict=True)
    )
  tokens = _tokens(state, work.slots, starts)

  def call(kv: KVPages, size: int) -> tuple[Array, KVPages]:
    if not size:
      views = packing.packed(single, None)
      return model(params, tokens[None], starts[None], kv, views, work.last)
    chunks = packing.chunk_views(cache, work)
    row, positions = packed_positions(chunks[0], size)
    owners = ops.take(work.order, row, fill=num_slots)
    more = _tokens(state, owners, positions)
    return model(
      params,
      jnp.concatenate([tokens, more])[None],
      jnp.concatenate([starts, jnp.maximum(positions, 0)])[None],
      kv,
      packing.packed(single, chunks),
      work.last,
    )

  shape = jax.eval_shape(lambda kv: call(kv, 0)[0], state.kv)
  check_logits(shape, num_slots)
  carry = state.kv, jnp.zeros(shape.shape, shape.dtype)
  for width, size in enumerate(sizes):

    def once(carry: Any, size: int = size) -> Any:
      logits, kv = call(carry[0], size)
      return kv, logits

    # A conditional, or a switch, would copy the memory.
    carry = ops.at_most_once(work.width == width, once, carry)
  return carry


def _tokens(state: RolloutState, slots: Array, positions: Array) -> Array:
  """int32[X]: tokens of the sequences in slots; 0 for an empty one."""
  none = state.sequences.length.shape[0]
  numbers = ops.take(state.running, slots, fill=none)
  return ops.take(state.sequences.tokens, numbers, positions)


def _commit(
  state: RolloutState, counts: Array
) -> tuple[CacheState, Array | None]:
  """Commits each slot's next tokens, a page's worth in a trip.

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
    now, before = jnp.minimum(left, size), ops.quotient(cache.length, aligned)
    tokens = ops.take(
      state.sequences.tokens, numbers, cache.length[:, None] + column
    )
    cache, _ = commit(cache, tokens, now)
    if keys is not None and cache.hashes is not None:
      # The chain's key is that after the last page that all groups end.
      after = ops.quotient(cache.length, aligned)
      place = ops.where_valid(after > before, state.running)
      last = after * (aligned // size) - 1
      keys = ops.put(keys, place, last, values=cache.hashes.chain)
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
  draws: Array,
  sizes: tuple[int, ...],
) -> RolloutState:
  before, numbers, counts = state.counters, state.running, work.counts
  rows = numbers.shape[0] + jnp.asarray(sizes, jnp.int32)[work.width]
  in_use = cache.config.num_pages - 1 - cache.pool.queue.num_free
  held = cache.num_pages - cache.num_skipped_pages
  shared = jnp.sum(held, dtype=jnp.int32) - in_use
  place = ops.where_valid(counts > 0, numbers)
  known = ops.take(state.computed, place)
  again = jnp.clip(known - state.cache.length, 0, counts)
  last = (draws & (again < counts)).astype(jnp.int32)
  counters = dataclasses.replace(
    before,
    steps=before.steps + 1,
    calls=before.calls.at[work.width].add(1),
    rows=before.rows + rows,
    generated=before.generated + jnp.sum(draws, dtype=jnp.int32),
    prefilled=before.prefilled
    + jnp.sum(counts - again - last, dtype=jnp.int32),
    recomputed=before.recomputed + jnp.sum(again, dtype=jnp.int32),
    peak_pages=jnp.maximum(before.peak_pages, in_use),
    peak_shared=jnp.maximum(before.peak_shared, shared),
  )
  computed = jnp.maximum(known, state.cache.length + counts)
  return dataclasses.replace(
    state,
    counters=counters,
    computed=ops.put(state.computed, place, values=computed),
  )
