"""Further calls of the model in a step, in which sequences only decode.

A step schedules once for up to `RolloutConfig.decode_steps` calls. The first
call may compute tokens of prompts. A further call computes, for each sequence,
the token that was sampled after the previous call, and the sequence samples its
next token. Pages for the further calls are reserved together, and all tokens of
a step are committed together. The slot of a sequence that ends early is idle
for the rest of the step.
"""

import dataclasses
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv._src.arrays import elementwise
from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import loops
from jaxkv._src.arrays import sharding
from jaxkv._src.cache.pool import recurrent
from jaxkv._src.cache.state import rows_of
from jaxkv._src.cache.verbs.allocate import make_room
from jaxkv._src.engine import schedule
from jaxkv._src.engine.hooks import Model
from jaxkv._src.engine.hooks import Process
from jaxkv._src.engine.hooks import is_exact
from jaxkv._src.engine.memory import move_pages
from jaxkv._src.engine.model_call.call_model import call_model
from jaxkv._src.engine.pages.grow import num_new_pages
from jaxkv._src.engine.results import timeline
from jaxkv._src.engine.sampling.sample_and_verify import Sampled
from jaxkv._src.engine.sampling.sample_and_verify import sample_tokens
from jaxkv._src.engine.schedule import Work
from jaxkv._src.engine.slots import missing_tokens
from jaxkv._src.engine.state import RolloutState
from jaxkv._src.engine.state import replaced


class Round(NamedTuple):
  """The results of a step's calls so far.

  Attributes:
    num_further: int32[], the number of further calls in which a slot decoded.
    counts: int32[B], the number of tokens that each slot computed.
    sampled: the results of sampling.
    log: see `RolloutState.log`.
  """

  num_further: Array
  counts: Array
  sampled: Sampled
  log: Array | None


def first(
  state: RolloutState, work: Work, sampled: Sampled, leaving: Array
) -> Round:
  """Returns the results of a step's first call, with the tokens of `work`.

  `leaving`, int32[B], is the row of the sequence that leaves each slot.
  """
  # A slot that decodes computes its last token and the accepted drafts, which
  # are together as many tokens as it sampled.
  counts = jnp.maximum(work.counts, sampled.counts)
  log = timeline.record(
    state.log,
    state.counters.steps.modulo(max(state.config.timeline, 1)),
    state.queue,
    state.slots,
    counts,
    work.is_complete & (work.counts == 1),
    leaving,
  )
  return Round(jnp.zeros((), jnp.int32), counts, sampled, log)


@jax.named_scope("reserve")
def reserve(
  state: RolloutState, work: Work, max_calls: Array | None
) -> tuple[RolloutState, Array | None]:
  """Reserves pages for the tokens of the further calls.

  There are no further calls if any slot has tokens left to compute after the
  first call. If too few pages are free, the step makes fewer calls instead of
  preempting a sequence. A step makes at most `max_calls`, int32[], calls; None
  for no limit. In the first call, each slot computes the tokens of `work`, for
  which it has pages.

  Returns:
    The state; int32[B], the maximum number of further tokens of each slot, or
    None if a step has a single call.
  """
  queue, slots, cache = state.queue, state.slots, state.memory.cache
  config, counts, samples = state.config, work.counts, work.is_complete
  if config.decode_steps == 1:
    return state, None
  cache_config = cache.config
  # The last token of a sequence is never an input of the model.
  room = indexing.take(queue.limit, slots.row) - 1
  room -= indexing.take(queue.length, slots.row)
  if recurrent.has_states(cache_config):
    # A step stops at the end of a page, where its commit stores the state.
    tail_tokens = elementwise.remainder(cache.length, cache_config.page_size)
    room = jnp.minimum(room, cache_config.page_size - tail_tokens - counts)
  # A slot with an incomplete prompt would be idle in further calls, while the
  # next step can compute many tokens of the prompt.
  is_incomplete = jnp.any(missing_tokens(queue, slots, cache) > counts)
  is_complete = ~sharding.any_shard(is_incomplete, config.lockstep_axis)
  room = jnp.where(samples & is_complete, jnp.maximum(room, 0), 0)
  further_counts = jnp.arange(1, config.decode_steps, dtype=jnp.int32)

  def tokens_with(num_further: Array) -> Array:
    """Returns int32[B], a step's tokens of slots that decode again, else 0."""
    further = jnp.minimum(room, num_further)
    return jnp.where(further > 0, counts + further, 0)

  def fits_with(num_further: Array) -> Array:
    needed = num_new_pages(cache, tokens_with(num_further))
    return jnp.all(needed <= cache.pool.queue.num_free)

  fits = jax.vmap(fits_with)(further_counts)
  if max_calls is not None:
    fits &= further_counts < max_calls
  longest = jnp.sum(fits, dtype=jnp.int32)
  rows = rows_of(cache, None, None)
  cache, out = make_room(cache, rows, tokens_with(longest), suffices=True)
  memory = move_pages(dataclasses.replace(state.memory, cache=cache))
  num_more = jnp.where(out.ok, jnp.minimum(room, longest), 0)
  return replaced(state, memory=memory), num_more


