"""Defines `Sampling` row by row, in plain Python and float64.

A batch is a list of `Row`. `sampling_of` and `history_of` make the library's
arguments; the other functions compute the expected results.
"""

import dataclasses
from collections.abc import Mapping
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._src.sampling import penalties
from jaxkv._src.sampling import settings
from jaxkv._src.sampling.penalties import History
from jaxkv._src.sampling.settings import Sampling


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """A sequence with its settings, which are off by default.

  Attributes:
    prompt: the tokens of the prompt.
    drawn: the tokens drawn so far.
  """

  prompt: Sequence[int] = (0,)
  drawn: Sequence[int] = ()
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  presence_penalty: float = 0.0
  frequency_penalty: float = 0.0
  repetition_penalty: float = 1.0
  min_tokens: int = 0
  stop_tokens: Sequence[int] = ()
  logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
  bad_words: Sequence[Sequence[int]] = ()


_FIELDS = [
  field.name
  for field in dataclasses.fields(Row)
  if field.name not in ("prompt", "drawn")
]


def sampling_of(rows: Sequence[Row], *fields: str) -> Sampling:
  """Returns the settings of all rows, by default all fields."""
  return settings.as_sampling(
    Sampling(
      **{
        name: [getattr(row, name) for row in rows] for name in fields or _FIELDS
      }
    ),
    len(rows),
  )


def history_of(
  rows: Sequence[Row], sampling: Sampling, vocabulary: int, stop_token: int = -1
) -> History:
  """Returns the history of the rows, as `adjust` takes it."""
  texts = [[*row.prompt, *row.drawn] for row in rows]
  width = max(len(text) for text in texts)
  tokens = np.full((len(rows), width), vocabulary - 1, np.int32)
  is_drawn = np.ones((len(rows), width), bool)
  for i, (row, text) in enumerate(zip(rows, texts, strict=True)):
    tokens[i, : len(text)] = text
    is_drawn[i, : len(row.prompt)] = False
  tokens = jnp.asarray(tokens)
  lengths = jnp.asarray([len(text) for text in texts], jnp.int32)
  occurrences = None
  if penalties.needs_seen(sampling):
    occurrences = penalties.seen_in(
      tokens, lengths, jnp.asarray(is_drawn), vocab_size=vocabulary
    )
  return History(
    counts=jnp.asarray([len(row.drawn) for row in rows], jnp.int32),
    seen=occurrences,
    last_tokens=penalties.last_tokens_of(
      tokens,
      jnp.arange(len(rows), dtype=jnp.int32),
      lengths,
      penalties.num_last_tokens(sampling),
    ),
    stop_token=stop_token,
  )


def adjusted(logits: np.ndarray, row: Row, stop_token: int = -1) -> np.ndarray:
  """Applies biases, bans and penalties to the logits of a row, float64[V]."""
  logits = np.array(logits, np.float64)
  text = [*row.prompt, *row.drawn]
  for token, value in row.logit_bias.items():
    logits[token] += value
  if len(row.drawn) < row.min_tokens:
    logits[
      [token for token in (*row.stop_tokens, stop_token) if token >= 0]
    ] = -np.inf
  for *word_prefix, banned_token in row.bad_words:
    if not word_prefix or text[-len(word_prefix) :] == word_prefix:
      logits[banned_token] = -np.inf
  for token in range(len(logits)):
    count = list(row.drawn).count(token)
    if token in text:
      penalty = row.repetition_penalty
      logits[token] *= 1 / penalty if logits[token] > 0 else penalty
    logits[token] -= row.frequency_penalty * count
    logits[token] -= row.presence_penalty * (count > 0)
  return logits


def weights(logits: np.ndarray, row: Row) -> np.ndarray:
  """Returns weights, float64[V]: 1 for the best token, 0 for filtered ones."""
  if row.temperature == 0:
    return (np.arange(len(logits)) == np.argmax(logits)).astype(np.float64)
  scaled = (logits - logits.max()) / np.float64(np.float32(row.temperature))
  shares = np.exp(scaled)
  shares[shares < np.float32(row.min_p)] = 0
  if 0 < row.top_k < len(shares):
    shares[shares < np.sort(shares)[-row.top_k]] = 0
  if row.top_p < 1:
    order = np.sort(shares)[::-1]
    mass_before = np.cumsum(order) - order
    needed = mass_before < np.float64(np.float32(row.top_p)) * shares.sum()
    shares[shares < order[np.count_nonzero(needed) - 1]] = 0
  return shares


def probabilities(logits: np.ndarray, row: Row) -> np.ndarray:
  """Returns the distribution to sample from, float64[V]."""
  shares = weights(logits, row)
  return shares / shares.sum()


def drawn(shares: np.ndarray, key, count: int) -> int:
  """Draws a block of tokens, then one of its tokens, by two uniform numbers.

  Args:
    shares: float64[V], weights.
    key: the key of the sequence.
    count: the number of tokens that the sequence has drawn.
  """
  bits = jax.random.bits(jax.random.fold_in(key, count), (2,), jnp.uint32)
  uniforms = (np.asarray(bits) >> 8) / 2.0**24
  width = 1
  while width * width < len(shares):
    width *= 2
  sums = np.cumsum(np.add.reduceat(shares, np.arange(0, len(shares), width)))
  block = int(np.searchsorted(sums, uniforms[0] * sums[-1], side="right"))
  cumulative = np.cumsum(shares[width * block : width * (block + 1)])
  index = np.searchsorted(
    cumulative, uniforms[1] * cumulative[-1], side="right"
  )
  return width * block + int(index)
