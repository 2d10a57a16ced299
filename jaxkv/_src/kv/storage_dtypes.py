"""The dtypes in which a device stores the numbers of a pool."""

import jax
import numpy as np

import jaxkv_kernels as kernels
from jaxkv._src.arrays import arguments

# The number formats, each with the integer dtype in which a CPU stores its
# bits, or None. XLA for a CPU would convert a whole pool of bfloat16 or float8
# to update one number, but not a pool of integers.
_BITS = {
  "float32": None,
  "bfloat16": "uint16",
  "float16": None,
  "float8_e4m3fn": "uint8",
  "float8_e5m2": None,
  "int8": None,
}


def default_for(dtype: np.dtype) -> np.dtype:
  """Returns the default storage dtype of a number format."""
  bits = _BITS[dtype.name]
  stores_bits = bits is not None and jax.default_backend() == "cpu"
  return np.dtype(bits if stores_bits else dtype)


def resolve(
  dtype: np.dtype, storage_dtype: jax.typing.DTypeLike | None
) -> np.dtype:
  """Returns `storage_dtype`, or the default one in place of None.

  Raises:
    ValueError: `dtype` is not a number format, or `storage_dtype` does not
      store it.
  """
  if dtype.name not in _BITS:
    expected = f"one of {', '.join(_BITS)}"
    arguments.refuse(ValueError, "dtype", expected, dtype)
  if storage_dtype is None:
    return default_for(dtype)
  # The bits are accepted on every device, though only a CPU needs them.
  if kernels.logical_dtype(storage_dtype) != dtype:
    bits = _BITS[dtype.name]
    expected = (
      dtype.name if bits is None else f"{dtype.name} or {bits}, its bits"
    )
    arguments.refuse(
      ValueError, "storage_dtype", expected, np.dtype(storage_dtype)
    )
  return np.dtype(storage_dtype)
