"""Units of work, sizes and references of the Hopper kernel.

The docstring of the package `attention` defines the letters. Here Y is a
multiple of 8 up to 64, and the rings of keys and of values can differ in F.
"""

import dataclasses
from typing import Any
from typing import NamedTuple

import jax
import numpy as np
from jax import lax

# Rows of a product on the tensor cores. Rows past the end of a tile are
# undefined, which is harmless, because rows do not depend on each other.
ROWS = 64
# A, tokens of a block.
TOKENS = 64
# Columns of a result that are copied through shared memory at a time.
RESULT = 32


class Unit(NamedTuple):
  """A unit of work, a piece of the keys of a tile; one row of `Refs.units`.

  Attributes:
    sequence: the row of the page table.
    tile: the tile of queries.
    first: the position of the first token of the piece.
    end: one past the last token of the piece.
    position: the position of the tile's first query.
    window: as in `CallOptions`; for None a number larger than any context.
    tree: the block in which the sequence's tree begins.
    result: the index of the unit's result, 0..O-1.
  """

  sequence: Any
  tile: Any
  first: Any
  end: Any
  position: Any
  window: Any
  tree: Any
  result: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuStatic:
  """Sizes and choices of one kernel.

  Attributes:
    kv_heads: K.
    per_kv_head: H / K.
    page_size: S.
    streams: the number of streams of a thread block, see `kernel`.
    k_stages: the number of stages of a ring of keys.
    v_stages: the number of stages of a ring of values.
    blocks: the number of thread blocks.
    causal: True if rows of a tile see different keys.
    soft_cap: as in `CallOptions`.
    alibi: True if the call has ALiBi slopes.
    tree: True if the call has a tree mask.
    interpreted: True in the interpreter.
  """

  kv_heads: int
  per_kv_head: int
  page_size: int
  streams: int
  k_stages: int
  v_stages: int
  blocks: int
  causal: bool
  soft_cap: float | None
  alibi: bool
  tree: bool
  interpreted: bool = False

  @property
  def pages(self) -> int:
    """The number of pages of a block; 1 if a block is part of a page."""
    return scales_of_block(self.page_size)[0]


class Side(NamedTuple):
  """The keys or the values: their pages and their ring."""

  # Input, in device memory
  pages: Any  # [N * K, S, D]
  scale: Any  # float32[N * K, S], of tokens; or None
  # Scratch, in shared memory
  ring: Any  # [streams, F, A, D], in the pages' format
  # Barriers, one for each stage of the rings of all streams
  full: Any  # [streams * F]
  free: Any  # [streams * F]
  # Scratch for 8-bit pages, or None
  wide: Any = None  # [streams, A, D], in the queries' format
  # Scratch for scales of tokens, or None; copies are aligned to 128 bytes
  scales: Any = None  # float32[streams, F, *scales_of_block(S)]
  factors: Any = None  # float32[streams, A]


class Refs(NamedTuple):
  """References to the kernel's arrays."""

  # Input, in device memory
  units: Any  # int32[U, 8]
  begins: Any  # int32[Z + 1], each tile's first unit, then the first idle one
  table: Any  # int32[B, M], clamped to the pool
  factor: Any  # float32[K]
  q: Any  # [Z * K, Y, D]
  # Output, in device memory
  out: Any  # float32[O * K, Y, Dv]
  totals: Any  # float32[O * K, 2, 64], the softmax's m and l
  # Scratch, in shared memory
  queries: Any  # [streams, 64, D]
  result: Any  # float32[streams, 64, 32], some columns at a time
  sums: Any  # float32[streams, 2, 64]
  q_full: Any  # Barriers [streams]
  # The keys and the values
  k: Side
  v: Side
  # Input, in device memory, or None
  slopes: Any = None  # float32[K, 64]
  trees: Any = None  # int8[Z, J, 64, A], masks of J blocks
  shown: Any = None  # int32[Z, J, A], 0 for tokens that no row sees


def scales_of_block(page_size: int) -> tuple[int, int, int]:
  """Returns the shape of a block's scales: [pages, rows of a page, tokens]."""
  # A copy to shared memory must begin at a multiple of 128 bytes. So a page of
  # fewer than 32 tokens gets several rows, but uses only the first.
  tokens = min(page_size, TOKENS)
  return TOKENS // tokens, max(1, 32 // tokens), tokens


def quotient(dividend: Any, divisor: int) -> jax.Array:
  """Divides a non-negative int32. The result is int32 even in 64-bit mode."""
  return lax.div(dividend, np.int32(divisor))


def remainder(dividend: Any, divisor: int) -> jax.Array:
  """Returns the remainder of the division in `quotient`."""
  return lax.rem(dividend, np.int32(divisor))


def first_block(unit: Unit) -> jax.Array:
  """Returns the index, in the sequence, of the block in which a unit begins."""
  return quotient(unit.first, TOKENS)


def num_blocks(unit: Unit) -> jax.Array:
  """Returns the number of blocks that a unit overlaps."""
  return quotient(unit.end + TOKENS - 1, TOKENS) - first_block(unit)


def stage_of(
  ring: Any, stream: jax.Array, used: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns the stage of block number `used`, and the index of its barriers."""
  stages = ring.shape[1]
  stage = remainder(used, stages)
  return stage, stream * stages + stage
