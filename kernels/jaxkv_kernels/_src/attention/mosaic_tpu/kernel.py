"""The TPU kernel of paged attention, in Pallas' Mosaic dialect.

One grid step serves one tile of queries: it walks over the blocks of pages
that the tile sees. Pages are copied into a ring of buffers, one copy per page
for all heads. The last blocks of a step already fetch the first blocks of the
next step, so the ring drains only at the end of the grid. The softmax is the
online softmax of FlashAttention (Dao et al. 2022, algorithm 1) in float32.

Only features that the TPU interpreter runs are used, so that a CPU can check
the numbers and the races. See `attention` for the letters.
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

# F, stages of the ring. With two, one block is copied while the other is used.
# A third hides the latency of short blocks.
BUFFERS = 3
# Bytes that the compiler may use, of the 64 MiB of the smallest memory (v7x).
MEMORY_BYTES = 48 * 2**20

# For block indices. A Python 0 would be int64 in 64-bit mode, unknown to a TPU.
_ZERO = np.int32(0)

_POOLS = ("k_pages", "v_pages")
_SCALES = ("k_scale", "v_scale")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuStatic:
  """Sizes and choices of one kernel.

  Attributes:
    tiles: tiles of one sequence.
    pages: pages of a block.
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

  Args:
    static: sizes.
    firsts: int32[Z], first token that a tile sees.
    ends: int32[Z], one past the last, 0 for none.
    inputs: those of `_in_specs`; scales of tokens, slopes and a tree are
      optional.
    interpret: as in `CallOptions`.

  Returns:
    (float32[Z, K, Y, Dv], float32[Z, K, Y, 1] natural log-sum-exp).
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
      out_specs=[_one_a_step(out.shape), _one_a_step(lse.shape)],
      scratch_shapes=[_scratch(static, inputs)],
    ),
    out_shape=[out, lse],
    compiler_params=pltpu.CompilerParams(
      # In order: a step fetches for the next one.
      dimension_semantics=("arbitrary",),
      vmem_limit_bytes=MEMORY_BYTES,
    ),
    interpret=interpret,
    name="paged_attention",
  )(firsts, ends, inputs)


def _in_specs(
  static: TpuStatic, inputs: dict[str, jax.Array]
) -> dict[str, Any]:
  """The block of each input that a grid step sees."""
  num, columns = inputs["q"].shape[0], inputs["table"].shape[2]
  in_place = pl.BlockSpec(memory_space=pl.ANY)

  def table(step: int) -> pl.BlockSpec:
    """The page table's row of the grid step that is `step` ahead."""
    return pl.BlockSpec(
      (1, 1, columns),
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
    "q": _one_a_step(inputs["q"].shape),  # [Z, K, Y, D] as [1, K, Y, D]
    "reach": _one_a_step(inputs["reach"].shape),  # int32[Z, Y, 3] as [1, Y, 3]
    "factor": _whole(inputs["factor"].shape),  # float32[K, Y, 1]
    "slopes": _whole(inputs["factor"].shape),  # float32[K, Y, 1]
    "k_pages": in_place,  # [N, K, S, D]
    "v_pages": in_place,  # [N, K, S, Dv]
    "k_scale": in_place,  # float32[B, J, K, A]
    "v_scale": in_place,  # float32[B, J, K, A]
  }
  if "tree" in inputs:  # int8[Z, J, Y, A] as [1, J, Y, A]
    specs["tree"] = _one_a_step(inputs["tree"].shape)
    # int32[B]
    specs["tree_first"] = _whole(inputs["tree_first"].shape, pltpu.SMEM)
  return specs


def _one_a_step(shape: tuple[int, ...]) -> pl.BlockSpec:
  """Row z of an array, in grid step z."""
  zeros = (_ZERO,) * (len(shape) - 1)
  return pl.BlockSpec(
    (1, *shape[1:]), lambda z, *_: (z, *zeros), memory_space=pltpu.VMEM
  )


def _whole(shape: tuple[int, ...], memory: Any = pltpu.VMEM) -> pl.BlockSpec:
  """All of an array, in every grid step."""
  zeros = (_ZERO,) * len(shape)
  return pl.BlockSpec(shape, lambda *_: zeros, memory_space=memory)


