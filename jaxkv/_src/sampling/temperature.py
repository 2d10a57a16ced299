"""Sampling temperatures: their valid range, and the divisor of logits."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from jaxkv._src.arrays.arguments import as_real_numbers
from jaxkv._src.arrays.arguments import check_shape

LEAST = float(np.finfo(np.float32).tiny)
"""The lowest temperature above 0. Some devices flush lower ones to 0."""
HIGHEST = 2.0**126
"""The highest temperature. XLA may multiply by the reciprocal in place of a
division. The reciprocal of a higher temperature is subnormal, and some devices
flush it to 0. A logit of -inf would then become -inf * 0, which is NaN."""
RANGE = f"0, or a finite float32 of {LEAST:.2g} .. {HIGHEST:.2g}"


def as_temperature(temperature: Any) -> Array:
  """Converts a temperature to float32[]; a traced value is not checked."""
  name = "temperature"
  value = as_real_numbers(name, temperature)
  check_shape(name, value, ())
  is_concrete = not isinstance(value, Tracer)
  if is_concrete and float(value) != 0 and not LEAST <= float(value) <= HIGHEST:
    raise ValueError(
      f"`{name}` must be {RANGE}, got {float(value)}; use 0 for greedy "
      "decoding."
    )
  return jnp.asarray(value, jnp.float32)


def divisor(temperature: Array) -> Array:
  """Returns the divisor of logits, which is 1 for temperature 0.

  Returns NaN for traced temperatures out of range, which `as_temperature`
  cannot check.
  """
  fits = (temperature >= LEAST) & (temperature <= HIGHEST)
  valid = jnp.where(fits, temperature, jnp.full_like(temperature, jnp.nan))
  return jnp.where(temperature == 0, jnp.ones_like(temperature), valid)
