"""Hides differences between releases of Pallas' Mosaic GPU, from jax 0.10 on.

The interpreter of jax 0.10 does not support layouts, and no release's
interpreter multiplies operands in registers. With `interpreted=True`, the
functions use neither.
"""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

MATRIX = plgpu.Layout.WGMMA
ROW = plgpu.Layout.WGMMA.reduce(1)
COLUMN = plgpu.Layout.WGMMA.reduce(0)
# In this layout a thread reads 8-bit numbers four at a time.
UPCAST = plgpu.Layout.WGMMA_UPCAST_2X

_load: Any = plgpu.load
# Before jax 0.11, `load` requires an argument `idx`, which 0.11 deprecates.
_index = inspect.signature(_load).parameters.get("idx")
_INDEXED = _index is not None and _index.default is inspect.Parameter.empty


def tiled(shape: tuple[int, ...], dtype: Any) -> Any:
  """Returns tiled and swizzled shared memory, as tensor cores require it."""
  itemsize = jnp.dtype(dtype).itemsize
  width = swizzle(shape[-1] * itemsize)
  tile = plgpu.TilingTransform((8, width // itemsize))
  return plgpu.SMEM(
    shape, dtype, transforms=(tile, plgpu.SwizzleTransform(width))
  )


def swizzle(row: int) -> int:
  """Returns the width in bytes of the swizzle for rows of `row` bytes."""
  return 128 if row % 128 == 0 else 64


def min_rows(tokens: int, interpreted: bool) -> int:
  """Returns the minimum number of rows float32[tokens] of one copy."""
  # Before jax 0.11 a copy must have at least 128 bytes, so it takes several
  # short rows, of which only the first is used. On a GPU, rows past an array's
  # end read as zeros. In the interpreter they do not, so it copies one row.
  return max(1, 32 // tokens) if _INDEXED and not interpreted else 1


def load(ref: Any, layout: Any, *, interpreted: bool) -> jax.Array:
  """Loads a whole ref into registers."""
  if interpreted:
    return ref[...]
  # `optimized=False` permits layouts for which the load is slow.
  if _INDEXED:
    return _load(ref, (), layout=layout, optimized=False)
  return _load(ref, layout=layout, optimized=False)


def full(
  shape: tuple[int, ...], value: float, layout: Any, *, interpreted: bool
) -> jax.Array:
  """Returns a float32 array of one value."""
  array = jnp.full(shape, value, jnp.float32)
  return array if interpreted else plgpu.layout_cast(array, layout)


def iota(
  shape: tuple[int, ...], axis: int, *, layout: Any = MATRIX, interpreted: bool
) -> jax.Array:
  """Returns int32 indices along an axis."""
  if interpreted:
    return lax.broadcasted_iota(jnp.int32, shape, axis)
  return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)


def products(left: Any, right: Any, *, interpreted: bool) -> jax.Array:
  """Returns [X, A], the product of refs [X, D] and [A, D] in shared memory."""
  if interpreted:
    return _dot(left[...], right[...].T)
  # Transposing is a method since jax 0.11, and was a function before.
  transposed = (
    plgpu.transpose_ref(right, (1, 0)) if _INDEXED else right.transpose((1, 0))
  )

  def multiply(result):
    plgpu.wgmma(result, left, transposed)
    return result[...]

  shape = left.shape[0], right.shape[0]
  return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def add_product(
  accumulator: jax.Array, left: jax.Array, right: Any, *, interpreted: bool
) -> jax.Array:
  """Returns `accumulator + left @ right`; only `right` is in shared memory."""
  if interpreted:
    return accumulator + _dot(left, right[...])

  def multiply(result):
    plgpu.wgmma(result, left, right)

  sums: Any = pl.run_state(multiply)(
    plgpu.WGMMAAccumulatorRef.init(accumulator)
  )
  return sums


def _dot(left, right):
  """Returns a plain product, for the interpreter."""
  # The operands must be read before a copy overwrites their memory. On a GPU,
  # `wgmma` ensures that.
  plgpu.commit_smem()
  return jnp.dot(left, right, preferred_element_type=jnp.float32)
