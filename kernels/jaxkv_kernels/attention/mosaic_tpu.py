"""Paged attention for TPUs: tiles of queries around the kernel.

Interpreted on a CPU and compiled for v5e, v6e and v7x; not timed.
"""

import jax
import jax.numpy as jnp

from jaxkv_kernels.attention import mosaic_tpu_kernel
from jaxkv_kernels.attention import query_tiles
from jaxkv_kernels.attention import whole_heads
from jaxkv_kernels.attention.mosaic_tpu_kernel import BUFFERS
from jaxkv_kernels.attention.mosaic_tpu_kernel import Static
from jaxkv_kernels.attention.options import Options

# Query rows of a tile: the matrix unit takes 128 at once.
_ROWS = 128
# Tokens of a block, where the pages of one fit.
_TOKENS = 256
# What the ring may take of the 64 MiB of the smallest memory (v7x).
_RING_BYTES = 24 * 2**20

_FLOATS = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16))
_BYTES = (
  jnp.dtype(jnp.int8),
  jnp.dtype(jnp.float8_e4m3fn),
  jnp.dtype(jnp.float8_e5m2),
)


def attend(
  q: jax.Array,
  k_pages: jax.Array,
  v_pages: jax.Array,
  page_table: jax.Array,
  starts: jax.Array,
  counts: jax.Array,
  options: Options,
) -> tuple[jax.Array, jax.Array]:
  """Attention of a rectangle: float32[B, T, H, Dv], float32[B, T, H]."""
  batch, columns, heads, _ = q.shape
  num_pages, kv_heads, page_size = k_pages.shape[:3]
  group = heads // kv_heads
  capacity = page_table.shape[1] * page_size
  size = min(columns, max(1, _ROWS // group))
  reach = query_tiles.reach(starts, counts, columns, capacity, options.window)
  # Whole sublanes, of pairs of rows where these are 16 bits.
  tiles = query_tiles.tile(q, reach, kv_heads=kv_heads, size=size, multiple=16)
  static = Static(
    tiles=-(-columns // size),
    pages=_pages_per_block(k_pages, v_pages),
    page_size=page_size,
    soft_cap=options.soft_cap,
    dtype=_compute_dtype(q, k_pages),
  )
  table = jnp.clip(page_table + options.page_offset, 0, num_pages - 1)
  inputs = {
    "table": table[:, None],
    "next_table": table[:, None],
    "q": tiles.q,
    "reach": tiles.reach,
    "k_pages": k_pages,
    "v_pages": v_pages,
    **_of_heads(options, heads, kv_heads, size, tiles.q.shape[2]),
    **_of_tokens(options, table, static),
  }
  if options.tree_mask is not None:
    inputs["tree"], inputs["tree_first"] = query_tiles.trees(
      options,
      group=group,
      size=size,
      rows=tiles.q.shape[2],
      tokens=static.tokens,
    )
  out, lse = mosaic_tpu_kernel.call(
    static, tiles.first, tiles.end, inputs, options.interpret
  )
  out = query_tiles.untile(out, batch, columns, heads, size)
  lse = query_tiles.untile(lse, batch, columns, heads, size)[..., 0]
  seen = jnp.arange(columns, dtype=jnp.int32)[None] < counts[:, None]
  return whole_heads.finish(out, lse, seen, options)


def unsupported(
  platform: str,
  q: jax.Array,
  k_pages: jax.Array,
  v_pages: jax.Array,
  options: Options,
) -> str | None:
  """Why this backend does not serve a call; None if it does."""
  size = k_pages.shape[2]
  dims = k_pages.shape[3], v_pages.shape[3]
  pool = jnp.dtype(k_pages.dtype)
  block = _pages_per_block(k_pages, v_pages) * _page_bytes(k_pages, v_pages)
  reasons = {
    f"platform={platform!r}; this backend is for tpu": platform != "tpu",
    f"q is {q.dtype}; float32 and bfloat16 are supported": (
      q.dtype not in _FLOATS
    ),
    f"k_pages is {pool}; float32, bfloat16, int8, float8_e4m3fn and"
    " float8_e5m2 are supported": pool not in (*_FLOATS, *_BYTES),
    f"k_pages has pages of {size} tokens; multiples of 8 are supported": (
      size % 8 != 0
    ),
    f"k_pages and v_pages have head sizes {dims}; multiples of 128 are"
    " supported": any(dim % 128 for dim in dims),
    f"k_pages and v_pages have pages of {_page_bytes(k_pages, v_pages)} bytes"
    f" together; up to {_RING_BYTES // BUFFERS} are supported": (
      block * BUFFERS > _RING_BYTES
    ),
  }
  return next((reason for reason, holds in reasons.items() if holds), None)


def _of_heads(
  options: Options, heads: int, kv_heads: int, size: int, rows: int
) -> dict[str, jax.Array]:
  """What is one number per query head, as float32[K, R, 1]."""

  def spread(values: jax.Array) -> jax.Array:
    values = jnp.tile(values.reshape(kv_heads, -1), (1, size))
    idle = rows - values.shape[1]
    return jnp.pad(values, ((0, 0), (0, idle)))[..., None]

  result = {"factor": spread(whole_heads.factors(options, heads, kv_heads))}
  if options.alibi_slopes is not None:
    result["slopes"] = spread(options.alibi_slopes.astype(jnp.float32))
  return result


def _of_tokens(
  options: Options, table: jax.Array, static: Static
) -> dict[str, jax.Array]:
  """Scales of tokens, as float32[B, N, K, C] for the N blocks of the table.

  They are a thirtieth of the pages or less, so they are gathered beforehand:
  the kernel's copies cannot place numbers within a row of 128.
  """
  result = {}
  for name in ("k_scale", "v_scale"):
    scale = getattr(options, name)
    if scale is None or scale.ndim == 1:
      continue
    spare = -table.shape[1] % static.pages
    ids = jnp.pad(table, ((0, 0), (0, spare)))
    batch, kv_heads = ids.shape[0], scale.shape[1]
    # Long rows: a TPU would first lay out short ones anew, all of them.
    tokens = scale.reshape(scale.shape[0], -1)[ids]
    tokens = tokens.reshape(batch, -1, kv_heads, static.page_size)
    tokens = tokens.swapaxes(1, 2)  # [B, K, M, S]
    tokens = tokens.reshape(batch, kv_heads, -1, static.tokens)
    result[name] = tokens.swapaxes(1, 2).astype(jnp.float32)
  return result


def _page_bytes(k_pages: jax.Array, v_pages: jax.Array) -> int:
  """Bytes of one page, keys and values."""
  return sum(
    pages.size // pages.shape[0] * pages.dtype.itemsize
    for pages in (k_pages, v_pages)
  )


def _pages_per_block(k_pages: jax.Array, v_pages: jax.Array) -> int:
  """As many as make a block of the wanted size, if the ring holds them."""
  fit = _RING_BYTES // (BUFFERS * _page_bytes(k_pages, v_pages))
  return max(1, min(_TOKENS // k_pages.shape[2], fit))


def _compute_dtype(q: jax.Array, k_pages: jax.Array) -> jnp.dtype:
  """bfloat16 holds 8-bit numbers exactly; float32 queries ask for more."""
  if jnp.dtype(jnp.float32) in (q.dtype, k_pages.dtype):
    return jnp.dtype(jnp.float32)
  return jnp.dtype(jnp.bfloat16)
