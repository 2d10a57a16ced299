"""Checks of arguments, and casts to the library's dtypes.

A wrong type or dtype raises `TypeError`. A wrong shape or value raises
`ValueError`. Messages read "`name` must be X, got Y; do Z.". The checks run
before or during a trace, so compiled programs contain none of them.
"""

import operator
import os
import threading
from typing import Any
from typing import NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

_INT32 = np.iinfo(np.int32)
_WIDE = ("int64", "uint64", "uint32")

Shape = tuple[int | str, ...]
"""The expected shape of an array. A letter matches any size except 0."""


def refuse(
  error: type[Exception],
  name: str,
  requirement: str,
  value: Any,
  hint: str = "",
) -> NoReturn:
  """Raises `error` with the message "`name` must be X, got Y; do Z.".

  X is the `requirement`, and `describe` formats the `value` as Y. "do Z" is the
  `hint`, which is empty if the remedy is obvious.
  """
  tail = f"; {hint}." if hint else "."
  raise error(f"`{name}` must be {requirement}, got {describe(value)}{tail}")


def check_type(
  name: str, value: Any, classes: Any, requirement: str, hint: str = ""
) -> None:
  """Raises TypeError unless `value` is an instance of `classes`.

  The message is that of `refuse`, with the type of the value.
  """
  if not isinstance(value, classes):
    tail = f"; {hint}." if hint else "."
    type_name = type(value).__name__
    raise TypeError(f"`{name}` must be {requirement}, got {type_name}{tail}")


def check_not_donated(name: str, array: Any) -> None:
  """Raises ValueError if an array of the argument `name` was donated."""
  if isinstance(array, Tracer) or not isinstance(array, Array):
    return
  if array.is_deleted():
    raise ValueError(
      f"`{name}` must be the newest, got one whose arrays were donated to an "
      "earlier call; use what that call returned, or make a copy before you "
      f"donate: jax.tree.map(jnp.copy, {name})."
    )


def describe(value: Any) -> str:
  """Formats arrays as `dtype[shape]`, dtypes by name, and others by `repr`."""
  if isinstance(value, np.dtype):
    return value.name
  if isinstance(value, jax.Array | np.ndarray):
    return f"{value.dtype}{list(value.shape)}"
  return repr(value)


def as_int(name: str, value: Any) -> int:
  """Converts a static Python or NumPy integer; raises TypeError for others."""
  # A bool is an int in Python, but `num_pages=True` is always a mistake.
  if isinstance(value, bool) or not isinstance(value, int | np.integer):
    raise TypeError(f"`{name}` must be an int, got {_static(value)}.")
  return operator.index(value)


def as_count(name: str, value: Any, minimum: int) -> int:
  """Converts a static integer; raises unless it is `minimum` .. 2**31 - 1."""
  count = as_int(name, value)
  if not minimum <= count <= _INT32.max:
    raise ValueError(
      f"`{name}` must be at least {minimum} and below 2**31, got {value}."
    )
  return count


def check_bool(name: str, value: Any) -> None:
  """Raises TypeError unless a static argument is a bool."""
  if not isinstance(value, bool):
    raise TypeError(f"`{name}` must be True or False, got {_static(value)}.")


def _static(value: Any) -> str:
  """Describes a static value for a message."""
  if isinstance(value, Array):
    return "a jax.Array; it is static, so give a Python value"
  return f"{value!r} of type {type(value).__name__}"


def as_seconds(name: str, value: Any) -> float:
  """Returns a time as a float, which a thread can wait for."""
  if not is_number(value):
    refuse(TypeError, name, "a number of seconds", value)
  if not 0 <= value <= threading.TIMEOUT_MAX:
    requirement = f"at least 0 and at most {threading.TIMEOUT_MAX:g}"
    refuse(ValueError, name, f"a number of seconds, {requirement}", value)
  return float(value)


def is_number(value: Any) -> bool:
  """Returns True for a real number or a scalar array of real dtype."""
  if isinstance(value, int | float) and not isinstance(value, bool):
    return True
  return is_integer(value) or _is_scalar(value, jnp.floating)


def is_integer(value: Any) -> bool:
  """Returns True for an integer or a scalar array of integer dtype."""
  if isinstance(value, int):
    return not isinstance(value, bool)
  return _is_scalar(value, jnp.integer)


def _is_scalar(value: Any, family: Any) -> bool:
  is_array = isinstance(value, np.number | np.ndarray | jax.Array)
  return is_array and value.ndim == 0 and jnp.issubdtype(value.dtype, family)


def is_concrete(value: Any) -> bool:
  """Returns True if a value is not traced, so the host can read it."""
  return not isinstance(value, Tracer)


