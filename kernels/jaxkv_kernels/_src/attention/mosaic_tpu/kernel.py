"""The TPU kernel of paged attention, in Pallas' Mosaic dialect.

One grid step computes one tile of queries: it loops over the blocks of pages
that the tile sees. Pages are copied into a ring of buffers, with one copy per
page for all heads. While a step works on its last blocks, it fetches the first
blocks of the next step, so that copies do not pause between steps. The online
softmax is that of FlashAttention (Dao et al. 2022, algorithm 1).

The kernel uses only features that the TPU interpreter supports (no
`ref.reshape` or `ref.bitcast`), so tests on a CPU can check results and races.
The docstring of the package `attention` defines the letters.
"""

import dataclasses
import functools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxkv_kernels._src.attention import query_tiles
from jaxkv_kernels._src.attention.online_softmax import LOWEST

# F, stages of the ring. With two stages, one block is copied while another is
# used. A third hides the latency of short blocks.
BUFFERS = 3
# Bytes of VMEM that the compiler can use. The smallest VMEM has 64 MiB (v7x).
MEMORY_BYTES = 48 * 2**20

# For block indices. In 64-bit mode a Python 0 is an int64, which TPUs lack.
_ZERO = np.int32(0)

_POOLS = ("k_pages", "v_pages")
_SCALES = ("k_scale", "v_scale")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuStatic:
  """Sizes and choices of one kernel.

  Attributes:
    tiles: the number of tiles of one sequence.
    pages: the number of pages of a block.
    page_size: S.
    soft_cap: as in `CallOptions`.
    dtype: the format that the matrix unit multiplies.
  """

  tiles: int
  pages: int
  page_size: int
  soft_cap: float | None
  dtype: jnp.dtype

  @property
  def tokens(self) -> int:
    """A, tokens of a block."""
    return self.pages * self.page_size


def call(
  static: TpuStatic,
  firsts: jax.Array,
  ends: jax.Array,
  inputs: dict[str, jax.Array],
  interpret: Any,
) -> tuple[jax.Array, jax.Array]:
  """Runs the kernel.

  `firsts`, int32[Z], are the first tokens that tiles see; `ends`, int32[Z], are
  one past the last token, 0 for none. `inputs` has arrays by name, see
  `_in_specs`, of which scales, slopes and trees are optional.

  Returns:
    (float32[Z, K, Y, Dv], float32[Z, K, Y, 1] natural log-sum-exps).
  """
  num, kv_heads, rows, _ = inputs["q"].shape
  shape = num, kv_heads, rows, inputs["v_pages"].shape[-1]
  out = query_tiles.float32(shape, inputs)
  lse = query_tiles.float32((*shape[:-1], 1), inputs)
  specs = _in_specs(static, inputs)
  return pl.pallas_call(
    functools.partial(_kernel, static),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=2,
      grid=(num,),
      in_specs=[{name: specs[name] for name in inputs}],
      out_specs=[_row_of_step(out.shape), _row_of_step(lse.shape)],
      scratch_shapes=[_scratch(static, inputs)],
    ),
    out_shape=[out, lse],
    compiler_params=pltpu.CompilerParams(
      # Grid steps must run in order, as each fetches blocks of the next one.
      dimension_semantics=("arbitrary",),
      vmem_limit_bytes=MEMORY_BYTES,
    ),
    interpret=interpret,
    name="paged_attention",
  )(firsts, ends, inputs)


