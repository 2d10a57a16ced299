"""What the functions of a loss are given."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxkv._src.cache import checks
from jaxkv_kernels._src import check


def log_probabilities(name: str, values: jax.Array) -> jax.Array:
  """Floats [Q, T], or of more axes, as float32.

  Raises:
    TypeError: they are no floats.
    ValueError: they have fewer axes.
  """
  values = jnp.asarray(values)
  if values.ndim < 2:
    raise ValueError(
      f"`{name}` must be [Q, T] or [N, G, R], a number for each token, got "
      f"{list(values.shape)}."
    )
  return _floats(name, values)


def like(name: str, values: jax.Array, other: jax.Array) -> jax.Array:
  """Floats of the shape of others, as float32.

  Raises:
    TypeError: they are no floats.
    ValueError: they have another shape.
  """
  values = jnp.asarray(values)
  checks.check_shape(name, values, other.shape, ", one for each token")
  return _floats(name, values)


def drawn(
  name: str,
  mask: jax.Array,
  other: jax.Array,
  meaning: str = ", one for each token",
) -> jax.Array:
  """A mask of the shape of other numbers.

  Raises:
    TypeError: it is not bool.
    ValueError: it has another shape.
  """
  mask = jnp.asarray(mask)
  checks.check_shape(name, mask, other.shape, meaning)
  if mask.dtype != jnp.bool_:
    raise TypeError(
      f"`{name}` must be bool, got {mask.dtype.name}; compare it with 0."
    )
  return mask


def real(name: str, values: Any) -> jax.Array:
  """Floats, integers or bools of any shape.

  Raises:
    TypeError: they are something else, such as complex numbers.
  """
  values = jnp.asarray(values)
  kinds = (jnp.floating, jnp.integer, jnp.bool_)
  if not any(jnp.issubdtype(values.dtype, kind) for kind in kinds):
    raise TypeError(
      f"`{name}` must be floats, integers or bools, got {values.dtype.name}."
    )
  return values


def is_number(value: Any) -> bool:
  """Whether a value is a real number, or a scalar array of one, also traced."""
  if isinstance(value, int | float) and not isinstance(value, bool):
    return True
  return is_whole(value) or _is_scalar(value, jnp.floating)


def is_whole(value: Any) -> bool:
  """Whether a value is an integer, or a scalar array of one, also traced."""
  if isinstance(value, int):
    return not isinstance(value, bool)
  return _is_scalar(value, jnp.integer)


def _is_scalar(value: Any, kind: Any) -> bool:
  array = isinstance(value, np.number | np.ndarray | jax.Array)
  return array and value.ndim == 0 and jnp.issubdtype(value.dtype, kind)


def is_known(value: Any) -> bool:
  """Whether a number can be looked at: it is not traced."""
  return not isinstance(value, Tracer)


def number(name: str, value: Any) -> jax.Array:
  """A number, also a traced one, as float32[].

  Raises:
    TypeError: it is none.
  """
  if not is_number(value):
    check.refuse(TypeError, name, "a number", value)
  return jnp.asarray(value, jnp.float32)


def _floats(name: str, values: jax.Array) -> jax.Array:
  if not jnp.issubdtype(values.dtype, jnp.floating):
    raise TypeError(f"`{name}` must be floats, got {values.dtype.name}.")
  return values.astype(jnp.float32)
