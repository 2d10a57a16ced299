"""Paged attention in Pallas-Triton, for NVIDIA GPUs from sm_80.

A program takes up to 64 of the query rows that share a K/V head, as one tile
for the tensor cores, and a part of their keys. It reads keys and values token
by token through the page table, so any page size will do, and none twice.
Where there would be too few programs, or one would have too much to do, the
keys of a row are split; every part is normalised, in float32, and the parts
are put together by the sums of their softmaxes.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv_kernels._src import check
from jaxkv_kernels._src.attention import online_softmax
from jaxkv_kernels._src.attention import query_tiles
from jaxkv_kernels._src.attention.options import CallOptions
from jaxkv_kernels._src.attention.triton import compat
from jaxkv_kernels._src.attention.triton.kernel import Sizes
from jaxkv_kernels._src.attention.triton.kernel import attention_kernel
from jaxkv_kernels._src.attention.triton.kernel import power_of_two
from jaxkv_kernels._src.formats import logical_dtype

# Query rows of a program: the least a tensor core multiplies, and the most
# whose sums stay in registers.
_LEAST_ROWS, _MOST_ROWS = 16, 64
# Bytes of K, and of V, in a block: three stages of both leave room for two
# programs in a core's 227 KB.
_BLOCK_BYTES = 16 * 1024
_MOST_BLOCK = 128
# Programs wanted at once: two on each of an H100's or H200's 132 cores.
_PROGRAMS = 264
_MOST_SPLITS = 64
# Tokens of a program: a long row beside short ones is split so that they end
# together; less than the least takes as long to begin as to do.
_MOST_TOKENS, _LEAST_TOKENS = 4096, 1024
# Bytes that the parts may take, float32 copies of the output as they are, if
# there are programs enough without them.
_PART_BYTES = 64 * 2**20
_LARGEST_HEAD = 256
# Elements of a latent vector that are its value, and those behind them.
_LARGEST_VALUE, _LARGEST_BEHIND = 512, 64


def attend(
  q: jax.Array,
  k_pages: jax.Array,
  v_pages: jax.Array,
  page_table: jax.Array,
  starts: jax.Array,
  counts: jax.Array,
  options: CallOptions,
) -> tuple[jax.Array, jax.Array]:
  """A rectangle of queries: float32[B, T, H, Dv], float32[B, T, H]."""
  value_dim = options.value_dim
  sizes = _sizes(q, k_pages, v_pages, page_table, value_dim)
  window = options.window
  inputs = {
    "q": q,
    "k": k_pages,
    "v": v_pages if value_dim is None else None,
    "table": page_table,
    "starts": starts,
    "counts": counts,
    "page_offset": options.page_offset.reshape(1),
    "scale": jnp.asarray(options.scale, jnp.float32).reshape(1),
    "window": _one_int32(window),
    "slopes": options.alibi_slopes,
    "k_scale": options.k_scale,
    "v_scale": options.v_scale,
    # Triton has no pointers to single bits.
    "tree": _as_int8(options.tree_mask),
    "tree_starts": options.tree_starts,
  }
  few = sizes.rows == _LEAST_ROWS and value_dim is None
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
    # Twice the threads for twice the sums: none spills its registers.
    num_warps=4 if few else 8,
    num_stages=3,
    interpret=options.interpret,
  )
  column = jnp.arange(sizes.columns, dtype=jnp.int32)
  real = (column[None] < counts[:, None])[:, :, None]
  return _together(parts, totals, options.sinks, real)


def unsupported(
  platform: str,
  q: jax.Array,
  k_pages: jax.Array,
  v_pages: jax.Array,
  options: CallOptions,
) -> str | None:
  """Why it does not serve a call; None if it does."""
  if platform != "cuda":
    return f"the platform is {platform}; supported is cuda"
  reason = _too_large(q, k_pages, v_pages, options.value_dim)
  if reason is not None:
    return reason
  e4m3 = logical_dtype(k_pages.dtype).name == "float8_e4m3fn"
  least = 89 if e4m3 else 80
  oldest = min(check.architectures(), default=least)
  if oldest < least and not options.interpret:
    return (
      f"k_pages is {k_pages.dtype} and the GPU is sm_{oldest}; supported is"
      f" sm_{least} and later"
    )
  return None


def _too_large(
  q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, latent: int | None
) -> str | None:
  """Which vectors or pools are; None if none are."""
  if latent is not None:
    behind = q.shape[-1] - latent
    if latent > _LARGEST_VALUE or behind > _LARGEST_BEHIND:
      return (
        f"value_dim is {latent} and {behind} elements follow; supported are up"
        f" to {_LARGEST_VALUE} and {_LARGEST_BEHIND}"
      )
  for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
    if latent is None and pages.shape[3] > _LARGEST_HEAD:
      return (
        f"{name} has head size {pages.shape[3]}; supported is up to"
        f" {_LARGEST_HEAD}"
      )
    # Pallas-Triton counts elements in 32 bits, with a sign, up to 4 GiB.
    if pages.dtype.itemsize == 1 and 2**31 < pages.size <= 2**32:
      return (
        f"{name} has {pages.size} elements of 8 bits; supported are up to 2^31,"
        " and more than 2^32"
      )
  return None


def _one_int32(value: jax.Array | int | None) -> jax.Array | None:
  if value is None:
    return None
  return jnp.asarray(value, jnp.int32).reshape(1)


def _as_int8(mask: jax.Array | None) -> jax.Array | None:
  return None if mask is None else mask.astype(jnp.int8)


def _sizes(
  q: jax.Array,
  k_pages: jax.Array,
  v_pages: jax.Array,
  page_table: jax.Array,
  latent: int | None = None,
) -> Sizes:
  """How the work is cut, from shapes alone; `latent` is `value_dim`."""
  batch, columns, heads, dim = q.shape
  value_dim = latent or v_pages.shape[3]
  cuts = (0, dim) if latent in (None, dim) else (0, latent, dim)
  parts = tuple((a, b - a) for a, b in itertools.pairwise(cuts))
  pages, kv_heads, page_size, _ = k_pages.shape
  capacity = page_table.shape[1] * page_size
  in_all = columns * heads // kv_heads
  numbers = _numbers(q.dtype, logical_dtype(k_pages.dtype))
  rows = max(power_of_two(in_all), _LEAST_ROWS)
  rows = min(rows, _most_rows(numbers, latent))
  tiles = -(-in_all // rows)
  widest = power_of_two(max(value_dim, *(size for _, size in parts)))
  block = _block(rows, widest, k_pages.dtype, numbers, latent is not None)
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
  # float32 is multiplied outside the tensor cores, in many more registers.
  if numbers.itemsize > 2:
    return _LEAST_ROWS
  return _MOST_ROWS if latent is None else _MOST_ROWS // 2


def _block(
  rows: int, widest: int, stored: np.dtype, numbers: np.dtype, latent: bool
) -> int:
  """Tokens of a step."""
  if latent:
    # What is key and value at once takes the room of both.
    return max(2 * _BLOCK_BYTES // (widest * numbers.itemsize), 16)
  # Numbers of 8 bits widen in registers, of which many rows leave few.
  few = rows == _LEAST_ROWS
  width = max(stored.itemsize, numbers.itemsize // (2 if few else 1))
  most = _MOST_BLOCK if few else _MOST_BLOCK // 2
  return min(max(_BLOCK_BYTES // (widest * width), 16), most)


def _numbers(query, stored) -> np.dtype:
  """The format in which queries meet keys, and weights values.

  8-bit numbers are exact in all others; a pair of different wider formats
  meets in float32.
  """
  query, stored = np.dtype(query), np.dtype(stored)
  if stored.itemsize == 1 or stored == query:
    return query
  return np.dtype(np.float32)


def _together(
  parts: jax.Array,
  totals: jax.Array,
  sinks: jax.Array | None,
  real: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Merges parts [N, B, T, H, Dv]; then the sinks join in.

  `totals` float32[2, N, B, T, H] are the kernel's. `real` bool[B, T, 1] says
  which are queries: a sink adds to one that sees no key, but not to padding.
  """
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
