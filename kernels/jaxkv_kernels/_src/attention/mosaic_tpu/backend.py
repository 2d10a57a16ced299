"""Paged attention for TPUs: cuts queries into tiles and calls the kernel.

Tests interpret the kernel on a CPU and compile it for v5e, v6e and v7x. It has
not been timed. The docstring of the package `attention` defines the letters.
"""

import jax
import jax.numpy as jnp

from jaxkv_kernels._src.attention import head_epilogue
from jaxkv_kernels._src.attention import query_tiles
from jaxkv_kernels._src.attention.mosaic_tpu import kernel
from jaxkv_kernels._src.attention.mosaic_tpu.kernel import BUFFERS
from jaxkv_kernels._src.attention.mosaic_tpu.kernel import MEMORY_BYTES
from jaxkv_kernels._src.attention.mosaic_tpu.kernel import TpuStatic
from jaxkv_kernels._src.attention.options import AttentionCall
from jaxkv_kernels._src.attention.options import CallOptions

# Query rows of a tile: the matrix unit of a v5e has 128. A multiple of 16 rows
# fills registers, whose 8 sublanes have two 16-bit rows each.
_ROWS = 128
_MULTIPLE = 16
# Lanes of a vector register. An array [Y, 1] takes the memory of [Y, 128].
_LANES = 128
# The maximum number of tokens of a block, unless one page has more.
_TOKENS = 256
# The maximum number of bytes of the ring of K/V buffers; VMEM has 64 MiB (v7x).
_RING_BYTES = 24 * 2**20

_FLOATS = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16))
_BYTES = (
  jnp.dtype(jnp.int8),
  jnp.dtype(jnp.float8_e4m3fn),
  jnp.dtype(jnp.float8_e5m2),
)


