"""64-bit counts in two words, because jax's integers have 32 bits."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Count:
  """A count below 2**64, or an array of counts.

  On the host, `int(count)` or `numpy.asarray(count)`, which is uint64.

  Attributes:
    low: the count modulo 2**32.  # uint32[...]
    high: how often `low` wrapped around.  # uint32[...]

  Examples:
    >>> count = Count.zeros() + jnp.int32(2**31 - 1) + jnp.int32(2**31 - 1)
    >>> int(count + jnp.int32(7))
    4294967301
  """

  low: Array
  high: Array

  @classmethod
  def zeros(cls, shape: tuple[int, ...] = ()) -> "Count":
    """Returns zeros, in buffers that no other count shares."""
    return cls(
      low=jnp.zeros(shape, jnp.uint32), high=jnp.zeros(shape, jnp.uint32)
    )

  def __add__(self, more: Array) -> "Count":
    """Adds a non-negative int32[...]."""
    low = self.low + more.astype(jnp.uint32)
    # A sum that wrapped around is less than each of its terms.
    return Count(low=low, high=self.high + (low < self.low).astype(jnp.uint32))

  def since(self, earlier: "Count") -> Array:
    """Returns the difference, int32[...], which must be below 2**31."""
    return (self.low - earlier.low).astype(jnp.int32)

  def modulo(self, size: int) -> Array:
    """Returns the remainder of the division by `size`, int32[...].

    Correct while `high * size` is below 2**32: for a size of 10**6, up to
    2**44.
    """
    number = jnp.uint32(size)
    wrapped = self.high * jnp.uint32(2**32 % size) % number
    return ((wrapped + self.low % number) % number).astype(jnp.int32)

  def __int__(self) -> int:
    return int(np.asarray(self))

  def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
    del copy
    low, high = (np.asarray(x).astype(np.uint64) for x in (self.low, self.high))
    return np.asarray(low + (high << np.uint64(32)), dtype)
