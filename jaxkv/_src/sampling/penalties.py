"""Applies the settings of each sequence to its logits before sampling."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays.arguments import as_floats
from jaxkv._src.sampling.padding import PADDING
from jaxkv._src.sampling.settings import Sampling

_IN_PROMPT = 1 << 15
"""The bit of a tally for tokens of the prompt. The lower bits count draws."""

_MAX_COUNT = _IN_PROMPT - 1
_LARGEST = float(np.finfo(np.float32).max)
_CHUNK = 2**16 - 1
"""The maximum number of columns counted at once, so that counts fit 16 bits."""


class History(NamedTuple):
  """The tokens of R sequences so far, in the forms that `adjust` needs.

  Attributes:
    counts: int32[R], the number of tokens drawn since the last prompt.
    seen: uint16[R, V], the tally of each token from `seen_in`; None if there
      are no penalties.
    last_tokens: int32[R, Y - 1] from `last_tokens_of`, for bad words of up to Y
      tokens; None if no bad word has several tokens.
    stop_token: the stop token of all sequences; -1 if there is none.
  """

  counts: Array
  seen: Array | None = None
  last_tokens: Array | None = None
  stop_token: int = PADDING


def needs_seen(sampling: Sampling) -> bool:
  """Returns True if penalties are set, for which `adjust` needs `seen`."""
  return any(
    penalty is not None
    for penalty in (
      sampling.presence_penalty,
      sampling.frequency_penalty,
      sampling.repetition_penalty,
    )
  )


def num_last_tokens(sampling: Sampling) -> int:
  """Returns Y - 1, for bad words of up to Y tokens; 0 without bad words."""
  words = sampling.bad_words
  return 0 if words is None else words.shape[2] - 1


def last_tokens_of(
  tokens: Array, sequences: Array, lengths: Array, count: int
) -> Array:
  """Gathers the last X tokens of R sequences, with -1 before the first token.

  Row i reads `lengths[i]` tokens of row `sequences[i]` of int32[Q, W]; an empty
  row has an index out of range. Returns int32[R, X], with the last token in the
  last column, for X = `count`.
  """
  column = lengths[:, None] - count + jnp.arange(count, dtype=jnp.int32)[None]
  return indexing.take(tokens, sequences[:, None], column, fill=PADDING)


def seen_in(
  tokens: Array, lengths: Array, is_sampled: Array, *, vocab_size: int
) -> Array:
  """Counts the occurrences of each token in R sequences, as uint16[R, V].

  The lower 15 bits count the times that a token was sampled, up to 32,767. The
  highest bit is set if the token occurs in the prompt. Reads the first
  `lengths`, int32[R], of the `tokens`, int32[R, W]. `is_sampled`, bool[R, W],
  is False for tokens of the prompt.
  """
  rows, width = tokens.shape
  is_token = indexing.between(jnp.zeros_like(lengths), lengths, width)
  # One scatter counts sampled tokens in the lower 16 bits and tokens of the
  # prompt in the upper 16. The lower half cannot overflow in a chunk of
  # `_CHUNK` columns.
  increments = jnp.where(is_sampled, jnp.uint32(1), jnp.uint32(1 << 16))
  column = jnp.where(is_token, tokens, indexing.NOWHERE)
  row = _rows(tokens)
  tally = jnp.zeros((rows, vocab_size), jnp.uint16)
  for first_column in range(0, width, _CHUNK):
    part = slice(first_column, first_column + _CHUNK)
    pairs = jnp.zeros((rows, vocab_size), jnp.uint32)
    pairs = indexing.add(
      pairs, row, column[:, part], values=increments[:, part]
    )
    count = (tally & _MAX_COUNT).astype(jnp.uint32)
    count += pairs & jnp.uint32(_CHUNK)
    prompt = (pairs > _CHUNK) | (tally >= _IN_PROMPT)
    tally = jnp.minimum(count, jnp.uint32(_MAX_COUNT)).astype(jnp.uint16)
    tally = jnp.where(prompt, tally | jnp.uint16(_IN_PROMPT), tally)
  return tally


def see(tally: Array, tokens: Array, mask: Array) -> Array:
  """Adds the drawn tokens of rows where `mask` is True to a tally."""
  row = jnp.arange(tally.shape[0], dtype=jnp.int32)
  count = indexing.take(tally, row, tokens)
  # The highest count is not increased, as it would carry into `_IN_PROMPT`.
  is_full = (count & jnp.uint16(_MAX_COUNT)) == jnp.uint16(_MAX_COUNT)
  column = indexing.where_valid(mask & ~is_full, tokens)
  return indexing.put(tally, row, column, values=count + jnp.uint16(1))


def adjust(logits: Array, sampling: Sampling, history: History) -> Array:
  """Applies biases, bans and penalties to the logits of R rows.

  The order is `logit_bias`, `min_tokens`, `bad_words`, `repetition_penalty`,
  `frequency_penalty`, `presence_penalty`. `sample_tokens` applies the
  temperature and the filters. The logits of banned tokens become -inf. Other
  finite logits stay finite, because values that would overflow are clipped.
  `sampling` has the rows' settings, from `settings.rows`, and `history` their
  tokens so far. Returns float32[R, V].
  """
  logits = as_floats("logits", logits)
  bias = sampling.logit_bias
  if bias is not None:
    # Biases of -inf are applied later as bans, because `_saturate` would make
    # their logits finite.
    values = jnp.where(bias.values == -jnp.inf, 0, bias.values)
    biased = indexing.add(logits, _rows(logits), bias.tokens, values=values)
    logits = _saturate(biased, logits)
  banned = _banned_tokens(sampling, history)
  if banned:
    tokens = jnp.concatenate(banned, axis=1)
    logits = indexing.put_min(
      logits, _rows(logits), tokens, values=jnp.float32(-jnp.inf)
    )
  return _penalize(logits, sampling, history.seen)


def _rows(matrix: Array) -> Array:
  """Returns the index of each row, int32[R, 1]."""
  return jnp.arange(matrix.shape[0], dtype=jnp.int32)[:, None]


def _saturate(logits: Array, original: Array) -> Array:
  """Clips logits to the float32 range where `original` is finite."""
  return jnp.where(
    jnp.isfinite(original), jnp.clip(logits, -_LARGEST, _LARGEST), logits
  )


def _banned_tokens(sampling: Sampling, history: History) -> list[Array]:
  """Returns arrays int32[R, X] of banned tokens, padded with invalid ones."""
  groups = []
  if (bias := sampling.logit_bias) is not None:
    groups.append(indexing.where_valid(bias.values == -jnp.inf, bias.tokens))
  if sampling.min_tokens is not None:
    rows = history.counts.shape[0]
    stops = jnp.full((rows, 1), history.stop_token, jnp.int32)
    if sampling.stop_tokens is not None:
      stops = jnp.concatenate([sampling.stop_tokens, stops], axis=1)
    is_early = history.counts < sampling.min_tokens
    is_early = jnp.broadcast_to(is_early[:, None], stops.shape)
    groups.append(indexing.where_valid(is_early, stops))
  if sampling.bad_words is not None:
    completes = _completes_word(sampling.bad_words, history.last_tokens)
    groups.append(indexing.where_valid(completes, sampling.bad_words[:, :, -1]))
  return groups


def _completes_word(words: Array, last_tokens: Array | None) -> Array:
  """Returns bool[R, X], True for words that lack only their last token."""
  prefix = words[:, :, :-1]
  if not prefix.shape[2]:
    return jnp.ones(words.shape[:2], bool)
  assert last_tokens is not None  # See `num_last_tokens`.
  return jnp.all((prefix == PADDING) | (prefix == last_tokens[:, None]), axis=2)


def _penalize(logits: Array, sampling: Sampling, tally: Array | None) -> Array:
  if not needs_seen(sampling):
    return logits
  assert tally is not None  # See `needs_seen`.
  if sampling.repetition_penalty is not None:
    penalty = sampling.repetition_penalty[:, None]
    penalized = jnp.where(logits > 0, logits / penalty, logits * penalty)
    penalized = jnp.where(tally > 0, penalized, logits)
    logits = _saturate(penalized, logits)
  count = (tally & _MAX_COUNT).astype(jnp.float32)
  if sampling.frequency_penalty is not None:
    penalty = sampling.frequency_penalty[:, None]
    # If the product were -inf, a banned logit would be -inf - (-inf), a NaN.
    penalty = jnp.clip(penalty * count, -_LARGEST, _LARGEST)
    logits = _saturate(logits - penalty, logits)
  if sampling.presence_penalty is not None:
    penalty = sampling.presence_penalty[:, None]
    penalized = logits - jnp.where(count > 0, penalty, 0)
    logits = _saturate(penalized, logits)
  return logits
