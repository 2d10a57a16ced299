"""One step of the engine.

Each step has these parts, in order. All but the model cost almost nothing if
they have no work:

| part     | action                                                         |
|----------|----------------------------------------------------------------|
| windows  | pages behind sliding windows are freed                         |
| fork     | samples share the prompt's pages with the one that computed it |
| admit    | waiting sequences take empty slots and cached prefixes         |
| draft    | speculation proposes tokens, if pages are free for them        |
| grow     | reserves pages for the next tokens of all slots; evicted pages |
|          | move to offload memory                                         |
| make way | forks without a page return to the queue; a sequence is        |
|          | preempted if another one got no page                           |
| schedule | chooses the tokens of the step                                 |
| model    | one call: the last token of each sequence that decodes, its    |
|          | drafts, and tokens of prompts                                  |
| commit   | the tokens become final; full pages are cached                 |
| sample   | sequences whose tokens are all computed sample another token   |
| free     | sequences that ended, or lost their slots, return their pages  |

With speculation, sampling comes before the commit, because it decides which
drafts are accepted. If `RolloutConfig.decode_steps` is above 1, the model is
called and tokens are sampled several times before the commit; see
`decode_round`. Log-probs of given tokens, as in `score`, are recorded after the
call; see `given_log_probs`.

If a running sequence gets no page, `preempt` chooses a victim, which returns to
the queue, and later resumes and samples the same tokens; a lone victim fails.
Full pages of a victim stay cached until they are evicted. Admission keeps one
page free for each running sequence and group of layers, so preemption is rare.
No sequence is admitted while a running one lacks a page, so one advances, in
this step or, with the pages of the victim, in the next.
"""

import dataclasses
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import loops
from jaxkv._src.cache.pool import recurrent
from jaxkv._src.cache.state import Status
from jaxkv._src.cache.state import is_empty
from jaxkv._src.cache.state import without_moves
from jaxkv._src.cache.verbs.free import free
from jaxkv._src.engine import admit
from jaxkv._src.engine import decode_round
from jaxkv._src.engine import fork
from jaxkv._src.engine import grow
from jaxkv._src.engine import preempt
from jaxkv._src.engine import schedule
from jaxkv._src.engine import timeline
from jaxkv._src.engine.commit import commit_tokens
from jaxkv._src.engine.commit import count_step
from jaxkv._src.engine.commit import read_of
from jaxkv._src.engine.config import RolloutConfig
from jaxkv._src.engine.decode_round import Round
from jaxkv._src.engine.expert_records import save_experts
from jaxkv._src.engine.expert_records import save_full_pages
from jaxkv._src.engine.given_log_probs import are_recorded
from jaxkv._src.engine.given_log_probs import end_given
from jaxkv._src.engine.hooks import Draft
from jaxkv._src.engine.hooks import Model
from jaxkv._src.engine.hooks import Process
from jaxkv._src.engine.hooks import is_exact
from jaxkv._src.engine.memory import Memory
from jaxkv._src.engine.memory import move_pages
from jaxkv._src.engine.model_call import call_model
from jaxkv._src.engine.queue import Queue
from jaxkv._src.engine.sample_and_verify import Sampled
from jaxkv._src.engine.sample_and_verify import Tally
from jaxkv._src.engine.sample_and_verify import count_entrants
from jaxkv._src.engine.sample_and_verify import sample_tokens
from jaxkv._src.engine.schedule import Width
from jaxkv._src.engine.schedule import Work
from jaxkv._src.engine.slots import Slots
from jaxkv._src.engine.slots import are_followed
from jaxkv._src.engine.slots import limit_to_chunk
from jaxkv._src.engine.slots import missing_tokens
from jaxkv._src.engine.slots import prompt_rest
from jaxkv._src.engine.speculate import learn_from
from jaxkv._src.engine.speculate import propose_drafts
from jaxkv._src.engine.state import RolloutState


class Buffers(NamedTuple):
  """Arrays that the loop carries from step to step, beside the state.

  Attributes:
    tally: token counts for penalties; None without penalties.
    draft_logits: [D, V], a buffer for the logits of drafts; None without
      speculation.
    bad_rows: int32[B], the rows of the queue whose sequences failed with
      BAD_LOGITS in this step; Q for none. None without prefix caching.
  """

  tally: Tally | None = None
  draft_logits: Array | None = None
  bad_rows: Array | None = None


