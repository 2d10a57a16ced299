"""Proposes draft tokens from n-gram matches, see `RolloutConfig.draft_match`.

A sequence gets no more drafts than are likely to be all accepted. Otherwise, at
high temperatures, most columns for drafts would be wasted.
"""

import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import elementwise
from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import loops
from jaxkv._src.arrays import sharding
from jaxkv._src.engine.config import RolloutConfig
from jaxkv._src.engine.queue.queue import FIRST_DRAFT_RATE
from jaxkv._src.engine.queue.queue import Queue

LIKELY = 0.5  # Minimum probability that all drafts of a row are accepted.
_DECAY = 0.8  # Decay of the moving average of acceptance rates.
_RECOVERY = 0.01  # Added to a low rate at each match without a draft.


def propose(
  queue: Queue, rows: Array, config: RolloutConfig
) -> tuple[Array, Array]:
  """Proposes the tokens after an earlier occurrence of the last n tokens.

  `rows`, int32[B], are those of the sequences; Q for none.

  Returns:
    int32[B, K], the drafts; int32[B], the number of tokens after the match,
    which may exceed K; 0 without a match.
  """
  samples = config.num_samples
  first_row = elementwise.quotient(rows, samples) * samples
  column, sample = _rightmost_match(queue, rows, first_row, config)
  source = first_row + sample
  ahead = jnp.arange(config.draft_tokens, dtype=jnp.int32)[None]
  drafts = indexing.take(queue.tokens, source[:, None], column[:, None] + ahead)
  counts = indexing.take(queue.length, source) - column
  return drafts, jnp.where(column > 0, counts, 0)


def _rightmost_match(
  queue: Queue, rows: Array, first_row: Array, config: RolloutConfig
) -> tuple[Array, Array]:
  """Finds the rightmost match of each sequence among all G samples.

  Returns:
    int32[B], the column after the match, 0 for none; int32[B], its sample, the
    last one of several.
  """
  samples, num_matched = config.num_samples, config.draft_match
  length = indexing.take(queue.length, rows)
  back = jnp.arange(-num_matched, 0, dtype=jnp.int32)[None]
  ngram = indexing.take(
    queue.tokens, rows[:, None], length[:, None] + back, fill=-1
  )
  sample = jnp.arange(samples, dtype=jnp.int32)
  group = first_row[:, None] + sample[None]
  # An EMPTY row may still have a removed sequence of another prompt.
  first_ids = queue.ids - jnp.arange(queue.size, dtype=jnp.int32)
  first_id = indexing.take(first_ids, rows)[:, None]
  is_same_prompt = indexing.take(first_ids, group) == first_id
  stop_column = jnp.where(is_same_prompt, indexing.take(queue.length, group), 0)
  # The columns that can follow a match.
  num_columns = max(queue.width - num_matched, 0)
  column = num_matched + jnp.arange(num_columns, dtype=jnp.int32)

  def match(_: Array) -> Array:
    tokens = indexing.take(queue.tokens, group)
    matches = column[None, None] < stop_column[..., None]
    for index in range(num_matched):
      earlier = tokens[:, :, index : index + num_columns]
      matches &= earlier == ngram[:, index, None, None]
    flat_index = column[None] * samples + sample[:, None]
    flat_index = jnp.where(matches, flat_index[None], 0)
    return jnp.max(flat_index, axis=(1, 2), initial=0)

  # Otherwise XLA:CPU would compute `ngram` and `stop_column` again for each of
  # the W columns.
  decodes = jnp.any(rows < queue.no_row)
  flat_index = loops.if_needed(decodes, match, sharding.zeros_like(rows))
  return (
    elementwise.quotient(flat_index, samples),
    elementwise.remainder(flat_index, samples),
  )


def likely_lengths(rates: Array, rows: Array, config: RolloutConfig) -> Array:
  """Returns int32[B], the largest counts with P(all accepted) >= LIKELY."""
  rate = indexing.take(rates, rows)
  powers = jnp.cumprod(
    jnp.broadcast_to(rate[:, None], (rate.shape[0], config.draft_tokens)),
    axis=1,
  )
  return jnp.sum(powers >= LIKELY, axis=1, dtype=jnp.int32)


def learn(
  rates: Array, rows: Array, has_match: Array, drafted: Array, accepted: Array
) -> Array:
  """Updates the acceptance rates of rows int32[B]; ignores row Q.

  If a row has a match, as `has_match`, bool[B], says, but no drafts, a low rate
  rises slowly, so that drafts are tried again later. `drafted` and `accepted`,
  int32[B], are numbers of draft tokens.
  """
  rate = indexing.take(rates, rows)
  fraction = accepted.astype(jnp.float32)
  fraction /= jnp.maximum(drafted, 1).astype(jnp.float32)
  updated = rate * jnp.float32(_DECAY) + fraction * jnp.float32(1 - _DECAY)
  recovered = jnp.minimum(
    rate + jnp.float32(_RECOVERY), jnp.float32(FIRST_DRAFT_RATE)
  )
  recovered = jnp.where(rate < LIKELY, recovered, rate)
  rate = jnp.where(drafted > 0, updated, recovered)
  target_rows = indexing.where_valid(has_match | (drafted > 0), rows)
  return indexing.put(rates, target_rows, values=rate)
