"""Checks of arguments when they are traced: shapes, dtypes, static values."""

import functools
import math
from typing import Any

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


def queries(name: str, q: jax.Array, letters: str) -> None:
  """The queries have one axis per letter, none empty, and a float dtype."""
  is_array(name, q)
  if q.ndim != len(letters) or 0 in q.shape:
    raise ValueError(
      f"{name} has shape {q.shape}; it must be [{', '.join(letters)}], none of"
      " them 0"
    )
  if q.dtype.name not in _QUERY_DTYPES:
    raise ValueError(
      f"{name} is {q.dtype}; supported are {', '.join(_QUERY_DTYPES)}"
    )


def is_array(name: str, value: Any) -> None:
  """A JAX or NumPy array, traced or not."""
  if not isinstance(value, (jax.Array, np.ndarray)):
    raise ValueError(
      f"{name} is of type {type(value).__name__}; it must be an array: wrap it"
      " in jnp.asarray"
    )


def pools(q: jax.Array, k_pages: jax.Array, v_pages: jax.Array) -> None:
  """K and V pools fit each other and q."""
  alike(k_pages, v_pages)
  beside("q", q, k_pages=k_pages, v_pages=v_pages)
  heads, dim = q.shape[-2:]
  kv_heads = k_pages.shape[1]
  if k_pages.shape[3] != dim:
    raise ValueError(
      f"k_pages has head size {k_pages.shape[3]} but q has {dim}; they must"
      " agree"
    )
  if heads % kv_heads != 0:
    raise ValueError(
      f"q has {heads} heads and k_pages {kv_heads}; the first must be a"
      " multiple of the second"
    )


def alike(k_pages: jax.Array, v_pages: jax.Array) -> None:
  """Pools that differ in their head size alone: a page id means both."""
  pool("k_pages", k_pages)
  pool("v_pages", v_pages)
  if k_pages.dtype != v_pages.dtype:
    raise ValueError(
      f"k_pages is {k_pages.dtype} but v_pages is {v_pages.dtype}; give both"
      " the same dtype"
    )
  if k_pages.shape[:3] != v_pages.shape[:3]:
    raise ValueError(
      f"k_pages has shape {k_pages.shape} but v_pages {v_pages.shape}; all but"
      " the last axis must agree"
    )


def pool(name: str, pages: jax.Array) -> None:
  """[P, K, S, D], no axis empty, in a dtype that pools may have."""
  is_array(name, pages)
  if pages.ndim != 4 or 0 in pages.shape:
    raise ValueError(
      f"{name} has shape {pages.shape}; it must be [P, K, S, D], none of them 0"
    )
  pool_dtype(name, pages.dtype)


def pool_dtype(name: str, value: Any) -> np.dtype:
  """The dtype that this is or is the name of; pools may have it."""
  try:
    dtype = None if value is None else np.dtype(value)
  except (TypeError, ValueError):
    dtype = None
  if dtype is None or dtype.name not in _POOL_DTYPES:
    raise ValueError(
      f"{name} is {dtype or repr(value)}; a pool is {', '.join(_POOL_DTYPES)};"
      " uint16 for the bits of bfloat16, uint8 for those of float8_e4m3fn"
    )
  return dtype


def real(name: str, values: jax.Array) -> None:
  """An array of floats or integers."""
  is_array(name, values)
  kinds = (jnp.floating, jnp.integer)
  if not any(jnp.issubdtype(values.dtype, kind) for kind in kinds):
    raise ValueError(f"{name} is {values.dtype}; it must be floats or integers")


def beside(name: str, array: jax.Array, **others: Any) -> None:
  """Arrays that were put on devices are on those of the one named first.

  Of what is traced nothing is known; there jax says it itself, without names.
  """
  wanted = placed(array)
  for other, value in others.items():
    devices = placed(value)
    if wanted is not None and devices is not None and devices != wanted:
      raise ValueError(
        f"{other} is on {_names(devices)} but {name} on {_names(wanted)}; put"
        " both on the same devices"
      )


@functools.cache
def architectures() -> frozenset[int]:
  """Of the GPUs at hand, 90 for one of sm_90; none without a GPU."""
  return frozenset(
    int(str(getattr(device, "compute_capability", "9.0")).replace(".", ""))
    for device in jax.local_devices()
    if device.platform == "gpu"
  )


def placed(array) -> set[Any] | None:
  """The devices that an array was put on; None if on none, or traced."""
  if isinstance(array, core.Tracer) or not isinstance(array, jax.Array):
    return None
  return array.devices() if array.committed else None


def _names(devices: set[Any]) -> str:
  return ", ".join(sorted(map(str, devices)))


