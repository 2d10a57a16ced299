"""The Hopper kernel of paged attention, in Pallas' Mosaic GPU dialect.

A thread block has one or two streams. A stream is a pair of warpgroups: one
copies pages into two rings in shared memory, for keys and for values; the other
multiplies. Streams take units of work in turn. The copying warpgroup runs ahead
by up to the length of a ring, even into the next unit. The arithmetic follows
FlashAttention 3 (Shah et al. 2024), but does not overlap two products, because
decoding is bound by memory bandwidth. The docstring of the package `attention`
defines the letters.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv_kernels._src.attention import online_softmax
from jaxkv_kernels._src.attention import query_tiles
from jaxkv_kernels._src.attention.mosaic_gpu import compat
from jaxkv_kernels._src.attention.mosaic_gpu import quantized
from jaxkv_kernels._src.attention.mosaic_gpu.compat import MATRIX
from jaxkv_kernels._src.attention.mosaic_gpu.compat import ROW
from jaxkv_kernels._src.attention.mosaic_gpu.work import RESULT
from jaxkv_kernels._src.attention.mosaic_gpu.work import ROWS
from jaxkv_kernels._src.attention.mosaic_gpu.work import TOKENS
from jaxkv_kernels._src.attention.mosaic_gpu.work import GpuStatic
from jaxkv_kernels._src.attention.mosaic_gpu.work import Refs
from jaxkv_kernels._src.attention.mosaic_gpu.work import Side
from jaxkv_kernels._src.attention.mosaic_gpu.work import Unit
from jaxkv_kernels._src.attention.mosaic_gpu.work import first_block
from jaxkv_kernels._src.attention.mosaic_gpu.work import num_blocks
from jaxkv_kernels._src.attention.mosaic_gpu.work import quotient
from jaxkv_kernels._src.attention.mosaic_gpu.work import remainder
from jaxkv_kernels._src.attention.mosaic_gpu.work import scales_of_block
from jaxkv_kernels._src.attention.mosaic_gpu.work import stage_of


def call(
  static: GpuStatic, arrays: dict[str, jax.Array], interpret: Any = None
) -> tuple[jax.Array, jax.Array]:
  """Runs the kernel.

  Args:
    static: sizes and choices of the kernel.
    arrays: the inputs of `Refs`, by name. For its fields `k` and `v`, these are
      `k_pages`, `v_pages` and, if tokens have scales, `k_scale` and `v_scale`.
    interpret: as in `CallOptions`.

  Returns:
    (float32[O * K, Y, Dv], normalised outputs, and float32[O * K, 2, 64], `m`
    and `l` of `online_softmax`). For K/V head k, the result of a unit is at
    index `Unit.result * K + k`. Other indices are not written.
  """
  q = arrays["q"]
  num = arrays["units"].shape[0] * static.kv_heads

  def entry(*refs):
    fields = dict(zip((*arrays, "out", "totals"), refs, strict=True))
    _with_scratch(static, q.dtype, fields)

  return plgpu.kernel(
    entry,
    out_type=(
      query_tiles.float32(
        (num, q.shape[1], arrays["v_pages"].shape[-1]), arrays
      ),
      query_tiles.float32((num, 2, ROWS), arrays),
    ),
    grid=(static.blocks,),
    grid_names=("block",),
    num_threads=2 * static.streams,
    thread_name="warpgroup",
    compiler_params=plgpu.CompilerParams(
      approx_math=True, reduction_scratch_bytes=1024
    ),
    **({} if not interpret else {"interpret": interpret}),
  )(*arrays.values())


def _with_scratch(static: GpuStatic, dtype, fields: dict[str, Any]) -> None:
  """Allocates scratch and runs the kernel; `fields` are inputs and outputs."""
  sides = [
    {name: fields.pop(f"{side}_{name}", None) for name in ("pages", "scale")}
    for side in "kv"
  ]
  streams = static.streams

  def scoped(queries, result, sums, rings, q_full, full, free, narrow):
    buffers = zip(sides, rings, full, free, narrow, strict=True)
    k, v = (
      Side(**side, ring=ring, full=full, free=free, **narrow)
      for side, ring, full, free, narrow in buffers
    )
    fields.update(queries=queries, result=result, sums=sums, q_full=q_full)
    _kernel(static, Refs(**fields, k=k, v=v))

  rings, full, free, narrow = zip(
    _memory(static, static.k_stages, dtype, **sides[0]),
    _memory(static, static.v_stages, dtype, **sides[1]),
    strict=True,
  )
  # Keep this order: it determines addresses and affects register allocation.
  pl.run_scoped(
    scoped,
    compat.tiled((streams, ROWS, fields["q"].shape[2]), dtype),
    plgpu.SMEM((streams, ROWS, RESULT), jnp.float32),
    plgpu.SMEM((streams, 2, ROWS), jnp.float32),
    rings,
    plgpu.Barrier(num_barriers=streams),
    full,
    free,
    narrow,
    collective_axes="warpgroup",
  )


def _memory(static: GpuStatic, stages: int, dtype, *, pages, scale) -> tuple:
  """Returns memory for a `Side`: `ring`, `full`, `free` and optional fields."""
  streams = static.streams
  num_stages = streams * stages
  # A stage is full after one copy for each page, and one for the page's scales.
  num_copies = static.pages * (1 if scale is None else 2)
  memory: dict[str, Any] = {}
  if pages.dtype != dtype:
    memory["wide"] = compat.tiled((streams, TOKENS, pages.shape[-1]), dtype)
  if scale is not None:
    shape = streams, stages, *scales_of_block(static.page_size)
    memory["scales"] = plgpu.SMEM(shape, jnp.float32)
    memory["factors"] = plgpu.SMEM((streams, TOKENS), jnp.float32)
  return (
    compat.tiled((streams, stages, TOKENS, pages.shape[-1]), pages.dtype),
    plgpu.Barrier(num_arrivals=num_copies, num_barriers=num_stages),
    plgpu.Barrier(num_barriers=num_stages),
    memory,
  )


def _kernel(static: GpuStatic, refs: Refs) -> None:
  """Runs one thread block: half of its warpgroups multiply, the others copy."""
  warpgroup = lax.axis_index("warpgroup")
  multiplies = warpgroup < static.streams
  stream = remainder(warpgroup, static.streams)
  # With two streams, warpgroups that multiply take registers from those that
  # copy. With one stream, the default number is enough.
  is_crowded = static.streams == 2

  @pl.when(multiplies)
  def _():
    if is_crowded:
      plgpu.set_max_registers(216, action="increase")
    _each_unit(static, refs, stream, functools.partial(_multiply, static, refs))

  @pl.when(jnp.logical_not(multiplies))
  def _():
    if is_crowded:
      plgpu.set_max_registers(40, action="decrease")
    num_copied = _each_unit(
      static, refs, stream, functools.partial(_copy, static, refs)
    )
    for side in (refs.k, refs.v):
      _await_all(side, stream, num_copied)


def _each_unit(static: GpuStatic, refs: Refs, stream, work) -> jax.Array:
  """Calls `work(stream, head, unit, used)` for a stream's units and K/V heads.

  `used` counts the blocks of earlier calls. Returns the count for all calls.
  """
  # Both warpgroups of a stream count the same blocks, so they agree on stages.
  first_index = lax.axis_index("block") * static.streams + stream
  step = static.blocks * static.streams
  num = refs.begins[refs.begins.shape[0] - 1] * static.kv_heads

  def body(turn, used):
    index = first_index + turn * step
    head = remainder(index, static.kv_heads)
    row = quotient(index, static.kv_heads)
    unit = Unit(*(refs.units[row, i] for i in range(len(Unit._fields))))
    work(stream, head, unit, used)
    return used + num_blocks(unit)

  turns = quotient(jnp.maximum(num - first_index + step - 1, 0), step)
  return lax.fori_loop(0, turns, body, jnp.int32(0))


def _await_all(side: Side, stream, num_copied) -> None:
  """Waits until the multiplying warpgroup has freed the last blocks."""
  # Before a kernel ends, it must wait for every arrival at a barrier.
  stages = side.ring.shape[1]
  for stage in range(stages):

    @pl.when(num_copied > stage)
    def _(barrier=stream * stages + stage):
      plgpu.barrier_wait(side.free.at[barrier])


def _copy(static: GpuStatic, refs: Refs, stream, head, unit, used) -> None:
  """Copies a unit's blocks into the rings, after `used` earlier blocks."""
  page_size = static.page_size
  rows = min(page_size, TOKENS)
  last_column = quotient(unit.end - 1, page_size)

  def body(block, _):
    base = (first_block(unit) + block) * TOKENS
    # Page ids are read before the wait, to hide the latency. Past a unit's end
    # the last page is copied again, because a barrier counts a fixed number of
    # copies.
    ids = [
      refs.table[
        unit.sequence, jnp.minimum(quotient(base, page_size) + i, last_column)
      ]
      for i in range(static.pages)
    ]
    index = used + block
    source = pl.ds(
      0 if page_size <= TOKENS else remainder(base, page_size), rows
    )
    for side in (refs.k, refs.v):
      stage, barrier = stage_of(side.ring, stream, index)

      # Stages are free at first, so the first copies need not wait.
      @pl.when(index >= side.ring.shape[1])
      def _(free=side.free, barrier=barrier):
        plgpu.barrier_wait(free.at[barrier])

      for i, page in enumerate(ids):
        row = page * static.kv_heads + head
        plgpu.copy_gmem_to_smem(
          side.pages.at[row, source],
          side.ring.at[stream, stage, pl.ds(i * rows, rows)],
          side.full.at[barrier],
        )
        if side.scale is not None:
          scale_rows = compat.min_rows(rows, static.interpreted)
          plgpu.copy_gmem_to_smem(
            side.scale.at[pl.ds(row, scale_rows), source],
            side.scales.at[stream, stage, i, pl.ds(0, scale_rows)],
            side.full.at[barrier],
          )
    return ()

  lax.fori_loop(0, num_blocks(unit), body, ())