def as_number(name: str, value: Any) -> Array:
  """Converts a number, traced or not, to float32[]; else raises TypeError."""
  if not is_number(value):
    refuse(TypeError, name, "a number", value)
  return jnp.asarray(value, jnp.float32)


def check_integer(name: str, value: Any) -> None:
  """Raises TypeError or ValueError unless `value` is an integer scalar.

  A value that is not traced must also fit int32.
  """
  requirement = "an integer scalar"
  if isinstance(value, jax.Array | np.ndarray | np.generic) and value.ndim:
    refuse(ValueError, name, requirement, value)
  if not is_integer(value):
    refuse(TypeError, name, requirement, value)
  if is_concrete(value) and not _INT32.min <= int(value) <= _INT32.max:
    refuse(ValueError, name, f"{requirement} that fits int32", value)


def as_int32(
  name: str, value: Any, shape: Shape | None = None, meaning: str = ""
) -> Any:
  """Converts integers to int32; values on the host become a NumPy array.

  `shape` and `meaning` are those of `check_shape`; None allows any shape.
  Raises TypeError for other elements, such as bools, and for traced ones with a
  dtype whose values may not fit int32, and ValueError for numbers that do not
  fit.
  """
  array = _as_int32(name, value)
  if shape is not None:
    check_shape(name, array, shape, meaning)
  return array


def _as_int32(name: str, value: Any) -> Any:
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
    return _as_int32(name, array)
  # NumPy makes an empty list a float64 array, so its dtype is not checked.
  if array.size == 0 and not hasattr(value, "dtype"):
    return array.astype(np.int32)
  _check_kind(name, array.dtype, "iu", "integers")
  if array.size and (array.min() < _INT32.min or array.max() > _INT32.max):
    raise ValueError(
      f"`{name}` must fit int32, got values from {array.min()} to "
      f"{array.max()}."
    )
  return array.astype(np.int32)


def as_real_numbers(name: str, value: Any) -> Any:
  """Converts floats or integers to an array, without a change of dtype."""
  array = value if isinstance(value, jax.Array) else _on_host(name, value)
  families = (jnp.floating, jnp.integer)
  if not any(jnp.issubdtype(array.dtype, family) for family in families):
    raise TypeError(f"`{name}` must hold real numbers, got {array.dtype}.")
  return array


def as_bool(name: str, value: Any) -> Any:
  """Converts a mask to an array; raises TypeError unless it holds bools."""
  array = value if isinstance(value, jax.Array) else _on_host(name, value)
  _check_kind(name, array.dtype, "b", "True and False")
  return array


def as_key(
  name: str, value: Any, remedy: str = "make it with jaxkv.salt"
) -> Any:
  """Converts salts or a secret to an array; raises TypeError if not uint32."""
  array = value if isinstance(value, jax.Array) else _on_host(name, value)
  if array.dtype != np.uint32:
    raise TypeError(f"`{name}` must be uint32, got {array.dtype}; {remedy}.")
  return array


def as_secret(name: str, value: Any) -> Array:
  """Converts a secret, uint32[4] or a `jax.random.key`, to uint32[4].

  None draws 128 bits from the system; under `jit` and with several processes,
  it raises ValueError.
  """
  if value is None:
    # During a trace, even a new constant is a tracer.
    tracing = isinstance(jnp.zeros((), bool), Tracer)
    if tracing or jax.process_count() > 1:
      raise ValueError(
        f"`{name}` must be given under jit, because one draw would serve all "
        "calls, and with several processes, because they must share a secret; "
        "pass a jax.random.key."
      )
    return jnp.asarray(np.frombuffer(os.urandom(16), np.uint32))
  dtype = getattr(value, "dtype", None)
  if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
    check_shape(name, value, ())
    return jax.random.bits(value, (4,), np.uint32)
  words = as_key(name, value, "pass a jax.random.key")
  check_shape(name, words, (4,))
  return jnp.asarray(words)


def _on_host(name: str, value: Any) -> Any:
  """Returns a NumPy array, or a JAX array for a list that holds tracers."""
  try:
    return np.asarray(value)
  except jax.errors.TracerArrayConversionError:
    return jnp.asarray(value)
  except ValueError as error:
    raise ValueError(f"`{name}` must be a rectangular array: {error}") from None


def _check_kind(name: str, dtype: Any, kinds: str, content: str) -> None:
  if np.dtype(dtype).kind not in kinds:
    raise TypeError(f"`{name}` must hold {content}, got {dtype}.")


