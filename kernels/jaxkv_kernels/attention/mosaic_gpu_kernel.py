"""The Hopper kernel of paged attention, in Pallas' Mosaic GPU dialect.

A block of threads has streams, each a pair of warpgroups: one copies pages
into a ring in shared memory, one multiplies. Streams take items of work in
turn, and a copying warpgroup runs ahead of its partner, into the next item
too, as far as the ring is long. The arithmetic is that of FlashAttention 3
(Shah et al. 2024) without its overlap of two products: decoding waits for
memory.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels.attention import block_softmax
from jaxkv_kernels.attention import mosaic_gpu_api
from jaxkv_kernels.attention import query_tiles
from jaxkv_kernels.attention.mosaic_gpu_api import MATRIX
from jaxkv_kernels.attention.mosaic_gpu_api import ROW
from jaxkv_kernels.attention.mosaic_gpu_work import RESULT
from jaxkv_kernels.attention.mosaic_gpu_work import ROWS
from jaxkv_kernels.attention.mosaic_gpu_work import TOKENS
from jaxkv_kernels.attention.mosaic_gpu_work import Item
from jaxkv_kernels.attention.mosaic_gpu_work import Refs
from jaxkv_kernels.attention.mosaic_gpu_work import Static
from jaxkv_kernels.attention.mosaic_gpu_work import first_block
from jaxkv_kernels.attention.mosaic_gpu_work import num_blocks
from jaxkv_kernels.attention.mosaic_gpu_work import place
from jaxkv_kernels.attention.mosaic_gpu_work import quotient
from jaxkv_kernels.attention.mosaic_gpu_work import remainder


def call(
  static: Static,
  arrays: tuple[jax.Array, ...],
  interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
  """Runs the kernel.

  Args:
    static: sizes.
    arrays: the inputs of `Refs`, in that order.
    interpret: as in `Options`.

  Returns:
    (float32[I * K, R, Dv], float32[I * K, 64]), normalised and natural, in the
    places that the items name; what no item names is not written.
  """
  items, q, v_pages = arrays[0], arrays[7], arrays[9]
  num = items.shape[0] * static.kv_heads
  rows, dim = q.shape[1:]
  value_dim = v_pages.shape[-1]
  streams = static.streams
  tiled = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
  keys = streams * static.k_stages
  values = streams * static.v_stages

  def memory(*shape: int):
    return plgpu.SMEM((streams, *shape), q.dtype, transforms=tiled)

  def entry(*refs):
    pl.run_scoped(
      lambda *scratch: _kernel(static, Refs(*refs, *scratch)),
      memory(ROWS, dim),
      plgpu.SMEM((streams, ROWS, RESULT), jnp.float32),
      plgpu.SMEM((streams, ROWS), jnp.float32),
      memory(static.k_stages, TOKENS, dim),
      memory(static.v_stages, TOKENS, value_dim),
      plgpu.Barrier(num_barriers=streams),
      plgpu.Barrier(num_arrivals=static.pages, num_barriers=keys),
      plgpu.Barrier(num_arrivals=static.pages, num_barriers=values),
      plgpu.Barrier(num_barriers=keys),
      plgpu.Barrier(num_barriers=values),
      collective_axes="warpgroup",
    )

  return plgpu.kernel(
    entry,
    out_type=(
      query_tiles.float32((num, rows, value_dim), arrays),
      query_tiles.float32((num, ROWS), arrays),
    ),
    grid=(static.blocks,),
    grid_names=("block",),
    num_threads=2 * streams,
    thread_name="warpgroup",
    compiler_params=plgpu.CompilerParams(
      approx_math=True, reduction_scratch_bytes=1024
    ),
    **({} if not interpret else {"interpret": interpret}),
  )(*arrays)


def _kernel(static: Static, refs: Refs) -> None:
  """One block of threads: the first half multiplies, the second copies."""
  warpgroup = lax.axis_index("warpgroup")
  multiplies = warpgroup < static.streams
  stream = remainder(warpgroup, static.streams)
  # All registers there are; a single stream has enough without asking.
  ask = static.streams == 2

  @pl.when(multiplies)
  def _():
    if ask:
      plgpu.set_max_registers(216, action="increase")
    _each_item(static, refs, stream, functools.partial(_multiply, static, refs))

  @pl.when(jnp.logical_not(multiplies))
  def _():
    if ask:
      plgpu.set_max_registers(40, action="decrease")
    copied = _each_item(
      static, refs, stream, functools.partial(_copy, static, refs)
    )
    for ring, free in (
      (refs.keys, refs.k_free),
      (refs.values, refs.v_free),
    ):
      _await_all(ring, free, stream, copied)


def _each_item(static: Static, refs: Refs, stream, work) -> jax.Array:
  """Calls work(stream, head, item, turn) for a stream's items.

  A turn is the number of blocks that went before, and that of all is returned.
  """
  first = lax.axis_index("block") * static.streams + stream
  step = static.blocks * static.streams
  num = refs.count[0] * static.kv_heads

  def body(turn_of_stream, turn):
    index = first + turn_of_stream * step
    head = remainder(index, static.kv_heads)
    row = quotient(index, static.kv_heads)
    item = Item(*(refs.items[row, i] for i in range(len(Item._fields))))
    work(stream, head, item, turn)
    return turn + num_blocks(item)

  turns = quotient(jnp.maximum(num - first + step - 1, 0), step)
  return lax.fori_loop(0, turns, body, jnp.int32(0))


def _await_all(ring, free, stream, copied) -> None:
  """Waits until the last blocks are used: no completion goes unseen."""
  stages = ring.shape[1]
  for slot in range(stages):

    @pl.when(copied > slot)
    def _(at=stream * stages + slot):
      plgpu.barrier_wait(free.at[at])


def _copy(static: Static, refs: Refs, stream, head, item, turn) -> None:
  """Fills the ring with an item's blocks; `turn` blocks went before."""
  size, dims = static.page_size, range(static.pages)
  last = quotient(item.end - 1, size)
  within = pl.ds(0, size)

  def body(block, _):
    base = (first_block(item) + block) * TOKENS
    # Before the wait, so that the ids arrive meanwhile. Past the end the last
    # page is read once more: a barrier counts copies.
    ids = [
      refs.table[item.sequence, jnp.minimum(quotient(base, size) + i, last)]
      for i in dims
    ]
    used = turn + block
    source = within if size <= TOKENS else pl.ds(remainder(base, size), TOKENS)
    for pages, ring, full, free in (
      (refs.k_pages, refs.keys, refs.k_full, refs.k_free),
      (refs.v_pages, refs.values, refs.v_full, refs.v_free),
    ):
      slot, at = place(ring, stream, used)

      @pl.when(used >= ring.shape[1])
      def _(free=free, at=at):
        plgpu.barrier_wait(free.at[at])

      for i, page in enumerate(ids):
        rows = min(size, TOKENS)
        plgpu.copy_gmem_to_smem(
          pages.at[page * static.kv_heads + head, source],
          ring.at[stream, slot, pl.ds(i * rows, rows)],
          full.at[at],
        )
    return ()

  lax.fori_loop(0, num_blocks(item), body, ())