def _multiply(static: GpuStatic, refs: Refs, stream, head, unit, used) -> None:
  """Computes attention of one tile of queries over a unit's blocks."""
  rows = refs.q.shape[1]
  value_dim = refs.v.pages.shape[2]
  interpreted = static.interpreted
  plgpu.copy_gmem_to_smem(
    refs.q.at[unit.tile * static.kv_heads + head],
    refs.queries.at[stream, pl.ds(0, rows)],
    refs.q_full.at[stream],
  )
  plgpu.barrier_wait(refs.q_full.at[stream])
  factor = refs.factor[head]
  slopes = None
  if static.alibi:
    slopes = compat.load(refs.slopes.at[head], ROW, interpreted=interpreted)

  def body(block, carry):
    m, l, weighted = carry
    base = (first_block(unit) + block) * TOKENS
    keys, factors = _block(static, refs.k, stream, used + block)
    products = compat.products(
      refs.queries.at[stream], keys, interpreted=interpreted
    )
    # From here on the next block of keys can be copied into this stage.
    _release(refs.k, stream, used + block)
    products = quantized.scaled(products, factors)
    mask, distance = _visible(static, unit, base)
    logits = online_softmax.logits(
      products, factor, distance, static.soft_cap, slopes
    )
    if static.tree:
      mask &= _in_tree(static, refs.trees, unit, base, MATRIX) > 0
    m, l, alpha, weights = online_softmax.absorb(logits, mask, m, l)
    weighted *= lax.broadcast_in_dim(alpha, weighted.shape, [0])
    values, factors = _block(static, refs.v, stream, used + block)
    weights, largest = quantized.scaled_weights(
      weights, mask, factors, refs.q.dtype
    )
    # `scaled_weights` divided the weights by `largest`. Earlier sums are also
    # divided, so that the product can be added to them.
    if largest is not None:
      weighted /= lax.broadcast_in_dim(largest, weighted.shape, [0])
    _clear_unused(static, refs, unit, base, values)
    weighted = compat.add_product(
      weighted, weights.astype(refs.q.dtype), values, interpreted=interpreted
    )
    _release(refs.v, stream, used + block)
    if largest is not None:
      weighted *= lax.broadcast_in_dim(largest, weighted.shape, [0])
    return m, l, weighted

  row = functools.partial(
    compat.full, (ROWS,), layout=ROW, interpreted=interpreted
  )
  zeros = compat.full((ROWS, value_dim), 0.0, MATRIX, interpreted=interpreted)
  carry = row(online_softmax.LOWEST), row(0.0), zeros
  carry = lax.fori_loop(0, num_blocks(unit), body, carry)
  _write(refs, stream, unit.result * static.kv_heads + head, *carry)