def table(
  page_table: jax.Array, batch: int | None, name: str = "page_table"
) -> None:
  """int32[B, M], neither of them 0; any B if `batch` is None."""
  integers(name, page_table)
  shape = page_table.shape
  rows = shape[:1] if batch is None else (batch,)
  if len(shape) != 2 or shape[:1] != rows or 0 in shape:
    wanted = "B >= 1" if batch is None else batch
    raise ValueError(
      f"{name} has shape {shape}; it must be [{wanted}, M] with M >= 1"
    )


def vector(name: str, values: jax.Array, size: int | None) -> None:
  """int32[size]; of any size if None."""
  integers(name, values)
  if values.ndim != 1 or size not in (None, values.size):
    wanted = "a vector" if size is None else f"[{size}]"
    raise ValueError(f"{name} has shape {values.shape}; it must be {wanted}")


def integers(name: str, values: jax.Array) -> None:
  """int32."""
  is_array(name, values)
  if values.dtype != jnp.int32:
    raise ValueError(f"{name} is {values.dtype}; it must be int32")


def max_query_len(value: int | None, rows: int) -> int:
  """The longest query run, at least 1."""
  if value is None:
    return max(rows, 1)
  if not isinstance(value, int) or value < 1:
    raise ValueError(
      f"max_query_len={value!r}; it must be a Python int of at least 1, or None"
    )
  return value


def window(value: jax.Array | int | None) -> None:
  """An integer scalar of at least 1 that fits int32, or None."""
  if value is None:
    return
  scalar("window", value, np.integer)
  if isinstance(value, (int, np.integer)) and not 1 <= value <= _INT32_MAX:
    raise ValueError(
      f"window={value}; it must be at least 1 and fit int32, or None"
    )


def soft_cap(value: float | None) -> None:
  """A finite Python number above 0, or None."""
  if value is None:
    return
  number = isinstance(value, (int, float)) and not isinstance(value, bool)
  if not number or not 0 < value < math.inf:
    raise ValueError(
      f"soft_cap={value!r}; it must be a finite Python number above 0, or None"
    )


def per_head(name: str, values: jax.Array | None, heads: int) -> None:
  """float[heads], or None."""
  if values is None:
    return
  is_array(name, values)
  floats = jnp.issubdtype(values.dtype, jnp.floating)
  if values.shape != (heads,) or not floats:
    raise ValueError(
      f"{name} is {values.dtype}{list(values.shape)}; it must be"
      f" float[{heads}], one per query head"
    )


def scales(name: str, values: jax.Array | None, pages: jax.Array) -> None:
  """float32[K] or float32[P, K, S] for a pool [P, K, S, D]; or None."""
  if values is None:
    return
  is_array(name, values)
  shapes = (pages.shape[1:2], pages.shape[:3])
  if values.dtype != jnp.float32 or values.shape not in shapes:
    raise ValueError(
      f"{name} is {values.dtype}{list(values.shape)}; it must be"
      f" float32{list(shapes[0])}, a factor a head, or float32"
      f"{list(shapes[1])}, one a token and head"
    )


def tree_mask(mask: jax.Array | None, leading: tuple[int, ...]) -> None:
  """bool[*leading, N], N at least 1; or None."""
  if mask is None:
    return
  is_array("tree_mask", mask)
  fits = mask.ndim == len(leading) + 1 and mask.shape[:-1] == leading
  if mask.dtype != jnp.bool_ or not fits or mask.shape[-1] == 0:
    sizes = ", ".join(map(str, leading))
    raise ValueError(
      f"tree_mask is {mask.dtype}{list(mask.shape)}; it must be"
      f" bool[{sizes}, N] with N >= 1"
    )


def count(name: str, value: int) -> None:
  """A Python integer of at least 1."""
  if not isinstance(value, int) or isinstance(value, bool) or value < 1:
    raise ValueError(f"{name}={value!r}; it must be an int of at least 1")


def scalar(name: str, value, kind) -> None:
  """A Python number, or an array scalar of this kind; an integer fits int32."""
  if isinstance(value, bool):
    fits = False
  elif isinstance(value, (int, float)):
    fits = isinstance(value, int) or kind is np.floating
  else:
    array = isinstance(value, (jax.Array, np.ndarray, np.generic))
    fits = array and value.ndim == 0 and jnp.issubdtype(value.dtype, kind)
  if isinstance(value, (int, np.integer)) and kind is np.integer:
    fits &= -_INT32_MAX <= value <= _INT32_MAX
  if not fits:
    wanted = "an integer (int32)" if kind is np.integer else "a float"
    raise ValueError(f"{name}={value!r}; it must be {wanted} scalar")
