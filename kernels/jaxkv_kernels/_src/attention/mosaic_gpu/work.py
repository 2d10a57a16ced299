"""What the Hopper kernel of paged attention is told, and how it counts blocks.

| letter | size of |
|---|---|
| I | items of work |
| O | places for their results |
| W | tiles of queries |
| R | query rows of a tile, a multiple of 8 up to 64 |
| C | tokens of a block |
| X | blocks in a ring, of keys or of values |
"""

import dataclasses
from typing import Any
from typing import NamedTuple

import jax
import numpy as np
from jax import lax

# Rows of a product on the tensor cores. A tile that has fewer leaves the rest
# to chance: no row's result depends on another row.
ROWS = 64
# Tokens of a block.
TOKENS = 64
# Columns of a result that go through shared memory at a time.
RESULT = 32


class Item(NamedTuple):
  """What one stream does at a time; a row of int32[I, 8], or scalars.

  Attributes:
    sequence: row of the page table.
    tile: of queries.
    first: first token.
    end: one past the last.
    position: of the tile's first query.
    window: as in `CallOptions`, larger than any context where there is none.
    tree: block in which the sequence's tree begins.
    place: of its result.
  """

  sequence: Any
  tile: Any
  first: Any
  end: Any
  position: Any
  window: Any
  tree: Any
  place: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuStatic:
  """Sizes and choices of one kernel.

  Attributes:
    kv_heads: K.
    group: G.
    page_size: S.
    streams: of one block of threads.
    k_stages: X, for keys.
    v_stages: X, for values.
    blocks: of threads, one a multiprocessor.
    causal: whether rows of a tile see different keys.
    soft_cap: as in `CallOptions`.
    alibi: whether logits have a bias.
    tree: whether there is a tree mask.
    interpreted: whether products are to be plain ones.
  """

  kv_heads: int
  group: int
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
    """Copies that make up a block of tokens, of K or of V."""
    return scales_of_block(self.page_size)[0]


class Side(NamedTuple):
  """Keys or values: where they come from, and their ring."""

  # Input, in device memory
  pages: Any  # [P * K, S, D]
  scale: Any  # float32[P * K, S] of tokens, or None
  # Scratch, in shared memory, the first index being the stream
  ring: Any  # [streams, X, C, D], of the pages' format
  # Barriers, one for every place of all rings
  full: Any  # [streams * X]
  free: Any  # [streams * X]
  # Scratch for pages of 8 bits, else None
  wide: Any = None  # [streams, C, D], of the queries' format
  # Scratch for scales of tokens, else None; a copy begins at 128 bytes
  scales: Any = None  # float32[streams, X, *scales_of_block(S)]
  factors: Any = None  # float32[streams, C]


class Refs(NamedTuple):
  """What the kernel sees."""

  # Input, in device memory
  items: Any  # int32[I, 8]
  begins: Any  # int32[W + 1], of each tile's items; from the last on are idle
  table: Any  # int32[B, M], clamped to the pool
  factor: Any  # float32[K]
  q: Any  # [W * K, R, D]
  # Output, in device memory
  out: Any  # float32[O * K, R, Dv]
  totals: Any  # float32[O * K, 2, 64], the softmax's top and total
  # Scratch, in shared memory, the first index being the stream
  queries: Any  # [streams, 64, D]
  result: Any  # float32[streams, 64, 32], some columns at a time
  sums: Any  # float32[streams, 2, 64]
  q_full: Any  # Barriers [streams]
  # All of the keys, and all of the values
  k: Side
  v: Side
  # Input, in device memory, or None
  slopes: Any = None  # float32[K, 64]
  trees: Any = None  # int8[W, E, 64, C], masks of E blocks
  shown: Any = None  # int32[W, E, C], 0 where no row sees a token


def scales_of_block(page_size: int) -> tuple[int, int, int]:
  """Places for a block's scales of tokens: pages, rows of each, tokens.

  A copy to shared memory begins at a multiple of 128 bytes; the first of a
  page's rows counts.
  """
  tokens = min(page_size, TOKENS)
  return TOKENS // tokens, max(1, 32 // tokens), tokens


def quotient(number: Any, by: int) -> jax.Array:
  """Of an int32 that is not negative; also where integers have 64 bits."""
  return lax.div(number, np.int32(by))


def remainder(number: Any, by: int) -> jax.Array:
  """Likewise."""
  return lax.rem(number, np.int32(by))


def first_block(item: Item) -> jax.Array:
  """In which an item begins, counted from its sequence's beginning."""
  return quotient(item.first, TOKENS)


def num_blocks(item: Item) -> jax.Array:
  """That an item touches."""
  return quotient(item.end + TOKENS - 1, TOKENS) - first_block(item)


def place(
  ring: Any, stream: jax.Array, used: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Where a stream's next block goes after `used`: in its ring, in all."""
  stages = ring.shape[1]
  slot = remainder(used, stages)
  return slot, stream * stages + slot