def _multiply(static: Static, refs: Refs, stream, head, item, turn) -> None:
  """Attention of one tile of queries over an item's blocks."""
  rows = refs.q.shape[1]
  value_dim = refs.v_pages.shape[2]
  interpreted = static.interpreted
  plgpu.copy_gmem_to_smem(
    refs.q.at[item.tile * static.kv_heads + head],
    refs.queries.at[stream, pl.ds(0, rows)],
    refs.q_full.at[stream],
  )
  plgpu.barrier_wait(refs.q_full.at[stream])
  factor = refs.factor[head]
  slopes = None
  if static.alibi:
    slopes = mosaic_gpu_api.load(
      refs.slopes.at[head], ROW, interpreted=interpreted
    )

  def body(block, carry):
    top, total, weighted = carry
    base = (first_block(item) + block) * TOKENS
    slot, at = place(refs.keys, stream, turn + block)
    plgpu.barrier_wait(refs.k_full.at[at])
    keys = refs.keys.at[stream, slot]
    products = mosaic_gpu_api.products(
      refs.queries.at[stream], keys, interpreted=interpreted
    )
    plgpu.barrier_arrive(refs.k_free.at[at])
    seen, distance = _visible(static, item, base)
    logits = block_softmax.logits(
      products, factor, distance, static.soft_cap, slopes
    )
    if static.tree:
      seen &= _in_tree(static, refs.trees, item, base, MATRIX) > 0
    top, total, shrink, weights = block_softmax.absorb(logits, seen, top, total)
    weighted *= lax.broadcast_in_dim(shrink, weighted.shape, [0])
    slot, at = place(refs.values, stream, turn + block)
    plgpu.barrier_wait(refs.v_full.at[at])
    values = refs.values.at[stream, slot]
    _clear_unused(static, refs, item, base, values)
    weights = weights.astype(refs.q.dtype)
    weighted = mosaic_gpu_api.add_product(
      weighted, weights, values, interpreted=interpreted
    )
    plgpu.barrier_arrive(refs.v_free.at[at])
    return top, total, weighted

  row = functools.partial(
    mosaic_gpu_api.full, (ROWS,), layout=ROW, interpreted=interpreted
  )
  nothing = mosaic_gpu_api.full(
    (ROWS, value_dim), 0.0, MATRIX, interpreted=interpreted
  )
  carry = row(block_softmax.LOWEST), row(0.0), nothing
  carry = lax.fori_loop(0, num_blocks(item), body, carry)
  _write(refs, stream, item.place * static.kv_heads + head, *carry)