def decode(
  params: Any,
  state: RolloutState,
  first_round: Round,
  num_more: Array | None,
  *,
  model: Model,
  process: Process | None,
) -> tuple[RolloutState, Round]:
  """Runs the further calls of a step, after its first, `first_round`.

  `state` has the tokens sampled after the first call, before the commit.
  `num_more`, int32[B], limits further tokens, see `reserve`.

  Returns:
    The state, and the results of all calls.
  """
  if num_more is None:
    return state, first_round
  slots, config = state.slots, state.config
  max_counts = first_round.counts + num_more
  size_of_log = max(config.timeline, 1)
  first_log_row = state.counters.steps.modulo(size_of_log)
  widths = (schedule.DECODE_ONLY,)

  def is_decoding(going: Array) -> Array:
    return sharding.any_shard(jnp.any(going), config.lockstep_axis)

  def going_in(round_: Round, has_sampled: Array) -> Array:
    return has_sampled & ~round_.sampled.ended & (round_.counts < max_counts)

  def call(loop: Any) -> Any:
    call_index, going, queue, kv, previous_round = loop
    work = schedule.decode_work(going, previous_round.counts)
    # A call without work is not logged: its row is out of range.
    log_row = elementwise.remainder(first_log_row + call_index, size_of_log)
    is_call = is_decoding(going)
    log_row = jnp.where(is_call, log_row, size_of_log)
    log = timeline.record(
      previous_round.log, log_row, queue, slots, work.counts, going
    )
    call_state = replaced(state, queue=queue, kv=kv)
    call_state, logits = call_model(
      params, call_state, work, model=model, widths=widths
    )
    call_state, sampled = sample_tokens(
      call_state,
      work,
      logits,
      tally=previous_round.sampled.tally,
      exact=is_exact(model),
      process=process,
    )
    queue, kv = call_state.queue, call_state.memory.kv
    next_round = Round(
      num_further=previous_round.num_further + is_call.astype(jnp.int32),
      counts=previous_round.counts + work.counts,
      sampled=Sampled(
        ended=previous_round.sampled.ended | sampled.ended,
        counts=previous_round.sampled.counts + sampled.counts,
        tally=sampled.tally,
      ),
      log=log,
    )
    going = going_in(next_round, sampled.counts > 0)
    return call_index + 1, going, queue, kv, next_round

  def goes_on(loop: Any) -> Array:
    call_index, going, *_ = loop
    # On an accelerator, the trip count is static: an idle call costs less than
    # the wait for the host before each call of a dynamic loop.
    is_needed = lax.platform_dependent(
      is_decoding(going), cpu=lambda x: x, default=lambda x: x | True
    )
    return (call_index < config.decode_steps) & is_needed

  def calls(loop: Any) -> Any:
    start = sharding.match_varying_axes((jnp.ones((), jnp.int32), *loop))
    return lax.while_loop(goes_on, call, start)[1:]

  going = going_in(first_round, first_round.sampled.counts > 0)
  loop = going, state.queue, state.memory.kv, first_round
  _, queue, kv, last_round = loops.at_most_once(is_decoding(going), calls, loop)
  return replaced(state, queue=queue, kv=kv), last_round