def attend(call: AttentionCall) -> tuple[jax.Array, jax.Array]:
  """Computes attention of queries [B, T, H, D]; see `choose.Backend`."""
  options = call.options
  k_pages = call.k_pages
  columns, heads = call.q.shape[1:3]
  num_pages, kv_heads, page_size = k_pages.shape[:3]
  tile_size = _queries(call)
  tiles = query_tiles.tile(call, tile_size=tile_size, multiple=_MULTIPLE)
  static = TpuStatic(
    tiles=-(-columns // tile_size),
    pages=_pages_per_block(k_pages, call.v_pages),
    page_size=page_size,
    soft_cap=options.soft_cap,
    dtype=_compute_dtype(call.q, k_pages),
  )
  # Page ids are clipped here, because the kernel copies pages unchecked.
  table = jnp.clip(call.page_table + options.page_offset, 0, num_pages - 1)
  inputs = {
    # Passed twice, because a grid step also reads the next step's page ids.
    "table": table[:, None],
    "next_table": table[:, None],
    "q": tiles.q,
    "reach": tiles.reach,
    "k_pages": k_pages,
    "v_pages": call.v_pages,
    **_per_head(options, heads, kv_heads, tile_size, tiles.q.shape[2]),
    **_token_scales(options, table, static),
  }
  if options.tree_mask is not None:
    inputs["tree"], inputs["tree_first"] = query_tiles.trees(
      options,
      per_kv_head=heads // kv_heads,
      tile_size=tile_size,
      rows=tiles.q.shape[2],
      tokens=static.tokens,
    )
  out, lse = kernel.call(
    static, tiles.first, tiles.end, inputs, options.interpret
  )
  out = query_tiles.untile(out, call, tile_size)
  lse = query_tiles.untile(lse, call, tile_size)[..., 0]
  return head_epilogue.finish(out, lse, call.is_query, options)


def unsupported(platform: str, call: AttentionCall) -> str | None:
  """Returns the reason why this backend does not support a call, if any."""
  q = call.q
  k_pages = call.k_pages
  v_pages = call.v_pages
  page_size = k_pages.shape[2]
  dims = k_pages.shape[3], v_pages.shape[3]
  pool = jnp.dtype(k_pages.dtype)
  block = _pages_per_block(k_pages, v_pages) * _page_bytes(k_pages, v_pages)
  min_memory = _memory(1, call)
  reasons = {
    f"`value_dim` must be None, got {call.options.value_dim}": (
      call.options.value_dim is not None
    ),
    f"the platform must be tpu, got {platform}": platform != "tpu",
    f"`q` must be float32 or bfloat16, got {q.dtype}": q.dtype not in _FLOATS,
    "`k_pages` must be float32, bfloat16, int8, float8_e4m3fn or float8_e5m2,"
    f" got {pool}": pool not in (*_FLOATS, *_BYTES),
    f"`k_pages` must have pages of a multiple of 8 tokens, got {page_size}": (
      page_size % 8 != 0
    ),
    # v7x copies 16-bit numbers in whole tiles of 16 tokens.
    "`k_pages` must have pages of 8 or a multiple of 16 tokens for 16-bit"
    f" numbers, got {page_size}": pool.itemsize == 2
    and page_size > 8
    and page_size % 16 != 0,
    "`k_pages` and `v_pages` must have head sizes that are multiples of 128,"
    f" got {dims}": any(dim % 128 for dim in dims),
    "`k_pages` and `v_pages` must have pages of at most"
    f" {_RING_BYTES // BUFFERS} bytes together, got"
    f" {_page_bytes(k_pages, v_pages)}": block * BUFFERS > _RING_BYTES,
    "`q` must have few enough heads that the kernel takes at most"
    f" {MEMORY_BYTES} bytes, got {q.shape[-2]} heads for {k_pages.shape[1]} K/V"
    f" heads, with which it takes {min_memory}": min_memory > MEMORY_BYTES,
  }
  return next((reason for reason, holds in reasons.items() if holds), None)


def _per_head(
  options: CallOptions, heads: int, kv_heads: int, tile_size: int, rows: int
) -> dict[str, jax.Array]:
  """Returns per-head options for the rows of a tile, as float32[K, Y, 1]."""

  def spread(values: jax.Array) -> jax.Array:
    values = jnp.tile(values.reshape(kv_heads, -1), (1, tile_size))
    padding = rows - values.shape[1]
    return jnp.pad(values, ((0, 0), (0, padding)))[..., None]

  result = {"factor": spread(head_epilogue.factors(options, heads, kv_heads))}
  if options.alibi_slopes is not None:
    result["slopes"] = spread(options.alibi_slopes.astype(jnp.float32))
  return result


def _token_scales(
  options: CallOptions, table: jax.Array, static: TpuStatic
) -> dict[str, jax.Array]:
  """Returns scales of tokens, as float32[B, J, K, A] for J blocks of a row.

  Both arrays take 8 * K bytes for each token of the page table's capacity. This
  can be more than the pools take, if the table is long and the pools are small.
  """
  # Gathered here, because the kernel's copies cannot write into part of a row
  # of 128 numbers.
  result = {}
  for name in ("k_scale", "v_scale"):
    scale = getattr(options, name)
    if scale is None or scale.ndim == 1:
      continue
    padding = -table.shape[1] % static.pages
    ids = jnp.pad(table, ((0, 0), (0, padding)))
    batch = ids.shape[0]
    # Flattened, because XLA would copy `scale` to gather its short last axis.
    tokens = scale.reshape(scale.shape[0], -1)[ids]
    tokens = tokens.reshape(batch, -1, scale.shape[1], static.page_size)
    tokens = tokens.swapaxes(1, 2)  # [B, K, M, S]
    tokens = tokens.reshape(batch, scale.shape[1], -1, static.tokens)
    result[name] = tokens.swapaxes(1, 2).astype(jnp.float32)
  return result


def _queries(call: AttentionCall) -> int:
  """Returns queries per tile: enough for the matrix unit, if they fit VMEM."""
  columns, heads = call.q.shape[1:3]
  tile_size = min(columns, max(1, _ROWS * call.k_pages.shape[1] // heads))
  while tile_size > 1 and _memory(tile_size, call) > MEMORY_BYTES:
    tile_size = -(-tile_size // 2)
  return tile_size


def _memory(tile_size: int, call: AttentionCall) -> int:
  """Returns an estimate of the VMEM that tiles of `tile_size` queries take."""
  k_pages = call.k_pages
  v_pages = call.v_pages
  kv_heads, page_size, dim = k_pages.shape[1:]
  value_dim = v_pages.shape[3]
  pages = _pages_per_block(k_pages, v_pages)
  tokens = pages * page_size
  ring = BUFFERS * pages * _page_bytes(k_pages, v_pages)
  values = kv_heads * tokens * value_dim * 4
  # Double-buffered for each row: query and output; log-sum-exp, factor, slope.
  # Single: the maximum and the sum of the softmax; logits and weights.
  row = 2 * (dim * call.q.dtype.itemsize + value_dim * 4)
  row += (2 * 3 + 2) * _LANES * 4 + 2 * tokens * 4
  tree = 0
  mask = call.options.tree_mask
  if mask is not None:
    tree = 2 * (mask.shape[-1] + 2 * tokens)
  rows = tile_size * (call.q.shape[-2] // kv_heads)
  rows += -rows % _MULTIPLE
  return ring + values + rows * (kv_heads * row + tree)


def _page_bytes(k_pages: jax.Array, v_pages: jax.Array) -> int:
  """Returns the bytes of one page of keys and one of values."""
  return sum(
    pages.size // pages.shape[0] * pages.dtype.itemsize
    for pages in (k_pages, v_pages)
  )


def _pages_per_block(k_pages: jax.Array, v_pages: jax.Array) -> int:
  """Returns the number of pages of a block."""
  # A block takes memory in each stage of the ring. Its values also take memory
  # in float32.
  values = 4 * v_pages.size // v_pages.shape[0]
  fit = _RING_BYTES // (BUFFERS * _page_bytes(k_pages, v_pages) + values)
  return max(1, min(_TOKENS // k_pages.shape[2], fit))


def _compute_dtype(q: jax.Array, k_pages: jax.Array) -> jnp.dtype:
  """Returns the dtype of products: float32 if q or pages are float32."""
  if jnp.dtype(jnp.float32) in (q.dtype, k_pages.dtype):
    return jnp.dtype(jnp.float32)
  # Also for 8-bit pages, because bfloat16 holds every 8-bit number exactly.
  return jnp.dtype(jnp.bfloat16)
