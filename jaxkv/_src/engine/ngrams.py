"""Proposes draft tokens from n-gram matches, see `RolloutConfig.draft_match`.

The table of a prompt maps the hash of an n-gram of N tokens to its rightmost
occurrence. Hashes can collide, so the tokens are compared too.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv._src.arrays import elementwise
from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import sharding
from jaxkv._src.engine.config import RolloutConfig

LIKELY = 0.5  # Minimum probability that all drafts of a row are accepted.
_FIRST_RATE = 0.8  # Initial acceptance rate.
_DECAY = 0.8  # Decay of the moving average of acceptance rates.
_RECOVERY = 0.01  # Added to a low rate at each match without a draft.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class NgramTables:
  """A table of Z entries for each of P prompts, and acceptance rates.

  Attributes:
    table: column * G + sample + 1, where `column` of `sample` follows the
      rightmost occurrence of an n-gram; 0 for none.  # int32[P, Z]
    rate: the acceptance rate of each sequence's drafts.  # float32[Q]
  """

  table: Array
  rate: Array


def init_tables(
  tokens: Array, lengths: Array, config: RolloutConfig
) -> NgramTables | None:
  """Returns tables with the prompts' n-grams; None without speculation."""
  if not config.draft_tokens:
    return None
  num_rows, width = tokens.shape
  # At least twice the number of n-grams, so that few collide. `_place` needs a
  # power of two.
  table_size = 1 << (2 * width * config.num_samples - 1).bit_length()
  tables = NgramTables(
    table=jnp.zeros((num_rows // config.num_samples, table_size), jnp.int32),
    rate=jnp.full((num_rows,), _FIRST_RATE, jnp.float32),
  )
  rows = jnp.arange(num_rows, dtype=jnp.int32)
  return reset_rows(tables, tokens, lengths, rows, config)


def reset_rows(
  tables: NgramTables,
  tokens: Array,
  lengths: Array,
  rows: Array,
  config: RolloutConfig,
) -> NgramTables:
  """Resets the tables and rates of whole groups, in rows int32[R]."""
  samples = config.num_samples
  # A group shares one table, which at first has the n-grams of the prompt.
  first_rows = rows[::samples]
  group = jnp.where(
    first_rows < tokens.shape[0], first_rows // samples, tables.table.shape[0]
  )
  tables = dataclasses.replace(
    tables,
    table=indexing.put(tables.table, group, values=0),
    rate=indexing.put(tables.rate, rows, values=jnp.float32(_FIRST_RATE)),
  )
  length = indexing.take(lengths, first_rows)
  width = tokens.shape[1]
  start = sharding.zeros_like(length)
  return add_tokens(tables, tokens, first_rows, start, length, config, width)


def replace_rows(
  tables: NgramTables,
  tokens: Array,
  lengths: Array,
  *,
  group_rows: Array,
  new_rows: Array,
  config: RolloutConfig,
) -> NgramTables:
  """Enters sequences in rows int32[R], some of them in new groups.

  `group_rows`, int32[X], are all rows of the new groups, whose tables are
  reset.
  """
  # Of no tokens, because EMPTY rows still have those of removed sequences.
  tables = reset_rows(
    tables, tokens, jnp.zeros_like(lengths), group_rows, config
  )
  return add_tokens(
    tables,
    tokens,
    new_rows,
    jnp.zeros_like(new_rows),
    indexing.take(lengths, new_rows),
    config,
    tokens.shape[1],
  )


def add_tokens(
  tables: NgramTables,
  tokens: Array,
  rows: Array,
  start: Array,
  stop_column: Array,
  config: RolloutConfig,
  max_tokens: int,
) -> NgramTables:
  """Adds the n-grams that end before the columns `start` .. `stop_column - 1`.

  `rows`, `start` and `stop_column` are int32[R]. At most `max_tokens` columns
  of a row are used, and none of row Q.
  """
  samples = config.num_samples
  column = start[:, None] + jnp.arange(max_tokens, dtype=jnp.int32)[None]
  inside = (column < stop_column[:, None]) & (column >= config.draft_match)
  inside &= (rows < tokens.shape[0])[:, None]
  bucket = _place(tables, _ngrams_before(tokens, rows, column, config))
  group = indexing.where_valid(inside, (rows // samples)[:, None])
  # The maximum keeps the rightmost occurrence of an n-gram.
  value = column * samples + (rows % samples)[:, None] + 1
  table = indexing.put_max(tables.table, group, bucket, values=value)
  return dataclasses.replace(tables, table=table)


def _ngrams_before(
  tokens: Array, rows: Array, column: Array, config: RolloutConfig
) -> Array:
  """Returns the N tokens before each column int32[R, X], as int32[R, X, N]."""
  back = jnp.arange(-config.draft_match, 0, dtype=jnp.int32)
  position = column[..., None] + back[None, None]
  return indexing.take(tokens, rows[:, None, None], position, fill=-1)


def _place(tables: NgramTables, ngrams: Array) -> Array:
  """Returns the table index of n-grams int32[..., N]."""
  key = jnp.zeros(ngrams.shape[:-1], jnp.uint32)
  for index in range(ngrams.shape[-1]):
    token = ngrams[..., index].astype(jnp.uint32)
    # Multiplication mixes low bits into high bits, and the shift the reverse.
    key = (key ^ token) * jnp.uint32(0x9E3779B1)
    key ^= key >> jnp.uint32(15)
  return (key & jnp.uint32(tables.table.shape[1] - 1)).astype(jnp.int32)


def propose(
  tables: NgramTables,
  tokens: Array,
  lengths: Array,
  rows: Array,
  decodes: Array,
  config: RolloutConfig,
) -> tuple[Array, Array, Array]:
  """Proposes tokens for `rows`, int32[B], where `decodes`, bool[B], is True.

  Returns:
    int32[B, K], the drafts; int32[B], the number of tokens after the match,
    which may exceed K; and bool[B], rows with an n-gram match, see `learn`.
  """
  samples = config.num_samples
  max_drafts = config.draft_tokens
  length = indexing.take(lengths, rows)
  ngram = _ngrams_before(tokens, rows, length[:, None], config)[:, 0]
  bucket = _place(tables, ngram)
  value = indexing.take(tables.table, rows // samples, bucket) - 1
  column = elementwise.quotient(jnp.maximum(value, 0), samples)
  source = rows // samples * samples + jnp.maximum(value, 0) % samples
  match = _ngrams_before(tokens, source, column[:, None], config)[:, 0]
  stop_column = indexing.take(lengths, source)
  has_match = decodes & (value >= 0) & (column < stop_column)
  has_match &= jnp.all(match == ngram, axis=1) & jnp.all(ngram >= 0, axis=1)
  ahead = column[:, None] + jnp.arange(max_drafts, dtype=jnp.int32)[None]

  def drafts() -> tuple[Array, Array]:
    counts = jnp.where(has_match, stop_column - column, 0)
    return indexing.take(tokens, source[:, None], ahead), counts

  # Most steps have no match, so the gather is usually skipped.
  drafted, counts = lax.cond(
    jnp.any(has_match), drafts, lambda: (sharding.zeros_like(ahead), column & 0)
  )
  return drafted, counts, has_match


def likely_lengths(
  tables: NgramTables, rows: Array, config: RolloutConfig
) -> Array:
  """Returns int32[B], the largest counts with P(all accepted) >= LIKELY."""
  rate = indexing.take(tables.rate, rows)
  powers = jnp.cumprod(
    jnp.broadcast_to(rate[:, None], (rate.shape[0], config.draft_tokens)),
    axis=1,
  )
  return jnp.sum(powers >= LIKELY, axis=1, dtype=jnp.int32)


def learn(
  tables: NgramTables,
  rows: Array,
  has_match: Array,
  drafted: Array,
  accepted: Array,
) -> NgramTables:
  """Updates the acceptance rates of rows int32[B]; ignores row Q.

  If a row has a match but no drafts, a low rate rises slowly, so that drafts
  are tried again later. `drafted` and `accepted`, int32[B], are numbers of
  draft tokens.
  """

  def learned() -> Array:
    rate = indexing.take(tables.rate, rows)
    fraction = accepted.astype(jnp.float32)
    fraction /= jnp.maximum(drafted, 1).astype(jnp.float32)
    updated = rate * jnp.float32(_DECAY) + fraction * jnp.float32(1 - _DECAY)
    recovered = jnp.minimum(
      rate + jnp.float32(_RECOVERY), jnp.float32(_FIRST_RATE)
    )
    recovered = jnp.where(rate < LIKELY, recovered, rate)
    rate = jnp.where(drafted > 0, updated, recovered)
    target_rows = indexing.where_valid(has_match | (drafted > 0), rows)
    return indexing.put(tables.rate, target_rows, values=rate)

  changed = jnp.any(has_match | (drafted > 0))
  rate = lax.cond(changed, learned, lambda: tables.rate)
  return dataclasses.replace(tables, rate=rate)
