"""The dtypes in which a device stores the numbers of a pool."""

from typing import Any

import jax
import numpy as np

from jaxkv._src.arrays import arguments

# Maps each number format to the integer dtype in which a CPU stores its bits by
# default, or to None if it is stored as itself. On a CPU, XLA converts a whole
# buffer of bfloat16 or float8 to update one element, but not a buffer of
# integers. float8_e5m2 maps to None, because uint8 means float8_e4m3fn.
_BITS = {
  "float32": None,
  "bfloat16": "uint16",
  "float16": None,
  "float8_e4m3fn": "uint8",
  "float8_e5m2": None,
  "int8": None,
}


FORMATS = tuple(_BITS)
"""The names of the number formats of keys and values."""


def as_dtype(name: str, value: Any, formats: tuple[str, ...]) -> np.dtype:
  """Converts a dtype; raises ValueError unless it is one of `formats`."""
  # NumPy's error for an unknown dtype does not name the argument.
  try:
    dtype = np.dtype(value)
  except TypeError:
    dtype = None
  if dtype is None or dtype.name not in formats:
    shown = value if dtype is None else dtype
    arguments.refuse(ValueError, name, f"one of {', '.join(formats)}", shown)
  return dtype


def resolve(
  dtype: np.dtype, storage_dtype: jax.typing.DTypeLike | None = None
) -> np.dtype:
  """Returns `storage_dtype`, or the default storage dtype if it is None.

  Other dtypes than the format and the integers of its bits raise ValueError.
  """
  bits = _BITS[dtype.name]
  if storage_dtype is None:
    stores_bits = bits is not None and jax.default_backend() == "cpu"
    return np.dtype(bits if stores_bits else dtype)
  # Bits are accepted on every platform, but are the default only on a CPU.
  for name in (dtype.name, bits):
    if name is not None and storage_dtype == np.dtype(name):
      return np.dtype(name)
  expected = dtype.name if bits is None else f"{dtype.name}, or {bits} for bits"
  arguments.refuse(ValueError, "storage_dtype", expected, storage_dtype)
