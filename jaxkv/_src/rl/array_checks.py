"""Checks of arrays with one value per token."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkv._src.arrays.arguments import as_array
from jaxkv._src.arrays.arguments import as_floats
from jaxkv._src.arrays.arguments import check_shape

_PER_TOKEN = ", one for each token"


def as_log_probs(name: str, values: Any) -> jax.Array:
  """Converts floats [Q, T] or [N, G, R] to float32, or raises an error."""
  values = as_array(name, values)
  if values.ndim < 2:
    raise ValueError(
      f"`{name}` must be [Q, T] or [N, G, R], a number for each token, got "
      f"{list(values.shape)}."
    )
  return as_floats(name, values)


def as_floats_like(name: str, values: Any, other: jax.Array) -> jax.Array:
  """Converts floats of the shape of `other` to float32, or raises an error."""
  values = as_array(name, values)
  check_shape(name, values, other.shape, _PER_TOKEN)
  return as_floats(name, values)


def as_mask(
  name: str, mask: Any, other: jax.Array, meaning: str = _PER_TOKEN
) -> jax.Array:
  """Returns bools of the shape of `other` as an array, or raises an error."""
  mask = as_array(name, mask)
  check_shape(name, mask, other.shape, meaning)
  # Numbers are refused, because they could be weights instead of a mask.
  if mask.dtype != jnp.bool_:
    raise TypeError(
      f"`{name}` must be bool, got {mask.dtype.name}; compare it with 0."
    )
  return mask
