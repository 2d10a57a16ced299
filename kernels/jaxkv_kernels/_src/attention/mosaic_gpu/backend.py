"""Paged attention for Hopper GPUs: work lists and merges around the kernel.

A tile is a few queries of one row. A unit of work is a piece of the keys that a
tile sees. The kernel computes attention over each piece. `merge_pieces` merges
the results, weighted by the sums of their softmaxes. A row's pieces do not
depend on the lengths of other rows, and neither do its results.

Tests compile the kernel for an H200, and run it if there is a Hopper GPU. On a
CPU they interpret it, with race detection and with plain products in place of
tensor core products. The docstring of `attention` defines the letters.
"""

import math

import jax
import jax.numpy as jnp

from jaxkv_kernels._src import check
from jaxkv_kernels._src.attention import head_epilogue
from jaxkv_kernels._src.attention import query_tiles
from jaxkv_kernels._src.attention.mosaic_gpu import kernel
from jaxkv_kernels._src.attention.mosaic_gpu.work import RESULT
from jaxkv_kernels._src.attention.mosaic_gpu.work import ROWS
from jaxkv_kernels._src.attention.mosaic_gpu.work import TOKENS
from jaxkv_kernels._src.attention.mosaic_gpu.work import GpuStatic
from jaxkv_kernels._src.attention.mosaic_gpu.work import Unit
from jaxkv_kernels._src.attention.mosaic_gpu.work import scales_of_block
from jaxkv_kernels._src.attention.options import AttentionCall
from jaxkv_kernels._src.attention.options import CallOptions
from jaxkv_kernels._src.attention.query_packing import row_of
from jaxkv_kernels._src.attention.triton.merge import merge_pieces

# sm_90, Hopper: only these GPUs have the instruction `wgmma`.
_ARCHITECTURE = 90
# Thread blocks: one for each multiprocessor of an H100 or H200 SXM. Other GPUs
# share the work less evenly.
_BLOCKS = 132
# Thread blocks in the interpreter: few, so that each stream (see `kernel`) gets
# several units.
_INTERPRETED_BLOCKS = 2
# Units for each stream if contexts fill their tables. With fewer units, some
# streams would get much more work than others.
_UNITS_PER_STREAM = 4
# The minimum tokens of a piece, in total and per query row. Reading fewer
# tokens would cost less than writing and merging the output.
_MIN_TOKENS = 128
_MIN_TOKENS_PER_ROW = 16
# Bytes of shared memory of a thread block, less 2 KiB for barriers and sums.
_SHARED = 227 * 2**10 - 2 * 2**10
_MAX_STAGES = 4
_NO_WINDOW = 2**30

_FLOATS = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
_POOLS = (
  *_FLOATS,
  jnp.dtype(jnp.int8),
  jnp.dtype(jnp.float8_e4m3fn),
  jnp.dtype(jnp.float8_e5m2),
)


