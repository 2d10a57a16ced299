"""Blocks of 8-bit numbers, and scales of tokens, in the Hopper kernel.

8-bit pages are copied to shared memory unchanged. A block is then widened in
registers to the format of the queries, which represents every 8-bit number
exactly. After that, the block's stage of the ring is free. Scales of tokens are
copied with the pages. They multiply products and weights in float32. The
docstring of the package `attention` defines the letters.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels._src.attention.mosaic_gpu import compat
from jaxkv_kernels._src.attention.mosaic_gpu.compat import COLUMN
from jaxkv_kernels._src.attention.mosaic_gpu.compat import UPCAST
from jaxkv_kernels._src.attention.mosaic_gpu.work import TOKENS
from jaxkv_kernels._src.attention.mosaic_gpu.work import GpuStatic
from jaxkv_kernels._src.attention.mosaic_gpu.work import Side

# The lower bound of a row's divisor, so that a row of zeros is not divided by
# zero. Only rows whose weights are all smaller lose precision. Such weights add
# less to an output than the smallest float16, 2**-24.
_MIN_DIVISOR = 2.0**-60


def unpack(
  static: GpuStatic, side: Side, stream: jax.Array, stage: jax.Array
) -> tuple[Any, jax.Array | None]:
  """Returns a block [A, D] in 16-bit numbers, and float32[A] scales or None.

  Afterwards the stages of an 8-bit block and of its scales can be freed.
  """
  # It is safe to overwrite `side.wide` and `side.factors` here, because all
  # threads synchronise between two blocks of keys, and of values.
  narrow = side.ring.at[stream, stage]
  if side.scales is not None and side.wide is None:
    # With 16-bit pages, nothing else makes threads synchronise.
    plgpu.commit_smem()
  if side.scales is not None:
    rows = min(static.page_size, TOKENS)
    for i in range(static.pages):
      side.factors[stream, pl.ds(i * rows, rows)] = compat.load(
        side.scales.at[stream, stage, i, 0],
        COLUMN,
        interpreted=static.interpreted,
      )
  if side.wide is not None:
    _widen(static, narrow, side.wide.at[stream])
  if side.wide is not None or side.scales is not None:
    plgpu.commit_smem()
  factors = None
  if side.scales is not None:
    factors = compat.load(
      side.factors.at[stream], COLUMN, interpreted=static.interpreted
    )
  return narrow if side.wide is None else side.wide.at[stream], factors


def _widen(static: GpuStatic, narrow: Any, wide: Any) -> None:
  """Converts a block [A, D] to the format of `wide` [A, D]."""
  block = compat.load(narrow, UPCAST, interpreted=static.interpreted)
  if jnp.issubdtype(block.dtype, jnp.floating):
    # The hardware converts 8-bit floats only to float16, so the conversion to
    # bfloat16 takes a step through float32.
    block = block.astype(jnp.float32)
  wide[...] = block.astype(wide.dtype)


def scaled(matrix: jax.Array, factors: jax.Array | None) -> jax.Array:
  """Multiplies columns float32[Y, A] by their factors float32[A], if any."""
  if factors is None:
    return matrix
  return matrix * lax.broadcast_in_dim(factors, matrix.shape, [1])


def scaled_weights(
  weights: jax.Array, mask: jax.Array, factors: jax.Array | None, dtype: Any
) -> tuple[jax.Array, jax.Array | None]:
  """Multiplies weights by the scales of values.

  Args:
    weights: float32[Y, A].
    mask: bool[Y, A], True for keys that a row sees. Scales of other keys can be
      NaN.
    factors: float32[A], the scales of values; or None.
    dtype: the format of the product with values, bfloat16 or float16.

  Returns:
    (float32[Y, A], the scaled weights; float32[Y], the factor by which the
    caller must multiply each row of the product with values, or None for 1).
  """
  if factors is None:
    return weights, None
  weights = jnp.where(mask, scaled(weights, factors), 0.0)
  if dtype != jnp.float16:
    return weights, None
  # A weight times a scale can be outside the range of float16, so each row is
  # divided by its largest magnitude.
  largest = jnp.maximum(jnp.max(weights, axis=1), jnp.max(-weights, axis=1))
  largest = jnp.maximum(largest, _MIN_DIVISOR)
  return weights / lax.broadcast_in_dim(largest, weights.shape, [0]), largest
