"""Steps that decoding and rectangles share, given a backend.

The docstring of the package `attention` defines the letters.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv_kernels._src.attention.choose import Backend
from jaxkv_kernels._src.attention.options import AttentionCall
from jaxkv_kernels._src.attention.options import CallOptions

Pools = tuple[jax.Array, jax.Array]


def decode_call(
  q: jax.Array,
  pools: Pools,
  page_table: jax.Array,
  lengths: jax.Array,
  options: CallOptions,
) -> AttentionCall:
  """Returns the `AttentionCall` of a decode step, whose q is [B, H, D]."""
  return AttentionCall(
    q=q,
    k_pages=pools[0],
    v_pages=pools[1],
    page_table=page_table,
    # The query is the last token. An idle row has length 0 and sees no key.
    starts=lengths - 1,
    counts=jnp.ones_like(lengths),
    options=options,
  )


def decode_with(
  module: Backend, call: AttentionCall
) -> tuple[jax.Array, jax.Array]:
  """Computes a `decode_call`, as a rectangle of one column."""
  call = dataclasses.replace(call, q=call.q[:, None])
  out, lse = module.attend(call)
  return out[:, 0], lse[:, 0]


def attend_rectangle(
  module: Backend, call: AttentionCall
) -> tuple[jax.Array, jax.Array]:
  """Computes all columns of a rectangle at once, or `query_tile` at a time."""
  query_tile = call.query_tile
  if query_tile is None:
    return module.attend(call)
  columns = call.q.shape[1]
  # The same compiled code computes every tile of [B, query_tile] queries, so
  # that all tiles round equally. There must be at least two tiles, because with
  # one XLA would hoist parts of the loop's body and compile them differently.
  num_tiles = max(-(-columns // query_tile), 2)
  padding = num_tiles * query_tile - columns
  q = jnp.pad(call.q, ((0, 0), (0, padding), (0, 0), (0, 0)))
  # The largest count determines the number of tiles, so it must not exceed T.
  counts = jnp.minimum(call.counts, columns)
  call = dataclasses.replace(call, q=q, counts=counts)
  if getattr(module, "TAKES_QUERY_TILES", False):
    out, lse = module.attend(call)
  else:
    out, lse = _attend_by_tile(module, call, query_tile)
  return out[:, :columns], lse[:, :columns]


def _attend_by_tile(
  module: Backend, call: AttentionCall, query_tile: int
) -> tuple[jax.Array, jax.Array]:
  """Calls a backend without `TAKES_QUERY_TILES` once for each tile."""
  q = call.q

  def attend_tile(index: jax.Array, results: Any) -> Any:
    first_column = index * query_tile
    tile = dataclasses.replace(
      call,
      q=lax.dynamic_slice_in_dim(q, first_column, query_tile, 1),
      starts=call.starts + first_column,
      counts=jnp.clip(call.counts - first_column, 0, query_tile),
    )
    return jax.tree.map(
      lambda x, part: lax.dynamic_update_slice_in_dim(x, part, first_column, 1),
      results,
      module.attend(tile),
    )

  shape = q.shape[:3]
  # `zeros_like` keeps the mesh axes over which q varies under `shard_map`.
  results = (
    jnp.zeros_like(q, jnp.float32, shape=(*shape, call.value_dim)),
    jnp.zeros_like(q, jnp.float32, shape=shape) - jnp.inf,
  )
  # Tiles past the longest row are not computed. XLA cannot unroll this loop,
  # because its number of iterations is not a constant.
  tiles = (jnp.max(call.counts) + query_tile - 1) // query_tile
  return lax.fori_loop(jnp.zeros_like(tiles), tiles, attend_tile, results)
