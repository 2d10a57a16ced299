"""Packs the small arrays of a state into one array for each call.

On a CPU each array that a call takes or returns costs more than a microsecond.
A state has about thirty; half of them are single numbers.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax import lax

from jaxkv._src.cache.state import CacheState

_SMALL = 64  # Elements.


Leaves = tuple[Array, ...]
"""int32[X], the bits of all small arrays one after another; the large arrays.

A plain tuple: to make any other pytree runs Python code.
"""


class _Place(NamedTuple):
  """The position of an array of a state among its `Leaves`."""

  shape: tuple[int, ...]  # of the array, as `dtype`
  dtype: np.dtype
  begin: int  # its first element among the bits, or its leaf's index
  is_small: bool  # True if it is among the bits

  @property
  def part(self) -> slice:
    """The slice of its elements among the bits."""
    return slice(self.begin, self.begin + math.prod(self.shape))


@dataclasses.dataclass(frozen=True)
class Layout:
  """The positions of a state's arrays among its `Leaves`."""

  structure: Any  # of the state
  places: tuple[_Place, ...]  # of its arrays, in order

  @classmethod
  def of(cls, state: CacheState) -> "Layout":
    """Returns the layout of a state and of all its successors."""
    arrays, structure = jax.tree.flatten(state)
    places, num_elements, num_leaves = [], 0, 1
    for array in arrays:
      is_small = array.size <= _SMALL and array.dtype.itemsize == 4
      begin = num_elements if is_small else num_leaves
      places.append(_Place(array.shape, array.dtype, begin, is_small))
      num_elements += array.size * is_small
      num_leaves += not is_small
    return cls(structure, tuple(places))

  def pack(self, state: CacheState) -> Leaves:
    """Returns the leaves of a state."""
    pairs = [*zip(jax.tree.leaves(state), self.places, strict=True)]
    small = _joined([array for array, place in pairs if place.is_small])
    return (small, *(array for array, place in pairs if not place.is_small))

  def unpack(self, leaves: Leaves) -> CacheState:
    """Returns the state with the given leaves."""
    places = tuple(place for place in self.places if place.is_small)
    small = iter(_parts(places)(leaves[0]))
    arrays = [
      next(small) if place.is_small else leaves[place.begin]
      for place in self.places
    ]
    return jax.tree.unflatten(self.structure, arrays)

  def read(self, leaves: Leaves, which: Callable[[Any], Any]) -> np.ndarray:
    """Copies one array of a state to the host without unpacking the others."""
    place = which(self._map)
    if not place.is_small:
      return np.asarray(leaves[place.begin])
    bits = np.asarray(leaves[0])[place.part]
    return bits.view(place.dtype).reshape(place.shape)

  @functools.cached_property
  def _map(self) -> Any:
    """A state whose arrays are replaced by their places."""
    return jax.tree.unflatten(self.structure, self.places)


@jax.jit
def _joined(arrays: list[Array]) -> Array:
  """Concatenates the bits of arrays into int32[X]."""
  bits = [lax.bitcast_convert_type(array, jnp.int32) for array in arrays]
  return jnp.concatenate([one.reshape(-1) for one in bits])


@functools.cache
def _parts(places: tuple[_Place, ...]) -> Callable[[Array], list[Array]]:
  """Returns the inverse of `_joined` for small arrays at `places`."""

  @jax.jit
  def parts(small: Array) -> list[Array]:
    return [
      lax.bitcast_convert_type(
        small[place.part].reshape(place.shape), place.dtype
      )
      for place in places
    ]

  return parts
