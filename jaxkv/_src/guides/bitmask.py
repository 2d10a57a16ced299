"""Sets of tokens with a bit for each token, and logits outside of them.

Token t is bit t % 32 of word t // 32, where bit 0 is the least significant. The
bits past the last token are 0. Several libraries for guided decoding use this
order, with words of int32; `words.view(jnp.uint32)` are the same bits.
"""

import chex
import jax.numpy as jnp
from jax import Array

BITS = 32
"""Bits in a word."""


def num_words(vocab_size: int) -> int:
  """Words that hold a bit for each of V tokens, ceil(V / 32)."""
  return -(-vocab_size // BITS)


def mask_logits(logits: Array, bits: Array) -> Array:
  """Sets the logits of all tokens that are not allowed to -inf.

  Args:
    logits: floats [..., V] of any width.
    bits: uint32[..., ceil(V / 32)].

  Returns:
    Logits of the same shape and width.

  Examples:
    >>> bits = jnp.asarray([[0b101]], jnp.uint32)
    >>> mask_logits(jnp.asarray([[0.5, 2.0, 1.0]]), bits)
    Array([[ 0.5, -inf,  1. ]], dtype=float32)
  """
  *lead, size = logits.shape
  chex.assert_shape(bits, (*lead, num_words(size)))
  chex.assert_type(bits, jnp.uint32)
  places = jnp.uint32(1) << jnp.arange(BITS, dtype=jnp.uint32)
  places = places.reshape(*(1,) * bits.ndim, BITS)
  ones = (bits[..., None] & places) != jnp.uint32(0)
  allowed = ones.reshape(*lead, bits.shape[-1] * BITS)[..., :size]
  return jnp.where(allowed, logits, -jnp.inf)
