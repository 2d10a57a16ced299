"""Checks of arguments: cast to the library's dtypes, or refused by name.

A wrong type or dtype is a `TypeError`, a wrong shape or value a `ValueError`.
Messages read "`name` must be X, got Y; do Z.". Arrays are checked when they are
traced, so a check costs nothing at run time.
"""

import operator
import os
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
"""Sizes; a letter stands for any size but 0."""


def refuse(
  error: type[Exception], name: str, wanted: str, got: Any, hint: str = ""
) -> NoReturn:
  """Raises `error` with a message in the form above.

  Args:
    error: `TypeError` or `ValueError`.
    name: of the argument.
    wanted: what it must be.
    got: the value; an array is described by its dtype and shape.
    hint: what to do, if that is not obvious.
  """
  tail = f"; {hint}." if hint else "."
  raise error(f"`{name}` must be {wanted}, got {describe(got)}{tail}")


def describe(value: Any) -> str:
  """A value for a message: arrays as `dtype[shape]`, others by `repr`."""
  if isinstance(value, np.dtype):
    return value.name
  if isinstance(value, jax.Array | np.ndarray):
    return f"{value.dtype}{list(value.shape)}"
  return repr(value)


def as_int(name: str, value: Any) -> int:
  """Converts a static number, of Python or of NumPy.

  Raises:
    TypeError: it is not an int.
  """
  if isinstance(value, bool) or not isinstance(value, int | np.integer):
    raise TypeError(f"`{name}` must be an int, got {_static(value)}.")
  return operator.index(value)


def as_count(name: str, value: Any, minimum: int) -> int:
  """Converts a static int32 of at least `minimum`.

  Raises:
    TypeError: it is not an int.
    ValueError: it is out of range.
  """
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
  """A static value for a message."""
  if isinstance(value, Array):
    return "a jax.Array; it is static, so give a value of Python"
  return f"{value!r} of type {type(value).__name__}"


def is_number(value: Any) -> bool:
  """Returns whether a value is a real number, or a scalar array of one."""
  if isinstance(value, int | float) and not isinstance(value, bool):
    return True
  return is_integer(value) or _is_scalar(value, jnp.floating)


def is_integer(value: Any) -> bool:
  """Returns whether a value is an integer, or a scalar array of one."""
  if isinstance(value, int):
    return not isinstance(value, bool)
  return _is_scalar(value, jnp.integer)


def _is_scalar(value: Any, kind: Any) -> bool:
  is_array = isinstance(value, np.number | np.ndarray | jax.Array)
  return is_array and value.ndim == 0 and jnp.issubdtype(value.dtype, kind)


def is_concrete(value: Any) -> bool:
  """Returns whether a number can be read: it is not traced."""
  return not isinstance(value, Tracer)


def as_number(name: str, value: Any) -> Array:
  """Converts a number, also a traced one, to float32[].

  Raises:
    TypeError: it is not a number.
  """
  if not is_number(value):
    refuse(TypeError, name, "a number", value)
  return jnp.asarray(value, jnp.float32)


def check_integer(name: str, value: Any) -> None:
  """Raises unless it is an integer scalar; one of Python must fit int32."""
  wanted = "an integer scalar"
  if isinstance(value, jax.Array | np.ndarray | np.generic) and value.ndim:
    refuse(ValueError, name, wanted, value)
  if not is_integer(value):
    refuse(TypeError, name, wanted, value)
  if is_concrete(value) and not _INT32.min <= int(value) <= _INT32.max:
    refuse(ValueError, name, f"{wanted} that fits int32", value)