def _in_specs(
  static: TpuStatic, inputs: dict[str, jax.Array]
) -> dict[str, Any]:
  """Returns the block spec of each input."""
  num = inputs["q"].shape[0]
  # Pools and scales stay in HBM. The kernel copies the parts that it needs.
  in_place = pl.BlockSpec(memory_space=pl.ANY)

  def table(step: int) -> pl.BlockSpec:
    """Returns the spec of the page ids of the grid step `step` steps ahead."""
    return pl.BlockSpec(
      (1, 1, inputs["table"].shape[2]),
      lambda z, *_: (
        lax.div(jnp.minimum(z + step, num - 1), np.int32(static.tiles)),
        _ZERO,
        _ZERO,
      ),
      memory_space=pltpu.SMEM,
    )

  specs = {
    "table": table(0),  # int32[B, 1, M] as [1, 1, M]
    "next_table": table(1),  # int32[B, 1, M] as [1, 1, M]
    "q": _row_of_step(inputs["q"].shape),  # [Z, K, Y, D] as [1, K, Y, D]
    "reach": _row_of_step(inputs["reach"].shape),  # int32[Z, Y, 3] as [1, Y, 3]
    "factor": _whole(inputs["factor"].shape),  # float32[K, Y, 1]
    "slopes": _whole(inputs["factor"].shape),  # float32[K, Y, 1]
    "k_pages": in_place,  # [N, K, S, D]
    "v_pages": in_place,  # [N, K, S, Dv]
    "k_scale": in_place,  # float32[B, J, K, A]
    "v_scale": in_place,  # float32[B, J, K, A]
  }
  if "tree" in inputs:  # int8[Z, J, Y, A] as [1, J, Y, A]
    specs["tree"] = _row_of_step(inputs["tree"].shape)
    # int32[B]
    specs["tree_first"] = _whole(inputs["tree_first"].shape, pltpu.SMEM)
  return specs


def _row_of_step(shape: tuple[int, ...]) -> pl.BlockSpec:
  """Returns the spec of row z of an array, in grid step z."""
  zeros = (_ZERO,) * (len(shape) - 1)
  return pl.BlockSpec(
    (1, *shape[1:]), lambda z, *_: (z, *zeros), memory_space=pltpu.VMEM
  )


def _whole(shape: tuple[int, ...], memory: Any = pltpu.VMEM) -> pl.BlockSpec:
  """Returns the spec of a whole array, in every grid step."""
  zeros = (_ZERO,) * len(shape)
  return pl.BlockSpec(shape, lambda *_: zeros, memory_space=memory)


def _scratch(static: TpuStatic, inputs: dict[str, jax.Array]) -> dict[str, Any]:
  """Returns the scratch memory; the ring of an input has the input's name."""
  kv_heads, rows = inputs["q"].shape[1:3]
  block = BUFFERS, kv_heads, static.tokens
  scratch: dict[str, Any] = {
    "ring": pltpu.SMEM((1,), jnp.int32),
    "arrived": pltpu.SemaphoreType.DMA((BUFFERS,)),
    "m": pltpu.VMEM((kv_heads, rows, 1), jnp.float32),
    "l": pltpu.VMEM((kv_heads, rows, 1), jnp.float32),
  }
  for name in _POOLS:  # [F, K, A, D]
    shape = *block, inputs[name].shape[-1]
    scratch[name] = pltpu.VMEM(shape, inputs[name].dtype)
  for name in _SCALES:  # float32[F, K, A]
    if name in inputs:
      scratch[name] = pltpu.VMEM(block, jnp.float32)
  return scratch


class _Step(NamedTuple):
  """The blocks of one grid step.

  Attributes:
    table: page ids of the step's sequence.
    row: the row of the page table.
    first_page: the column of the page table of the first page.
    end_page: one past the column of the last page.
    first: the index of the first block in the sequence.
    num: the number of blocks, 0 if the tile sees no key.
  """

  table: Any  # int32[1, 1, M]
  row: Any  # int32[]
  first_page: Any  # int32[]
  end_page: Any  # int32[]
  first: Any  # int32[]
  num: Any  # int32[]


