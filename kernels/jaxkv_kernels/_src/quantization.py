"""Quantization to the number formats of page pools.

XLA for a CPU rewrites a whole bfloat16 or 8-bit float array to update one
element. On a CPU, pools should therefore store the same bits in an integer
dtype. Functions then reinterpret only the elements that they read or write.

| pool dtype | elements |
|---|---|
| float32, float16, bfloat16 | numbers |
| uint16 | bfloat16 bits |
| float8_e4m3fn, float8_e5m2 | numbers, times a scale if there is one |
| uint8 | float8_e4m3fn bits |
| int8 | integers from -127 to 127, times a scale |

float8_e5m2 has no integer form, so on a CPU each write rewrites the whole pool.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxkv_kernels._src import check

_E4M3 = np.dtype(jnp.float8_e4m3fn)
_E5M2 = np.dtype(jnp.float8_e5m2)
_LOGICAL_DTYPE = {
  np.dtype(np.float32): np.dtype(np.float32),
  np.dtype(np.float16): np.dtype(np.float16),
  np.dtype(jnp.bfloat16): np.dtype(jnp.bfloat16),
  np.dtype(np.uint16): np.dtype(jnp.bfloat16),
  _E4M3: _E4M3,
  np.dtype(np.uint8): _E4M3,
  _E5M2: _E5M2,
  np.dtype(np.int8): np.dtype(np.int8),
}
# The largest numbers of the 8-bit formats, to which `store` clips. Conversion
# of a larger number to a float8 would give NaN or infinity.
_LARGEST = {np.dtype(np.int8): 127.0, _E4M3: 448.0, _E5M2: 57344.0}


def logical_dtype(pool_dtype) -> np.dtype:
  """Returns the number format of a pool's elements.

  Args:
    pool_dtype: float32, float16, bfloat16, float8_e4m3fn, float8_e5m2, int8,
      uint16 (bits of bfloat16) or uint8 (bits of float8_e4m3fn).

  Returns:
    The dtype of the numbers that `load` returns.

  Raises:
    TypeError: a pool cannot have this dtype.

  Examples:
    >>> logical_dtype("uint16")
    dtype(bfloat16)
  """
  return _LOGICAL_DTYPE[check.pool_dtype("pool_dtype", pool_dtype)]


def load(stored: jax.Array) -> jax.Array:
  """Converts elements of a pool to numbers, without applying scales.

  Call it on elements gathered from a pool. On a CPU, a conversion of the whole
  pool would copy it.
  """
  check.is_array("stored", stored)
  dtype = _LOGICAL_DTYPE[check.pool_dtype("stored", stored.dtype)]
  if stored.dtype == dtype:
    return jnp.asarray(stored)
  return lax.bitcast_convert_type(stored, dtype)


def store(values: jax.Array, pool_dtype) -> jax.Array:
  """Rounds numbers to a pool's format, and returns them in the pool's dtype.

  Numbers outside the range of an 8-bit format are clipped to it.
  """
  check.real("values", values)
  dtype = logical_dtype(pool_dtype)
  values = jnp.asarray(values)
  if dtype in _LARGEST:
    values = values.astype(jnp.float32)
    largest = jnp.float32(_LARGEST[dtype])
    values = jnp.clip(values, -largest, largest)
    if dtype == np.dtype(np.int8):
      values = jnp.round(values)
  elements = values.astype(dtype)
  if np.dtype(pool_dtype) == dtype:
    return elements
  return lax.bitcast_convert_type(elements, np.dtype(pool_dtype))


def quantize(values: jax.Array, pool_dtype) -> tuple[jax.Array, jax.Array]:
  """Quantizes vectors to 8 bits, with one scale per vector.

  Vectors lie along the last axis. A vector's scale maps its element of largest
  magnitude to the largest number of the format. The result times the scale
  approximates the vector. The scale is 1 for a vector of zeros, and NaN for a
  vector with a NaN or an infinity. If all magnitudes are below about 1e-36, the
  result loses precision.

  Args:
    values: float[..., D].
    pool_dtype: int8, float8_e4m3fn, float8_e5m2 or uint8.

  Returns:
    ([..., D] in `pool_dtype`, the elements; float32[...], the scales).

  Raises:
    TypeError: `values` are not numbers, or `pool_dtype` is not an 8-bit format.
    ValueError: `values` is a scalar or D is 0.

  Examples:
    >>> import jax.numpy as jnp
    >>> stored, scale = quantize(jnp.asarray([2.0, -4.0, 1.0]), "int8")
    >>> stored.tolist(), round(float(scale) * 127, 4)
    ([64, -127, 32], 4.0)
  """
  check.real("values", values)
  if values.shape[-1:] in ((), (0,)):
    check.refuse(ValueError, "values", "[..., D] with D >= 1", values)
  dtype = logical_dtype(pool_dtype)
  if dtype not in _LARGEST:
    expected = "int8, float8_e4m3fn, float8_e5m2 or uint8 to have scales"
    check.refuse(TypeError, "pool_dtype", expected, np.dtype(pool_dtype))
  values = jnp.asarray(values, jnp.float32)
  largest = jnp.max(jnp.abs(values), axis=-1)
  # A subnormal scale would be flushed to 0, and vectors would be divided by 0.
  min_normal = jnp.finfo(jnp.float32).tiny
  scale = jnp.maximum(largest / _LARGEST[dtype], min_normal)
  scale = jnp.where(largest > 0, scale, jnp.float32(1))
  scale = jnp.where(jnp.isfinite(largest), scale, jnp.float32(jnp.nan))
  return store(values / scale[..., None], pool_dtype), scale