def _block(static: GpuStatic, side: Side, stream, used):
  """Waits for a block; returns it in the queries' format, with its scales."""
  stage, barrier = stage_of(side.ring, stream, used)
  plgpu.barrier_wait(side.full.at[barrier])
  block, factors = quantized.unpack(static, side, stream, stage)
  if side.wide is not None:
    plgpu.barrier_arrive(side.free.at[barrier])
  return block, factors


def _release(side: Side, stream, used) -> None:
  """Frees a block's stage of the ring, unless `_block` has done so."""
  if side.wide is None:
    _, barrier = stage_of(side.ring, stream, used)
    plgpu.barrier_arrive(side.free.at[barrier])


def _visible(static: GpuStatic, unit: Unit, base):
  """Returns bool[64, A], the keys that a row sees, and int32[64, A], distances.

  A distance is the key's position minus the query's.
  """
  iota = functools.partial(
    compat.iota, (ROWS, TOKENS), interpreted=static.interpreted
  )
  key = base + iota(1)
  mask = (key >= unit.first) & (key < unit.end)
  if not static.causal:
    return mask, key - unit.position
  distance = key - unit.position - quotient(iota(0), static.per_kv_head)
  return mask & (distance <= 0) & (distance > -unit.window), distance


def _in_tree(static: GpuStatic, masks, unit: Unit, base, layout):
  """Returns a block of `masks` in int32; above 0 outside of the tree."""
  blocks = masks.shape[1]
  index = quotient(base, TOKENS) - unit.tree
  outside = jnp.where((index < 0) | (index >= blocks), 1, 0)
  mask = compat.load(
    masks.at[unit.tile, jnp.clip(index, 0, blocks - 1)],
    layout,
    interpreted=static.interpreted,
  )
  return mask.astype(jnp.int32) + outside


