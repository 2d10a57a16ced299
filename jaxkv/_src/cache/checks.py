"""Arguments of the verbs: cast to the library's dtypes, or refused by name."""

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

_INT32 = np.iinfo(np.int32)
_WIDE = ("int64", "uint64", "uint32")


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


_BEHIND_ROWS: dict[str, tuple[int | str, ...]] = {
  "tokens": ("T",),
  "salts": (4,),
}
"""The axes behind R of the arguments that have more than one."""
