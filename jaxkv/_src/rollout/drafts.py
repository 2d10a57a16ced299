"""Speculation: guesses tokens by n-gram matches within a group.

The guess is the text that followed the last match of the sequence's n-gram in
the prompt, in the sequence, or in another sample of the prompt. A hash table
for each prompt has the last place of each n-gram; a place counts only if its
tokens match. The number of guesses depends on the acceptance rate of earlier
ones, see `_lengths`.
"""

import dataclasses
from typing import Any
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv._src.arrays import elementwise
from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import sharding
from jaxkv._src.arrays.arguments import as_int32
from jaxkv._src.arrays.arguments import check_shape
from jaxkv._src.rollout.config import RolloutConfig
from jaxkv._src.rollout.rows import Rows
from jaxkv._src.rollout.sequences import Sequences


class Draft(Protocol):
  """A function that proposes the next tokens of every slot's sequence."""

  def __call__(
    self, params: Any, rows: Rows, tokens: Array, /
  ) -> tuple[Array, Array]:
    """Returns proposed tokens int32[B, K] and their numbers int32[B].

    Args:
      params: weights, as `generate` received them.
      rows: the sequence of each slot, B rows.
      tokens: int32[B, W], the tokens of each slot's sequence; W is the width of
        the queue.

    Returns:
      Tokens int32[B, K], where K is `RolloutConfig.draft_tokens`, and how many
      of each row count, int32[B]. The loop verifies them: a wrong one costs
      time and changes no token.
    """
    ...


_LIKELY = 0.5  # Least probability that a guess and all before it are accepted.
_BEGIN = 0.8  # Initial acceptance rate.
_MEMORY = 0.8  # Decay of the moving average of acceptance rates.
_RETRY = 0.01  # Added to a low rate at each match that was not guessed.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafts:
  """Tables of n-grams with Z entries, and acceptance rates.

  Attributes:
    table: the last place of each n-gram as column * G + sample + 1; 0 for none.
      One table for each prompt.  # int32[P, Z]
    rate: the acceptance rate of each sequence's guesses.  # float32[Q]
  """

  table: Array
  rate: Array


