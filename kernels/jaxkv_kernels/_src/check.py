"""Checks types, shapes, devices and static values of arguments.

Each check accepts the arguments that its docstring names, which can be traced.
For others it raises a `TypeError` if a type or dtype is wrong, and a
`ValueError` otherwise. Messages read "`name` must be X, got Y; do Z.".
"""

import functools
import math
from typing import Any
from typing import NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

_INT32_MAX = np.iinfo(np.int32).max
_QUERY_DTYPES = ("float32", "bfloat16", "float16")
_POOL_DTYPES = (
  "float32",
  "float16",
  "bfloat16",
  "float8_e4m3fn",
  "float8_e5m2",
  "int8",
  "uint16",
  "uint8",
)


def refuse(
  error: type[Exception], name: str, expected: str, value: Any, hint: str = ""
) -> NoReturn:
  """Raises `error` with the message "`name` must be X, got Y; do Z.".

  X is what is `expected`, and `describe` formats the `value` as Y. "do Z" is
  the `hint`, which is empty if the remedy is obvious.
  """
  tail = f"; {hint}." if hint else "."
  raise error(f"`{name}` must be {expected}, got {describe(value)}{tail}")


def describe(value: Any) -> str:
  """Formats an array as `dtype[shape]`, a dtype as its name, else by `repr`."""
  if isinstance(value, np.dtype):
    return value.name
  if isinstance(value, (jax.Array, np.ndarray)):
    return f"{value.dtype}{list(value.shape)}"
  return repr(value)


def is_array(name: str, value: Any) -> None:
  """Accepts a JAX or NumPy array, traced or not."""
  if not isinstance(value, (jax.Array, np.ndarray)):
    raise TypeError(
      f"`{name}` must be an array, got {type(value).__name__}; wrap it in"
      " jnp.asarray."
    )


def queries(name: str, q: jax.Array, letters: str) -> None:
  """Accepts floats of 16 or 32 bits, with one non-empty axis per letter."""
  is_array(name, q)
  if q.ndim != len(letters) or 0 in q.shape:
    expected = f"[{', '.join(letters)}] with no axis of size 0"
    refuse(ValueError, name, expected, q)
  if q.dtype.name not in _QUERY_DTYPES:
    refuse(TypeError, name, _one_of(_QUERY_DTYPES), q.dtype)


def pools(q: jax.Array, k_pages: jax.Array, v_pages: Any) -> None:
  """Accepts K and V pools that match each other and the queries."""
  pool_pair(k_pages, v_pages)
  same_devices("q", q, k_pages=k_pages, v_pages=v_pages)
  heads, dim = q.shape[-2:]
  _, kv_heads, page_size, key_dim = k_pages.shape
  if key_dim != dim:
    expected = f"[N, {kv_heads}, {page_size}, {dim}], with the head size of q"
    refuse(ValueError, "k_pages", expected, k_pages)
  if heads % kv_heads != 0:
    raise ValueError(
      f"`q` must have a number of heads that is a multiple of {kv_heads}, the"
      f" number of heads of k_pages, got {heads}."
    )


def latents(q: jax.Array, k_pages: jax.Array, v_pages: Any, size: int) -> None:
  """Accepts a pool of latents that matches q, whose values have `size`."""
  pool("k_pages", k_pages)
  dim = q.shape[-1]
  if k_pages.shape[1] != 1 or k_pages.shape[3] != dim:
    expected = f"[N, 1, S, {dim}], one head with the head size of q"
    refuse(ValueError, "k_pages", expected, k_pages)
  count("value_dim", size)
  if size > dim:
    expected = f"at most {dim}, the size of a latent vector"
    refuse(ValueError, "value_dim", expected, size)
  if v_pages is not None:
    refuse(ValueError, "v_pages", "None with `value_dim`", v_pages)
  same_devices("q", q, k_pages=k_pages)


