"""Bitmasks over the vocabulary, and their application to logits.

Bit t % 32 of word t // 32 represents token t, where bit 0 is the least
significant. The bits beyond the last token are 0. Other libraries for guided
decoding use the same bit order, in int32 words; `words.view(jnp.uint32)`
converts such words.
"""

import chex
import jax.numpy as jnp
from jax import Array

BITS = 32
"""The number of bits in a word."""


def num_words(vocab_size: int) -> int:
  """Returns ceil(V / 32), the number of words in a bitmask of V tokens."""
  return -(-vocab_size // BITS)


def mask_logits(logits: Array, bits: Array) -> Array:
  """Masks logits: tokens whose bit is 0 get the logit -inf.

  The logits are floats [..., V], and the bits uint32[..., ceil(V / 32)].
  """
  *lead, size = logits.shape
  chex.assert_shape(bits, (*lead, num_words(size)))
  chex.assert_type(bits, jnp.uint32)
  # A broadcast AND with 32 single-bit words unpacks the bits without a gather,
  # which would need V indices per row.
  places = jnp.uint32(1) << jnp.arange(BITS, dtype=jnp.uint32)
  places = places.reshape(*(1,) * bits.ndim, BITS)
  ones = (bits[..., None] & places) != jnp.uint32(0)
  allowed = ones.reshape(*lead, bits.shape[-1] * BITS)[..., :size]
  return jnp.where(allowed, logits, -jnp.inf)
