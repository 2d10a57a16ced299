"""A digest of the contents of arrays, computed where they are."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


def digest(leaves: list[Array]) -> tuple[int, ...]:
  """Returns a hash of the contents of each array, two 32-bit words each.

  Examples:
    >>> one, other = jnp.ones((2, 3)), jnp.ones((2, 3))
    >>> digest([one]) == digest([other]), digest([one]) == digest([2 * one])
    (True, False)
  """
  words = [_digest(leaf) for leaf in leaves]
  return tuple(np.asarray(jax.device_get(words)).reshape(-1).tolist())


@jax.jit
def _digest(leaf: Array) -> Array:
  """Returns the hash of one array, uint32[2]."""
  if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
    leaf = jax.random.key_data(leaf)
  bits = leaf.reshape(-1)
  if bits.dtype in (jnp.bool_, jnp.int4, jnp.uint4):
    bits = bits.astype(jnp.uint8)
  width = bits.dtype.itemsize
  # Bits are hashed, not values, because 0.0 == -0.0, and NaN != NaN.
  bits = jax.lax.bitcast_convert_type(
    bits, {1: jnp.uint8, 2: jnp.uint16}.get(width, jnp.uint32)
  )
  words = bits.reshape(-1).astype(jnp.uint32)
  # Each word is hashed with its index, so that the sum depends on the order of
  # words. `mix_words` applies the finalizer of MurmurHash3 to every word.
  index = jax.lax.iota(jnp.uint32, words.shape[0]) * jnp.uint32(0x9E3779B9)

  def mix_words(start: int) -> Array:
    x = words ^ (index + jnp.uint32(start))
    for factor, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13)):
      x = (x ^ (x >> jnp.uint32(shift))) * jnp.uint32(factor)
    return jnp.sum(x ^ (x >> jnp.uint32(16)), dtype=jnp.uint32)

  return jnp.stack([mix_words(0), mix_words(0x5BD1E995)])
