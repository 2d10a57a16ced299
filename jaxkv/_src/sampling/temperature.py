"""Temperatures: what logits are divided by before a softmax."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from jaxkv._src.arrays.arguments import as_real_numbers
from jaxkv._src.arrays.arguments import check_shape

LEAST = float(np.finfo(np.float32).tiny)
"""Dividing by less overflows."""
HIGHEST = 2.0**126
"""The reciprocal of more is not normal: XLA may multiply -inf by 0 then."""
RANGE = f"0, or a finite float32 of {LEAST:.2g} .. {HIGHEST:.2g}"


def as_temperature(temperature: Any) -> Array:
  """The temperature, float32[].

  A traced one is not checked for its value.

  Raises:
    TypeError: it is not a real number.
    ValueError: it is not a scalar, or is negative, NaN, too large, or so small
      that dividing by it overflows.
  """
  name = "temperature"
  value = as_real_numbers(name, temperature)
  check_shape(name, value, ())
  known = not isinstance(value, Tracer)
  if known and float(value) != 0 and not LEAST <= float(value) <= HIGHEST:
    raise ValueError(
      f"`{name}` must be {RANGE}, got {float(value)}; use 0 for greedy "
      "decoding."
    )
  return jnp.asarray(value, jnp.float32)


def divisor(temperature: Array) -> Array:
  """What logits are divided by for log-probs: 1 for 0, which is greedy.

  NaN for a number that `as_temperature` would have refused, were it known.

  Args:
    temperature: float32[...].

  Returns:
    float32[...].
  """
  fits = (temperature >= LEAST) & (temperature <= HIGHEST)
  one, none = jnp.ones_like(temperature), jnp.full_like(temperature, jnp.nan)
  return jnp.where(temperature == 0, one, jnp.where(fits, temperature, none))
