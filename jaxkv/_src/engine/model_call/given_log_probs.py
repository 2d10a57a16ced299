"""Log-probs of given tokens, see `Requests.log_probs_from`.

The logits of a token give the log-prob of the next one, so the model returns
the logits of all columns in a call that computes such tokens.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import Status
from jaxkv._src.engine.config import RolloutConfig
from jaxkv._src.engine.hooks import Rows
from jaxkv._src.engine.queue.queue import NOT_SAMPLED
from jaxkv._src.engine.queue.queue import Finish
from jaxkv._src.engine.queue.queue import Queue
from jaxkv._src.engine.queue.queue import SequenceStatus
from jaxkv._src.engine.queue.queue import fail
from jaxkv._src.engine.queue.queue import set_status
from jaxkv._src.engine.slots import Slots
from jaxkv._src.exact import log_probs
from jaxkv._src.exact import row_loop
from jaxkv._src.sampling import statistics
from jaxkv._src.sampling.statistics import Records


def are_recorded(
  queue: Queue, slots: Slots, cache: CacheState, counts: Array
) -> Array:
  """Returns bool[B], slots that record log-probs if they compute `counts`."""
  first_recorded = _first_recorded(queue, slots.row)
  first_recorded = jnp.maximum(first_recorded, cache.length + 1)
  last_given = indexing.take(queue.length, slots.row) - 1
  return first_recorded <= jnp.minimum(cache.length + counts, last_given)


def rows_of_columns(queue: Queue, rows: Rows, positions: Array) -> Rows:
  """Returns `rows` as if the recorded tokens were sampled one by one.

  `positions`, int32[C], are those of the tokens in the columns. If the log-prob
  of the token after a column is recorded, the column has the `Rows` with which
  this token would be sampled.
  """
  first_recorded = _first_recorded(queue, rows.numbers)
  is_recorded = positions + 1 >= first_recorded
  is_recorded &= positions + 1 < rows.lengths
  length = jnp.where(is_recorded, positions + 1, rows.lengths)
  return rows._replace(
    counts=jnp.where(is_recorded, length - first_recorded, rows.counts),
    lengths=length,
    last_tokens=indexing.take(queue.tokens, rows.numbers, length - 1),
  )


def record_given(
  recorded: tuple[Array, Records],
  queue: Queue,
  *,
  rows: Array,
  positions: Array,
  logits: Array,
  config: RolloutConfig,
) -> tuple[Array, Records]:
  """Records the given tokens that the logits of a call predict.

  `recorded` are the `Queue.log_probs` and `Queue.records` so far. The logits
  [C, V] are those of columns with the tokens at `positions` of queue rows
  `rows`, int32[C] each; the row is Q for none.
  """
  next_position = positions + 1
  is_given = next_position < indexing.take(queue.length, rows)
  is_given &= next_position >= _first_recorded(queue, rows)
  version = indexing.take(queue.versions, rows, next_position)
  target_rows = indexing.where_valid(is_given & (version == NOT_SAMPLED), rows)
  tokens = indexing.take(queue.tokens, rows, next_position)
  logits = logits.astype(jnp.float32)
  raw = log_probs.of_tokens(logits, tokens, jnp.ones_like(logits[:, 0]))

  def put(array: Array, new: Array) -> Array:
    return indexing.put(array, target_rows, next_position, values=new)

  all_log_probs, records = recorded
  observed = Records(raw_log_probs=raw)
  if config.entropy or config.top_log_probs:
    observed = _observe(logits, tokens, raw, config)
    observed = dataclasses.replace(observed, raw_log_probs=raw)
  new_records = {
    name: put(array, values)
    for name, array in vars(records).items()
    if array is not None and (values := getattr(observed, name)) is not None
  }
  return put(all_log_probs, raw), dataclasses.replace(records, **new_records)


def _observe(
  logits: Array, tokens: Array, values: Array, config: RolloutConfig
) -> Records:
  observe = functools.partial(
    statistics.observe,
    entropy=config.entropy,
    top_log_probs=config.top_log_probs,
    parts=config.vocab_parts,
  )

  def observe_tile(_: tuple[()], *rows: Array) -> Any:
    return observe(*rows)

  arrays = (logits, tokens, values)
  return row_loop.loop(observe_tile, (), arrays, tile=log_probs.ROWS)


def end_given(
  queue: Queue, slots: Slots, is_complete: Array
) -> tuple[Queue, Array]:
  """Ends sequences in `is_complete`, bool[B], that sample no token.

  Sequences with a recorded log-prob that is NaN fail.

  Returns:
    The queue; bool[B], slots whose sequence ended.
  """
  length = indexing.take(queue.length, slots.row)
  is_over = length >= indexing.take(queue.limit, slots.row)
  # A token of probability 0 has the log-prob -inf, and fails no sequence.
  values = indexing.take(queue.log_probs, slots.row)
  is_bad = is_complete & jnp.any(jnp.isnan(values), axis=1)
  ended = (is_complete & is_over) | is_bad
  queue = set_status(queue, slots.row, ended, SequenceStatus.DONE)
  ended_rows = indexing.where_valid(ended, slots.row)
  finish = indexing.put(queue.finish, ended_rows, values=int(Finish.LENGTH))
  queue = dataclasses.replace(queue, finish=finish)
  code = jnp.full_like(slots.row, Status.BAD_LOGITS)
  return fail(queue, slots.row, is_bad, code), ended


def _first_recorded(queue: Queue, rows: Array) -> Array:
  """Returns `Queue.log_probs_from` of rows int32[...]."""
  log_probs_from = queue.log_probs_from
  assert log_probs_from is not None
  return indexing.take(log_probs_from, rows)
