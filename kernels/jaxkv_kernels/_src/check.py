"""Checks of arguments when they are traced: types, shapes, static values.

A wrong type or dtype is a `TypeError`, a wrong shape or value a `ValueError`.
Messages read "`name` must be X, got Y; do Z.". The docstring of a check says
what it accepts.
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
  raise error(f"`{name}` must be {wanted}, got {described(got)}{tail}")


def described(value: Any) -> str:
  """A value for a message: arrays as `dtype[shape]`, others by `repr`."""
  if isinstance(value, np.dtype):
    return value.name
  if isinstance(value, (jax.Array, np.ndarray)):
    return f"{value.dtype}{list(value.shape)}"
  return repr(value)


def is_array(name: str, value: Any) -> None:
  """A JAX or NumPy array, traced or not."""
  if not isinstance(value, (jax.Array, np.ndarray)):
    raise TypeError(
      f"`{name}` must be an array, got {type(value).__name__}; wrap it in"
      " jnp.asarray."
    )


def queries(name: str, q: jax.Array, letters: str) -> None:
  """Queries: one non-empty axis for each letter, a float dtype."""
  is_array(name, q)
  if q.ndim != len(letters) or 0 in q.shape:
    wanted = f"[{', '.join(letters)}] with no axis of size 0"
    refuse(ValueError, name, wanted, q)
  if q.dtype.name not in _QUERY_DTYPES:
    refuse(TypeError, name, _one_of(_QUERY_DTYPES), q.dtype)


def pools(q: jax.Array, k_pages: jax.Array, v_pages: jax.Array) -> None:
  """K and V pools that match each other and the queries."""
  alike(k_pages, v_pages)
  beside("q", q, k_pages=k_pages, v_pages=v_pages)
  heads, dim = q.shape[-2:]
  _, kv_heads, page_size, found = k_pages.shape
  if found != dim:
    wanted = f"[N, {kv_heads}, {page_size}, {dim}], with the head size of q"
    refuse(ValueError, "k_pages", wanted, k_pages)
  if heads % kv_heads != 0:
    raise ValueError(
      f"`q` must have a multiple of the {kv_heads} heads of k_pages, got"
      f" {heads}."
    )


def alike(k_pages: jax.Array, v_pages: jax.Array) -> None:
  """K and V pools of one dtype and shape; only the head sizes may differ."""
  pool("k_pages", k_pages)
  pool("v_pages", v_pages)
  if k_pages.dtype != v_pages.dtype:
    wanted = f"{k_pages.dtype}, the dtype of k_pages"
    refuse(TypeError, "v_pages", wanted, v_pages.dtype)
  if k_pages.shape[:3] != v_pages.shape[:3]:
    sizes = ", ".join(map(str, k_pages.shape[:3]))
    refuse(ValueError, "v_pages", f"[{sizes}, Dv], as k_pages is", v_pages)


def pool(name: str, pages: jax.Array) -> None:
  """[N, K, S, D] without empty axes, in a dtype that pools may have."""
  is_array(name, pages)
  if pages.ndim != 4 or 0 in pages.shape:
    refuse(ValueError, name, "[N, K, S, D] with no axis of size 0", pages)
  pool_dtype(name, pages.dtype)


def pool_dtype(name: str, value: Any) -> np.dtype:
  """The dtype that `value` is or names, if pools may have it."""
  try:
    dtype = None if value is None else np.dtype(value)
  except (TypeError, ValueError):
    dtype = None
  if dtype is None or dtype.name not in _POOL_DTYPES:
    hint = "use uint16 for the bits of bfloat16, uint8 for float8_e4m3fn"
    found = value if dtype is None else dtype
    refuse(TypeError, name, _one_of(_POOL_DTYPES), found, hint)
  return dtype


def real(name: str, values: jax.Array) -> None:
  """An array of floats or integers."""
  is_array(name, values)
  kinds = (jnp.floating, jnp.integer)
  if not any(jnp.issubdtype(values.dtype, kind) for kind in kinds):
    refuse(TypeError, name, "floats or integers", values)


def beside(name: str, array: jax.Array, **others: Any) -> None:
  """Arrays on the same devices as the one named first.

  Uncommitted arrays are not checked. Traced arrays are not checked either:
  their placement is unknown until lowering, where jax checks it.
  """
  wanted = placed(array)
  for other, value in others.items():
    devices = placed(value)
    if wanted is not None and devices is not None and devices != wanted:
      raise ValueError(
        f"`{other}` must be on {_names(wanted)} like {name}, got"
        f" {_names(devices)}; move one of them with jax.device_put."
      )


@functools.cache
def architectures() -> frozenset[int]:
  """Compute capabilities of the local GPUs, 90 for sm_90; empty without one."""
  return frozenset(
    int(str(getattr(device, "compute_capability", "9.0")).replace(".", ""))
    for device in jax.local_devices()
    if device.platform == "gpu"
  )


def placed(array) -> set[Any] | None:
  """The devices that an array is committed to; None if there are none."""
  if isinstance(array, core.Tracer) or not isinstance(array, jax.Array):
    return None
  return array.devices() if array.committed else None


def _names(devices: set[Any]) -> str:
  return ", ".join(sorted(map(str, devices)))


def table(
  page_table: jax.Array, batch: int | None, name: str = "page_table"
) -> None:
  """int32[B, M] with B and M at least 1; any B if `batch` is None."""
  integers(name, page_table)
  shape = page_table.shape
  rows = shape[:1] if batch is None else (batch,)
  if len(shape) != 2 or shape[:1] != rows or 0 in shape:
    sizes = "B, M] with B >= 1 and" if batch is None else f"{batch}, M] with"
    refuse(ValueError, name, f"int32[{sizes} M >= 1", page_table)


def vector(name: str, values: jax.Array, size: int | None) -> None:
  """int32[size]; any size if it is None."""
  integers(name, values)
  if values.ndim != 1 or size not in (None, values.size):
    wanted = "a vector" if size is None else f"int32[{size}]"
    refuse(ValueError, name, wanted, values)


def integers(name: str, values: jax.Array) -> None:
  """An int32 array."""
  is_array(name, values)
  if values.dtype != jnp.int32:
    hint = f"cast it with {name}.astype(jnp.int32)"
    refuse(TypeError, name, "int32", values.dtype, hint)


def max_query_len(value: int | None, rows: int) -> int:
  """The longest run of queries, at least 1; `rows` for None."""
  if value is None:
    return max(rows, 1)
  count("max_query_len", value)
  return value


def window(value: jax.Array | int | None, name: str = "window") -> None:
  """An integer scalar from 1 to 2**31 - 1, or None."""
  if value is None:
    return
  scalar(name, value, np.integer)
  if isinstance(value, (int, np.integer)) and value < 1:
    refuse(ValueError, name, "at least 1, or None", value)


def soft_cap(value: float | None, name: str = "soft_cap") -> None:
  """A finite Python number above 0, or None."""
  if value is None:
    return
  wanted = "a finite Python number above 0, or None"
  if not isinstance(value, (int, float)) or isinstance(value, bool):
    refuse(TypeError, name, wanted, value)
  if not 0 < value < math.inf:
    refuse(ValueError, name, wanted, value)


def per_head(name: str, values: jax.Array | None, heads: int) -> None:
  """float[heads], or None."""
  if values is None:
    return
  is_array(name, values)
  wanted = f"float[{heads}], one number for each query head"
  if not jnp.issubdtype(values.dtype, jnp.floating):
    refuse(TypeError, name, wanted, values)
  if values.shape != (heads,):
    refuse(ValueError, name, wanted, values)


def scales(name: str, values: jax.Array | None, pages: jax.Array) -> None:
  """float32[K] or float32[N, K, S] for a pool [N, K, S, D]; or None."""
  if values is None:
    return
  head, token = list(pages.shape[1:2]), list(pages.shape[:3])
  wanted = (
    f"float32{head}, one for each head, or float32{token}, one for each token"
    " and head"
  )
  float32(name, values, wanted)
  if list(values.shape) not in (head, token):
    refuse(ValueError, name, wanted, values)


def float32(name: str, values: jax.Array, wanted: str = "float32") -> None:
  """A float32 array."""
  is_array(name, values)
  if values.dtype != jnp.float32:
    refuse(TypeError, name, wanted, values)


def tree_mask(
  mask: jax.Array | None, leading: tuple[int, ...], name: str = "tree_mask"
) -> None:
  """bool[*leading, X], X at least 1; or None."""
  if mask is None:
    return
  is_array(name, mask)
  wanted = f"bool[{', '.join(map(str, leading))}, X] with X >= 1"
  if mask.dtype != jnp.bool_:
    refuse(TypeError, name, wanted, mask)
  if mask.ndim == 0 or mask.shape[:-1] != leading or mask.shape[-1] == 0:
    refuse(ValueError, name, wanted, mask)


def count(name: str, value: int) -> None:
  """A Python integer of at least 1."""
  if not isinstance(value, int) or isinstance(value, bool):
    refuse(TypeError, name, "a Python int of at least 1", value)
  if value < 1:
    refuse(ValueError, name, "a Python int of at least 1", value)


def scalar(name: str, value, kind) -> None:
  """A Python number or array scalar of a kind; integers must fit int32."""
  wanted = "an integer scalar" if kind is np.integer else "a float scalar"
  if isinstance(value, bool):
    fits = False
  elif isinstance(value, (int, float)):
    fits = isinstance(value, int) or kind is np.floating
  else:
    array = isinstance(value, (jax.Array, np.ndarray, np.generic))
    fits = array and jnp.issubdtype(value.dtype, kind)
  if not fits:
    refuse(TypeError, name, wanted, value)
  if np.ndim(value) != 0:
    refuse(ValueError, name, wanted, value)
  if kind is np.integer and isinstance(value, (int, np.integer)):
    if not -_INT32_MAX <= value <= _INT32_MAX:
      refuse(ValueError, name, f"{wanted} that fits int32", value)


def _one_of(names: tuple[str, ...]) -> str:
  return f"{', '.join(names[:-1])} or {names[-1]}"
