"""Cuts rectangles of queries into tiles of rows, and finds the keys they see.

A row is one query head of one query. A kernel multiplies the Y rows of a tile
that share a K/V head with the keys of that head in one product. The docstring
of the package `attention` defines the other letters.
"""

from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxkv_kernels._src.attention.options import AttentionCall
from jaxkv_kernels._src.attention.options import CallOptions


class Tiles(NamedTuple):
  """Queries in tiles, and the range of keys that they see.

  Attributes:
    q: the rows of Z tiles. For each K/V head, row t * (H / K) + h of a tile is
      query t with the h-th query head of that K/V head; padding follows.
    reach: three positions for each row: its first key, one past its last key,
      and its query. The first two are 0 for padding.
    first: the first key that any row of each tile sees.
    end: one past the last key of each tile, 0 if no row sees a key.
    position: the position of each tile's first query.
  """

  q: jax.Array  # [Z, K, Y, D]
  reach: jax.Array  # int32[Z, Y, 3]
  first: jax.Array  # int32[Z]
  end: jax.Array  # int32[Z]
  position: jax.Array  # int32[Z]


class Reach(NamedTuple):
  """The keys that each query sees, at positions first <= p < end.

  Attributes:
    first: the first key; 0 for padding.
    end: one past the last key; 0 for padding.
    position: the position of the query itself.
  """

  first: jax.Array  # int32[B, T]
  end: jax.Array  # int32[B, T]
  position: jax.Array  # int32[B, T]


def span(
  position: jax.Array, capacity: int, window: jax.Array | int | None
) -> tuple[jax.Array, jax.Array]:
  """Returns the first key that a query sees, and one past the last.

  Args:
    position: int32[...], -1 for a query without keys; may exceed the capacity.
    capacity: M * S; keys have lower positions.
    window: as in `CallOptions`. It ends at `position`, even past the capacity.
  """
  end_key = jnp.clip(position + 1, 0, capacity)
  if window is None:
    return jnp.zeros_like(end_key), end_key
  return jnp.clip(position + 1 - window, 0, end_key), end_key


def reach(call: AttentionCall) -> Reach:
  """Returns the keys that each query of a rectangle sees."""
  column = jnp.arange(call.q.shape[1], dtype=jnp.int32)[None]
  position = call.starts[:, None] + column
  first_key, end_key = span(position, call.capacity, call.options.window)
  first_key, end_key = (
    jnp.where(call.is_query, x, 0) for x in (first_key, end_key)
  )
  return Reach(first_key, end_key, position)


def tile(call: AttentionCall, *, tile_size: int, multiple: int) -> Tiles:
  """Cuts a rectangle into tiles; the tiles of a sequence are consecutive.

  Y, the rows of a tile of `tile_size` queries, is rounded up to a `multiple`.
  """
  columns, heads, dim = call.q.shape[1:]
  kv_heads = call.k_pages.shape[1]
  per_kv_head = heads // kv_heads
  padding = -columns % tile_size
  q = jnp.pad(call.q, ((0, 0), (0, padding), (0, 0), (0, 0)))
  rows = jnp.stack(reach(call), axis=-1)
  rows = jnp.pad(rows, ((0, 0), (0, padding), (0, 0)))
  # [Z, K, tile_size * H / K, D]: rows that share a K/V head are consecutive.
  q = q.reshape(-1, tile_size, kv_heads, per_kv_head, dim).swapaxes(1, 2)
  q = q.reshape(-1, kv_heads, tile_size * per_kv_head, dim)
  rows = rows.reshape(-1, tile_size, 3)
  first_key = rows[..., 0]
  end_key = rows[..., 1]
  position = rows[:, 0, 2]
  tile_end = jnp.max(end_key, axis=1)
  row_padding = -(tile_size * per_kv_head) % multiple
  rows = jnp.repeat(rows, per_kv_head, axis=1)
  return Tiles(
    q=jnp.pad(q, ((0, 0), (0, 0), (0, row_padding), (0, 0))),
    reach=jnp.pad(rows, ((0, 0), (0, row_padding), (0, 0))),
    # Padding has first 0, which must not become the first key of the tile.
    first=jnp.min(jnp.where(end_key > 0, first_key, tile_end[:, None]), axis=1),
    end=tile_end,
    position=position,
  )


def trees(
  options: CallOptions,
  *,
  per_kv_head: int,
  tile_size: int,
  rows: int,
  tokens: int,
) -> tuple[jax.Array, jax.Array]:
  """Cuts a tree mask into tiles of Y `rows` and blocks of A `tokens`.

  A tile has `tile_size` queries, with `per_kv_head`, H / K, heads each.

  Returns:
    (int8[Z, J, Y, A], 0 for a key that the tree mask hides from a row;
    int32[B], the first of the J blocks of keys that each tree overlaps).
  """
  mask = options.tree_mask
  starts = options.tree_starts
  assert mask is not None and starts is not None
  columns, nodes = mask.shape[1:]
  # A tree that begins inside a block can overlap one more block.
  num = -(-nodes // tokens) + 1
  first_block = jnp.maximum(starts, 0) // tokens
  key = jnp.arange(num * tokens, dtype=jnp.int32)[None]
  key = first_block[:, None] * tokens + key
  node = (key - starts[:, None])[:, None]
  # True for keys outside of the tree, to which the mask does not apply.
  tiles = jnp.take_along_axis(mask, jnp.clip(node, 0, nodes - 1), axis=2)
  tiles = tiles | (node < 0) | (node >= nodes)
  tiles = jnp.pad(tiles, ((0, 0), (0, -columns % tile_size), (0, 0)))
  tiles = jnp.repeat(
    tiles.reshape(-1, tile_size, num, tokens), per_kv_head, axis=1
  )
  tiles = jnp.pad(
    tiles, ((0, 0), (0, rows - tile_size * per_kv_head), (0, 0), (0, 0))
  )
  return tiles.swapaxes(1, 2).astype(jnp.int8), first_block


def float32(shape: tuple[int, ...], inputs: Any) -> jax.ShapeDtypeStruct:
  """Returns the type of a float32 output that varies over axes of `inputs`."""
  axes = jax.typeof(zero(inputs)).manual_axis_type
  return jax.ShapeDtypeStruct(shape, jnp.float32, manual_axis_type=axes)


def zero(inputs: Any) -> Any:
  """Returns a float32 0 that varies over the mesh axes of all inputs."""
  # Under `shard_map`, a sum varies over the mesh axes of all its terms.
  return sum(
    jnp.zeros_like(array, jnp.float32, shape=())
    for array in jax.tree.leaves(inputs)
  )


def untile(rows: jax.Array, call: AttentionCall, tile_size: int) -> jax.Array:
  """Returns rows [Z, K, Y, X] of tiles of queries as [B, T, H, X]."""
  batch, columns, heads, _ = call.q.shape
  kv_heads = rows.shape[1]
  dim = rows.shape[3]
  per_kv_head = heads // kv_heads
  rows = rows[:, :, : tile_size * per_kv_head]
  rows = rows.reshape(-1, kv_heads, tile_size, per_kv_head, dim).swapaxes(1, 2)
  return rows.reshape(batch, -1, heads, dim)[:, :columns]
