"""Samples tokens after a call of the model, and verifies drafts.

Without speculation, a sequence samples one token after a call. With
speculation, while the sampled token equals the draft at its position, the
sequence samples another token, from the logits of that draft. So speculation
changes no token, whatever `Sampling` and `process` do.
"""

import dataclasses
import functools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import loops
from jaxkv._src.arrays import sharding
from jaxkv._src.cache.state import Status
from jaxkv._src.engine.config import RolloutConfig
from jaxkv._src.engine.hooks import Process
from jaxkv._src.engine.hooks import check_processed
from jaxkv._src.engine.hooks import rows_of
from jaxkv._src.engine.model_call.call_model import Logits
from jaxkv._src.engine.model_call.given_log_probs import end_given
from jaxkv._src.engine.queue.queue import NOT_SAMPLED
from jaxkv._src.engine.queue.queue import Queue
from jaxkv._src.engine.queue.queue import SequenceStatus
from jaxkv._src.engine.queue.queue import fail
from jaxkv._src.engine.queue.queue import set_status
from jaxkv._src.engine.sampling.stop_rules import endings
from jaxkv._src.engine.schedule import Drafts
from jaxkv._src.engine.schedule import Work
from jaxkv._src.engine.slots import Slots
from jaxkv._src.engine.state import RolloutState
from jaxkv._src.engine.state import replaced
from jaxkv._src.sampling import penalties
from jaxkv._src.sampling import sample
from jaxkv._src.sampling import settings
from jaxkv._src.sampling.penalties import History
from jaxkv._src.sampling.sample import SampledTokens


class Tally(NamedTuple):
  """Token counts of the sequences in the slots, for penalties.

  Attributes:
    rows: int32[B], the queue row of the counted sequence; Q for none.
    counts: uint16[B, V], see `penalties.seen_in`.
  """

  rows: Array
  counts: Array


class Sampled(NamedTuple):
  """Results of sampling after a call of the model.

  Attributes:
    ended: bool[B], slots whose sequence ended or failed.
    counts: int32[B], the number of tokens that each slot sampled.
    tally: the `Tally` after sampling; None without penalties.
  """

  ended: Array
  counts: Array
  tally: Tally | None


def count_entrants(
  queue: Queue, slots: Slots, tally: Tally | None
) -> Tally | None:
  """Counts the tokens of sequences that entered slots since the last step."""
  if tally is None:
    return None
  vocab_size = tally.counts.shape[1]
  # The row of an empty slot is cleared, because its sequence may sample in
  # another slot before it returns.
  rows = jnp.where(slots.row < queue.no_row, tally.rows, slots.row)
  tally = tally._replace(rows=rows)

  def is_new(tally: Tally) -> Array:
    return tally.rows != slots.row

  def count_one(tally: Tally) -> Tally:
    slot = jnp.argmax(is_new(tally)).astype(jnp.int32)
    row = slots.row[slot][None]
    counts = penalties.seen_in(
      indexing.take(queue.tokens, row),
      indexing.take(queue.length, row),
      indexing.take(queue.versions, row) != NOT_SAMPLED,
      vocab_size=vocab_size,
    )
    return Tally(
      rows=tally.rows.at[slot].set(row[0]),
      counts=tally.counts.at[slot].set(counts[0]),
    )

  return lax.while_loop(lambda tally: jnp.any(is_new(tally)), count_one, tally)


@jax.named_scope("sample")
def sample_tokens(
  state: RolloutState,
  work: Work,
  logits: Logits,
  *,
  tally: Tally | None,
  exact: bool,
  process: Process | None,
  drafts: Drafts | None = None,
  read: Array | None = None,
) -> tuple[RolloutState, Sampled]:
  """Samples the next tokens of slots, and appends them to their sequences.

  The slots in `work.is_complete` sample, or end if their sequences sample
  nothing. `read`, int32[], is a value from earlier reads of `queue`, see
  `read_before`; None for no earlier reads.
  """
  queue, slots, config = state.queue, state.slots, state.config
  samples = work.is_complete
  ended = jnp.zeros_like(samples)
  if queue.log_probs_from is not None:
    queue, ended = end_given(queue, slots, samples)
    samples &= ~ended
  sampled = Sampled(ended, jnp.zeros_like(work.counts), tally)
  if not config.max_new_tokens:
    return replaced(state, queue=queue), sampled
  assert logits.last is not None  # It is None only before the call.
  sample_one = functools.partial(
    _sample,
    slots=slots,
    read=jnp.zeros((), jnp.int32) if read is None else read,
    version=state.memory.cache.epoch.astype(jnp.int32),
    config=config,
    exact=exact,
    process=process,
  )
  queue, sampled, tokens = sample_one(queue, sampled, samples, logits.last)
  draft_logits = logits.drafts
  counts = work.drafts
  starts = work.begins
  if drafts is None or draft_logits is None or counts is None or starts is None:
    return replaced(state, queue=queue), sampled
  draft_tokens = drafts.tokens

  def accepted(going: Array, tokens: Array, sampled: Sampled, draft_index: Any):
    is_draft = (draft_index < counts) & (tokens == draft_tokens[:, draft_index])
    return going & is_draft & ~sampled.ended

  def verify(loop):
    queue, sampled, going, draft_index = loop
    rows = starts + draft_index - 1
    queue, sampled, tokens = sample_one(
      queue, sampled, going, draft_logits.at[rows].get(mode="clip")
    )
    going = accepted(going, tokens, sampled, draft_index)
    return queue, sampled, going, draft_index + 1

  going = accepted(samples, tokens, sampled, 0)
  start = sharding.match_varying_axes(
    (queue, sampled, going, jnp.ones((), jnp.int32))
  )
  queue, sampled, *_ = lax.while_loop(
    lambda loop: jnp.any(loop[2]), verify, start
  )
  return replaced(state, queue=queue), sampled