def as_int32(name: str, value: Any) -> Any:
  """Whole numbers as int32; a value on the host stays there.

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


def as_real_numbers(name: str, value: Any) -> Any:
  """Floats or integers; a value on the host stays there, in its own dtype.

  Raises:
    TypeError: the value holds something else, such as bools.
  """
  array = value if isinstance(value, jax.Array) else _on_host(name, value)
  kinds = (jnp.floating, jnp.integer)
  if not any(jnp.issubdtype(array.dtype, kind) for kind in kinds):
    raise TypeError(f"`{name}` must hold real numbers, got {array.dtype}.")
  return array


def as_bool(name: str, value: Any) -> Any:
  """A mask.

  Raises:
    TypeError: the value holds no bools.
  """
  array = value if isinstance(value, jax.Array) else _on_host(name, value)
  _check_kind(name, array.dtype, "b", "True and False")
  return array


def as_key(
  name: str, value: Any, remedy: str = "make it with jaxkv.salt"
) -> Any:
  """Salts, uint32.

  Raises:
    TypeError: the value is no uint32 array.
  """
  array = value if isinstance(value, jax.Array) else _on_host(name, value)
  if array.dtype != np.uint32:
    raise TypeError(f"`{name}` must be uint32, got {array.dtype}; {remedy}.")
  return array


def as_secret(name: str, value: Any) -> Array:
  """The value as uint32[4]; for None, as many bits of the system's randomness.

  Raises:
    TypeError: it is neither uint32 nor a `jax.random.key`.
    ValueError: it has another shape, or is None while tracing or in one of
      several processes.
  """
  if value is None:
    tracing = isinstance(jnp.zeros((), bool), Tracer)
    if tracing or jax.process_count() > 1:
      raise ValueError(
        f"`{name}` must be given under jit, where one draw would serve every "
        "call, and with several processes, which must agree; pass a "
        "jax.random.key."
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


def as_floats(name: str, values: Any) -> Array:
  """Converts floats of any width and shape to float32.

  Raises:
    TypeError: they are not floats.
  """
  values = jnp.asarray(values)
  if not jnp.issubdtype(values.dtype, jnp.floating):
    raise TypeError(f"`{name}` must be floats, got {values.dtype.name}.")
  return values.astype(jnp.float32)


def as_real(name: str, values: Any) -> Array:
  """Converts floats, integers or bools of any shape to an array.

  Raises:
    TypeError: they are something else, such as complex numbers.
  """
  values = jnp.asarray(values)
  kinds = (jnp.floating, jnp.integer, jnp.bool_)
  if not any(jnp.issubdtype(values.dtype, kind) for kind in kinds):
    raise TypeError(
      f"`{name}` must be floats, integers or bools, got {values.dtype.name}."
    )
  return values


def check_array(name: str, value: Any) -> None:
  """Raises TypeError unless it is an array of JAX or NumPy."""
  if not isinstance(value, jax.Array | np.ndarray):
    raise TypeError(
      f"`{name}` must be an array, got {type(value).__name__}; wrap it in "
      "jnp.asarray."
    )


def check_integers(name: str, values: Any) -> None:
  """Raises TypeError unless it is an array of integers of any width."""
  check_array(name, values)
  if not jnp.issubdtype(values.dtype, jnp.integer):
    refuse(TypeError, name, "integers", values)


def check_int32(name: str, values: Any, shape: Shape) -> None:
  """Raises unless it is an int32 array of a shape; see `check_shape`."""
  check_array(name, values)
  if values.dtype != jnp.int32:
    hint = f"cast it with {name}.astype(jnp.int32)"
    refuse(TypeError, name, "int32", values.dtype, hint)
  if not _fits(values, shape):
    refuse(ValueError, name, f"int32[{', '.join(map(str, shape))}]", values)


def check_shape(
  name: str, value: Array, shape: Shape, meaning: str = ""
) -> None:
  """Raises ValueError unless an argument has the shape given.

  Args:
    name: the argument's name, for the message.
    value: the argument.
    shape: its sizes; a letter stands for any size but 0.
    meaning: what the rows are, for the message.
  """
  if not _fits(value, shape):
    letters = ", ".join(map(str, shape))
    found = ", ".join(map(str, value.shape))
    raise ValueError(
      f"`{name}` must have the shape [{letters}]{meaning}, got [{found}]."
    )


def _fits(value: Array, shape: Shape) -> bool:
  return len(value.shape) == len(shape) and all(
    found > 0 if isinstance(wanted, str) else found == wanted
    for found, wanted in zip(value.shape, shape, strict=True)
  )


def shapes_of(tree: Any) -> dict[str, tuple[int, ...]]:
  """Returns the shape of each array of a pytree, by its path."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {jax.tree_util.keystr(path): leaf.shape for path, leaf in leaves}


def check_sizes(
  name: str, value: Any, expected: dict[str, tuple[int, ...]]
) -> None:
  """Raises ValueError unless the arrays of a state have the sizes expected.

  Args:
    name: the argument's name; it has a `config`.
    value: the state.
    expected: what `shapes_of` gives for a state of its config.
  """
  found = shapes_of(value)
  for path in expected | found:
    wanted, got = expected.get(path, "no array"), found.get(path, "no array")
    if wanted != got:
      raise ValueError(
        f"`{name}{path}` must have the shape that `{name}.config` asks for, "
        f"{wanted}, got {got}; make a state of that config with jaxkv.init."
      )


def check_rows(arguments: dict[str, Any], lead: str, num_slots: int) -> None:
  """Raises ValueError unless the arguments of a verb have the same rows.

  Args:
    arguments: by name; None where not given.
    lead: the argument whose rows count. Without `slots` they are all slots;
      `pages` may have any shape.
    num_slots: B.
  """
  first, meaning = arguments.get(lead), f", one for each row of `{lead}`"
  if lead == "slots":
    meaning = ", one for each slot"
  rows: tuple[int, ...] = (num_slots,)
  if first is not None and lead == "pages":
    rows = first.shape
  elif first is not None:
    check_shape(lead, first, ("R", *_BEHIND_ROWS.get(lead, ())))
    rows = first.shape[:1]
  for name, value in arguments.items():
    if value is not None and name != lead:
      behind = _BEHIND_ROWS.get(name, ())
      check_shape(name, value, (*rows, *behind), meaning)


_BEHIND_ROWS: dict[str, Shape] = {
  "tokens": ("T",),
  "salts": (4,),
}
"""The axes behind R of the arguments that have more than one."""
