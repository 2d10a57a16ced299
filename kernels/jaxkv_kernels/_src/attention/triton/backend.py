"""Paged attention in Pallas-Triton, for NVIDIA GPUs from sm_80.

A program takes up to 64 of the query rows that share a K/V head, as one tile
for the tensor cores, and a part of their keys. It reads each key and value
once, token by token through the page table, so any page size is supported.
If there would be too few programs, or one would have too much work, the keys of
a row are split. Each part is normalised in float32, and the parts are merged by
the sums of their softmaxes.
"""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxkv_kernels._src import check
from jaxkv_kernels._src.attention import online_softmax
from jaxkv_kernels._src.attention import query_tiles
from jaxkv_kernels._src.attention.options import AttentionCall
from jaxkv_kernels._src.attention.triton import compat
from jaxkv_kernels._src.attention.triton.kernel import Sizes
from jaxkv_kernels._src.attention.triton.kernel import attention_kernel
from jaxkv_kernels._src.attention.triton.kernel import power_of_two
from jaxkv_kernels._src.formats import logical_dtype

# Query rows of a program: the fewest that a tensor core multiplies, and the
# most whose sums fit in registers.
_LEAST_ROWS, _MOST_ROWS = 16, 64
# Bytes of K, and of V, in a block: three stages of both leave room for two
# programs in a core's 227 KB.
_BLOCK_BYTES = 16 * 1024
_MOST_BLOCK = 128
# Programs wanted at once: two on each of an H100's or H200's 132 cores.
_PROGRAMS = 264
_MOST_SPLITS = 64
# Tokens of a program. A long row beside short ones is split, so that programs
# end together. Below the least, starting a program takes longer than its work.
_MOST_TOKENS, _LEAST_TOKENS = 4096, 1024
# Bytes that the parts may take if there are enough programs without a split. A
# part is a float32 copy of the output.
_PART_BYTES = 64 * 2**20
_LARGEST_HEAD = 256
# The most elements of a latent vector's value, and of the rest behind it.
_LARGEST_VALUE, _LARGEST_BEHIND = 512, 64


def attend(call: AttentionCall) -> tuple[jax.Array, jax.Array]:
  """Attention of a rectangle: float32[B, T, H, Dv], float32[B, T, H]."""
  options, latent = call.options, call.options.value_dim
  sizes = _sizes(call)
  inputs = {
    "q": call.q,
    "k": call.k_pages,
    "v": call.v_pages if latent is None else None,
    "table": call.page_table,
    "starts": call.starts,
    "counts": call.counts,
    "page_offset": options.page_offset.reshape(1),
    "scale": jnp.asarray(options.scale, jnp.float32).reshape(1),
    "window": _one_int32(options.window),
    "slopes": options.alibi_slopes,
    "k_scale": options.k_scale,
    "v_scale": options.v_scale,
    # Triton has no pointers to single bits.
    "tree": _as_int8(options.tree_mask),
    "tree_starts": options.tree_starts,
  }
  few = sizes.rows == _LEAST_ROWS and latent is None
  shape = (sizes.splits, sizes.batch, sizes.columns, sizes.heads)
  parts, totals = compat.call(
    functools.partial(attention_kernel, sizes=sizes, soft_cap=options.soft_cap),
    inputs,
    name="jaxkv_paged_attention",
    grid=(sizes.batch * sizes.kv_heads * sizes.tiles, sizes.splits),
    out_shape=(
      query_tiles.float32((*shape, sizes.value_dim), inputs),
      query_tiles.float32((2, *shape), inputs),
    ),
    # Twice the sums get twice the threads, so that no register spills.
    num_warps=4 if few else 8,
    num_stages=3,
    interpret=options.interpret,
  )
  return _merge(parts, totals, options.sinks, call.real[:, :, None])


def unsupported(platform: str, call: AttentionCall) -> str | None:
  """Why this backend does not serve a call; None if it does."""
  if platform != "cuda":
    return f"the platform must be cuda, got {platform}"
  reason = _too_large(call)
  if reason is not None:
    return reason
  dtype = call.k_pages.dtype
  e4m3 = logical_dtype(dtype).name == "float8_e4m3fn"
  least = 89 if e4m3 else 80
  oldest = min(check.architectures(), default=least)
  if oldest < least and not call.options.interpret:
    return (
      f"the GPU must be sm_{least} or later for pages of {dtype}, got"
      f" sm_{oldest}"
    )
  return None


