"""Whether weights have changed, told without reading them where possible."""

import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


class WeightWatch:
  """Tells new weights from the same ones in other arrays.

  A trainer that keeps its weights on the host between calls hands out other
  arrays with the same contents, again and again. Then contents are compared,
  by 64 bits of each array, as no copy is kept to compare with.
  """

  def __init__(self):
    self._leaves: list[weakref.ref] = []
    self._digest: tuple[int, ...] | None = None

  def see(self, tree: Any, *, by_contents: bool) -> bool:
    """Whether a tree has other weights than the last one that was seen.

    Args:
      tree: the weights.
      by_contents: whether equal contents in other arrays are the same weights.

    Returns:
      True also for the first ones, and where contents were not known before.
    """
    leaves = jax.tree.leaves(tree)
    same = len(leaves) == len(self._leaves) and all(
      one() is leaf for one, leaf in zip(self._leaves, leaves, strict=True)
    )
    if same and not (by_contents and self._digest is None):
      return False
    before, self._digest = self._digest, None
    if by_contents:
      self._digest = digest(leaves)
    self._leaves = [weakref.ref(leaf) for leaf in leaves]
    return not same and (before is None or before != self._digest)


def digest(leaves: list[Array]) -> tuple[int, ...]:
  """Two words for each array, of its contents and their order.

  Examples:
    >>> one, other = jnp.ones((2, 3)), jnp.ones((2, 3))
    >>> digest([one]) == digest([other]), digest([one]) == digest([2 * one])
    (True, False)
  """
  words = [_digest(leaf) for leaf in leaves]
  return tuple(np.asarray(jax.device_get(words)).reshape(-1).tolist())


@jax.jit
def _digest(leaf: Array) -> Array:
  """uint32[2]: sums of mixed words, each with its place."""
  if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
    leaf = jax.random.key_data(leaf)
  bits = leaf.reshape(-1)
  if bits.dtype == jnp.bool_:
    bits = bits.astype(jnp.uint8)
  width = bits.dtype.itemsize
  bits = jax.lax.bitcast_convert_type(
    bits, {1: jnp.uint8, 2: jnp.uint16}.get(width, jnp.uint32)
  )
  words = bits.reshape(-1).astype(jnp.uint32)
  place = jax.lax.iota(jnp.uint32, words.shape[0]) * jnp.uint32(0x9E3779B9)

  def mixed(start: int) -> Array:
    x = words ^ (place + jnp.uint32(start))
    for factor, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13)):
      x = (x ^ (x >> jnp.uint32(shift))) * jnp.uint32(factor)
    return jnp.sum(x ^ (x >> jnp.uint32(16)), dtype=jnp.uint32)

  return jnp.stack([mixed(0), mixed(0x5BD1E995)])
