"""Sets of tokens with a bit for each token, and logits outside of them.

Token t is bit t % 32 of word t // 32, where bit 0 is the least significant. The
bits past the last token are 0. Several libraries for guided decoding use this
order, with words of int32; `words.view(jnp.uint32)` are the same bits.
"""

import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays.arguments import as_bool

BITS = 32
"""Bits in a word."""


def num_words(vocab_size: int) -> int:
  """Words that hold a bit for each of V tokens, ceil(V / 32)."""
  return -(-vocab_size // BITS)


def pack_bits(allowed: Array) -> Array:
  """Packs a bool for each token into words.

  Args:
    allowed: bool[..., V]; for token t the bit t % 32 of word t // 32.

  Returns:
    uint32[..., ceil(V / 32)], 0 past the last token.

  Raises:
    TypeError: `allowed` holds no bools.
    ValueError: `allowed` is a scalar.

  Examples:
    >>> allowed = jnp.asarray([True, False, True] + [False] * 29 + [True])
    >>> pack_bits(allowed)
    Array([5, 1], dtype=uint32)
  """
  allowed = jnp.asarray(as_bool("allowed", allowed))
  if not allowed.ndim:
    raise ValueError("`allowed` must have the shape [..., V], got a scalar.")
  *lead, size = allowed.shape
  words = num_words(size)
  padding = [(0, 0)] * len(lead) + [(0, words * BITS - size)]
  bits = jnp.pad(allowed, padding).reshape(*lead, words, BITS)
  return jnp.sum(
    jnp.where(bits, _places(bits.ndim), jnp.uint32(0)),
    axis=-1,
    dtype=jnp.uint32,
  )


def mask_logits(logits: Array, bits: Array) -> Array:
  """Sets the logits of all tokens that are not allowed to -inf.

  Args:
    logits: floats [..., V] of any width.
    bits: uint32[..., ceil(V / 32)], as `pack_bits` makes them.

  Returns:
    Logits of the same shape and width.

  Raises:
    TypeError: `logits` holds no floats, or `bits` is not uint32.
    ValueError: the shapes do not belong together.

  Examples:
    >>> logits = jnp.asarray([[0.5, 2.0, 1.0]])
    >>> mask_logits(logits, pack_bits(jnp.asarray([[True, False, True]])))
    Array([[ 0.5, -inf,  1. ]], dtype=float32)
  """
  _check(logits, bits)
  *lead, size = logits.shape
  ones = (bits[..., None] & _places(bits.ndim + 1)) != jnp.uint32(0)
  allowed = ones.reshape(*lead, bits.shape[-1] * BITS)[..., :size]
  return jnp.where(allowed, logits, -jnp.inf)


def _places(rank: int) -> Array:
  """uint32[1, .., 32]: a word with one bit, for each bit."""
  places = jnp.uint32(1) << jnp.arange(BITS, dtype=jnp.uint32)
  return places.reshape(*(1,) * (rank - 1), BITS)


def _check(logits: Array, bits: Array) -> None:
  if not jnp.issubdtype(logits.dtype, jnp.floating):
    raise TypeError(f"`logits` must be floats, got {logits.dtype}.")
  if bits.dtype != jnp.uint32:
    raise TypeError(
      f"`bits` must be uint32, got {bits.dtype}; make it with pack_bits, or "
      "view words of int32 as uint32."
    )
  *lead, size = logits.shape
  if bits.shape != (*lead, num_words(size)):
    raise ValueError(
      f"`bits` must have the shape {[*lead, num_words(size)]}, 32 tokens in a "
      f"word for logits of {[*lead, size]}, got {[*bits.shape]}."
    )
