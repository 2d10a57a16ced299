"""Logits of each sequence, changed by its settings before a token is drawn."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.sampling.logits import as_logits
from jaxkv._src.sampling.padding import PADDING
from jaxkv._src.sampling.settings import Sampling

_IN_PROMPT = 1 << 15
"""The bit of `seen` for tokens of the prompt; the others are a count."""

_MOST = _IN_PROMPT - 1
_HIGHEST = float(np.finfo(np.float32).max)
_CHUNK = 2**16 - 1
"""Columns whose tokens can be counted in 16 bits."""


class History(NamedTuple):
  """What the sequences of R rows have drawn so far.

  Attributes:
    counts: int32[R], tokens drawn in this turn.
    seen: uint16[R, V], which tokens occur, see `seen_in`; None without
      penalties.
    last_tokens: int32[R, Y - 1], see `last_tokens_of`; None without words of
      several tokens.
    stop_token: the stop token of all sequences; -1 for none.
  """

  counts: Array
  seen: Array | None = None
  last_tokens: Array | None = None
  stop_token: int = PADDING


def needs_seen(sampling: Sampling) -> bool:
  """Whether `adjust` needs `History.seen`: there are penalties."""
  return any(
    penalty is not None
    for penalty in (
      sampling.presence_penalty,
      sampling.frequency_penalty,
      sampling.repetition_penalty,
    )
  )


def num_last_tokens(sampling: Sampling) -> int:
  """The number of last tokens that `adjust` needs, Y - 1 for words of Y."""
  words = sampling.bad_words
  return 0 if words is None else words.shape[2] - 1


def last_tokens_of(
  tokens: Array, numbers: Array, lengths: Array, count: int
) -> Array:
  """The last tokens of some sequences, -1 before the first.

  Args:
    tokens: int32[Q, W], of all sequences.
    numbers: int32[R], those of the rows; any other number for none.
    lengths: int32[R], how many tokens they have.
    count: X, how many to take.

  Returns:
    int32[R, X]; the last token is in the last place.

  Examples:
    >>> tokens = jnp.asarray([[4, 5, 6, 0]], jnp.int32)
    >>> zero, three = jnp.zeros((1,), jnp.int32), jnp.full((1,), 3, jnp.int32)
    >>> last_tokens_of(tokens, zero, three, 4).tolist()
    [[-1, 4, 5, 6]]
  """
  column = lengths[:, None] - count + jnp.arange(count, dtype=jnp.int32)[None]
  return indexing.take(tokens, numbers[:, None], column, fill=PADDING)


def seen_in(
  tokens: Array, lengths: Array, drawn: Array, *, vocab_size: int
) -> Array:
  """Which tokens occur in sequences, and how often they were drawn.

  Args:
    tokens: int32[R, W].
    lengths: int32[R], how many of them are there.
    drawn: bool[R, W], which of them the sequence has drawn itself. The others
      count as tokens of the prompt.
    vocab_size: V.

  Returns:
    uint16[R, V]. The lower 15 bits count the times that a token was drawn, up
    to 32,767. The highest one is set if it occurs in the prompt.

  Examples:
    >>> tokens = jnp.asarray([[3, 1, 1, 1]], jnp.int32)
    >>> length, drawn = jnp.full((1,), 4), jnp.asarray([[0, 0, 1, 1]]) > 0
    >>> seen = seen_in(tokens, length.astype(jnp.int32), drawn, vocab_size=4)
    >>> (seen >> 15).tolist(), (seen & 32767).tolist()
    ([[0, 1, 0, 1]], [[0, 2, 0, 0]])
  """
  rows, width = tokens.shape
  there = indexing.between(jnp.zeros_like(lengths), lengths, width)
  # One number counts both kinds of tokens, so they are scattered once.
  once = jnp.where(drawn, jnp.uint32(1), jnp.uint32(1 << 16))
  column = jnp.where(there, tokens, indexing.NOWHERE)
  row = _rows(tokens)
  seen = jnp.zeros((rows, vocab_size), jnp.uint16)
  for begin in range(0, width, _CHUNK):
    part = slice(begin, begin + _CHUNK)
    both = jnp.zeros((rows, vocab_size), jnp.uint32)
    both = indexing.add(both, row, column[:, part], values=once[:, part])
    count = (both & jnp.uint32(_CHUNK)) + (seen & _MOST).astype(jnp.uint32)
    prompt = (both > _CHUNK) | (seen >= _IN_PROMPT)
    seen = jnp.minimum(count, jnp.uint32(_MOST)).astype(jnp.uint16)
    seen = jnp.where(prompt, seen | jnp.uint16(_IN_PROMPT), seen)
  return seen


def see(seen: Array, tokens: Array, mask: Array) -> Array:
  """Counts a token that each row has drawn.

  Args:
    seen: uint16[R, V].
    tokens: int32[R].
    mask: bool[R], rows that have drawn one.
  """
  row = jnp.arange(seen.shape[0], dtype=jnp.int32)
  before = indexing.take(seen, row, tokens)
  full = (before & jnp.uint16(_MOST)) == jnp.uint16(_MOST)
  place = indexing.where_valid(mask & ~full, tokens)
  return indexing.put(seen, row, place, values=before + jnp.uint16(1))


def adjust(logits: Array, sampling: Sampling, history: History) -> Array:
  """Logits with all that the settings change, but for the temperature.

  In this order: `logit_bias`, `min_tokens`, `bad_words`, `repetition_penalty`,
  `frequency_penalty`, `presence_penalty`. `sampling.draw` does the rest.
  Finite logits stay finite unless a token is banned: what would overflow
  becomes the float32 of the largest magnitude.

  Args:
    logits: floats [R, V].
    sampling: of these R rows, see `settings.rows`.
    history: what the rows have drawn so far.

  Returns:
    float32[R, V]; the logits themselves if nothing changes them.

  Raises:
    ValueError: `history` lacks something that the settings need.
  """
  logits = as_logits(logits)
  bias = sampling.logit_bias
  if bias is not None:
    # Bans come after all sums: an overflow plus -inf would be NaN.
    values = jnp.where(bias.values == -jnp.inf, 0, bias.values)
    biased = indexing.add(logits, _rows(logits), bias.tokens, values=values)
    logits = _saturated(biased, logits)
  banned = _banned(sampling, history)
  if banned:
    tokens = jnp.concatenate(banned, axis=1)
    logits = indexing.put_min(
      logits, _rows(logits), tokens, values=jnp.float32(-jnp.inf)
    )
  return _penalized(logits, sampling, history.seen)


def _rows(matrix: Array) -> Array:
  """The index of each row, int32[R, 1]."""
  return jnp.arange(matrix.shape[0], dtype=jnp.int32)[:, None]


def _saturated(logits: Array, before: Array) -> Array:
  """Logits without overflow, but for those that were not finite before."""
  return jnp.where(
    jnp.isfinite(before), jnp.clip(logits, -_HIGHEST, _HIGHEST), logits
  )


def _banned(sampling: Sampling, history: History) -> list[Array]:
  """The tokens that must not be drawn, int32[R, X] each; NOWHERE for none."""
  found = []
  if (bias := sampling.logit_bias) is not None:
    found.append(indexing.where_valid(bias.values == -jnp.inf, bias.tokens))
  if sampling.min_tokens is not None:
    rows = history.counts.shape[0]
    stops = jnp.full((rows, 1), history.stop_token, jnp.int32)
    if sampling.stop_tokens is not None:
      stops = jnp.concatenate([sampling.stop_tokens, stops], axis=1)
    early = history.counts < sampling.min_tokens
    early = jnp.broadcast_to(early[:, None], stops.shape)
    found.append(indexing.where_valid(early, stops))
  if sampling.bad_words is not None:
    begun = _begun(sampling.bad_words, history.last_tokens)
    found.append(indexing.where_valid(begun, sampling.bad_words[:, :, -1]))
  return found


def _begun(words: Array, last_tokens: Array | None) -> Array:
  """bool[R, X]: words of which only the last token is missing."""
  before = words[:, :, :-1]
  if before.shape[2] and last_tokens is None:
    raise ValueError(
      "`history.last_tokens` must be given for bad words of several tokens, "
      "got None; make it with last_tokens_of."
    )
  if last_tokens is None:
    return jnp.ones(words.shape[:2], bool)
  return jnp.all((before == PADDING) | (before == last_tokens[:, None]), axis=2)


def _penalized(logits: Array, sampling: Sampling, seen: Array | None) -> Array:
  if not needs_seen(sampling):
    return logits
  if seen is None:
    raise ValueError(
      "`history.seen` must be given for penalties, got None; make it with "
      "seen_in."
    )
  if sampling.repetition_penalty is not None:
    penalty = sampling.repetition_penalty[:, None]
    less = jnp.where(logits > 0, logits / penalty, logits * penalty)
    less = jnp.where(seen > 0, less, logits)
    logits = _saturated(less, logits)
  count = (seen & _MOST).astype(jnp.float32)
  if sampling.frequency_penalty is not None:
    penalty = sampling.frequency_penalty[:, None]
    # Clipped, too: a banned logit minus -inf would be NaN.
    penalty = jnp.clip(penalty * count, -_HIGHEST, _HIGHEST)
    logits = _saturated(logits - penalty, logits)
  if sampling.presence_penalty is not None:
    penalty = sampling.presence_penalty[:, None]
    less = logits - jnp.where(count > 0, penalty, 0)
    logits = _saturated(less, logits)
  return logits
