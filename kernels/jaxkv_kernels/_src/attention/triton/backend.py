"""Paged attention in Pallas-Triton, for NVIDIA GPUs from sm_80.

A query row is one head of one query. A program computes up to 64 query rows
that share a K/V head, as one tile for the tensor cores. It reads each key and
value once. It looks up the page of each token, so it supports any page size. If
programs are too few or could get too much work, keys are split into parts.
`_merge` merges the parts, weighted by the sums of their softmaxes. The
docstring of the package `attention` defines the letters.
"""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from jaxkv_kernels._src import check
from jaxkv_kernels._src.attention import online_softmax
from jaxkv_kernels._src.attention import query_tiles
from jaxkv_kernels._src.attention.options import AttentionCall
from jaxkv_kernels._src.attention.triton.kernel import TritonStatic
from jaxkv_kernels._src.attention.triton.kernel import attention_kernel
from jaxkv_kernels._src.attention.triton.kernel import power_of_two
from jaxkv_kernels._src.quantization import logical_dtype

# Query rows of a program: a tensor core multiplies at least 16, and the sums of
# at most 64 fit in registers.
_MIN_ROWS = 16
_MAX_ROWS = 64
# Bytes of K, and of V, in a block. With three stages of both in each program,
# two programs then fit in a multiprocessor's 227 KB of shared memory.
_BLOCK_BYTES = 16 * 1024
_MAX_BLOCK = 128
# Programs to aim at: two on each of the 132 multiprocessors of an H100 or H200.
_PROGRAMS = 264
_MAX_SPLITS = 64
# Bounds of the tokens of a program. The maximum balances the work, as far as
# `_PART_BYTES` permits. The minimum limits overhead, if no cores are idle.
_MAX_TOKENS = 4096
_MIN_TOKENS = 1024
# The maximum number of bytes of all parts, each of which is as large as the
# output in float32. Splits that are needed to fill the GPU may exceed it.
_PART_BYTES = 64 * 2**20
_LARGEST_HEAD = 256
# The maximum sizes of the value in a latent vector, and of the rest of it.
_LARGEST_VALUE = 512
_LARGEST_BEHIND = 64


def attend(call: AttentionCall) -> tuple[jax.Array, jax.Array]:
  """Computes attention of a rectangle; see `choose.Backend`."""
  options = call.options
  static = _static(call)
  tree = options.tree_mask
  window = options.window
  if window is not None:
    window = jnp.asarray(window, jnp.int32).reshape(1)
  inputs = {
    "q": call.q,
    "k": call.k_pages,
    "v": call.v_pages if call.options.value_dim is None else None,
    "table": call.page_table,
    "starts": call.starts,
    "counts": call.counts,
    "page_offset": options.page_offset.reshape(1),
    "scale": jnp.asarray(options.scale, jnp.float32).reshape(1),
    "window": window,
    "slopes": options.alibi_slopes,
    "k_scale": options.k_scale,
    "v_scale": options.v_scale,
    # Triton has no pointers to single bits.
    "tree": None if tree is None else tree.astype(jnp.int8),
    "tree_starts": options.tree_starts,
  }
  has_few_sums = static.rows == _MIN_ROWS and call.options.value_dim is None
  shape = (static.splits, static.batch, static.columns, static.heads)
  parts, totals = pl.pallas_call(
    functools.partial(
      attention_kernel, static=static, soft_cap=options.soft_cap
    ),
    name="jaxkv_paged_attention",
    grid=(static.batch * static.kv_heads * static.tiles, static.splits),
    out_shape=(
      query_tiles.float32((*shape, static.value_dim), inputs),
      query_tiles.float32((2, *shape), inputs),
    ),
    # With more sums, a program needs twice the threads to avoid spills.
    compiler_params=plt.CompilerParams(
      num_warps=4 if has_few_sums else 8, num_stages=3
    ),
    interpret=bool(options.interpret),
  )(inputs)
  return _merge(parts, totals, options.sinks, call.is_query[:, :, None])


def unsupported(platform: str, call: AttentionCall) -> str | None:
  """Returns the reason why this backend does not support a call, if any."""
  if platform != "cuda":
    return f"the platform must be cuda, got {platform}"
  reason = _too_large(call)
  if reason is not None:
    return reason
  dtype = call.k_pages.dtype
  # Triton converts float8_e4m3fn with an instruction that sm_89 introduced.
  is_e4m3 = logical_dtype(dtype).name == "float8_e4m3fn"
  required = 89 if is_e4m3 else 80
  oldest = min(check.architectures(), default=required)
  if oldest < required and not call.options.interpret:
    return (
      f"the GPU must be sm_{required} or later for pages of {dtype}, got"
      f" sm_{oldest}"
    )
  return None


def _too_large(call: AttentionCall) -> str | None:
  """Returns the reason if vectors are too large or pools cannot be indexed."""
  latent = call.options.value_dim
  if latent is not None:
    suffix = call.q.shape[-1] - latent
    if latent > _LARGEST_VALUE or suffix > _LARGEST_BEHIND:
      return (
        f"`value_dim` must be at most {_LARGEST_VALUE}, with at most"
        f" {_LARGEST_BEHIND} elements after it, got {latent} and {suffix}"
      )
  for name, pages in (("k_pages", call.k_pages), ("v_pages", call.v_pages)):
    if latent is None and pages.shape[3] > _LARGEST_HEAD:
      return (
        f"`{name}` must have a head size of at most {_LARGEST_HEAD}, got"
        f" {pages.shape[3]}"
      )
    # Pallas-Triton indexes pools of up to 4 GiB with int32, which can overflow.
    if pages.dtype.itemsize == 1 and 2**31 < pages.size <= 2**32:
      return (
        f"`{name}` must have at most 2**31 or more than 2**32 elements of 8"
        f" bits, got {pages.size}"
      )
  return None


