"""Arguments of the verbs: cast to the library's dtypes, or refused by name."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

_INT32 = np.iinfo(np.int32)
_WIDE = ("int64", "uint64", "uint32")


def as_int32(name: str, value: Any) -> Any:
  """Whole numbers as int32, on the host where they are there.

  Raises:
    TypeError: the value holds no integers, such as floats or bools.
    ValueError: a number does not fit int32.
  """
  if isinstance(value, jax.Array):
    if value.dtype == jnp.int32:
      return value
    _check_kind(name, value.dtype, "iu", "integers")
    if value.dtype.name not in _WIDE:
      return value.astype(jnp.int32)
    if isinstance(value, Tracer):
      raise TypeError(
        f"`{name}` must be int32 in a traced function, got {value.dtype}, "
        f"which may not fit; cast it with {name}.astype(jnp.int32)."
      )
  array = _on_host(name, value)
  if isinstance(array, jax.Array):
    return as_int32(name, array)
  if array.size == 0 and not hasattr(value, "dtype"):
    return array.astype(np.int32)
  _check_kind(name, array.dtype, "iu", "integers")
  if array.size and (array.min() < _INT32.min or array.max() > _INT32.max):
    raise ValueError(
      f"`{name}` must fit int32, got values from {array.min()} to "
      f"{array.max()}."
    )
  return array.astype(np.int32)


def as_bool(name: str, value: Any) -> Any:
  """A mask.

  Raises:
    TypeError: the value holds no bools.
  """
  array = value if isinstance(value, jax.Array) else _on_host(name, value)
  _check_kind(name, array.dtype, "b", "True and False")
  return array


def as_key(name: str, value: Any) -> Any:
  """Salts, uint32.

  Raises:
    TypeError: the value is no uint32 array.
  """
  array = value if isinstance(value, jax.Array) else _on_host(name, value)
  if array.dtype != np.uint32:
    raise TypeError(
      f"`{name}` must be uint32, got {array.dtype}; make it with jaxkv.salt."
    )
  return array


def _on_host(name: str, value: Any) -> Any:
  """A numpy array; a jax array for a list of traced values."""
  try:
    return np.asarray(value)
  except jax.errors.TracerArrayConversionError:
    return jnp.asarray(value)
  except ValueError as error:
    raise ValueError(f"`{name}` must be a rectangular array: {error}") from None


def _check_kind(name: str, dtype: Any, kinds: str, wanted: str) -> None:
  if np.dtype(dtype).kind not in kinds:
    raise TypeError(f"`{name}` must hold {wanted}, got {dtype}.")


def check_shape(
  name: str, value: Array, shape: tuple[int | str, ...], meaning: str = ""
) -> None:
  """Raises ValueError unless an argument has the shape given.

  Args:
    name: the argument's name, for the message.
    value: the argument.
    shape: its sizes; a letter stands for any size but 0.
    meaning: what the rows are, for the message.
  """
  fits = len(value.shape) == len(shape) and all(
    found > 0 if isinstance(wanted, str) else found == wanted
    for found, wanted in zip(value.shape, shape, strict=True)
  )
  if not fits:
    letters = ", ".join(map(str, shape))
    found = ", ".join(map(str, value.shape))
    raise ValueError(
      f"`{name}` must have the shape [{letters}]{meaning}, got [{found}]."
    )


def check_sequences(tokens: Array, lengths: Array, salts: Array | None) -> None:
  """Checks the arguments that give R token sequences."""
  check_shape("tokens", tokens, ("R", "T"))
  check_shape("lengths", lengths, (tokens.shape[0],), ", one for each row")
  if salts is not None:
    check_shape("salts", salts, (tokens.shape[0], 4), ", one for each row")