def _kernel(static: TpuStatic, firsts, ends, inputs, out, lse, scratch) -> None:
  """Computes one tile of queries; refs as in `_in_specs` and `_scratch`."""
  index = pl.program_id(0)
  step = _step(static, index, firsts, ends, inputs["table"])
  next_step = _step(static, index + 1, firsts, ends, inputs["next_table"])
  previous_step = _step(static, index - 1, firsts, ends, None)

  @pl.when(index == 0)
  def _():
    scratch["ring"][0] = 0

  # The stage of this step's first block follows the previous step's stages.
  ring = scratch["ring"][0]

  def stage(block):
    return (ring + block) % BUFFERS

  def fetch(blocks: _Step, block, slot) -> None:
    _copies(static, blocks, block, slot, inputs, scratch, lambda c: c.start())

  # After each of its last `BUFFERS` blocks, the previous step fetched one block
  # of this step. If the previous step had fewer blocks, this loop fetches the
  # remaining blocks that fit the ring.
  @pl.loop(0, jnp.clip(BUFFERS - previous_step.num, 0, step.num))
  def _(block):
    fetch(step, block, stage(block))

  scratch["m"][...] = jnp.full_like(scratch["m"], LOWEST)
  scratch["l"][...] = jnp.zeros_like(scratch["l"])
  out[...] = jnp.zeros_like(out)

  @pl.loop(0, step.num)
  def _(block):
    slot = stage(block)
    _copies(static, step, block, slot, inputs, scratch, lambda c: c.wait())
    _absorb(static, step.row, step.first + block, slot, inputs, out, scratch)
    # The stage is free now, so fill it with a block of this or the next step.
    next_block = block + BUFFERS

    @pl.when(next_block < step.num)
    def _():
      fetch(step, next_block, slot)

    @pl.when((next_block >= step.num) & (next_block - step.num < next_step.num))
    def _():
      fetch(next_step, next_block - step.num, slot)

  scratch["ring"][0] = stage(step.num)
  l = scratch["l"][...]
  is_empty = l == 0
  divisor = jnp.where(is_empty, jnp.float32(1), l)
  out[0] = out[0] / divisor
  lse[0] = jnp.where(is_empty, -jnp.inf, scratch["m"][...] + jnp.log(divisor))


def _step(static: TpuStatic, index, firsts, ends, table) -> _Step:
  """Returns the blocks of a grid step; no blocks outside of the grid."""
  last_step = pl.num_programs(0) - 1
  is_in_grid = (index >= 0) & (index <= last_step)
  index = jnp.clip(index, 0, last_step)
  first_page = firsts[index] // static.page_size
  end_page = (ends[index] + static.page_size - 1) // static.page_size
  first_block = first_page // static.pages
  end_block = (end_page + static.pages - 1) // static.pages
  return _Step(
    table=table,
    row=index // static.tiles,
    first_page=first_page,
    end_page=end_page,
    first=first_block,
    num=jnp.where(is_in_grid & (end_page > 0), end_block - first_block, 0),
  )


def _copies(
  static: TpuStatic, step: _Step, block, slot, inputs, scratch, action
) -> None:
  """Starts or awaits the copies of a step's block into stage `slot`."""
  arrived = scratch["arrived"].at[slot]
  base = (step.first + block) * static.pages
  page_size = static.page_size

  # Pages that the tile does not see are not copied. Their part of the stage
  # keeps its old contents, which the masks exclude.
  @pl.loop(
    jnp.maximum(base, step.first_page),
    jnp.minimum(base + static.pages, step.end_page),
  )
  def _(column):
    page = step.table[0, 0, column]
    tokens = pl.ds(
      pl.multiple_of((column - base) * page_size, page_size), page_size
    )
    for name in _POOLS:
      target = scratch[name].at[slot, :, tokens]
      action(pltpu.make_async_copy(inputs[name].at[page], target, arrived))

  for name in _SCALES:
    if name in inputs:
      source = inputs[name].at[step.row, step.first + block]
      action(pltpu.make_async_copy(source, scratch[name].at[slot], arrived))


