"""Blocks of 8-bit numbers in the Hopper kernel.

Pages arrive as they are, in half the bytes. A block is widened by way of
registers into the format of the queries, in which every such number is exact,
and its place in the ring is free before the product. Scales of tokens come
with the pages, and multiply logits and weights in float32.
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

# Far below any share of a row that float16 could hold of its values.
_LEAST = 2.0**-60


def unpack(
  static: GpuStatic, side: Side, stream: jax.Array, slot: jax.Array
) -> tuple[Any, jax.Array | None]:
  """A block of 16-bit numbers, and what its tokens are scaled by.

  What has 8 bits in its ring has left it afterwards, scales included. Between
  two blocks of one side all threads meet: what is written here has been used.

  Returns:
    (ref [C, D], float32[C] or None).
  """
  narrow = side.ring.at[stream, slot]
  if side.scales is not None and side.wide is None:
    # Where the other side is plain, they meet nowhere else.
    plgpu.commit_smem()
  if side.scales is not None:
    rows = min(static.page_size, TOKENS)
    for i in range(static.pages):
      side.factors[stream, pl.ds(i * rows, rows)] = compat.load(
        side.scales.at[stream, slot, i, 0],
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
  """Both are [C, D]."""
  held = compat.load(narrow, UPCAST, interpreted=static.interpreted)
  if jnp.issubdtype(held.dtype, jnp.floating):
    # The hardware turns these into float16 alone, which float32 follows.
    held = held.astype(jnp.float32)
  wide[...] = held.astype(wide.dtype)


def scaled(numbers: jax.Array, factors: jax.Array | None) -> jax.Array:
  """Columns times their factors: float32[R, C], float32[C]."""
  if factors is None:
    return numbers
  return numbers * lax.broadcast_in_dim(factors, numbers.shape, [1])


def scaled_weights(
  weights: jax.Array, seen: jax.Array, factors: jax.Array | None, dtype: Any
) -> tuple[jax.Array, jax.Array | None]:
  """Weights times scales of values.

  Such a product has no range that float16 is sure to hold: there it becomes a
  share of its row's largest.

  Args:
    weights: float32[R, C].
    seen: whether a row sees a key; scales of others may be NaN. bool[R, C]
    factors: float32[C], or None.
    dtype: in which they are to be multiplied, bfloat16 or float16.

  Returns:
    (float32[R, C], what to multiply its rows by: float32[R], or None).
  """
  if factors is None:
    return weights, None
  weights = jnp.where(seen, scaled(weights, factors), 0.0)
  if dtype != jnp.float16:
    return weights, None
  largest = jnp.maximum(jnp.max(weights, axis=1), jnp.max(-weights, axis=1))
  largest = jnp.maximum(largest, _LEAST)
  return weights / lax.broadcast_in_dim(largest, weights.shape, [0]), largest