def _clear_unused(
  static: GpuStatic, refs: Refs, unit: Unit, base, values
) -> None:
  """Writes zeros over the values of a block that no row of the unit sees."""
  # 0 * NaN is NaN, so a weight of zero would not exclude a NaN. Integers have
  # no NaN. Only the first and last block of a unit, and blocks of a tree, have
  # values that no row sees.
  if jnp.issubdtype(refs.v.pages.dtype, jnp.integer):
    return
  has_unused = (base < unit.first) | (base + TOKENS > unit.end)
  if static.tree:
    index = quotient(base, TOKENS) - unit.tree
    has_unused |= (index >= 0) & (index < refs.shown.shape[1])

  @pl.when(has_unused)
  def _():
    interpreted = static.interpreted
    key = base + compat.iota((TOKENS,), 0, layout=ROW, interpreted=interpreted)
    is_used = (key >= unit.first) & (key < unit.end)
    if static.tree:
      is_used &= _in_tree(static, refs.shown, unit, base, ROW) > 0
    is_used = jnp.where(is_used, jnp.int32(1), jnp.int32(0))
    is_used = lax.broadcast_in_dim(is_used, (TOKENS, 64), [0]) > 0
    # 64 columns at a time, to save registers.
    for start in range(0, values.shape[1], 64):
      part = values.at[:, pl.ds(start, 64)]
      columns = compat.load(part, MATRIX, interpreted=interpreted)
      part[...] = jnp.where(is_used, columns, jnp.zeros_like(columns))
    plgpu.commit_smem()


def _write(refs: Refs, stream, index, m, l, weighted) -> None:
  """Writes a unit's results: Y rows of output, and the sums of all rows."""
  out = online_softmax.normalise(l, weighted)
  rows, value_dim = refs.out.shape[1:]
  refs.sums[stream, 0] = m
  refs.sums[stream, 1] = l
  # The rings leave little shared memory, so copy `RESULT` columns at a time.
  for start in range(0, value_dim, RESULT):
    refs.result[stream] = out[:, start : start + RESULT]
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(
      refs.result.at[stream, pl.ds(0, rows)],
      refs.out.at[index, :, pl.ds(start, RESULT)],
    )
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
  plgpu.copy_smem_to_gmem(refs.sums.at[stream], refs.totals.at[index])
  plgpu.wait_smem_to_gmem(0, wait_read_only=True)
