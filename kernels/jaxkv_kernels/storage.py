"""What the bits of a page pool mean.

XLA on a CPU rewrites a whole bfloat16 array to update one element of it, so
bfloat16 pools travel there as the same bits in uint16. Only what is read or
written is ever reinterpreted, never the pool.

| pool dtype | elements mean |
|---|---|
| float32, float16, bfloat16 | themselves |
| uint16 | bfloat16 bits |
| uint8 | reserved for 8-bit floats; not supported yet |
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_MEANING = {
  np.dtype(np.float32): np.dtype(np.float32),
  np.dtype(np.float16): np.dtype(np.float16),
  np.dtype(jnp.bfloat16): np.dtype(jnp.bfloat16),
  np.dtype(np.uint16): np.dtype(jnp.bfloat16),
}


def logical_dtype(pool_dtype) -> np.dtype:
  """The number format that a pool of this dtype holds.

  Args:
    pool_dtype: dtype of a page pool.

  Returns:
    The dtype its elements have once loaded.

  Raises:
    ValueError: the dtype is not one a pool may have.

  Examples:
    >>> logical_dtype("uint16")
    dtype(bfloat16)
  """
  dtype = np.dtype(pool_dtype)
  if dtype in _MEANING:
    return _MEANING[dtype]
  hint = ""
  if dtype == np.dtype(np.uint8):
    hint = "; uint8 is reserved for 8-bit floats, which are not supported yet"
  raise ValueError(
    f"pool dtype {dtype} is not supported: use float32, float16, bfloat16, or"
    f" uint16 for bfloat16 bits{hint}"
  )


def load(stored: jax.Array) -> jax.Array:
  """Elements of a pool as the numbers they are; same shape.

  Call it on what was gathered from a pool, not on the pool: on a CPU the
  conversion of a pool costs a pass over all of it.
  """
  if stored.dtype == jnp.uint16:
    return lax.bitcast_convert_type(stored, jnp.bfloat16)
  return stored


def store(values: jax.Array, pool_dtype) -> jax.Array:
  """Numbers as elements of a pool of this dtype, rounded to its format."""
  rounded = values.astype(logical_dtype(pool_dtype))
  if np.dtype(pool_dtype) == np.dtype(np.uint16):
    return lax.bitcast_convert_type(rounded, jnp.uint16)
  return rounded
