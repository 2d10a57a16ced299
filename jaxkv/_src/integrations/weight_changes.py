"""Detects new weights, by the identity of arrays or by their contents."""

import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


class WeightWatch:
  """Remembers the last weights and reports a change.

  A trainer that keeps its weights on the host between calls passes new arrays
  with equal contents. To compare contents, the object stores a 64-bit digest of
  each array, not a copy.
  """

  def __init__(self):
    self._leaves: list[weakref.ref] = []
    self._digest: tuple[int, ...] | None = None

  def has_changed(self, tree: Any, *, by_contents: bool) -> bool:
    """Returns True if the weights differ from those of the last call.

    With `by_contents`, new arrays with equal contents are not a change. This
    requires that `by_contents` was True for the last weights, too. The first
    call returns True.
    """
    leaves = jax.tree.leaves(tree)
    is_same = len(leaves) == len(self._leaves) and all(
      reference() is leaf
      for reference, leaf in zip(self._leaves, leaves, strict=True)
    )
    if is_same and not (by_contents and self._digest is None):
      return False
    last_digest = self._digest
    self._digest = None
    if by_contents:
      self._digest = digest(leaves)
    # Weak references let old weights be freed. A dead reference returns None,
    # so it differs from any new leaf.
    self._leaves = [weakref.ref(leaf) for leaf in leaves]
    return not is_same and (last_digest is None or last_digest != self._digest)


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
  if bits.dtype == jnp.bool_:
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