def _static(call: AttentionCall) -> TritonStatic:
  """Returns the sizes of programs, which depend only on static values."""
  batch, columns, heads, dim = call.q.shape
  latent = call.options.value_dim
  value_dim = call.value_dim
  capacity = call.capacity
  pool_dtype = call.k_pages.dtype
  # As one part, 512 + 64 elements would be padded to a power of two: 1,024.
  cuts = (0, dim) if latent in (None, dim) else (0, latent, dim)
  parts = tuple((a, b - a) for a, b in itertools.pairwise(cuts))
  pages, kv_heads, page_size, _ = call.k_pages.shape
  num_rows = columns * heads // kv_heads
  dtype = _compute_dtype(call.q.dtype, logical_dtype(pool_dtype))
  rows = max(power_of_two(num_rows), _MIN_ROWS)
  rows = min(rows, _max_rows(dtype, latent))
  tiles = -(-num_rows // rows)
  vector_size = power_of_two(max(value_dim, *(width for _, width in parts)))
  block = _block(rows, vector_size, pool_dtype, dtype, latent is not None)
  programs = batch * kv_heads * tiles
  has_idle_cores = programs < _PROGRAMS
  part_bytes = batch * columns * heads * value_dim * 4
  # If programs already fill the GPU, splits still balance their work.
  extra_splits = min(-(-capacity // _MAX_TOKENS), _PART_BYTES // part_bytes)
  splits = max(-(-_PROGRAMS // programs), extra_splits)
  splits = min(splits, _MAX_SPLITS, -(-capacity // block))
  return TritonStatic(
    batch=batch,
    columns=columns,
    heads=heads,
    kv_heads=kv_heads,
    key_parts=parts,
    value_dim=value_dim,
    pages=pages,
    page_size=page_size,
    capacity=capacity,
    rows=rows,
    tiles=tiles,
    block=block,
    splits=splits,
    min_blocks=1 if has_idle_cores else -(-_MIN_TOKENS // block),
    dtype=dtype,
  )


def _max_rows(dtype: np.dtype, latent: int | None) -> int:
  """Returns the maximum number of query rows of a program."""
  # Products of float32 use no tensor cores, and so take more registers.
  if dtype.itemsize > 2:
    return _MIN_ROWS
  return _MAX_ROWS if latent is None else _MAX_ROWS // 2


def _block(
  rows: int,
  vector_size: int,
  pool_dtype: np.dtype,
  dtype: np.dtype,
  latent: bool,
) -> int:
  """Returns the number of tokens of a step."""
  if latent:
    # A latent vector replaces a key and a value, so it can take the bytes of
    # both.
    return max(2 * _BLOCK_BYTES // (vector_size * dtype.itemsize), 16)
  # Widening 8-bit numbers takes registers, and many rows leave few of them.
  has_few_rows = rows == _MIN_ROWS
  width = max(pool_dtype.itemsize, dtype.itemsize // (2 if has_few_rows else 1))
  limit = _MAX_BLOCK if has_few_rows else _MAX_BLOCK // 2
  return min(max(_BLOCK_BYTES // (vector_size * width), 16), limit)


def _compute_dtype(query_dtype, pool_dtype) -> np.dtype:
  """Returns the dtype of the products with keys and values."""
  query_dtype = np.dtype(query_dtype)
  pool_dtype = np.dtype(pool_dtype)
  # Every query dtype represents 8-bit numbers exactly. If queries and pages
  # have different dtypes of 16 bits or more, only float32 represents both.
  if pool_dtype.itemsize == 1 or pool_dtype == query_dtype:
    return query_dtype
  return np.dtype(np.float32)


def _merge(
  parts: jax.Array,
  totals: jax.Array,
  sinks: jax.Array | None,
  is_query: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Merges parts and adds the sinks.

  Args:
    parts: float32[splits, B, T, H, Dv], normalised.
    totals: float32[2, splits, B, T, H], `m` and `l` of `online_softmax`.
    sinks: float32[H], or None.
    is_query: bool[B, T, 1], False for padding, whose log-sum-exp is -inf.

  Returns:
    (float32[B, T, H, Dv], float32[B, T, H]).
  """
  chex.assert_shape(totals, (2, *parts.shape[:-1]))
  part_m, part_l = totals
  # Merging by `m` and `l` loses fewer digits than by log-sum-exps.
  m = jnp.max(part_m, axis=0)
  if sinks is not None:
    sinks = (sinks * online_softmax.LOG2_E)[None, None]
    m = jnp.maximum(m, sinks)
  weights = part_l * jnp.exp2(part_m - m[None])
  l = jnp.sum(weights, axis=0)
  if sinks is not None:
    l = l + jnp.exp2(sinks - m)
  divisor = jnp.where(l == 0, jnp.float32(1), l)
  out = jnp.sum(parts * (weights / divisor[None])[..., None], axis=0)
  return out, jnp.where(is_query, online_softmax.log_sum_exp(m, l), -jnp.inf)
