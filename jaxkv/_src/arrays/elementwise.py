"""Elementwise functions of Python numbers, NumPy arrays and JAX arrays.

Compiled programs and the Python manager `jaxkv.host` both call the methods of
`cache.group_kinds`, which use these functions. For values on the host, the
functions use NumPy or plain Python, so the manager needs no device.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax import lax


def numpy_for(*values: Any) -> Any:
  """Returns `jax.numpy` if any value is a JAX array or traced, else `numpy`."""
  return jnp if any(isinstance(value, Array) for value in values) else np


def maximum(left: Any, right: Any) -> Any:
  """Returns the larger of two numbers, element by element."""
  if isinstance(left, int) and isinstance(right, int):
    return max(left, right)
  return numpy_for(left, right).maximum(left, right)


def minimum(left: Any, right: Any) -> Any:
  """Returns the smaller of two numbers, element by element."""
  if isinstance(left, int) and isinstance(right, int):
    return min(left, right)
  return numpy_for(left, right).minimum(left, right)


def where(condition: Any, yes: Any, no: Any) -> Any:
  """Returns `yes` where the condition holds, and `no` elsewhere."""
  if isinstance(condition, bool):
    return yes if condition else no
  return numpy_for(condition, yes, no).where(condition, yes, no)


def zeros_like(value: Any) -> Any:
  """Returns 0 in the shape and dtype of a number or an array."""
  return 0 if isinstance(value, int) else numpy_for(value).zeros_like(value)


def quotient(dividend: Any, divisor: int) -> Any:
  """Computes `number // divisor` for numbers that are not negative."""
  if divisor & (divisor - 1) == 0:
    return dividend >> (divisor.bit_length() - 1)
  if not isinstance(dividend, Array):
    return dividend // divisor
  # The `//` of JAX rounds down, so it would also compute signs and remainders.
  return lax.div(dividend, lax.full_like(dividend, divisor))


def remainder(dividend: Any, divisor: int) -> Any:
  """Computes `number % divisor` for numbers that are not negative."""
  if divisor & (divisor - 1) == 0:
    return dividend & (divisor - 1)
  if not isinstance(dividend, Array):
    return dividend % divisor
  return lax.rem(dividend, lax.full_like(dividend, divisor))
