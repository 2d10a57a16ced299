"""What is known of the model's own distribution, before anything changes it."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv._src.arrays import sharding
from jaxkv._src.sampling import reductions
from jaxkv._src.sampling.reductions import Block


class Observed(NamedTuple):
  """Of the distribution of each row, at temperature 1.

  Attributes:
    log_probs: float32[R], of some tokens.
    entropy: float32[R], in nats.
    top_tokens: int32[R, X], the most likely tokens, descending.
    top_log_probs: float32[R, X], of those.
  """

  log_probs: Array
  entropy: Array | None
  top_tokens: Array | None
  top_log_probs: Array | None


def observe(
  logits: Array,
  tokens: Array,
  log_probs: Array,
  *,
  entropy: bool,
  top_log_probs: int,
) -> Observed:
  """Log-probabilities of tokens, and what else is asked for.

  Args:
    logits: float32[R, V].
    tokens: int32[R].
    log_probs: float32[R], the last that the draw computes.
    entropy: whether to compute it.
    top_log_probs: X, how many of the most likely tokens to find.

  Raises:
    ValueError: `top_log_probs` is more than V.
  """
  # After the draw, not beside it: XLA gives what is independent to another
  # thread of a CPU, which takes longer than the work. It cannot tell that this
  # always holds.
  done = lax.bitcast_convert_type(log_probs, jnp.int32) & jnp.int32(2**31 - 1)
  logits = jnp.where(done[:, None] >= 0, logits, jnp.nan)
  best = reductions.maxima(logits)[:, None]
  weights = jnp.exp(logits - best)
  total = reductions.sums(weights)
  mass = jnp.log(total)[:, None]
  chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)
  nats = top = top_logits = None
  if entropy:
    # A logit of -inf has no part in it.
    parts = jnp.where(weights > 0, weights * (logits - best), 0)
    mean = reductions.sums(parts) / total
    nats = mass[:, 0] - mean
  if top_log_probs:
    top, top_logits = most_likely(logits, top_log_probs)
    top_logits = top_logits - best - mass
  return Observed(
    log_probs=(chosen - best - mass)[:, 0],
    entropy=nats,
    top_tokens=top,
    top_log_probs=top_logits,
  )


def most_likely(logits: Array, count: int) -> tuple[Array, Array]:
  """The tokens with the highest logits, descending, and their logits.

  Of equal logits, the first token comes first. Where fewer than X logits are
  above -inf, the other tokens are any, with -inf.

  Args:
    logits: float32[R, V].
    count: X, how many.

  Returns:
    int32[R, X] and float32[R, X].

  Raises:
    ValueError: `count` is more than V.

  Examples:
    >>> most_likely(jnp.asarray([[2.0, 5.0, 3.0, 5.0]]), 3)[0]
    Array([[1, 3, 2]], dtype=int32)
  """
  rows, size = logits.shape
  if count > size:
    raise ValueError(
      f"`top_log_probs` must be at most {size}, the tokens there are, got "
      f"{count}."
    )
  highest = reductions.by_block(reductions.maxima, logits)
  number = jnp.arange(highest.shape[1], dtype=jnp.int32)[None]

  def trip(
    loop: tuple[Array, Array, Array], _: None
  ) -> tuple[tuple[Array, Array, Array], tuple[Array, Array]]:
    highest, value, token = loop
    best = reductions.maxima(highest)[:, None]
    own = reductions.first_of(highest == best)
    block = reductions.read_block(logits, own)
    left = block.valid & _is_behind(block, value, token)
    place = reductions.first_of(left & (block.values == best))
    token = jnp.take_along_axis(block.columns, place[:, None], axis=1)
    left &= _is_behind(block, best, token)
    rest = jnp.where(left, block.values, -jnp.inf)
    rest = reductions.maxima(rest)[:, None]
    highest = jnp.where(number == own[:, None], rest, highest)
    return (highest, best, token), (token[:, 0], best[:, 0])

  first = jnp.full((rows, 1), jnp.inf), jnp.full((rows, 1), -1, jnp.int32)
  _, (tokens, values) = lax.scan(
    trip, sharding.match_varying_axes((highest, *first)), None, length=count
  )
  return tokens.T, values.T


def _is_behind(block: Block, value: Array, token: Array) -> Array:
  """bool[R, Y]: tokens behind another one in the order of `most_likely`."""
  equal = block.values == value
  return (block.values < value) | (equal & (block.columns > token))
