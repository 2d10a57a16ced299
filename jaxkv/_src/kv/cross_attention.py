"""Attention of new tokens over all tokens of an encoder.

No kernel for it is needed. All queries of a row see the same keys, so they are
further query heads of a single query: T queries with H heads, over K key-value
heads, are a decode step with T * H heads, which reads the keys once.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import jaxkv_kernels as kernels
from jaxkv._src.kv.memory import KVPages
from jaxkv._src.kv.view import FreshView
from jaxkv._src.kv.view import View
from jaxkv._src.kv.view import rows_of

_HEADS = 64
"""The most query heads of a key-value head that every backend serves."""


def attend_packed(
  kv: KVPages, rows: View, q: jax.Array, call: dict[str, Any]
) -> tuple[jax.Array, jax.Array]:
  """Attention of queries that stand one row after another.

  Each query sees positions 0 .. starts - 1 of its row, and no others.

  Args:
    kv: the pages.
    rows: their `starts` are the tokens to be seen, their `counts` the queries.
    q: [C, H, D].
    call: further arguments of `kernels.paged_decode`.

  Returns:
    [C, H, D]; float32[C, H], log-sum-exps.
  """
  begins = jnp.zeros((1,), jnp.int32)
  ends = jnp.cumsum(rows.counts, dtype=jnp.int32)
  runs = jnp.concatenate([begins, ends])
  columns = q.shape[0]
  tiles = kernels.tile_queries(rows.starts, runs, columns, columns)
  own = View(
    page_table=jnp.take(rows.page_table, tiles.sequences, axis=0, mode="clip"),
    starts=jnp.take(rows.starts, tiles.sequences, mode="clip"),
    counts=tiles.counts,
  )
  out, lse = attend_rectangle(kv, own, tiles.pack(q), call)
  return tiles.unpack(out, lse)


def attend_rectangle(
  kv: KVPages, view: View | FreshView, q: jax.Array, call: dict[str, Any]
) -> tuple[jax.Array, jax.Array]:
  """Attention of queries [B, T, H, D]; see `attend_packed`.

  The columns are cut into pieces of few enough query heads.
  """
  rows = rows_of(view)
  batch, columns, heads, dim = q.shape
  groups = kv.num_kv_heads
  size = max(1, min(columns, _HEADS * groups // heads))
  pieces = -(-columns // size)
  q = jnp.pad(q, ((0, 0), (0, pieces * size - columns), (0, 0), (0, 0)))
  first = jnp.arange(pieces, dtype=jnp.int32)[None] * size
  # A piece without queries reads nothing.
  some = first < rows.counts[:, None]
  lengths = jnp.where(some, rows.starts[:, None], 0).reshape(-1)
  folded = q.reshape(batch * pieces, size, groups, heads // groups, dim)
  folded = folded.swapaxes(1, 2).reshape(batch * pieces, size * heads, dim)
  options: kernels.AttentionOptions = call["options"]
  if options.sinks is not None:
    sinks = options.sinks.reshape(groups, 1, -1)
    sinks = jnp.broadcast_to(sinks, (groups, size, heads // groups))
    options = dataclasses.replace(options, sinks=sinks.reshape(-1))
    call = call | {"options": options}
  table = jnp.repeat(rows.page_table, pieces, axis=0)
  assert kv.v is not None  # `attend` refuses latents.
  out, lse = kernels.paged_decode(folded, kv.k, kv.v, table, lengths, **call)

  def unfolded(array: jax.Array) -> jax.Array:
    """[B, T, H, X] of [B * pieces, size * H, X]."""
    shape = (batch * pieces, groups, size, heads // groups, array.shape[-1])
    array = array.reshape(shape).swapaxes(1, 2)
    return array.reshape(batch, pieces * size, heads, -1)[:, :columns]

  real = jnp.arange(columns, dtype=jnp.int32)[None] < rows.counts[:, None]
  out, lse = unfolded(out), unfolded(lse[..., None])[..., 0]
  out = jnp.where(real[..., None, None], out, jnp.zeros_like(out))
  return out, jnp.where(real[..., None], lse, -jnp.inf)