def pool_pair(k_pages: jax.Array, v_pages: jax.Array) -> None:
  """Accepts K and V pools of one dtype, equal in all axes but the last."""
  pool("k_pages", k_pages)
  pool("v_pages", v_pages)
  if k_pages.dtype != v_pages.dtype:
    expected = f"{k_pages.dtype}, the dtype of k_pages"
    refuse(TypeError, "v_pages", expected, v_pages.dtype)
  if k_pages.shape[:3] != v_pages.shape[:3]:
    axes = ", ".join(map(str, k_pages.shape[:3]))
    refuse(ValueError, "v_pages", f"[{axes}, Dv], like k_pages", v_pages)


def pool(name: str, pages: jax.Array, num_axes: tuple[int, ...] = (4,)) -> None:
  """Accepts [N, K, S, D] without empty axes, in one of the pool dtypes.

  Also accepts [N, K, S], a pool of scales, if `num_axes` contains 3.
  """
  is_array(name, pages)
  if pages.ndim not in num_axes or 0 in pages.shape:
    refuse(ValueError, name, "[N, K, S, D] with no axis of size 0", pages)
  pool_dtype(name, pages.dtype)


def pool_dtype(name: str, value: Any) -> np.dtype:
  """Converts `value` to a dtype; accepts only pool dtypes of `quantization`."""
  try:
    dtype = None if value is None else np.dtype(value)
  except (TypeError, ValueError):
    dtype = None
  if dtype is None or dtype.name not in _POOL_DTYPES:
    hint = "use uint16 for the bits of bfloat16, uint8 for float8_e4m3fn"
    shown = value if dtype is None else dtype
    refuse(TypeError, name, _one_of(_POOL_DTYPES), shown, hint)
  return dtype


def real(name: str, values: jax.Array) -> None:
  """Accepts an array of floats or integers."""
  is_array(name, values)
  families = (jnp.floating, jnp.integer)
  if not any(jnp.issubdtype(values.dtype, family) for family in families):
    refuse(TypeError, name, "floats or integers", values)


def same_devices(name: str, array: jax.Array, **arrays: Any) -> None:
  """Accepts values that are not committed to other devices than `array`."""
  expected = devices_of(array)
  for argument, value in arrays.items():
    devices = devices_of(value)
    if expected is not None and devices is not None and devices != expected:
      raise ValueError(
        f"`{argument}` must be on {_names(expected)} like {name}, got"
        f" {_names(devices)}; move one of them with jax.device_put."
      )


@functools.cache
def architectures() -> frozenset[int]:
  """Returns compute capabilities of the local GPUs, such as 90 for sm_90."""
  # A GPU without `compute_capability` counts as a Hopper GPU. An AMD GPU, which
  # has a name such as gfx942 instead of a number, is skipped.
  versions = (
    str(getattr(device, "compute_capability", "9.0")).replace(".", "")
    for device in jax.local_devices()
    if device.platform == "gpu"
  )
  return frozenset(int(version) for version in versions if version.isdigit())


def devices_of(array) -> set[Any] | None:
  """Returns the devices that an array is committed to, if any."""
  # jax knows the devices of a tracer only at lowering, and then checks them.
  if isinstance(array, core.Tracer) or not isinstance(array, jax.Array):
    return None
  return array.devices() if array.committed else None


def _names(devices: set[Any]) -> str:
  return ", ".join(sorted(map(str, devices)))


def table(
  page_table: jax.Array, batch: int | None, name: str = "page_table"
) -> None:
  """Accepts int32[batch, M] with M >= 1; any batch >= 1 if `batch` is None."""
  integers(name, page_table)
  shape = page_table.shape
  rows = shape[:1] if batch is None else (batch,)
  if len(shape) != 2 or shape[:1] != rows or 0 in shape:
    axes = "B, M] with B >= 1 and" if batch is None else f"{batch}, M] with"
    refuse(ValueError, name, f"int32[{axes} M >= 1", page_table)


def vector(name: str, values: jax.Array, length: int | None) -> None:
  """Accepts int32[length], or any int32 vector if `length` is None."""
  integers(name, values)
  if values.ndim != 1 or length not in (None, values.size):
    expected = "a vector" if length is None else f"int32[{length}]"
    refuse(ValueError, name, expected, values)


def integers(name: str, values: jax.Array) -> None:
  """Accepts an int32 array."""
  is_array(name, values)
  if values.dtype != jnp.int32:
    hint = f"cast it with {name}.astype(jnp.int32)"
    refuse(TypeError, name, "int32", values.dtype, hint)


