"""Rectangles of queries as tiles of rows, and which keys each row sees.

A row is one query head of one query. The Y rows of a tile that share a K/V head
are multiplied with its keys at once.
"""

from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxkv_kernels._src.attention.options import AttentionCall
from jaxkv_kernels._src.attention.options import CallOptions


class Tiles(NamedTuple):
  """Queries in tiles, and which keys they see.

  Attributes:
    q: row t * H / K + h of a tile is query t and the h-th query head of the K/V
      head; the rows after those are padding.
    reach: for each row its first key, one past its last key, and its own
      position; 0, 0, 0 for padding.
    first: first key that any row of the tile sees.
    end: one past the last, 0 if no row sees a key.
    position: position of the tile's first query.
  """

  q: jax.Array  # [Z, K, Y, D]
  reach: jax.Array  # int32[Z, Y, 3]
  first: jax.Array  # int32[Z]
  end: jax.Array  # int32[Z]
  position: jax.Array  # int32[Z]


class Reach(NamedTuple):
  """Which keys each query sees, as absolute positions, first <= p < end.

  Attributes:
    first: 0 where there is no query.
    end: 0 where there is no query.
    position: of the query itself.
  """

  first: jax.Array  # int32[B, T]
  end: jax.Array  # int32[B, T]
  position: jax.Array  # int32[B, T]


def span(
  position: jax.Array, capacity: int, window: jax.Array | int | None
) -> tuple[jax.Array, jax.Array]:
  """First key that a query at `position` sees, and one past the last.

  Args:
    position: int32[...], -1 for a query without keys; may exceed the capacity.
    capacity: tokens that a row of the page table holds; no others exist.
    window: as in `CallOptions`; it ends at the position, even past the table.

  Returns:
    int32[...] each.
  """
  end = jnp.clip(position + 1, 0, capacity)
  if window is None:
    return jnp.zeros_like(end), end
  return jnp.clip(position + 1 - window, 0, end), end


def reach(call: AttentionCall) -> Reach:
  """Which keys each query of a rectangle sees."""
  column = jnp.arange(call.q.shape[1], dtype=jnp.int32)[None]
  position = call.starts[:, None] + column
  first, end = span(position, call.capacity, call.options.window)
  first, end = (jnp.where(call.real, x, 0) for x in (first, end))
  return Reach(first, end, position)


def tile(call: AttentionCall, *, size: int, multiple: int) -> Tiles:
  """Cuts a rectangle into tiles.

  Args:
    call: the rectangle and its pages.
    size: queries of a tile.
    multiple: Y is the smallest multiple of it that fits.

  Returns:
    The tiles; those of one sequence are consecutive.
  """
  columns, heads, dim = call.q.shape[1:]
  kv_heads = call.k_pages.shape[1]
  per_kv_head = heads // kv_heads
  spare = -columns % size
  q = jnp.pad(call.q, ((0, 0), (0, spare), (0, 0), (0, 0)))
  rows = jnp.stack(reach(call), axis=-1)
  rows = jnp.pad(rows, ((0, 0), (0, spare), (0, 0)))
  q = q.reshape(-1, size, kv_heads, per_kv_head, dim).swapaxes(1, 2)
  q = q.reshape(-1, kv_heads, size * per_kv_head, dim)
  rows = rows.reshape(-1, size, 3)
  first, end = rows[..., 0], rows[..., 1]
  position = rows[:, 0, 2]
  last = jnp.max(end, axis=1)
  idle = -(size * per_kv_head) % multiple
  rows = jnp.repeat(rows, per_kv_head, axis=1)
  return Tiles(
    q=jnp.pad(q, ((0, 0), (0, 0), (0, idle), (0, 0))),
    reach=jnp.pad(rows, ((0, 0), (0, idle), (0, 0))),
    first=jnp.min(jnp.where(end > 0, first, last[:, None]), axis=1),
    end=last,
    position=position,
  )


def trees(
  options: CallOptions, *, per_kv_head: int, size: int, rows: int, tokens: int
) -> tuple[jax.Array, jax.Array]:
  """A tree mask cut into tiles of rows and blocks of keys.

  Args:
    options: of a call with a tree mask.
    per_kv_head: H / K.
    size: queries of a tile.
    rows: Y.
    tokens: A, keys of a block.

  Returns:
    (int8[Z, J, Y, A], 0 where a row does not see a key; int32[B], the first of
    the J blocks that a sequence's tree touches).
  """
  mask, starts = options.tree_mask, options.tree_starts
  assert mask is not None and starts is not None
  columns, nodes = mask.shape[1:]
  num = -(-nodes // tokens) + 1
  first = jnp.maximum(starts, 0) // tokens
  key = jnp.arange(num * tokens, dtype=jnp.int32)[None]
  key = first[:, None] * tokens + key
  node = (key - starts[:, None])[:, None]
  known = jnp.take_along_axis(mask, jnp.clip(node, 0, nodes - 1), axis=2)
  seen = known | (node < 0) | (node >= nodes)
  seen = jnp.pad(seen, ((0, 0), (0, -columns % size), (0, 0)))
  seen = jnp.repeat(seen.reshape(-1, size, num, tokens), per_kv_head, axis=1)
  seen = jnp.pad(seen, ((0, 0), (0, rows - size * per_kv_head), (0, 0), (0, 0)))
  return seen.swapaxes(1, 2).astype(jnp.int8), first


def float32(shape: tuple[int, ...], inputs: Any) -> jax.ShapeDtypeStruct:
  """Type of a kernel's float32 output; varies over the inputs' mesh axes."""
  zero = sum(
    jnp.zeros_like(array, jnp.float32, shape=())
    for array in jax.tree.leaves(inputs)
  )
  axes = jax.typeof(zero).manual_axis_type
  return jax.ShapeDtypeStruct(shape, jnp.float32, manual_axis_type=axes)


def untile(rows: jax.Array, call: AttentionCall, size: int) -> jax.Array:
  """Rows [Z, K, Y, X] of tiles of `size` queries back to [B, T, H, X]."""
  batch, columns, heads, _ = call.q.shape
  kv_heads, last = rows.shape[1], rows.shape[3]
  per_kv_head = heads // kv_heads
  rows = rows[:, :, : size * per_kv_head]
  rows = rows.reshape(-1, kv_heads, size, per_kv_head, last).swapaxes(1, 2)
  return rows.reshape(batch, -1, heads, last)[:, :columns]