def _sample(
  queue: Queue,
  sampled: Sampled,
  samples: Array,
  logits: Array,
  *,
  slots: Slots,
  read: Array,
  version: Array,
  config: RolloutConfig,
  exact: bool,
  process: Process | None,
) -> tuple[Queue, Sampled, Array]:
  """Samples a token for each slot in `samples` bool[B] from logits [B, V].

  A sequence fails if the log-prob of its token is not finite.

  Returns:
    The queue, the results, and the tokens int32[B].
  """
  row = slots.row
  tally = sampled.tally
  rows = rows_of(queue, row)
  sampling = settings.rows(queue.sampling, row)
  raw = logits.astype(jnp.float32)
  count = penalties.num_last_tokens(sampling)
  last_tokens = None
  if count:
    last_tokens = penalties.last_tokens_of(
      queue.tokens, row, rows.lengths, count
    )
  history = History(
    counts=rows.counts,
    seen=None if tally is None else tally.counts,
    last_tokens=last_tokens,
    stop_token=config.stop_token,
  )
  adjusted = penalties.adjust(raw, sampling, history)
  extra = queue.extra
  if process is not None:
    results = process(adjusted, rows, rows.extra)
    adjusted, new_extra = check_processed(results, adjusted, rows.extra)
    target = indexing.where_valid(samples, row)
    extra = jax.tree.map(
      lambda old, new: indexing.put(old, target, values=new), extra, new_extra
    )
  # The random numbers depend on the sequence's key and its number of tokens
  # after the prompt, but on neither the slot nor the step.
  step_tokens = sample.sample_tokens(
    queue.keys[jnp.minimum(row, queue.no_row - 1)],
    indexing.take(queue.length - queue.prompt_length, row),
    adjusted,
    sampling,
    raw_logits=raw,
    raw_log_probs=queue.records.raw_log_probs is not None,
    unfiltered_log_probs=config.unfiltered_log_probs,
    entropy=config.entropy,
    top_log_probs=config.top_log_probs,
    exact=exact,
    parts=config.vocab_parts,
  )
  # A log-prob is not finite if the logits define no distribution.
  fails = samples & ~jnp.isfinite(step_tokens.log_probs)
  samples &= ~fails
  ending = endings(queue, rows, step_tokens.tokens, sampling, config)
  # XLA copies the queue's arrays unless the writes depend on all reads.
  read = jnp.maximum(read, jnp.max(step_tokens.tokens))
  queue = dataclasses.replace(queue, extra=extra)
  queue, ended = _append(
    queue, loops.read_before(read, row), samples, step_tokens, version, ending
  )
  queue = fail(queue, row, fails, jnp.full_like(row, Status.BAD_LOGITS))
  if tally is not None:
    counts = penalties.see(tally.counts, step_tokens.tokens, samples)
    tally = tally._replace(counts=counts)
  sampled = Sampled(
    ended=sampled.ended | ended | fails,
    counts=sampled.counts + samples.astype(jnp.int32),
    tally=tally,
  )
  return queue, sampled, step_tokens.tokens


def _append(
  queue: Queue,
  rows: Array,
  mask: Array,
  step_tokens: SampledTokens,
  version: Array,
  ending: tuple[Array, Array, Array | None],
) -> tuple[Queue, Array]:
  """Appends a token to queue rows int32[B] where `mask` is True.

  `ending` is the result of `endings`.

  Returns:
    The queue; bool[B], True for sequences that ended with this token.
  """
  # Where `mask` is False, `target` is out of range, so nothing is written.
  target = indexing.where_valid(mask, rows)
  length = indexing.take(queue.length, target)
  finish, stop_value, stop_states = ending
  ended = mask & (finish > 0)
  records = jax.tree.map(
    lambda array, values: indexing.put(array, target, length, values=values),
    queue.records,
    step_tokens.records,
  )
  states = queue.stop_states
  if states is not None and stop_states is not None:
    states = indexing.put(states, target, values=stop_states)
  log_probs = indexing.put(
    queue.log_probs, target, length, values=step_tokens.log_probs
  )
  queue = dataclasses.replace(
    queue,
    tokens=indexing.put(
      queue.tokens, target, length, values=step_tokens.tokens
    ),
    length=indexing.add(queue.length, target, values=1),
    log_probs=log_probs,
    versions=indexing.put(queue.versions, target, length, values=version),
    records=records,
    finish=indexing.put(queue.finish, target, values=finish),
    stop=indexing.put(queue.stop, target, values=stop_value),
    stop_states=states,
  )
  return set_status(queue, rows, ended, SequenceStatus.DONE), ended
