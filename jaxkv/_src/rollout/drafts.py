"""Drafts: tokens guessed for a sequence, from what its group has drawn.

An n-gram is followed by what followed it before: in the prompt, in the sequence
itself, or in another sample of its prompt. A table for each prompt has the last
place of each n-gram. It is never believed: a place counts only if the tokens
before it are the sequence's last ones. And a wrong guess only costs time.

How many tokens are guessed depends on how many of the sequence's earlier ones
were right, see `_lengths`.
"""

import dataclasses
from typing import Any
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jax import lax

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


_LIKELY = 0.5  # A token is guessed if all up to it are right that often.
_BEGIN = 0.8  # Of the tokens guessed, how many are right, before any is.
_MEMORY = 0.8  # What an earlier guess counts beside a later one.
_RETRY = 0.01  # Added for each guess that was not made.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafts:
  """What sequences are guessed from; Z places in a table.

  Attributes:
    table: the last place of each n-gram, a column * G + a sample + 1; 0 for
      none. One table for each prompt.  # int32[P, Z]
    rate: which part of a sequence's guesses were right.  # float32[Q]
  """

  table: Array
  rate: Array


def init(sequences: Sequences, config: RolloutConfig) -> Drafts | None:
  """Tables with the prompts in them; None without drafts."""
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
  """Tables of new sequences, int32[R]; R is whole groups."""
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
  """Tables with the tokens `start .. stop` of some rows, int32[R] all three.

  Args:
    drafts: the tables.
    sequences: with those tokens.
    rows: int32[R]; Q for none.
    start: int32[R].
    stop: int32[R].
    config: how long an n-gram is, and the samples of a prompt.
    most: the most tokens of a row.
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
  """int32[R, X, N]: the tokens before each column, int32[R, X]."""
  back = jnp.arange(-config.draft_match, 0, dtype=jnp.int32)
  where = column[..., None] + back[None, None]
  return indexing.take(sequences.tokens, rows[:, None, None], where, fill=-1)


def _place(drafts: Drafts, tokens: Array) -> Array:
  """int32[...]: where the table has the n-grams int32[..., N]."""
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
  """Guesses the next tokens of some rows.

  Args:
    drafts: the tables.
    sequences: all sequences.
    rows: int32[B]; Q for none.
    asked: bool[B], rows that can use a guess.
    config: how many tokens are guessed.

  Returns:
    int32[B, K], the guesses; int32[B], how many; and bool[B], rows of which
    there was something to guess, see `learn`.
  """
  samples, most = config.num_samples, config.draft_tokens
  length = indexing.take(sequences.length, rows)
  own = _before(sequences, rows, length[:, None], config)[:, 0]
  value = indexing.take(drafts.table, rows // samples, _place(drafts, own)) - 1
  column = indexing.quotient(jnp.maximum(value, 0), samples)
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
  """int32[B]: how many guesses of some rows are made, of int32[B] that can be.

  No more than a sequence may draw before the last token, and than are likely to
  be right.
  """
  room = (
    indexing.take(sequences.limit, rows)
    - indexing.take(sequences.length, rows)
    - 1
  )
  likely = _lengths(indexing.take(drafts.rate, rows), config.draft_tokens)
  return jnp.maximum(jnp.minimum(jnp.minimum(likely, room), counts), 0)


def _lengths(rate: Array, most: int) -> Array:
  """int32[B]: how many tokens in a row are right with a chance of a half."""
  powers = jnp.cumprod(
    jnp.broadcast_to(rate[:, None], (rate.shape[0], most)), axis=1
  )
  return jnp.sum(powers >= _LIKELY, axis=1, dtype=jnp.int32)


def learn(
  drafts: Drafts, rows: Array, found: Array, guessed: Array, accepted: Array
) -> Drafts:
  """Drafts that know how many guesses of some rows were right.

  Args:
    drafts: the drafts.
    rows: int32[B]; Q for none.
    found: bool[B], rows of which there was something to guess. Those that are
      too often wrong to be guessed are tried again, later.
    guessed: int32[B], tokens guessed.
    accepted: int32[B], those that were right.
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
  """A user's guesses, with int32 of the right shapes.

  Raises:
    TypeError: they are no pair of integer arrays.
    ValueError: they have other shapes.
  """
  tokens, counts = guess
  tokens, counts = as_int32("tokens", tokens), as_int32("counts", counts)
  wanted = (num_slots, config.draft_tokens)
  check_shape("tokens", tokens, wanted, ", as `draft` returns them")
  check_shape("counts", counts, (num_slots,), ", as `draft` returns them")
  return jnp.asarray(tokens), jnp.asarray(counts)