def _absorb(static: TpuStatic, row, block, slot, inputs, out, scratch) -> None:
  """Adds a block of sequence `row`, in stage `slot`, to the online softmax."""
  reach = inputs["reach"]
  first_key, end_key, query_position = (
    reach[0, :, i : i + 1] for i in range(3)
  )
  rows = first_key.shape[0]
  base = block * static.tokens
  position = base + lax.broadcasted_iota(jnp.int32, (rows, static.tokens), 1)
  mask = (position >= first_key) & (position < end_key)
  is_hidden = None
  if "tree" in inputs:
    mask &= _in_tree(block - inputs["tree_first"][row], inputs["tree"])
    is_hidden = _hidden(mask)
  mask = mask[None]
  logits = _dot(static, inputs["q"][0], scratch["k_pages"][slot], 2)
  if "k_scale" in inputs:
    logits = logits * scratch["k_scale"][slot][:, None]
  logits = logits * inputs["factor"][...]
  if static.soft_cap is not None:
    logits = static.soft_cap * jnp.tanh(logits / static.soft_cap)
  if "slopes" in inputs:
    distance = (position - query_position).astype(jnp.float32)
    logits = logits + inputs["slopes"][...] * distance[None]
  logits = jnp.where(mask, logits, -jnp.inf)
  old_m = scratch["m"][...]
  # `m` is finite, so a block changes no bit of a row that sees none of its
  # keys.
  m = jnp.maximum(old_m, jnp.max(logits, axis=2, keepdims=True))
  alpha = jnp.exp(old_m - m)
  weights = jnp.exp(logits - m)
  scratch["m"][...] = m
  scratch["l"][...] = scratch["l"][...] * alpha + jnp.sum(
    weights, axis=2, keepdims=True
  )
  if "v_scale" in inputs:
    scale = scratch["v_scale"][slot][:, None]
    weights = jnp.where(mask, weights * scale, jnp.float32(0))
  values = _values(
    base, first_key, end_key, scratch["v_pages"].at[slot], is_hidden
  )
  out[0] = out[0] * alpha + _dot(static, weights, values, 1)


def _in_tree(block, tree):
  """Returns the tree mask of a block; all True outside of the tree."""
  blocks = tree.shape[1]
  outside = (block < 0) | (block >= blocks)
  mask = tree[0, jnp.clip(block, 0, blocks - 1)].astype(jnp.int32)
  return (mask + outside.astype(jnp.int32)) > 0


def _hidden(mask):
  """Returns bool[1, A, 1], True for tokens that no row of `mask` sees."""
  # A product with ones moves the A tokens from lanes to sublanes, because the
  # tokens of values are in sublanes.
  ones = jnp.ones((mask.shape[0], 128), jnp.float32)
  mask = mask.astype(jnp.int32).astype(jnp.float32)
  rows = lax.dot_general(
    mask, ones, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
  )
  return (rows[:, :1] == 0)[None]


def _values(base, first_key, end_key, ref, is_hidden):
  """Returns a block's values; floats of tokens that no row sees become 0."""
  values = ref[...]
  # 0 * NaN is NaN, so a weight of 0 would not exclude a NaN. int8 has no NaN.
  if values.dtype == jnp.int8:
    return values
  position = base + lax.broadcasted_iota(jnp.int32, values.shape, 1)
  lowest = jnp.min(jnp.where(end_key > 0, first_key, jnp.max(end_key)))
  is_used = (position >= lowest) & (position < jnp.max(end_key))
  values = jnp.where(is_used, values.astype(jnp.float32), jnp.float32(0))
  return values if is_hidden is None else jnp.where(is_hidden, 0.0, values)


def _dot(static: TpuStatic, left, right, contracted: int):
  """Contracts the last axis of `left` with axis `contracted` of `right`."""
  is_float32 = static.dtype == jnp.float32
  return lax.dot_general(
    _convert(left, static.dtype),
    _convert(right, static.dtype),
    (((2,), (contracted,)), ((0,), (0,))),
    precision=lax.Precision.HIGHEST if is_float32 else None,
    preferred_element_type=jnp.float32,
  )


def _convert(values, dtype):
  """Converts through float32; every TPU generation supports both steps."""
  if values.dtype == dtype:
    return values
  return values.astype(jnp.float32).astype(dtype)
