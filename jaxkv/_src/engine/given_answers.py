"""Scoring of given answers, which the model computes like prompts.

A row of the queue contains the tokens of a prompt and an answer. `Queue.length`
is one less than their number, because the last token is never computed. A
sequence ends when `Queue.length` tokens are computed. The logits of a token
give the log-prob of the next token.

Samples fork before the last token of their prompt. A step computes either
tokens before the fork, which need no logits, or later tokens.
"""

import dataclasses
import functools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import Status
from jaxkv._src.engine.config import RolloutConfig
from jaxkv._src.engine.hooks import Rows
from jaxkv._src.engine.queue import Queue
from jaxkv._src.engine.queue import SequenceStatus
from jaxkv._src.engine.queue import fail
from jaxkv._src.engine.queue import set_status
from jaxkv._src.engine.schedule import Width
from jaxkv._src.engine.slots import Slots
from jaxkv._src.engine.slots import are_computing
from jaxkv._src.engine.slots import prompt_rest
from jaxkv._src.exact import log_probs
from jaxkv._src.exact import row_loop
from jaxkv._src.sampling import reductions
from jaxkv._src.sampling import statistics
from jaxkv._src.sampling.statistics import Records


class Scoring(NamedTuple):
  """The options of `score` that a step needs.

  Attributes:
    widths: the widths of a call for prompts and of a call for answers.
    temperature: float32[], above 0.
  """

  widths: tuple[Width, Width]
  temperature: Array


class AnswerCounts(NamedTuple):
  """Counts for N prompts, which the loop of `score` carries.

  Attributes:
    computed: int32[N], the number of computed tokens.
    cached: int32[N], the number of tokens that lookups found in the cache.
    keeps_prompts: bool[], True if a prompt stays in its slot until all samples
      have forked from it. False with a single usable slot, or once a slot has
      lacked a page, because samples could then wait forever.
  """

  computed: Array
  cached: Array
  keeps_prompts: Array


def count_answers(
  counts: AnswerCounts | None,
  queue: Queue,
  slots: Slots,
  num_found: Array,
  tokens: Array,
  starved: Array,
) -> AnswerCounts | None:
  """Adds a step to the counts; None if tokens are sampled.

  `num_found`, int32[B], is the number of cached tokens of each sequence that
  entered in this step, and `tokens`, int32[B], that of computed tokens.
  """
  if counts is None:
    return None
  samples = queue.size // counts.computed.shape[0]
  group = indexing.where_valid(slots.row < queue.no_row, slots.row // samples)
  return AnswerCounts(
    computed=indexing.add(counts.computed, group, values=tokens),
    cached=indexing.add(counts.cached, group, values=num_found),
    keeps_prompts=counts.keeps_prompts & ~jnp.any(starved),
  )


def end_answers(
  queue: Queue, slots: Slots, is_complete: Array
) -> tuple[Queue, Array]:
  """Ends sequences that are complete, or have a log-prob that is NaN.

  Returns:
    The queue; bool[B], slots whose sequence ended.
  """
  # A token of probability 0 has the log-prob -inf, and fails no sequence.
  log_probs = indexing.take(queue.log_probs, slots.row)
  is_bad = jnp.any(jnp.isnan(log_probs), axis=1)
  queue = set_status(queue, slots.row, is_complete, SequenceStatus.DONE)
  code = jnp.full_like(slots.row, Status.BAD_LOGITS)
  return fail(queue, slots.row, is_bad, code), is_complete | is_bad


def keep_prompts(
  queue: Queue, slots: Slots, cache: CacheState, samples: int
) -> Array:
  """Returns bool[B], slots that stop before the last token of their prompt.

  Samples that wait in the queue will fork from these slots.
  """
  waits = (queue.status == SequenceStatus.WAITING).reshape(-1, samples)
  group = slots.row // samples
  # A prompt of one token has no token to share before its last one.
  has_prompt = indexing.take(queue.prompt_length, slots.row) > 1
  can_lead = are_computing(queue, slots) & has_prompt
  can_lead &= prompt_rest(queue, slots, cache) >= 0
  can_lead &= indexing.take(jnp.any(waits, axis=1), group, fill=False)
  # Samples fork from the first slot of their prompt, see `admission_order`. If
  # other slots of the prompt stopped too, the samples might never get a slot.
  is_rival = (group[:, None] == group[None]) & can_lead[None]
  return can_lead & ~jnp.any(jnp.tril(is_rival, k=-1), axis=1)


def limit_to_phase(rest: Array, missing: Array) -> tuple[Array, Array]:
  """Limits a step to tokens before forks while any slot has such tokens left.

  Of the `missing` tokens that a slot could compute, int32[B], `rest` are before
  the last token of the prompt; negative if the whole prompt is computed.

  Returns:
    int32[B], the limited numbers; int32[], the index in `Scoring.widths`.
  """
  is_answer = ~jnp.any(rest > 0)
  tokens = jnp.where(is_answer, missing, jnp.maximum(rest, 0))
  return tokens, is_answer.astype(jnp.int32)


def rows_of_columns(queue: Queue, rows: Rows, positions: Array) -> Rows:
  """Returns the `Rows` with which the token after each column was sampled.

  `rows` has the lengths of whole sequences. `positions`, int32[C], are those of
  the tokens in the columns.
  """
  exists = rows.numbers < queue.no_row
  prompt = indexing.take(queue.prompt_length, rows.numbers)
  length = jnp.maximum(positions + 1, prompt)
  length = jnp.where(exists, length, 0)
  return rows._replace(
    counts=length - prompt,
    lengths=length,
    last_tokens=indexing.take(queue.tokens, rows.numbers, length - 1),
  )


def record_scores(
  scores: tuple[Array, Records],
  queue: Queue,
  rows: Array,
  positions: Array,
  logits: Array,
  temperature: Array,
  config: RolloutConfig,
) -> tuple[Array, Records]:
  """Records statistics of the answer tokens that the logits of a call predict.

  `scores` are the `Queue.log_probs` and `Queue.records` so far.
  The logits [C, V] are those of columns with the tokens at `positions` of queue
  rows `rows`, int32[C] each; the row is Q for none.
  """
  logits, after = logits.astype(jnp.float32), positions + 1
  tokens = indexing.take(queue.tokens, rows, after)
  divisors = jnp.broadcast_to(temperature, tokens.shape)
  values = log_probs.of_tokens(logits, tokens, divisors)
  is_answer = after >= indexing.take(queue.prompt_length, rows)
  place = indexing.where_valid(is_answer, rows), after
  all_values, records = scores
  if config.entropy or config.top_log_probs:
    observed = _observe(logits, tokens, values, temperature, config)
    records = jax.tree.map(
      lambda array, new: indexing.put(array, *place, values=new),
      records,
      dataclasses.replace(observed, raw_log_probs=None),
    )
  return indexing.put(all_values, *place, values=values), records


def _observe(
  logits: Array,
  tokens: Array,
  values: Array,
  temperature: Array,
  config: RolloutConfig,
) -> Records:
  observe = functools.partial(
    statistics.observe,
    entropy=config.entropy,
    top_log_probs=config.top_log_probs,
  )

  def observe_tile(temperature: Array, logits: Array, *rows: Array) -> Any:
    # The maximum is subtracted first, because large logits could overflow when
    # divided by a small temperature.
    highest = reductions.maxima(logits)[:, None]
    return observe((logits - highest) / temperature, *rows)

  arrays = (logits, tokens, values)
  return row_loop.loop(observe_tile, temperature, arrays, tile=log_probs.ROWS)