def attend(call: AttentionCall) -> tuple[jax.Array, jax.Array]:
  """Computes attention of a rectangle; see `choose.Backend`."""
  options = call.options
  k_pages = call.k_pages
  batch, columns, heads, _ = call.q.shape
  num_pages, kv_heads, _, dim = k_pages.shape
  per_kv_head = heads // kv_heads
  tile_size = min(columns, ROWS // per_kv_head)
  tiles = query_tiles.tile(call, tile_size=tile_size, multiple=8)
  static = _static(k_pages, per_kv_head, tile_size, options)
  trees, tree_first = _trees(options, tiles, batch, per_kv_head, tile_size)
  units, first_units, max_pieces = work_list(
    tiles, tree_first, call.capacity, static, options
  )
  rows = tiles.q.shape[2]
  out, totals = kernel.call(
    static,
    {
      "units": units,
      "begins": first_units,
      "table": jnp.clip(
        call.page_table + options.page_offset, 0, num_pages - 1
      ),
      "factor": head_epilogue.factors(options, heads, kv_heads)[::per_kv_head],
      "q": tiles.q.reshape(-1, rows, dim),
      "k_pages": k_pages.reshape(-1, *k_pages.shape[2:]),
      "v_pages": call.v_pages.reshape(-1, *call.v_pages.shape[2:]),
      **_token_scales(options),
      **_slopes(options, kv_heads, tile_size),
      **trees,
    },
    options.interpret,
  )
  out, lse = merge_pieces(
    out.reshape(-1, kv_heads, *out.shape[1:]),
    totals.reshape(-1, kv_heads, 2, ROWS),
    first_units,
    max_pieces=max_pieces,
    rows=tile_size * per_kv_head,
    interpret=options.interpret,
  )
  out = query_tiles.untile(out, call, tile_size)
  lse = query_tiles.untile(lse[..., None], call, tile_size)[..., 0]
  # The kernel also computes rows of padding; their results are arbitrary.
  is_query = call.is_query
  out = jnp.where(is_query[..., None, None], out, jnp.float32(0))
  lse = jnp.where(is_query[..., None], lse, -jnp.inf)
  return head_epilogue.finish(out, lse, is_query, options)


def unsupported(platform: str, call: AttentionCall) -> str | None:
  """Returns the reason why this backend does not support a call, if any."""
  q = call.q
  k_pages = call.k_pages
  options = call.options
  kv_heads, page_size = k_pages.shape[1:3]
  dims = k_pages.shape[3], call.v_pages.shape[3]
  pool = jnp.dtype(k_pages.dtype)
  gpus = check.architectures() - {_ARCHITECTURE}
  reasons = {
    f"`value_dim` must be None, got {options.value_dim}": (
      options.value_dim is not None
    ),
    f"the platform must be cuda, got {platform}": platform != "cuda",
    f"the GPU must be sm_{_ARCHITECTURE}, got sm_{min(gpus, default=0)}": (
      bool(gpus) and not options.interpret
    ),
    f"`k_pages` must be one of {', '.join(map(str, _POOLS))}, got {pool}": (
      pool not in _POOLS
    ),
    f"`q` must be of the dtype of k_pages, {pool}, or bfloat16 or float16 for"
    f" 8-bit pages, got {q.dtype}": (
      q.dtype != pool and (pool in _FLOATS or q.dtype not in _FLOATS)
    ),
    f"`k_pages` must have pages of 8, 16, 32 or a multiple of {TOKENS} tokens,"
    f" got {page_size}": page_size not in (8, 16, 32)
    and page_size % TOKENS != 0,
    "`k_pages` and `v_pages` must have equal head sizes of 64, 128, 192 or 256,"
    f" got {dims}": dims[0] != dims[1] or dims[0] not in (64, 128, 192, 256),
    # Sums of larger heads leave too few registers to widen 8-bit numbers.
    f"`k_pages` must have a head size of 64 or 128 for 8 bits, got {dims[0]}": (
      pool not in _FLOATS and dims[0] not in (64, 128)
    ),
    # A block would have eight pages, and copying them with their scales takes
    # too many registers.
    f"`k_pages` must have pages of 16, 32 or a multiple of {TOKENS} tokens"
    f" if tokens have scales, got {page_size}": (
      page_size == 8 and bool(_token_scales(options))
    ),
    f"`q` must have at most {ROWS} heads for each of the {kv_heads} K/V heads,"
    f" got {q.shape[-2]}": q.shape[-2] // kv_heads > ROWS,
  }
  return next((reason for reason, holds in reasons.items() if holds), None)


def _static(
  k_pages: jax.Array, per_kv_head: int, tile_size: int, options: CallOptions
) -> GpuStatic:
  """Returns sizes and choices of the kernel, for tiles of that size."""
  _, kv_heads, page_size, dim = k_pages.shape
  scaled_page_size = page_size if _token_scales(options) else None
  k_stages, v_stages = stages(dim, k_pages.dtype.itemsize, scaled_page_size)
  return GpuStatic(
    kv_heads=kv_heads,
    per_kv_head=per_kv_head,
    page_size=page_size,
    streams=streams(dim),
    k_stages=k_stages,
    v_stages=v_stages,
    blocks=_INTERPRETED_BLOCKS if options.interpret else _BLOCKS,
    # The rows of a tile with one query all see the same keys.
    causal=tile_size > 1,
    soft_cap=options.soft_cap,
    alibi=options.alibi_slopes is not None,
    tree=options.tree_mask is not None,
    interpreted=bool(options.interpret),
  )


def streams(dim: int) -> int:
  """Returns the number of streams of a thread block, which registers limit."""
  return 2 if dim <= 128 else 1


def stages(
  dim: int, itemsize: int = 2, scaled: int | None = None
) -> tuple[int, int]:
  """Returns the numbers of stages of the rings of keys and of values.

  Args:
    dim: D.
    itemsize: bytes of a number in the pools.
    scaled: S if tokens have scales, else None.
  """
  room = _SHARED // streams(dim) - ROWS * (dim * 2 + RESULT * 4)
  block = TOKENS * dim * itemsize
  if itemsize == 1:
    # Memory for a block of keys and one of values, widened to 16-bit numbers.
    room -= 2 * TOKENS * dim * 2
  if scaled is not None:
    # Memory for the factors of keys and of values, each aligned to 1,024 bytes.
    room -= 2 * 1024
    block += math.prod(scales_of_block(scaled)) * 4
  room //= block
  return min(_MAX_STAGES, room - room // 2), min(_MAX_STAGES, room // 2)


def work_list(
  tiles: query_tiles.Tiles,
  tree_first: jax.Array,
  capacity: int,
  static: GpuStatic,
  options: CallOptions,
) -> tuple[jax.Array, jax.Array, int]:
  """Cuts the keys that each tile sees into units of work.

  `tree_first`, int32[B], is the block in which each sequence's tree begins, and
  `capacity` is M * S.

  Returns:
    (int32[U, 8], `Unit`s; int32[Z + 1], the first unit of each tile, then the
    first idle unit; the maximum number of results of a tile).
  """
  num = tiles.q.shape[0]
  per_row = num // tree_first.shape[0]
  min_blocks, max_pieces = cuts(tiles, capacity, static)
  first_block = tiles.first // TOKENS
  blocks = jnp.maximum((tiles.end + TOKENS - 1) // TOKENS - first_block, 0)
  share = jnp.maximum((blocks + max_pieces - 1) // max_pieces, min_blocks)
  ends = jnp.cumsum((blocks + share - 1) // share)
  first_units = jnp.concatenate([jnp.zeros((1,), jnp.int32), ends])
  index = jnp.arange(num * max_pieces, dtype=jnp.int32)
  tile = jnp.minimum(row_of(ends, index), num - 1)
  piece = index - first_units[tile]
  # An idle unit begins past its tile's end. The minimum below makes it empty.
  first_key = (first_block[tile] + piece * share[tile]) * TOKENS
  end_key = first_key + share[tile] * TOKENS
  result = tile * max_pieces + piece
  window = _NO_WINDOW if options.window is None else options.window
  sequence = tile // per_row
  first_key = jnp.maximum(first_key, tiles.first[tile])
  end_key = jnp.minimum(end_key, tiles.end[tile])
  unit = Unit(
    sequence=sequence,
    tile=tile,
    # Idle units and pieces before the window are empty.
    first=jnp.where(first_key < end_key, first_key, 0),
    end=jnp.where(first_key < end_key, end_key, 0),
    position=tiles.position[tile],
    window=jnp.broadcast_to(jnp.asarray(window, jnp.int32), tile.shape),
    tree=tree_first[sequence],
    result=result,
  )
  return jnp.stack(unit, axis=1), first_units, max_pieces


def cuts(
  tiles: query_tiles.Tiles, capacity: int, static: GpuStatic
) -> tuple[int, int]:
  """Returns the minimum blocks of a piece, and the maximum pieces of a tile."""
  # The limits depend on shapes only, so a tile's pieces do not depend on the
  # lengths of other rows.
  contexts = tiles.q.shape[0] * static.kv_heads
  workers = static.blocks * static.streams
  max_pieces = -(-_UNITS_PER_STREAM * workers // contexts)
  # A piece writes Y rows of float32, and the merge reads them. So the minimum
  # grows with Y.
  rows = tiles.q.shape[2]
  min_blocks = -(-max(_MIN_TOKENS, _MIN_TOKENS_PER_ROW * rows) // TOKENS)
  blocks = -(-capacity // TOKENS)
  return min_blocks, min(max_pieces, -(-blocks // min_blocks))


def _trees(
  options: CallOptions,
  tiles: query_tiles.Tiles,
  batch: int,
  per_kv_head: int,
  tile_size: int,
) -> tuple[dict[str, jax.Array], jax.Array]:
  """Returns the masks of trees as inputs of the kernel.

  Returns:
    (the inputs "trees" and "shown" of `work.Refs`, {} without a tree mask;
    int32[B], the block in which each tree begins).
  """
  if options.tree_mask is None:
    return {}, jnp.zeros((batch,), jnp.int32)
  mask, first_block = query_tiles.trees(
    options,
    per_kv_head=per_kv_head,
    tile_size=tile_size,
    rows=ROWS,
    tokens=TOKENS,
  )
  blocks = jnp.arange(mask.shape[1], dtype=jnp.int32)[None]
  blocks = blocks + jnp.repeat(first_block, mask.shape[0] // batch)[:, None]
  token = jnp.arange(TOKENS, dtype=jnp.int32)[None, None, None]
  key = blocks[:, :, None, None] * TOKENS + token
  first_key, end_key = (tiles.reach[:, None, :, i, None] for i in (0, 1))
  visible = (
    (key >= first_key) & (key < end_key) & (mask[:, :, : end_key.shape[2]] != 0)
  )
  shown = jnp.any(visible, axis=2).astype(jnp.int32)
  return {"trees": mask, "shown": shown}, first_block


def _token_scales(options: CallOptions) -> dict[str, jax.Array]:
  """Returns scales of tokens as float32[N * K, S], if there are any."""
  scales = {"k_scale": options.k_scale, "v_scale": options.v_scale}
  rows = {
    name: scale.reshape(-1, scale.shape[2])
    for name, scale in scales.items()
    if scale is not None and scale.ndim == 3
  }
  # Before jax 0.11 a copy of a short row takes two rows, so two must exist.
  return {
    name: jnp.pad(scale, ((0, max(0, 2 - len(scale))), (0, 0)))
    for name, scale in rows.items()
  }


def _slopes(
  options: CallOptions, kv_heads: int, tile_size: int
) -> dict[str, jax.Array]:
  """Returns the ALiBi slopes of a tile's rows, float32[K, 64], if any."""
  if options.alibi_slopes is None:
    return {}
  slopes = options.alibi_slopes.astype(jnp.float32).reshape(kv_heads, -1)
  slopes = jnp.tile(slopes, (1, tile_size))
  padding = ROWS - slopes.shape[1]
  return {"slopes": jnp.pad(slopes, ((0, 0), (0, padding)))}
