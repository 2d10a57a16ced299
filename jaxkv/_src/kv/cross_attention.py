"""Attention of new tokens over all tokens of an encoder.

All queries of a row see the same keys. So the queries of several columns are
passed to a decode kernel as one query with more heads. The kernel then reads
each key once for all of these columns.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import jaxkv_kernels as kernels
from jaxkv._src.kv.kv_pages import KVPages
from jaxkv._src.kv.view import FreshView
from jaxkv._src.kv.view import View
from jaxkv._src.kv.view import rows_of

# At common head sizes, all backends support this many query heads per K/V head.
_HEADS = 64


def attend_packed(
  kv: KVPages, rows: View, q: jax.Array, call: dict[str, Any]
) -> tuple[jax.Array, jax.Array]:
  """Computes attention of queries that are packed one row after another.

  Row b has `num_tokens[b]` queries, which see positions 0 .. starts[b] - 1.
  `call` has further arguments of `kernels.paged_decode`.

  Returns:
    For queries [C, H, D], the attention [C, H, D] and float32[C, H], its
    log-sum-exps.
  """
  begins = jnp.zeros((1,), jnp.int32)
  ends = jnp.cumsum(rows.num_tokens, dtype=jnp.int32)
  runs = jnp.concatenate([begins, ends])
  columns = q.shape[0]
  tiles = kernels.tile_queries(rows.starts, runs, columns, columns)
  tile_rows = View(
    page_table=jnp.take(rows.page_table, tiles.sequences, axis=0, mode="clip"),
    starts=jnp.take(rows.starts, tiles.sequences, mode="clip"),
    num_tokens=tiles.counts,
  )
  out, lse = attend_rectangle(kv, tile_rows, tiles.pack(q), call)
  return tiles.unpack(out, lse)


def attend_rectangle(
  kv: KVPages, view: View | FreshView, q: jax.Array, call: dict[str, Any]
) -> tuple[jax.Array, jax.Array]:
  """Computes attention of queries [B, T, H, D]; see `attend_packed`."""
  rows = rows_of(view)
  batch, columns, heads, dim = q.shape
  groups = kv.num_kv_heads
  # A piece is a run of columns that becomes one query of the decode kernel.
  size = max(1, min(columns, _HEADS * groups // heads))
  pieces = -(-columns // size)
  q = jnp.pad(q, ((0, 0), (0, pieces * size - columns), (0, 0), (0, 0)))
  first = jnp.arange(pieces, dtype=jnp.int32)[None] * size
  # A piece without queries gets length 0, so that it reads nothing.
  has_query = first < rows.num_tokens[:, None]
  lengths = jnp.where(has_query, rows.starts[:, None], 0).reshape(-1)
  # K/V heads go before columns, because the kernel expects the query heads of
  # a K/V head to be consecutive.
  queries = q.reshape(batch * pieces, size, groups, heads // groups, dim)
  queries = queries.swapaxes(1, 2).reshape(batch * pieces, size * heads, dim)
  options: kernels.AttentionOptions = call["options"]
  if options.sinks is not None:
    sinks = options.sinks.reshape(groups, 1, -1)
    sinks = jnp.broadcast_to(sinks, (groups, size, heads // groups))
    options = dataclasses.replace(options, sinks=sinks.reshape(-1))
    call = call | {"options": options}
  table = jnp.repeat(rows.page_table, pieces, axis=0)
  assert kv.v is not None  # `attend` refuses latents.
  out, lse = kernels.paged_decode(queries, kv.k, kv.v, table, lengths, **call)

  def to_columns(array: jax.Array) -> jax.Array:
    """Returns [B * pieces, size * H, X] as [B, T, H, X]."""
    shape = (batch * pieces, groups, size, heads // groups, array.shape[-1])
    array = array.reshape(shape).swapaxes(1, 2)
    return array.reshape(batch, pieces * size, heads, -1)[:, :columns]

  is_query = (
    jnp.arange(columns, dtype=jnp.int32)[None] < rows.num_tokens[:, None]
  )
  out, lse = to_columns(out), to_columns(lse[..., None])[..., 0]
  out = jnp.where(is_query[..., None, None], out, jnp.zeros_like(out))
  return out, jnp.where(is_query[..., None], lse, -jnp.inf)
