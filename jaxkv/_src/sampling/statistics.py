"""Statistics of the model's distribution, before settings change it."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv._src.arrays import sharding
from jaxkv._src.sampling import reductions
from jaxkv._src.sampling.reductions import Block


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Records:
  """Optional statistics of each token, if `RolloutConfig` enables them.

  All but `unfiltered_log_probs` describe the model's distribution before
  `Sampling` and `process` change it. Columns without a record are 0.

  Attributes:
    raw_log_probs: the log-prob of the token.  # float32[Q, W]
    unfiltered_log_probs: see `RolloutConfig`.  # float32[Q, W]
    entropy: the entropy of the distribution in nats.  # float32[Q, W]
    top_tokens: the X most likely tokens, most likely first.  # int32[Q, W, X]
    top_log_probs: the log-probs of `top_tokens`.  # float32[Q, W, X]
  """

  raw_log_probs: Array | None = None
  unfiltered_log_probs: Array | None = None
  entropy: Array | None = None
  top_tokens: Array | None = None
  top_log_probs: Array | None = None


def observe(
  logits: Array,
  tokens: Array,
  log_probs: Array,
  *,
  entropy: bool,
  top_log_probs: int,
  parts: int = 1,
) -> Records:
  """Computes log-probs of tokens, and optionally entropy and top tokens.

  The arrays of the result have R rows in place of [Q, W]. `logits` are
  float32[R, V], and `tokens` int32[R]. Their `log_probs`, float32[R], are used
  only to make XLA finish the draw first. `parts` divides V, see `reductions`.
  """
  # XLA would run independent work on another CPU thread, and the handoff takes
  # longer than the work. So a condition makes the logits depend on the draw.
  # XLA cannot infer that the condition is always true.
  done = lax.bitcast_convert_type(log_probs, jnp.int32) & jnp.int32(2**31 - 1)
  logits = jnp.where(done[:, None] >= 0, logits, jnp.nan)
  best = reductions.maxima(logits)[:, None]
  weights = jnp.exp(logits - best)
  weight_sum = reductions.sums(weights)
  mass = jnp.log(weight_sum)[:, None]
  chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)
  entropy_nats = top_tokens = top_logits = None
  if entropy:
    # Without the mask, a token of probability 0 would give 0 * -inf, a NaN.
    terms = jnp.where(weights > 0, weights * (logits - best), 0)
    mean = reductions.sums(terms) / weight_sum
    entropy_nats = mass[:, 0] - mean
  if top_log_probs:
    top_tokens, top_logits = most_likely(logits, top_log_probs, parts)
    top_logits = top_logits - best - mass
  return Records(
    raw_log_probs=(chosen - best - mass)[:, 0],
    entropy=entropy_nats,
    top_tokens=top_tokens,
    top_log_probs=top_logits,
  )


def most_likely(
  logits: Array, count: int, parts: int = 1
) -> tuple[Array, Array]:
  """Finds the X tokens with the highest logits, from the highest logit down.

  Tokens of equal logits are sorted by id. If fewer than X = `count` of the
  logits, float32[R, V], are above -inf, the remaining tokens are arbitrary,
  with logit -inf. `parts` divides V, see `reductions`. Returns int32[R, X] and
  float32[R, X]. X above V raises ValueError.
  """
  rows, vocab_size = logits.shape
  if count > vocab_size:
    raise ValueError(
      f"`top_log_probs` must be at most {vocab_size}, the size of the "
      f"vocabulary, got {count}."
    )
  if parts > 1:
    return _most_likely_of_parts(logits, count, parts)
  maxima = reductions.by_block(reductions.maxima, logits)
  block_ids = jnp.arange(maxima.shape[1], dtype=jnp.int32)[None]

  # Each iteration reads one block and finds one token. Candidates are tokens
  # that come after the last token found, so no logit has to be overwritten.
  def trip(
    loop: tuple[Array, Array, Array], _: None
  ) -> tuple[tuple[Array, Array, Array], tuple[Array, Array]]:
    maxima, value, token = loop
    best = reductions.maxima(maxima)[:, None]
    best_block = reductions.first_of(maxima == best)
    block = reductions.read_block(logits, best_block)
    candidates = block.valid & _comes_after(block, value, token)
    index = reductions.first_of(candidates & (block.values == best))
    token = jnp.take_along_axis(block.columns, index[:, None], axis=1)
    candidates &= _comes_after(block, best, token)
    next_max = jnp.where(candidates, block.values, -jnp.inf)
    next_max = reductions.maxima(next_max)[:, None]
    maxima = jnp.where(block_ids == best_block[:, None], next_max, maxima)
    return (maxima, best, token), (token[:, 0], best[:, 0])

  start = jnp.full((rows, 1), jnp.inf), jnp.full((rows, 1), -1, jnp.int32)
  _, (tokens, values) = lax.scan(
    trip, sharding.match_varying_axes((maxima, *start)), None, length=count
  )
  return tokens.T, values.T


def _most_likely_of_parts(
  logits: Array, count: int, parts: int
) -> tuple[Array, Array]:
  """Computes `most_likely` from the most likely tokens of each part."""
  rows = logits.shape[0]
  part_size = logits.shape[1] // parts
  tokens, values = jax.vmap(
    lambda part: most_likely(part, min(count, part_size)), in_axes=1, out_axes=1
  )(logits.reshape(rows, parts, part_size))
  tokens += jnp.arange(parts, dtype=jnp.int32)[None, :, None] * part_size
  bits = lax.bitcast_convert_type(values, jnp.int32)
  # XLA does not split this single axis, so each device gets all candidates.
  candidates = jnp.stack([tokens, bits], axis=1).reshape(rows, -1)
  tokens, bits = jnp.split(candidates, 2, axis=1)
  values = lax.bitcast_convert_type(bits, jnp.float32)
  # Candidates with equal logits are in ascending order of their tokens.
  index, values = most_likely(values, count)
  return jnp.take_along_axis(tokens, index, axis=1), values


def _comes_after(block: Block, value: Array, token: Array) -> Array:
  """Returns bool[R, Y], True where `most_likely` puts tokens after `token`."""
  equal = block.values == value
  return (block.values < value) | (equal & (block.columns > token))