def no_bad_rows(state: RolloutState) -> Array | None:
  """Returns the initial `Buffers.bad_rows`."""
  if state.queue.page_keys is None:
    return None
  return jnp.full_like(state.slots.row, state.queue.no_row)


def step(
  params: Any,
  state: RolloutState,
  buffers: Buffers,
  *,
  model: Model,
  process: Process | None = None,
  draft: Draft | None = None,
  max_calls: Array | None = None,
) -> tuple[RolloutState, Buffers]:
  """Runs one step of at most `max_calls`, int32[], calls, but at least one.

  `model`, `process` and `draft` are as in `generate`.
  """
  queue, slots, memory = state.queue, state.slots, state.memory
  config, counters = state.config, state.counters
  cache = without_moves(memory.cache)
  # First, so that this step's forks and admissions can use the freed pages.
  cache = grow.free_behind_windows(queue, slots, cache)
  with jax.named_scope("fork"):
    forks, leaders = fork.ready_forks(queue, slots, cache), slots.leader
    if config.num_samples > 1:
      slots, cache = fork.share_full_pages(slots, cache, forks)
  with jax.named_scope("admit"):
    memory = dataclasses.replace(memory, cache=cache)
    state = _replaced(state, queue, slots, memory)
    state = _admit(state)
  queue, slots, cache = state.queue, state.slots, state.memory.cache
  with jax.named_scope("draft"):
    drafts = propose_drafts(params, queue, slots, cache, config, draft)
  num_drafts = None if drafts is None else drafts.counts
  records = queue.log_probs_from is not None
  widths = schedule.widths(config, records=records)
  planned = _plan_tokens(state, widths)
  with jax.named_scope("grow"):
    state, starved = _reserve_pages(state, num_drafts, planned, forks)
    state, leaving = _make_way(state, forks, leaders, starved)
  # After admission and preemption, which change the sequences in the slots.
  tally = count_entrants(state.queue, state.slots, buffers.tally)
  work, is_complete = _schedule(state, starved, num_drafts, widths, planned)
  tokens = None if drafts is None else drafts.tokens
  queue, slots, memory = state.queue, state.slots, state.memory
  with jax.named_scope("model"):
    queue, kv, logits = call_model(
      params,
      queue,
      slots,
      memory,
      work,
      tokens,
      buffers.draft_logits,
      config,
      widths,
      model=model,
    )
  memory, counts = dataclasses.replace(memory, kv=kv), work.counts
  num_more = None
  if config.decode_steps > 1:
    with jax.named_scope("reserve"):
      cache, num_more = decode_round.reserve(
        queue, slots, memory.cache, counts, is_complete, max_calls, config
      )
      memory = move_pages(dataclasses.replace(memory, cache=cache))
  before = memory.cache
  place = counters.steps.modulo(max(config.timeline, 1))
  decodes = is_complete & (counts == 1)
  # Otherwise later tokens of the step depend on what is sampled.
  commits_first = drafts is None and num_more is None
  if commits_first:
    queue = save_full_pages(queue, slots, memory.kv, before, counts)
    queue, cache = commit_tokens(queue, slots, before, counts)
  queue, sampled = _sample(
    queue,
    slots=slots,
    work=work,
    is_complete=is_complete,
    tally=tally,
    logits=logits,
    drafts=tokens,
    # Sampling writes to arrays that the commit has read. It must wait for the
    # commit, or XLA would copy the arrays.
    read=read_of(cache) if commits_first else jnp.zeros((), jnp.int32),
    version=before.epoch.astype(jnp.int32),
    config=config,
    exact=is_exact(model),
    process=process,
  )
  if not commits_first:
    # A slot that decodes commits its last token and the accepted drafts, which
    # are together as many tokens as it sampled.
    counts = jnp.maximum(counts, sampled.counts)
  log = timeline.record(
    state.log, place, queue, slots, counts, decodes, leaving
  )
  num_decodes = None
  if num_more is not None:
    first_call = Round(jnp.zeros((), jnp.int32), counts, sampled, log)
    queue, kv, (num_decodes, counts, sampled, log) = decode_round.decode(
      params,
      queue,
      slots,
      memory,
      first_call,
      num_more,
      place,
      config,
      model=model,
      process=process,
    )
    memory = dataclasses.replace(memory, kv=kv)
  if not commits_first:
    queue = save_full_pages(queue, slots, memory.kv, before, counts)
    queue, cache = commit_tokens(queue, slots, before, counts)
  counters, queue = count_step(
    state.counters,
    queue,
    slots,
    before,
    cache,
    work,
    counts,
    sampled.counts,
    widths,
    num_decodes,
  )
  queue = learn_from(queue, slots, work, drafts, sampled.counts)
  # Pages of ended and of preempted sequences are freed in one call.
  leaving = jnp.where(sampled.ended, slots.row, leaving)
  queue = save_experts(queue, memory.kv, cache, leaving)
  cache, _ = free(cache, mask=leaving < queue.no_row)
  row = jnp.where(sampled.ended, queue.no_row, slots.row)
  state = dataclasses.replace(
    state,
    queue=queue,
    slots=dataclasses.replace(slots, row=row),
    memory=dataclasses.replace(memory, cache=cache),
    counters=counters,
    log=log,
  )
  bad_rows = _bad_rows(queue, slots, sampled.ended)
  return state, Buffers(sampled.tally, logits.drafts, bad_rows)


