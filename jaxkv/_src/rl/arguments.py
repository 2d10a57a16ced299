"""What the functions of a loss are given."""

import jax
import jax.numpy as jnp

from jaxkv._src.cache import checks


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


def _floats(name: str, values: jax.Array) -> jax.Array:
  if not jnp.issubdtype(values.dtype, jnp.floating):
    raise TypeError(f"`{name}` must be floats, got {values.dtype.name}.")
  return values.astype(jnp.float32)