def max_query_len(value: int | None, rows: int) -> int:
  """Accepts an int of at least 1, or None; returns max(rows, 1) for None."""
  if value is None:
    return max(rows, 1)
  count("max_query_len", value)
  return value


def window(value: jax.Array | int | None, name: str = "window") -> None:
  """Accepts an integer scalar, 1 to 2**31 - 1 if it is static, or None."""
  if value is None:
    return
  scalar(name, value, np.integer)
  if isinstance(value, (int, np.integer)) and value < 1:
    refuse(ValueError, name, "at least 1, or None", value)


def soft_cap(value: float | None, name: str = "soft_cap") -> None:
  """Accepts a finite Python number above 0, or None."""
  if value is None:
    return
  expected = "a finite Python number above 0, or None"
  if not isinstance(value, (int, float)) or isinstance(value, bool):
    refuse(TypeError, name, expected, value)
  if not 0 < value < math.inf:
    refuse(ValueError, name, expected, value)


def per_head(name: str, values: jax.Array | None, heads: int) -> None:
  """Accepts float[heads], or None."""
  if values is None:
    return
  is_array(name, values)
  expected = f"float[{heads}], one number for each query head"
  if not jnp.issubdtype(values.dtype, jnp.floating):
    refuse(TypeError, name, expected, values)
  if values.shape != (heads,):
    refuse(ValueError, name, expected, values)


def scales(name: str, values: jax.Array | None, pages: jax.Array) -> None:
  """Accepts None, and float32[K] or float32[N, K, S] for pages [N, K, S, D]."""
  if values is None:
    return
  head = list(pages.shape[1:2])
  token = list(pages.shape[:3])
  expected = (
    f"float32{head}, one for each head, or float32{token}, one for each token"
    " and head"
  )
  float32(name, values, expected)
  if list(values.shape) not in (head, token):
    refuse(ValueError, name, expected, values)


def float32(name: str, values: jax.Array, expected: str = "float32") -> None:
  """Accepts a float32 array."""
  is_array(name, values)
  if values.dtype != jnp.float32:
    refuse(TypeError, name, expected, values)


def tree_mask(
  mask: jax.Array | None, leading: tuple[int, ...], name: str = "tree_mask"
) -> None:
  """Accepts bool[*leading, X] with X >= 1, or None."""
  if mask is None:
    return
  is_array(name, mask)
  expected = f"bool[{', '.join(map(str, leading))}, X] with X >= 1"
  if mask.dtype != jnp.bool_:
    refuse(TypeError, name, expected, mask)
  if mask.ndim == 0 or mask.shape[:-1] != leading or mask.shape[-1] == 0:
    refuse(ValueError, name, expected, mask)


def count(name: str, value: int) -> None:
  """Accepts a Python integer of at least 1."""
  if not isinstance(value, int) or isinstance(value, bool):
    refuse(TypeError, name, "a Python int of at least 1", value)
  if value < 1:
    refuse(ValueError, name, "a Python int of at least 1", value)


def scalar(name: str, value, family) -> None:
  """Accepts an integer scalar for np.integer, else a float or Python int."""
  expected = "an integer scalar" if family is np.integer else "a float scalar"
  # A bool is an int in Python, but as an argument it is a mistake.
  if isinstance(value, bool):
    fits = False
  elif isinstance(value, (int, float)):
    fits = isinstance(value, int) or family is np.floating
  else:
    is_array_like = isinstance(value, (jax.Array, np.ndarray, np.generic))
    fits = is_array_like and jnp.issubdtype(value.dtype, family)
  if not fits:
    refuse(TypeError, name, expected, value)
  if np.ndim(value) != 0:
    refuse(ValueError, name, expected, value)
  if family is np.integer and isinstance(value, (int, np.integer)):
    if not -_INT32_MAX <= value <= _INT32_MAX:
      refuse(ValueError, name, f"{expected} that fits int32", value)


def _one_of(names: tuple[str, ...]) -> str:
  return f"{', '.join(names[:-1])} or {names[-1]}"