def _sample(
  queue: Queue,
  *,
  slots: Slots,
  work: Work,
  is_complete: Array,
  tally: Tally | None,
  config: RolloutConfig,
  **options: Any,
) -> tuple[Queue, Sampled]:
  """Ends sequences that sample nothing, and samples tokens of the others."""
  ended = jnp.zeros_like(is_complete)
  if queue.log_probs_from is not None:
    queue, ended = end_given(queue, slots, is_complete)
  sampled = Sampled(ended, jnp.zeros_like(work.counts), tally)
  if not config.max_new_tokens:
    return queue, sampled
  return sample_tokens(
    queue,
    sampled,
    slots=slots,
    work=work,
    samples=is_complete & ~ended,
    config=config,
    **options,
  )


def _bad_rows(queue: Queue, slots: Slots, ended: Array) -> Array | None:
  """Returns `Buffers.bad_rows` for the slots in `ended`, bool[B]."""
  if queue.page_keys is None:
    return None
  is_bad = indexing.take(queue.code, slots.row) == Status.BAD_LOGITS
  return jnp.where(ended & is_bad, slots.row, queue.no_row)


def _replaced(
  state: RolloutState, queue: Queue, slots: Slots, memory: Memory
) -> RolloutState:
  return dataclasses.replace(state, queue=queue, slots=slots, memory=memory)


def _admit(state: RolloutState) -> RolloutState:
  """Admits waiting sequences, if a slot is empty and pages are free."""
  config = state.config

  def enter(state: RolloutState) -> RolloutState:
    queue, slots, memory = state.queue, state.slots, state.memory
    cache, entrants = admit.attach_prefixes(queue, slots, memory.cache, config)
    queue, slots = admit.enter(queue, slots, entrants, cache.epoch)
    memory = dataclasses.replace(memory, cache=cache)
    return _replaced(state, queue, slots, memory)

  # Most steps admit nothing. `lax.cond` would copy the state; a loop does not.
  is_possible = admit.can_admit(
    state.queue, state.slots, state.memory.cache, config
  )
  with jax.named_scope("rare/enter"):
    return loops.at_most_once(is_possible, enter, state)


def _plan_tokens(state: RolloutState, widths: tuple[Width, ...]) -> Work | None:
  """Chooses the tokens of the step, if their pages depend on them.

  Returns:
    The tokens, if every slot gets pages; None without a `StateRetention`, with
    which the running state gets a page only in the column of the last token.
  """
  cache = state.memory.cache
  if cache.config.state_retention is None:
    return None
  no_slot = jnp.zeros(state.slots.row.shape, bool)
  planned, _ = _schedule(state, no_slot, None, widths)
  return planned