def init(sequences: Sequences, config: RolloutConfig) -> Drafts | None:
  """Returns tables with the prompts' n-grams; None without speculation."""
  if not config.draft_tokens:
    return None
  total, width = sequences.tokens.shape
  # So many n-grams that few places are used twice, and a power of two.
  size = 1 << (2 * width * config.num_samples - 1).bit_length()
  drafts = Drafts(
    table=jnp.zeros((total // config.num_samples, size), jnp.int32),
    rate=jnp.full((total,), _BEGIN, jnp.float32),
  )
  rows = jnp.arange(total, dtype=jnp.int32)
  return with_prompts(drafts, sequences, rows, config)


def with_prompts(
  drafts: Drafts, sequences: Sequences, rows: Array, config: RolloutConfig
) -> Drafts:
  """Resets the tables of new sequences, int32[R]; R is whole groups."""
  samples, none = config.num_samples, sequences.length.shape[0]
  first = rows[::samples]
  group = jnp.where(first < none, first // samples, drafts.table.shape[0])
  drafts = dataclasses.replace(
    drafts,
    table=indexing.put(drafts.table, group, values=0),
    rate=indexing.put(drafts.rate, rows, values=jnp.float32(_BEGIN)),
  )
  length = indexing.take(sequences.length, first)
  width = sequences.tokens.shape[1]
  start = sharding.zeros_like(length)
  return with_tokens(drafts, sequences, first, start, length, config, width)


def with_tokens(
  drafts: Drafts,
  sequences: Sequences,
  rows: Array,
  start: Array,
  stop: Array,
  config: RolloutConfig,
  most: int,
) -> Drafts:
  """Adds the tokens `start .. stop` of rows to the tables, int32[R] each.

  At most `most` tokens of a row are added; row Q has no tokens.
  """
  samples, none = config.num_samples, sequences.length.shape[0]
  column = start[:, None] + jnp.arange(most, dtype=jnp.int32)[None]
  inside = (column < stop[:, None]) & (column >= config.draft_match)
  inside &= (rows < none)[:, None]
  place = _place(drafts, _before(sequences, rows, column, config))
  group = indexing.where_valid(inside, (rows // samples)[:, None])
  # The last column wins, whatever the order of the writes.
  value = column * samples + (rows % samples)[:, None] + 1
  table = indexing.put_max(drafts.table, group, place, values=value)
  return dataclasses.replace(drafts, table=table)


def _before(
  sequences: Sequences, rows: Array, column: Array, config: RolloutConfig
) -> Array:
  """Returns the N tokens before each column int32[R, X], as int32[R, X, N]."""
  back = jnp.arange(-config.draft_match, 0, dtype=jnp.int32)
  where = column[..., None] + back[None, None]
  return indexing.take(sequences.tokens, rows[:, None, None], where, fill=-1)


def _place(drafts: Drafts, tokens: Array) -> Array:
  """Returns the table index of n-grams int32[..., N]."""
  key = jnp.zeros(tokens.shape[:-1], jnp.uint32)
  for number in range(tokens.shape[-1]):
    key = (key ^ tokens[..., number].astype(jnp.uint32)) * jnp.uint32(
      0x9E3779B1
    )
    key ^= key >> jnp.uint32(15)
  size = drafts.table.shape[1]
  return (key & jnp.uint32(size - 1)).astype(jnp.int32)


def propose(
  drafts: Drafts,
  sequences: Sequences,
  rows: Array,
  asked: Array,
  config: RolloutConfig,
) -> tuple[Array, Array, Array]:
  """Guesses the next tokens of rows, int32[B], where `asked` is True.

  Returns:
    int32[B, K], the guesses; int32[B], their number; and bool[B], rows with an
    n-gram match, see `learn`.
  """
  samples, most = config.num_samples, config.draft_tokens
  length = indexing.take(sequences.length, rows)
  own = _before(sequences, rows, length[:, None], config)[:, 0]
  value = indexing.take(drafts.table, rows // samples, _place(drafts, own)) - 1
  column = elementwise.quotient(jnp.maximum(value, 0), samples)
  source = rows // samples * samples + jnp.maximum(value, 0) % samples
  there = _before(sequences, source, column[:, None], config)[:, 0]
  stop = indexing.take(sequences.length, source)
  found = asked & (value >= 0) & (column < stop)
  found &= jnp.all(there == own, axis=1) & jnp.all(own >= 0, axis=1)
  ahead = column[:, None] + jnp.arange(most, dtype=jnp.int32)[None]

  def guesses() -> tuple[Array, Array]:
    counts = jnp.where(found, stop - column, 0)
    counts = limited(drafts, sequences, rows, counts, config)
    return indexing.take(sequences.tokens, source[:, None], ahead), counts

  tokens, counts = lax.cond(
    jnp.any(found), guesses, lambda: (sharding.zeros_like(ahead), column & 0)
  )
  return tokens, counts, found


def limited(
  drafts: Drafts,
  sequences: Sequences,
  rows: Array,
  counts: Array,
  config: RolloutConfig,
) -> Array:
  """Limits the number of guesses, int32[B], of each row.

  Leaves room for a last sampled token, and drops guesses that are unlikely to
  be accepted.
  """
  room = (
    indexing.take(sequences.limit, rows)
    - indexing.take(sequences.length, rows)
    - 1
  )
  likely = _lengths(indexing.take(drafts.rate, rows), config.draft_tokens)
  return jnp.maximum(jnp.minimum(jnp.minimum(likely, room), counts), 0)


def _lengths(rate: Array, most: int) -> Array:
  """Returns how many tokens are all accepted with probability 1/2."""
  powers = jnp.cumprod(
    jnp.broadcast_to(rate[:, None], (rate.shape[0], most)), axis=1
  )
  return jnp.sum(powers >= _LIKELY, axis=1, dtype=jnp.int32)


def learn(
  drafts: Drafts, rows: Array, found: Array, guessed: Array, accepted: Array
) -> Drafts:
  """Updates the acceptance rates of rows.

  Args:
    drafts: the drafts.
    rows: int32[B]; Q for none.
    found: bool[B], rows with an n-gram match. The rate of rows that match but
      are not guessed recovers slowly, so they are tried again later.
    guessed: int32[B], the number of guessed tokens.
    accepted: int32[B], the number of accepted tokens.
  """

  def learned() -> Array:
    rate = indexing.take(drafts.rate, rows)
    most = jnp.maximum(guessed, 1).astype(jnp.float32)
    part = accepted.astype(jnp.float32) / most
    known = rate * jnp.float32(_MEMORY) + part * jnp.float32(1 - _MEMORY)
    later = jnp.minimum(rate + jnp.float32(_RETRY), jnp.float32(_BEGIN))
    later = jnp.where(rate < _LIKELY, later, rate)
    rate = jnp.where(guessed > 0, known, later)
    place = indexing.where_valid(found | (guessed > 0), rows)
    return indexing.put(drafts.rate, place, values=rate)

  changed = jnp.any(found | (guessed > 0))
  rate = lax.cond(changed, learned, lambda: drafts.rate)
  return dataclasses.replace(drafts, rate=rate)


def checked(guess: Any, num_slots: int, config: RolloutConfig) -> Any:
  """Returns a user's guesses as int32; raises for wrong types and shapes."""
  tokens, counts = guess
  tokens, counts = as_int32("tokens", tokens), as_int32("counts", counts)
  wanted = (num_slots, config.draft_tokens)
  check_shape("tokens", tokens, wanted, ", as `draft` returns them")
  check_shape("counts", counts, (num_slots,), ", as `draft` returns them")
  return jnp.asarray(tokens), jnp.asarray(counts)