def as_array(name: str, values: Any) -> Array:
  """Converts numbers to a JAX array; raises TypeError for other values."""
  if isinstance(values, jax.Array):
    return values
  # JAX would refuse objects, strings and times without the argument's name.
  if np.dtype(_on_host(name, values).dtype).kind in "OSUMm":
    refuse(TypeError, name, "an array of numbers", values)
  return jnp.asarray(values)


def as_floats(name: str, values: Any) -> Array:
  """Converts floats of any width to float32; raises TypeError for others."""
  values = as_array(name, values)
  if not jnp.issubdtype(values.dtype, jnp.floating):
    raise TypeError(f"`{name}` must be floats, got {values.dtype.name}.")
  return values.astype(jnp.float32)


def as_real(name: str, values: Any) -> Array:
  """Converts floats, integers or bools to an array; else raises TypeError."""
  values = as_array(name, values)
  families = (jnp.floating, jnp.integer, jnp.bool_)
  if not any(jnp.issubdtype(values.dtype, family) for family in families):
    raise TypeError(
      f"`{name}` must be floats, integers or bools, got {values.dtype.name}."
    )
  return values


def check_array(name: str, value: Any) -> None:
  """Raises TypeError unless `value` is a JAX or NumPy array."""
  arrays = jax.Array | np.ndarray
  check_type(name, value, arrays, "an array", "wrap it in jnp.asarray")


def check_integers(name: str, values: Any) -> None:
  """Raises TypeError unless `values` is an array of integers of any width."""
  check_array(name, values)
  if not jnp.issubdtype(values.dtype, jnp.integer):
    refuse(TypeError, name, "integers", values)


def check_int32(name: str, values: Any, shape: Shape) -> None:
  """Raises unless `values` is an int32 array of the expected shape."""
  check_array(name, values)
  if values.dtype != jnp.int32:
    hint = f"cast it with {name}.astype(jnp.int32)"
    refuse(TypeError, name, "int32", values.dtype, hint)
  if not _fits(values, shape):
    refuse(ValueError, name, f"int32[{', '.join(map(str, shape))}]", values)


def check_shape(
  name: str, value: Array, shape: Shape, meaning: str = ""
) -> None:
  """Raises ValueError unless an argument has the expected shape.

  In the message, `meaning` follows the shape, such as ", one for each slot".
  """
  if not _fits(value, shape):
    letters = ", ".join(map(str, shape))
    actual = ", ".join(map(str, value.shape))
    raise ValueError(
      f"`{name}` must have the shape [{letters}]{meaning}, got [{actual}]."
    )


def _fits(value: Array, shape: Shape) -> bool:
  return len(value.shape) == len(shape) and all(
    length > 0
    if isinstance(expected_length, str)
    else length == expected_length
    for length, expected_length in zip(value.shape, shape, strict=True)
  )


def shapes_of(tree: Any) -> dict[str, tuple[int, ...]]:
  """Returns the shape of each array of a pytree, keyed by its path."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {jax.tree_util.keystr(path): leaf.shape for path, leaf in leaves}


def check_sizes(
  name: str, value: Any, expected: dict[str, tuple[int, ...]]
) -> None:
  """Raises ValueError unless the arrays of a state have the expected shapes.

  `expected` is the result of `shapes_of` for a new state with the same config.
  """
  actual = shapes_of(value)
  # A path that only one of the two states has is also an error.
  for path in expected | actual:
    expected_shape = expected.get(path, "no array")
    actual_shape = actual.get(path, "no array")
    if expected_shape != actual_shape:
      raise ValueError(
        f"`{name}{path}` must have the shape that `{name}.config` asks for, "
        f"{expected_shape}, got {actual_shape}; make a state of that config "
        "with jaxkv.init."
      )


def check_rows(arguments: dict[str, Any], lead: str, num_slots: int) -> None:
  """Raises ValueError unless the shapes of a verb's arguments agree.

  The argument `lead` defines the rows. For "pages", each page is a row. For
  "slots" with the value None, the rows are all B = `num_slots` slots.
  """
  lead_value = arguments.get(lead)
  meaning = f", one for each row of `{lead}`"
  if lead == "slots":
    meaning = ", one for each slot"
  rows: tuple[int, ...] = (num_slots,)
  if lead_value is not None and lead == "pages":
    rows = lead_value.shape
  elif lead_value is not None:
    check_shape(lead, lead_value, ("R", *_TRAILING_AXES.get(lead, ())))
    rows = lead_value.shape[:1]
  for name, value in arguments.items():
    if value is not None and name != lead:
      check_shape(name, value, (*rows, *_TRAILING_AXES.get(name, ())), meaning)


_TRAILING_AXES: dict[str, Shape] = {
  "tokens": ("T",),
  "salts": (4,),
  "shared_tokens": (2,),
}
"""The axes after the first, of arguments that have more than one axis."""
