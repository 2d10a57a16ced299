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
from jaxkv._src.cache.state import Status
from jaxkv._src.cache.verbs.free import free
from jaxkv._src.engine import decode_round
from jaxkv._src.engine.admission.admit import admit
from jaxkv._src.engine.commit import commit_tokens
from jaxkv._src.engine.commit import count_step
from jaxkv._src.engine.commit import read_of
from jaxkv._src.engine.expert_records import save_experts
from jaxkv._src.engine.hooks import Draft
from jaxkv._src.engine.hooks import Model
from jaxkv._src.engine.hooks import Process
from jaxkv._src.engine.hooks import is_exact
from jaxkv._src.engine.model_call.call_model import call_model
from jaxkv._src.engine.model_call.choose_tokens import choose_tokens
from jaxkv._src.engine.model_call.choose_tokens import plan_tokens
from jaxkv._src.engine.pages.fork import Forks
from jaxkv._src.engine.pages.fork import complete_forks
from jaxkv._src.engine.pages.fork import share_full_pages
from jaxkv._src.engine.pages.grow import free_behind_windows
from jaxkv._src.engine.pages.grow import reserve_pages
from jaxkv._src.engine.pages.preempt import preempt
from jaxkv._src.engine.queue.queue import Queue
from jaxkv._src.engine.sampling.sample_and_verify import Tally
from jaxkv._src.engine.sampling.sample_and_verify import count_entrants
from jaxkv._src.engine.sampling.sample_and_verify import sample_tokens
from jaxkv._src.engine.sampling.speculate import learn_from
from jaxkv._src.engine.sampling.speculate import propose_drafts
from jaxkv._src.engine.slots import Slots
from jaxkv._src.engine.state import RolloutState
from jaxkv._src.engine.state import replaced
from jaxkv._src.engine.state import widths_of


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
  # First, so that this step's forks and admissions can use the freed pages.
  state = free_behind_windows(state)
  state, forks = share_full_pages(state)
  state = admit(state)
  drafts = propose_drafts(params, state, draft)
  planned = plan_tokens(state)
  state, starved = reserve_pages(
    state, forks=forks, drafts=drafts, planned=planned
  )
  state, leaving = _make_way(state, forks, starved)
  # After admission and preemption, which change the sequences in the slots.
  tally = count_entrants(state.queue, state.slots, buffers.tally)
  work = choose_tokens(state, starved=starved, drafts=drafts, planned=planned)
  state, logits = call_model(
    params,
    state,
    work,
    model=model,
    widths=widths_of(state),
    drafts=drafts,
    draft_logits=buffers.draft_logits,
  )
  state, num_more = decode_round.reserve(state, work, max_calls)
  uncommitted = state
  # Otherwise later tokens of the step depend on what is sampled.
  commits_first = drafts is None and num_more is None
  if commits_first:
    state = commit_tokens(state, work.counts)
  state, sampled = sample_tokens(
    state,
    work,
    logits,
    tally=tally,
    exact=is_exact(model),
    process=process,
    drafts=drafts,
    # Sampling writes to arrays that the commit has read. It must wait for the
    # commit, or XLA would copy the arrays.
    read=read_of(state.memory.cache) if commits_first else None,
  )
  calls = decode_round.first(state, work, sampled, leaving)
  state, calls = decode_round.decode(
    params, state, calls, num_more, model=model, process=process
  )
  if not commits_first:
    state = commit_tokens(state, calls.counts)
  state = count_step(state, uncommitted=uncommitted, work=work, calls=calls)
  state = learn_from(
    state, work=work, drafts=drafts, sampled=calls.sampled.counts
  )
  state = _free_leaving(state, leaving, calls.sampled.ended)
  bad_rows = _bad_rows(uncommitted.slots, state.queue, calls.sampled.ended)
  return state, Buffers(calls.sampled.tally, logits.drafts, bad_rows)


@jax.named_scope("grow")
def _make_way(
  state: RolloutState, forks: Forks, starved: Array
) -> tuple[RolloutState, Array]:
  """Completes or cancels forks, and preempts a sequence if a slot got no page.

  Slots in `starved`, bool[B], got no page.

  Returns:
    The state; int32[B], the row of the sequence that leaves each slot and its
    pages, which are freed at the end of the step; Q for none.
  """
  old_row, no_row = state.slots.row, state.queue.no_row
  state, holds_pages = complete_forks(state, forks, starved)
  state, row_of_victim = preempt(state, starved & ~forks.mask)
  # In a slot, at most one of the two is a row; Q exceeds every row.
  leaving = jnp.where(holds_pages, old_row, no_row)
  return state, jnp.minimum(row_of_victim, leaving)


def _free_leaving(
  state: RolloutState, leaving: Array, ended: Array
) -> RolloutState:
  """Frees the pages of ended and of preempted sequences, in one call.

  `leaving`, int32[B], are the rows of preempted sequences, Q for none; the
  sequences of slots in `ended`, bool[B], have ended.
  """
  queue, slots, memory = state.queue, state.slots, state.memory
  leaving = jnp.where(ended, slots.row, leaving)
  queue = save_experts(queue, memory.kv, memory.cache, leaving)
  cache, _ = free(memory.cache, mask=leaving < queue.no_row)
  row = jnp.where(ended, queue.no_row, slots.row)
  slots = dataclasses.replace(slots, row=row)
  return replaced(state, queue=queue, slots=slots, cache=cache)


def _bad_rows(slots: Slots, queue: Queue, ended: Array) -> Array | None:
  """Returns `Buffers.bad_rows` for the slots in `ended`, bool[B]."""
  if queue.page_keys is None:
    return None
  is_bad = indexing.take(queue.code, slots.row) == Status.BAD_LOGITS
  return jnp.where(ended & is_bad, slots.row, queue.no_row)