def _scratch(static: TpuStatic, inputs: dict[str, jax.Array]) -> dict[str, Any]:
  """Scratch memory; a ring has the name of the input copied into it."""
  kv_heads, rows = inputs["q"].shape[1:3]
  block = BUFFERS, kv_heads, static.tokens
  scratch: dict[str, Any] = {
    "ring": pltpu.SMEM((1,), jnp.int32),
    "arrived": pltpu.SemaphoreType.DMA((BUFFERS,)),
    "top": pltpu.VMEM((kv_heads, rows, 1), jnp.float32),
    "total": pltpu.VMEM((kv_heads, rows, 1), jnp.float32),
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
    row: the sequence.
    first_page: first page seen, counted within the sequence.
    end_page: one past the last.
    first: first block.
    num: number of blocks, 0 if the tile sees nothing.
  """

  table: Any  # int32[1, 1, M]
  row: Any  # int32[]
  first_page: Any  # int32[]
  end_page: Any  # int32[]
  first: Any  # int32[]
  num: Any  # int32[]


def _kernel(static: TpuStatic, firsts, ends, inputs, out, lse, scratch) -> None:
  """Serves one tile of queries; refs as in `_in_specs` and `_scratch`."""
  index = pl.program_id(0)
  here = _step(static, index, firsts, ends, inputs["table"])
  after = _step(static, index + 1, firsts, ends, inputs["next_table"])
  before = _step(static, index - 1, firsts, ends, None)

  @pl.when(index == 0)
  def _():
    scratch["ring"][0] = 0

  ring = scratch["ring"][0]

  def stage(block):
    return (ring + block) % BUFFERS

  def fetch(step: _Step, block, at) -> None:
    _copies(static, step, block, at, inputs, scratch, lambda c: c.start())

  # The previous step fetched the other blocks, one for each block of its own.
  @pl.loop(0, jnp.clip(BUFFERS - before.num, 0, here.num))
  def _(block):
    fetch(here, block, stage(block))

  scratch["top"][...] = jnp.full_like(scratch["top"], LOWEST)
  scratch["total"][...] = jnp.zeros_like(scratch["total"])
  out[...] = jnp.zeros_like(out)

  @pl.loop(0, here.num)
  def _(block):
    at = stage(block)
    _copies(static, here, block, at, inputs, scratch, lambda c: c.wait())
    _absorb(static, here.row, here.first + block, at, inputs, out, scratch)
    ahead = block + BUFFERS

    @pl.when(ahead < here.num)
    def _():
      fetch(here, ahead, at)

    @pl.when((ahead >= here.num) & (ahead - here.num < after.num))
    def _():
      fetch(after, ahead - here.num, at)

  scratch["ring"][0] = stage(here.num)
  total = scratch["total"][...]
  empty = total == 0
  safe = jnp.where(empty, jnp.float32(1), total)
  out[0] = out[0] / safe
  lse[0] = jnp.where(empty, -jnp.inf, scratch["top"][...] + jnp.log(safe))


def _step(static: TpuStatic, index, firsts, ends, table) -> _Step:
  """The blocks of a grid step; none before the first and after the last."""
  last = pl.num_programs(0) - 1
  real = (index >= 0) & (index <= last)
  index = jnp.clip(index, 0, last)
  first_page = firsts[index] // static.page_size
  end_page = (ends[index] + static.page_size - 1) // static.page_size
  first = first_page // static.pages
  end = (end_page + static.pages - 1) // static.pages
  return _Step(
    table=table,
    row=index // static.tiles,
    first_page=first_page,
    end_page=end_page,
    first=first,
    num=jnp.where(real & (end_page > 0), end - first, 0),
  )


def _copies(
  static: TpuStatic, step: _Step, block, at, inputs, scratch, do
) -> None:
  """Starts or awaits the copies of a step's block into stage `at`."""
  arrived = scratch["arrived"].at[at]
  base = (step.first + block) * static.pages
  size = static.page_size

  @pl.loop(
    jnp.maximum(base, step.first_page),
    jnp.minimum(base + static.pages, step.end_page),
  )
  def _(column):
    page = step.table[0, 0, column]
    here = pl.ds(pl.multiple_of((column - base) * size, size), size)
    for name in _POOLS:
      target = scratch[name].at[at, :, here]
      do(pltpu.make_async_copy(inputs[name].at[page], target, arrived))

  for name in _SCALES:
    if name in inputs:
      source = inputs[name].at[step.row, step.first + block]
      do(pltpu.make_async_copy(source, scratch[name].at[at], arrived))


def _absorb(static: TpuStatic, row, block, at, inputs, out, scratch) -> None:
  """The online softmax of a block of sequence `row`, in stage `at`."""
  reach = inputs["reach"]
  first, end, own = (reach[0, :, i : i + 1] for i in range(3))
  rows = first.shape[0]
  base = block * static.tokens
  position = base + lax.broadcasted_iota(jnp.int32, (rows, static.tokens), 1)
  seen = (position >= first) & (position < end)
  hidden = None
  if "tree" in inputs:
    seen &= _in_tree(block - inputs["tree_first"][row], inputs["tree"])
    hidden = _hidden(seen)
  seen = seen[None]
  logits = _dot(static, inputs["q"][0], scratch["k_pages"][at], 2)
  if "k_scale" in inputs:
    logits = logits * scratch["k_scale"][at][:, None]
  logits = logits * inputs["factor"][...]
  if static.soft_cap is not None:
    logits = static.soft_cap * jnp.tanh(logits / static.soft_cap)
  if "slopes" in inputs:
    distance = (position - own).astype(jnp.float32)
    logits = logits + inputs["slopes"][...] * distance[None]
  logits = jnp.where(seen, logits, -jnp.inf)
  before = scratch["top"][...]
  # Never -inf: a block in which a row sees no key changes no bit of that row.
  top = jnp.maximum(before, jnp.max(logits, axis=2, keepdims=True))
  shrink = jnp.exp(before - top)
  weights = jnp.exp(logits - top)
  scratch["top"][...] = top
  scratch["total"][...] = scratch["total"][...] * shrink + jnp.sum(
    weights, axis=2, keepdims=True
  )
  if "v_scale" in inputs:
    scale = scratch["v_scale"][at][:, None]
    weights = jnp.where(seen, weights * scale, jnp.float32(0))
  values = _values(base, first, end, scratch["v_pages"].at[at], hidden)
  out[0] = out[0] * shrink + _dot(static, weights, values, 1)


def _in_tree(block, tree):
  """The tree mask of block `block`; all True outside the tree."""
  blocks = tree.shape[1]
  outside = (block < 0) | (block >= blocks)
  seen = tree[0, jnp.clip(block, 0, blocks - 1)].astype(jnp.int32)
  return (seen + outside.astype(jnp.int32)) > 0


def _hidden(seen):
  """Tokens that no row of `seen` bool[Y, A] sees, as bool[1, A, 1].

  Computed by a product, which moves lanes to sublanes.
  """
  ones = jnp.ones((seen.shape[0], 128), jnp.float32)
  seen = seen.astype(jnp.int32).astype(jnp.float32)
  rows = lax.dot_general(
    seen,
    ones,
    (((0,), (0,)), ((), ())),
    preferred_element_type=jnp.float32,
  )
  return (rows[:, :1] == 0)[None]


def _values(base, first, end, ref, hidden):
  """A block's values, with zeros for those that no row sees.

  0 * NaN is NaN: a weight of zero does not keep a value out.
  """
  values = ref[...]
  if values.dtype == jnp.int8:
    return values
  position = base + lax.broadcasted_iota(jnp.int32, values.shape, 1)
  lowest = jnp.min(jnp.where(end > 0, first, jnp.max(end)))
  used = (position >= lowest) & (position < jnp.max(end))
  values = jnp.where(used, values.astype(jnp.float32), jnp.float32(0))
  return values if hidden is None else jnp.where(hidden, 0.0, values)


def _dot(static: TpuStatic, left, right, contracted: int):
  """[K, Y, X] times [K, A, X], or [K, Y, A] times [K, A, X]; float32 sums."""
  exact = static.dtype == jnp.float32
  return lax.dot_general(
    _as(left, static.dtype),
    _as(right, static.dtype),
    (((2,), (contracted,)), ((0,), (0,))),
    precision=lax.Precision.HIGHEST if exact else None,
    preferred_element_type=jnp.float32,
  )


def _as(values, dtype):
  """Converts by way of float32, which every TPU generation supports."""
  if values.dtype == dtype:
    return values
  return values.astype(jnp.float32).astype(dtype)
