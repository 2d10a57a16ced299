"""Blocks of 8-bit numbers in the Hopper kernel.

Pages are copied unchanged, in half the bytes. A block is widened in registers
to the format of the queries, in which every 8-bit number is exact. Its stage of
the ring is free before the product. Scales of tokens are copied with the pages;
they multiply logits and weights in float32.
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

# Far below any share of a row's largest value that float16 can represent.
_LEAST = 2.0**-60


def unpack(
  static: GpuStatic, side: Side, stream: jax.Array, stage: jax.Array
) -> tuple[Any, jax.Array | None]:
  """A block in 16-bit numbers, and the scales of its tokens.

  Afterwards the stage of an 8-bit block is no longer needed, nor are its
  scales. All threads synchronise between two blocks of one side, so the memory
  written here is no longer in use.

  Returns:
    (ref [A, D], float32[A] or None).
  """
  narrow = side.ring.at[stream, stage]
  if side.scales is not None and side.wide is None:
    # With 16-bit pages there is no other synchronisation.
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
  held = compat.load(narrow, UPCAST, interpreted=static.interpreted)
  if jnp.issubdtype(held.dtype, jnp.floating):
    # The hardware converts these to float16 only, which then becomes float32.
    held = held.astype(jnp.float32)
  wide[...] = held.astype(wide.dtype)


def scaled(numbers: jax.Array, factors: jax.Array | None) -> jax.Array:
  """Columns float32[Y, A] times their factors float32[A], if any."""
  if factors is None:
    return numbers
  return numbers * lax.broadcast_in_dim(factors, numbers.shape, [1])


def scaled_weights(
  weights: jax.Array, seen: jax.Array, factors: jax.Array | None, dtype: Any
) -> tuple[jax.Array, jax.Array | None]:
  """Weights times scales of values.

  Such a product may be outside the range of float16. With float16 it is divided
  by the largest of its row.

  Args:
    weights: float32[Y, A].
    seen: bool[Y, A], whether a row sees a key; scales of others may be NaN.
    factors: float32[A], or None.
    dtype: format of the product with values, bfloat16 or float16.

  Returns:
    (float32[Y, A], float32[Y] to multiply its rows by, or None).
  """
  if factors is None:
    return weights, None
  weights = jnp.where(seen, scaled(weights, factors), 0.0)
  if dtype != jnp.float16:
    return weights, None
  largest = jnp.maximum(jnp.max(weights, axis=1), jnp.max(-weights, axis=1))
  largest = jnp.maximum(largest, _LEAST)
  return weights / lax.broadcast_in_dim(largest, weights.shape, [0]), largest