def _reserve_pages(
  state: RolloutState,
  num_drafts: Array | None,
  planned: Work | None,
  forks: Array,
) -> tuple[RolloutState, Array]:
  """Reserves pages for the next tokens of all slots, and moves evicted pages.

  Slots in `forks`, bool[B], fork in this step.

  Returns:
    The state; bool[B], slots that got no page.
  """
  tokens = None
  if planned is not None:
    # A fork needs a page for the copy of its leader's state, even if the step
    # computes none of its tokens.
    tokens = jnp.where(forks, jnp.maximum(planned.counts, 1), planned.counts)
  cache, starved = grow.grow(
    state.queue,
    state.slots,
    state.memory.cache,
    num_drafts,
    state.config,
    tokens,
  )
  # Evicted pages move to offload memory before new tokens overwrite them.
  memory = move_pages(dataclasses.replace(state.memory, cache=cache))
  return dataclasses.replace(state, memory=memory), starved


def _make_way(
  state: RolloutState, forks: Array, leaders: Array, starved: Array
) -> tuple[RolloutState, Array]:
  """Completes or cancels forks, and preempts a sequence if a slot got no page.

  Slots in `forks`, bool[B], fork from `leaders`, int32[B]. Slots in `starved`,
  bool[B], got no page.

  Returns:
    The state; int32[B], the row of the sequence that leaves each slot and its
    pages, which are freed at the end of the step; Q for none.
  """
  queue, slots, memory = state.queue, state.slots, state.memory
  counters, no_row = state.counters, queue.no_row
  leaving = jnp.full_like(slots.row, no_row)
  if state.config.num_samples > 1:
    forked, refused = forks & ~starved, forks & starved
    slot = jnp.arange(slots.size, dtype=jnp.int32)
    holds_pages = refused & ~is_empty(memory.cache, slot)
    leaving = jnp.where(holds_pages, slots.row, no_row)
    queue = fork.count_forked(
      queue, slots, memory.cache, leaders, forked, refused
    )
    memory = fork.copy_partial_pages(memory, leaders, forked, refused)
    slots = dataclasses.replace(
      slots, row=jnp.where(refused, no_row, slots.row)
    )
    num_forked = counters.forked + jnp.sum(forked, dtype=jnp.int32)
    counters = dataclasses.replace(counters, forked=num_forked)
  queue, slots, row_of_victim, num_preempted = preempt.preempt(
    queue, slots, memory.cache, starved & ~forks
  )
  counters = dataclasses.replace(
    counters, preempted=counters.preempted + num_preempted
  )
  state = dataclasses.replace(state, counters=counters)
  state = _replaced(state, queue, slots, memory)
  # In a slot, at most one of the two is a row; Q exceeds every row.
  return state, jnp.minimum(row_of_victim, leaving)


def _schedule(
  state: RolloutState,
  starved: Array,
  num_drafts: Array | None,
  widths: tuple[Width, ...],
  planned: Work | None = None,
) -> tuple[Work, Array]:
  """Chooses the tokens of the step, or those of `planned` that have pages.

  Returns:
    The tokens; bool[B], slots that complete their missing tokens in this step.
  """
  queue, slots, cache = state.queue, state.slots, state.memory.cache
  missing = missing_tokens(queue, slots, cache)
  missing = jnp.where(starved, 0, missing)
  # A slot with followers stops before the last token of its prompt.
  is_followed = are_followed(slots)
  rest = jnp.minimum(prompt_rest(queue, slots, cache), missing)
  tokens = jnp.where(is_followed, rest, missing)
  is_prefill, width = (missing > 1) | is_followed, None
  tokens = limit_to_chunk(cache, tokens, state.config)
  if planned is not None:
    width = planned.width
    tokens = jnp.where(missing > 0, planned.counts, 0)
  work = schedule.schedule(
    tokens,
    is_prefill,
    indexing.take(queue.place, slots.row),
    widths,
    num_drafts,
    one_part=recurrent.has_states(cache.config),
    width=width,
    axis=state.config.lockstep_axis,
  )
  if queue.log_probs_from is not None and planned is None:
    records = are_recorded(queue, slots, cache, work.counts)
    axis = state.config.lockstep_axis
    work = schedule.with_records(work, widths, jnp.any(records), axis)
  return work, (work.counts > 0) & (work.counts == missing)