def _too_large(call: AttentionCall) -> str | None:
  """Which vectors or pools are too large; None if none are."""
  latent = call.options.value_dim
  if latent is not None:
    behind = call.q.shape[-1] - latent
    if latent > _LARGEST_VALUE or behind > _LARGEST_BEHIND:
      return (
        f"`value_dim` must be at most {_LARGEST_VALUE}, with at most"
        f" {_LARGEST_BEHIND} elements behind it, got {latent} and {behind}"
      )
  for name, pages in (("k_pages", call.k_pages), ("v_pages", call.v_pages)):
    if latent is None and pages.shape[3] > _LARGEST_HEAD:
      return (
        f"`{name}` must have a head size of at most {_LARGEST_HEAD}, got"
        f" {pages.shape[3]}"
      )
    # Pallas-Triton indexes pools of up to 4 GiB with a signed 32-bit number.
    if pages.dtype.itemsize == 1 and 2**31 < pages.size <= 2**32:
      return (
        f"`{name}` must have at most 2**31 or more than 2**32 elements of 8"
        f" bits, got {pages.size}"
      )
  return None


def _one_int32(value: jax.Array | int | None) -> jax.Array | None:
  if value is None:
    return None
  return jnp.asarray(value, jnp.int32).reshape(1)


def _as_int8(mask: jax.Array | None) -> jax.Array | None:
  return None if mask is None else mask.astype(jnp.int8)


def _sizes(call: AttentionCall) -> Sizes:
  """Cuts the work into programs, from shapes alone."""
  batch, columns, heads, dim = call.q.shape
  latent, value_dim = call.options.value_dim, call.value_dim
  capacity, stored = call.capacity, call.k_pages.dtype
  cuts = (0, dim) if latent in (None, dim) else (0, latent, dim)
  parts = tuple((a, b - a) for a, b in itertools.pairwise(cuts))
  pages, kv_heads, page_size, _ = call.k_pages.shape
  in_all = columns * heads // kv_heads
  numbers = _numbers(call.q.dtype, logical_dtype(stored))
  rows = max(power_of_two(in_all), _LEAST_ROWS)
  rows = min(rows, _most_rows(numbers, latent))
  tiles = -(-in_all // rows)
  widest = power_of_two(max(value_dim, *(size for _, size in parts)))
  block = _block(rows, widest, stored, numbers, latent is not None)
  programs = batch * kv_heads * tiles
  idle = programs < _PROGRAMS
  part = batch * columns * heads * value_dim * 4
  wanted = min(-(-capacity // _MOST_TOKENS), _PART_BYTES // part)
  splits = max(-(-_PROGRAMS // programs), wanted)
  splits = min(splits, _MOST_SPLITS, -(-capacity // block))
  return Sizes(
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
    least=1 if idle else -(-_LEAST_TOKENS // block),
    numbers=numbers,
  )


def _most_rows(numbers: np.dtype, latent: int | None) -> int:
  """Query rows that a program has registers for."""
  # float32 is multiplied outside the tensor cores, which takes more registers.
  if numbers.itemsize > 2:
    return _LEAST_ROWS
  return _MOST_ROWS if latent is None else _MOST_ROWS // 2


def _block(
  rows: int, widest: int, stored: np.dtype, numbers: np.dtype, latent: bool
) -> int:
  """Tokens of a step."""
  if latent:
    # A latent vector takes the space of a key and of a value.
    return max(2 * _BLOCK_BYTES // (widest * numbers.itemsize), 16)
  # 8-bit numbers are widened in registers; many rows leave few for that.
  few = rows == _LEAST_ROWS
  width = max(stored.itemsize, numbers.itemsize // (2 if few else 1))
  most = _MOST_BLOCK if few else _MOST_BLOCK // 2
  return min(max(_BLOCK_BYTES // (widest * width), 16), most)


def _numbers(query, stored) -> np.dtype:
  """The format of the products of queries and keys, and of weights and values.

  8-bit numbers are exact in all others; a pair of different wider formats is
  multiplied in float32.
  """
  query, stored = np.dtype(query), np.dtype(stored)
  if stored.itemsize == 1 or stored == query:
    return query
  return np.dtype(np.float32)


def _merge(
  parts: jax.Array,
  totals: jax.Array,
  sinks: jax.Array | None,
  real: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Merges parts and adds the sinks.

  Args:
    parts: float32[splits, B, T, H, Dv], normalised.
    totals: float32[2, splits, B, T, H], top and total of each part.
    sinks: float32[H], or None.
    real: bool[B, T, 1], False for padding, which has no sink.

  Returns:
    (float32[B, T, H, Dv], float32[B, T, H]).
  """
  chex.assert_shape(totals, (2, *parts.shape[:-1]))
  tops, sums = totals
  top = jnp.max(tops, axis=0)
  if sinks is not None:
    sinks = (sinks * online_softmax.LOG2_E)[None, None]
    top = jnp.maximum(top, sinks)
  weights = sums * jnp.exp2(tops - top[None])
  total = jnp.sum(weights, axis=0)
  if sinks is not None:
    total = total + jnp.exp2(sinks - top)
  safe = jnp.where(total == 0, jnp.float32(1), total)
  out = jnp.sum(parts * (weights / safe[None])[..., None], axis=0)
  lse = online_softmax.log_sum_exp(top, total)
  return out, jnp.where(real, lse, -jnp.inf)
