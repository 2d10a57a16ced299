"""Paged attention for Hopper GPUs: work lists and merges around the kernel.

A tile of queries attends to its keys in pieces, which are items of work for
`mosaic_gpu.kernel`; their results are merged by the sums of their softmaxes.
Pieces follow from a row's own length, so a row's result does not depend on its
neighbours, unless a plan says otherwise.

Compiled for an H200, not run on one. A CPU interprets all of it, with race
detection, but for the products on tensor cores, which are plain ones there.
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
from jaxkv_kernels._src.attention.mosaic_gpu.work import Item
from jaxkv_kernels._src.attention.mosaic_gpu.work import scales_of_block
from jaxkv_kernels._src.attention.options import CallOptions
from jaxkv_kernels._src.attention.query_packing import row_of
from jaxkv_kernels._src.attention.triton.merge import merge_pieces

# Hopper's, which alone has these products on the tensor cores.
_ARCHITECTURE = 90
# Multiprocessors of an H100 or H200 SXM. Other numbers work too, less evenly.
_BLOCKS = 132
# As many as show streams taking turns.
_INTERPRETED_BLOCKS = 2
# Items for each stream where contexts fill their tables: enough to be even.
_ITEMS_PER_STREAM = 4
# Tokens. A shorter piece spends more on its output than it saves in waiting.
_SHORTEST = 128
_SHORTEST_PER_ROW = 16
# Shared memory of a block of threads, less what barriers and sums take.
_SHARED = 227 * 2**10 - 2 * 2**10
_MOST_STAGES = 4
_NO_WINDOW = 2**30

_FLOATS = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
_POOLS = (
  *_FLOATS,
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
  options: CallOptions,
) -> tuple[jax.Array, jax.Array]:
  """Attention of a rectangle: float32[B, T, H, Dv], float32[B, T, H]."""
  batch, columns, heads, _ = q.shape
  num_pages, kv_heads, page_size, dim = k_pages.shape
  group = heads // kv_heads
  capacity = page_table.shape[1] * page_size
  size = min(columns, ROWS // group)
  reach = query_tiles.reach(starts, counts, columns, capacity, options.window)
  tiles = query_tiles.tile(q, reach, kv_heads=kv_heads, size=size, multiple=8)
  static = _static(k_pages, group, size, options)
  trees, tree_first = _trees(options, tiles, batch, group, size)
  items, begins, most = work_list(tiles, tree_first, capacity, static, options)
  rows = tiles.q.shape[2]
  out, totals = kernel.call(
    static,
    {
      "items": items,
      "begins": begins,
      "table": jnp.clip(page_table + options.page_offset, 0, num_pages - 1),
      "factor": head_epilogue.factors(options, heads, kv_heads)[::group],
      "q": tiles.q.reshape(-1, rows, dim),
      "k_pages": k_pages.reshape(-1, *k_pages.shape[2:]),
      "v_pages": v_pages.reshape(-1, *v_pages.shape[2:]),
      **_token_scales(options),
      **_slopes(options, kv_heads, size),
      **trees,
    },
    options.interpret,
  )
  out, lse = merge_pieces(
    out.reshape(-1, kv_heads, *out.shape[1:]),
    totals.reshape(-1, kv_heads, 2, ROWS),
    begins,
    most=most,
    rows=size * group,
    interpret=options.interpret,
  )
  out = query_tiles.untile(out, batch, columns, heads, size)
  lse = query_tiles.untile(lse[..., None], batch, columns, heads, size)[..., 0]
  seen = jnp.arange(columns, dtype=jnp.int32)[None] < counts[:, None]
  out = jnp.where(seen[..., None, None], out, jnp.float32(0))
  lse = jnp.where(seen[..., None], lse, -jnp.inf)
  return head_epilogue.finish(out, lse, seen, options)


def unsupported(
  platform: str,
  q: jax.Array,
  k_pages: jax.Array,
  v_pages: jax.Array,
  options: CallOptions,
) -> str | None:
  """Why this backend does not serve a call; None if it does."""
  kv_heads, size = k_pages.shape[1:3]
  dims = k_pages.shape[3], v_pages.shape[3]
  pool = jnp.dtype(k_pages.dtype)
  others = check.architectures() - {_ARCHITECTURE}
  reasons = {
    "value_dim is given; keys and values of two pools are supported": (
      options.value_dim is not None
    ),
    f"platform={platform!r}; this backend is for cuda": platform != "cuda",
    f"a GPU is sm_{min(others, default=0)}; this backend is for"
    f" sm_{_ARCHITECTURE}": bool(others) and not options.interpret,
    f"k_pages is {pool}; {', '.join(map(str, _POOLS))} are supported": (
      pool not in _POOLS
    ),
    f"q is {q.dtype} and k_pages {pool}; equal dtypes are supported, and"
    " bfloat16 or float16 beside 8 bits": (
      q.dtype != pool and (pool in _FLOATS or q.dtype not in _FLOATS)
    ),
    f"k_pages has pages of {size} tokens; 8, 16, 32 and multiples of {TOKENS}"
    " are supported": size not in (8, 16, 32) and size % TOKENS != 0,
    f"k_pages and v_pages have head sizes {dims}; equal ones of 64, 128, 192"
    " and 256 are supported": (
      dims[0] != dims[1] or dims[0] not in (64, 128, 192, 256)
    ),
    # Sums of more columns leave no registers to widen numbers in: some spill.
    f"k_pages is {pool} and has head size {dims[0]}; 64 and 128 are supported"
    " for 8 bits": pool not in _FLOATS and dims[0] not in (64, 128),
    # Eight copies of scales beside those of pages have too few registers too.
    f"k_pages has pages of {size} tokens that have scales; 16, 32 and multiples"
    f" of {TOKENS} are supported": size == 8 and bool(_token_scales(options)),
    f"q has {q.shape[-2]} heads, {kv_heads} of keys; up to {ROWS} for each of"
    " these are supported": q.shape[-2] // kv_heads > ROWS,
  }
  return next((reason for reason, holds in reasons.items() if holds), None)


def at_once(k_pages: jax.Array) -> int:
  """Items that a GPU works on at once; see `backends.decode_workers`."""
  return _BLOCKS * streams(k_pages.shape[3])


def _static(
  k_pages: jax.Array, group: int, size: int, options: CallOptions
) -> GpuStatic:
  """What the kernel is told, for tiles of `size` queries."""
  _, kv_heads, page_size, dim = k_pages.shape
  scaled = page_size if _token_scales(options) else None
  k_stages, v_stages = stages(dim, k_pages.dtype.itemsize, scaled)
  return GpuStatic(
    kv_heads=kv_heads,
    group=group,
    page_size=page_size,
    streams=streams(dim),
    k_stages=k_stages,
    v_stages=v_stages,
    blocks=_INTERPRETED_BLOCKS if options.interpret else _BLOCKS,
    causal=size > 1,
    soft_cap=options.soft_cap,
    alibi=options.alibi_slopes is not None,
    tree=options.tree_mask is not None,
    interpreted=bool(options.interpret),
  )


def streams(dim: int) -> int:
  """Streams of a block of threads: as many as its registers serve."""
  return 2 if dim <= 128 else 1


def stages(
  dim: int, itemsize: int = 2, scaled: int | None = None
) -> tuple[int, int]:
  """Blocks of keys and of values in their rings: what shared memory holds.

  Args:
    dim: D.
    itemsize: bytes of a number in the pools.
    scaled: S, if tokens have scales.
  """
  room = _SHARED // streams(dim) - ROWS * (dim * 2 + RESULT * 4)
  block = TOKENS * dim * itemsize
  if itemsize == 1:
    # One block of each as 16-bit numbers.
    room -= 2 * TOKENS * dim * 2
  if scaled is not None:
    # Those of a block in one piece, and what all begins at: 1,024 bytes.
    room -= 2 * 1024
    block += math.prod(scales_of_block(scaled)) * 4
  room //= block
  return min(_MOST_STAGES, room - room // 2), min(_MOST_STAGES, room // 2)


def work_list(
  tiles: query_tiles.Tiles,
  tree_first: jax.Array,
  capacity: int,
  static: GpuStatic,
  options: CallOptions,
) -> tuple[jax.Array, jax.Array, int | None]:
  """Cuts what every tile sees into items of work.

  Args:
    tiles: of all sequences.
    tree_first: block in which a sequence's tree begins. int32[B]
    capacity: tokens that a row of the page table holds.
    static: of the kernel.
    options: of the call.

  Returns:
    (int32[I, 8] of `Item`s, int32[W + 1] where each tile's items begin, the
    places for results that a tile has or None if they are packed). Items from
    the last beginning on are idle.
  """
  num = tiles.q.shape[0]
  per_row = num // tree_first.shape[0]
  if options.plan is not None and per_row == 1 and not static.causal:
    plan = options.plan
    tile, begins, most = plan.row, plan.begins, None
    first, end = plan.first, plan.end
    where = jnp.arange(tile.shape[0], dtype=jnp.int32)
  else:
    least, most = cuts(tiles, capacity, static)
    begin = tiles.first // TOKENS
    blocks = jnp.maximum((tiles.end + TOKENS - 1) // TOKENS - begin, 0)
    share = jnp.maximum((blocks + most - 1) // most, least)
    ends = jnp.cumsum((blocks + share - 1) // share)
    begins = jnp.concatenate([jnp.zeros((1,), jnp.int32), ends])
    index = jnp.arange(num * most, dtype=jnp.int32)
    tile = jnp.minimum(row_of(ends, index), num - 1)
    nth = index - begins[tile]
    first = (begin[tile] + nth * share[tile]) * TOKENS
    end = first + share[tile] * TOKENS
    where = tile * most + nth
  window = _NO_WINDOW if options.window is None else options.window
  sequence = tile // per_row
  first = jnp.maximum(first, tiles.first[tile])
  end = jnp.minimum(end, tiles.end[tile])
  item = Item(
    sequence=sequence,
    tile=tile,
    # A piece of a plan may be behind the window, or past the table.
    first=jnp.where(first < end, first, 0),
    end=jnp.where(first < end, end, 0),
    position=tiles.position[tile],
    window=jnp.broadcast_to(jnp.asarray(window, jnp.int32), tile.shape),
    tree=tree_first[sequence],
    place=where,
  )
  return jnp.stack(item, axis=1), begins, most


def cuts(
  tiles: query_tiles.Tiles, capacity: int, static: GpuStatic
) -> tuple[int, int]:
  """How contexts are cut where no plan says so.

  A function of shapes: with it, what a tile sees alone decides its pieces.

  Args:
    tiles: W of them, of R rows.
    capacity: tokens of a context.
    static: of the kernel.

  Returns:
    (blocks of a piece, if there are so many, pieces of a context at most).
  """
  contexts, rows = tiles.q.shape[0] * static.kv_heads, tiles.q.shape[2]
  workers = static.blocks * static.streams
  wanted = -(-_ITEMS_PER_STREAM * workers // contexts)
  # A piece writes R rows of float32 and reads them again.
  least = -(-max(_SHORTEST, _SHORTEST_PER_ROW * rows) // TOKENS)
  blocks = -(-capacity // TOKENS)
  return least, min(wanted, -(-blocks // least))


def _trees(
  options: CallOptions,
  tiles: query_tiles.Tiles,
  batch: int,
  group: int,
  size: int,
) -> tuple[dict[str, jax.Array], jax.Array]:
  """What trees let be seen, if there are some.

  Returns:
    ({"trees": int8[W, E, 64, C], by each row, "shown": int32[W, E, C], by any
    row that is not padding, itself and window included}, int32[B], in which
    block each tree begins).
  """
  if options.tree_mask is None:
    return {}, jnp.zeros((batch,), jnp.int32)
  mask, first = query_tiles.trees(
    options, group=group, size=size, rows=ROWS, tokens=TOKENS
  )
  blocks = jnp.arange(mask.shape[1], dtype=jnp.int32)[None]
  blocks = blocks + jnp.repeat(first, mask.shape[0] // batch)[:, None]
  token = jnp.arange(TOKENS, dtype=jnp.int32)[None, None, None]
  key = blocks[:, :, None, None] * TOKENS + token
  begin, end = (tiles.reach[:, None, :, i, None] for i in (0, 1))
  seen = (key >= begin) & (key < end) & (mask[:, :, : end.shape[2]] != 0)
  shown = jnp.any(seen, axis=2).astype(jnp.int32)
  return {"trees": mask, "shown": shown}, first


def _token_scales(options: CallOptions) -> dict[str, jax.Array]:
  """Scales of tokens, float32[P * K, S], if there are some."""
  scales = {"k_scale": options.k_scale, "v_scale": options.v_scale}
  rows = {
    name: scale.reshape(-1, scale.shape[2])
    for name, scale in scales.items()
    if scale is not None and scale.ndim == 3
  }
  # A copy of a row may take the one after it too.
  return {
    name: jnp.pad(scale, ((0, max(0, 2 - len(scale))), (0, 0)))
    for name, scale in rows.items()
  }


def _slopes(
  options: CallOptions, kv_heads: int, size: int
) -> dict[str, jax.Array]:
  """ALiBi slopes of a tile's rows, float32[K, 64], if there are some."""
  if options.alibi_slopes is None:
    return {}
  slopes = options.alibi_slopes.astype(jnp.float32).reshape(kv_heads, -1)
  slopes = jnp.tile(slopes, (1, size))
  spare = ROWS - slopes.shape[1]
  return {"slopes": jnp.pad(slopes, ((0, 0), (0, spare)))}