def _visible(static: Static, item: Item, base):
  """Which keys of a block a row sees, bool[64, C], and how far they are.

  A distance, int32[64, C], is that of the key from the query; never above 0.
  """
  iota = functools.partial(
    mosaic_gpu_api.iota, (ROWS, TOKENS), interpreted=static.interpreted
  )
  key = base + iota(1)
  seen = (key >= item.first) & (key < item.end)
  if not static.causal:
    return seen, key - item.position
  distance = key - item.position - quotient(iota(0), static.group)
  return seen & (distance <= 0) & (distance > -item.window), distance


def _in_tree(static: Static, masks, item: Item, base, layout):
  """A tree's mask of a block in int32, not 0 where there is no tree."""
  blocks = masks.shape[1]
  index = quotient(base, TOKENS) - item.tree
  outside = jnp.where((index < 0) | (index >= blocks), 1, 0)
  mask = mosaic_gpu_api.load(
    masks.at[item.tile, jnp.clip(index, 0, blocks - 1)],
    layout,
    interpreted=static.interpreted,
  )
  return mask.astype(jnp.int32) + outside


def _clear_unused(static: Static, refs: Refs, item: Item, base, values) -> None:
  """Zeros for the values of a block that no row of the item sees.

  0 * NaN is NaN: a weight of zero does not keep a value out.
  """
  some = (base < item.first) | (base + TOKENS > item.end)
  if static.tree:
    index = quotient(base, TOKENS) - item.tree
    some |= (index >= 0) & (index < refs.shown.shape[1])

  @pl.when(some)
  def _():
    interpreted = static.interpreted
    key = base + mosaic_gpu_api.iota(
      (TOKENS,), 0, layout=ROW, interpreted=interpreted
    )
    used = (key >= item.first) & (key < item.end)
    if static.tree:
      used &= _in_tree(static, refs.shown, item, base, ROW) > 0
    used = jnp.where(used, jnp.int32(1), jnp.int32(0))
    used = lax.broadcast_in_dim(used, (TOKENS, 64), [0]) > 0
    # Some columns at a time, for want of registers.
    for start in range(0, values.shape[1], 64):
      part = values.at[:, pl.ds(start, 64)]
      held = mosaic_gpu_api.load(part, MATRIX, interpreted=interpreted)
      part[...] = jnp.where(used, held, jnp.zeros_like(held))
    plgpu.commit_smem()


def _write(refs: Refs, stream, index, top, total, weighted) -> None:
  """An item's output, by way of shared memory: only R rows of 64 count."""
  out, lse = block_softmax.normalise(top, total, weighted)
  rows, value_dim = refs.out.shape[1:]
  refs.sums[stream] = lse
  for start in range(0, value_dim, RESULT):
    refs.result[stream] = out[:, start : start + RESULT]
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(
      refs.result.at[stream, pl.ds(0, rows)],
      refs.out.at[index, :, pl.ds(start, RESULT)],
    )
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
  plgpu.copy_smem_to_gmem(refs.sums.at[stream], refs.lse.at[index])
  plgpu.wait_smem_to_gmem(0, wait_read_only=True)
