"""From logits to a token and its log-probability.

A row is cut into blocks of about the square root of its tokens. A block is
chosen first, then a token in it, so the logits are read twice and nothing of
their size is written: once for the largest in each block, once for the blocks'
probabilities. A token is drawn by inverting the cumulative distribution at two
uniform numbers, one for each choice, whatever the size of the vocabulary.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv._src.rollout.arguments import as_logits


def sample(
  keys: Array, counts: Array, logits: Array, temperature: Array
) -> tuple[Array, Array]:
  """Draws a token for every row.

  The draw depends on the row's own key and count alone, never on its place in
  the batch or on the rows beside it. At temperature 0 nothing is drawn.

  Args:
    keys: key[B], a sequence's own key.
    counts: int32[B], tokens the sequence has generated so far.
    logits: floats [B, V] of any width; computed with in float32.
    temperature: float32[]; 0 takes the most likely token.

  Returns:
    int32[B], and float32[B]: the log-probability of the token in the
    distribution it was drawn from; for temperature 0, in the model's own.

  Raises:
    TypeError: `logits` holds no floats.
  """
  logits = _blocks(as_logits(logits))
  greedy = temperature == 0
  divisor = jnp.where(greedy, jnp.float32(1), temperature)
  highest = jnp.max(logits, axis=2)
  best = jnp.max(highest, axis=1)

  def scaled(some: Array) -> Array:
    # Of the differences none overflows upwards, however low the temperature.
    return (some - best.reshape(-1, *(1,) * (some.ndim - 1))) / divisor

  masses = jnp.sum(jnp.exp(scaled(logits)), axis=2)

  def most_likely() -> tuple[Array, Array]:
    block = _first(highest == best[:, None])
    return block, _first(_block(logits, block) == best[:, None])

  def draw() -> tuple[Array, Array]:
    block_number, token_number = _uniforms(keys, counts)
    block = _inverse(masses, block_number)
    weights = jnp.exp(scaled(_block(logits, block)))
    return block, _inverse(weights, token_number)

  block, place = lax.cond(greedy, most_likely, draw)
  chosen = jnp.take_along_axis(_block(logits, block), place[:, None], axis=1)
  log_probs = scaled(chosen[:, 0]) - jnp.log(jnp.sum(masses, axis=1))
  return block * logits.shape[2] + place, log_probs


def _blocks(logits: Array) -> Array:
  """float32[B, X, Y] of float32[B, V], -inf behind the last token."""
  rows, size = logits.shape
  width = 1 << ((size - 1).bit_length() + 1) // 2
  logits = jnp.pad(
    logits, ((0, 0), (0, -size % width)), constant_values=-jnp.inf
  )
  return logits.reshape(rows, -1, width)


def _block(logits: Array, block: Array) -> Array:
  """float32[B, Y]: one block of each row, by int32[B]."""
  return jnp.take_along_axis(logits, block[:, None, None], axis=1)[:, 0]


def _uniforms(keys: Array, counts: Array) -> tuple[Array, Array]:
  """Two numbers of [0, 1) for each row, float32[B] each."""
  keys = jax.vmap(jax.random.fold_in)(keys, counts)
  bits = jax.vmap(lambda key: jax.random.bits(key, (2,), jnp.uint32))(keys)
  uniforms = (bits >> jnp.uint32(8)).astype(jnp.float32) * jnp.float32(2**-24)
  return uniforms[:, 0], uniforms[:, 1]


def _inverse(weights: Array, uniforms: Array) -> Array:
  """The index at which the cumulative distribution exceeds a number.

  Args:
    weights: float32[B, X], not negative, some positive in every row.
    uniforms: float32[B], in [0, 1).

  Returns:
    int32[B], never of an index whose weight is 0.
  """
  # A product with a triangle: `cumsum` takes ten times as long on a CPU.
  before = jnp.triu(jnp.ones((weights.shape[1],) * 2, jnp.float32))
  ends = jnp.matmul(weights, before, precision=lax.Precision.HIGHEST)
  inside = (ends > uniforms[:, None] * ends[:, -1:]) & (weights > 0)
  # Sums are rounded in any order, so the last one need not be the largest.
  heaviest = jnp.argmax(weights, axis=1).astype(jnp.int32)
  return jnp.where(jnp.any(inside, axis=1), _first(inside), heaviest)


def _first(condition: Array) -> Array:
  """int32[B]: the first index at which bool[B, X] holds, 0 if none does."""
  return jnp.argmax(condition, axis=1).astype(jnp.int32)
