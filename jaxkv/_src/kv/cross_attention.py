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
from jaxkv._src.kv.view import AnyView
from jaxkv._src.kv.view import PackedView
from jaxkv._src.kv.view import View
from jaxkv._src.kv.view import rows_of
from jaxkv_kernels._src.attention import query_packing

_HEADS = 64
"""The most query heads of a key-value head that every backend serves."""


def attend_encoder(
  kv: KVPages, view: AnyView, q: jax.Array, call: dict[str, Any]
) -> tuple[jax.Array, jax.Array]:
  """Each query sees positions 0 .. starts - 1 of its row, and no others.

  Args:
    kv: the pages.
    view: the rows; of them `starts` are the tokens to be seen, and `counts` the
      queries.
    q: [B, T, H, D].
    call: further arguments of `kernels.paged_decode`.

  Returns:
    [B, T, H, D]; float32[B, T, H].
  """
  if not isinstance(view, PackedView):
    return _rectangle(kv, rows_of(view), q, call)
  decode = rows_of(view.decode)
  single = decode.page_table.shape[0]
  out, lse = _rectangle(kv, decode, q[0, :single, None], call)
  parts = [(out[:, 0], lse[:, 0])]
  if view.prefill is not None:
    parts.append(_packed(kv, view.prefill, q[0, single:], call))
  out, lse = zip(*parts, strict=True)
  return jnp.concatenate(out)[None], jnp.concatenate(lse)[None]


def _packed(
  kv: KVPages, rows: View, q: jax.Array, call: dict[str, Any]
) -> tuple[jax.Array, jax.Array]:
  """Queries [C, H, D] that stand one row after another."""
  begins = jnp.zeros((1,), jnp.int32)
  ends = jnp.cumsum(rows.counts, dtype=jnp.int32)
  runs = jnp.concatenate([begins, ends])
  columns = q.shape[0]
  tiles = query_packing.tile(rows.starts, runs, columns, columns)
  own = View(
    page_table=jnp.take(rows.page_table, tiles.sequences, axis=0, mode="clip"),
    starts=jnp.take(rows.starts, tiles.sequences, mode="clip"),
    counts=tiles.counts,
  )
  out, lse = _rectangle(kv, own, query_packing.pack(q, tiles), call)
  return query_packing.unpack(out, lse, tiles)


def _rectangle(
  kv: KVPages, rows: View, q: jax.Array, call: dict[str, Any]
) -> tuple[jax.Array, jax.Array]:
  """Queries [B, T, H, D], cut into pieces of few enough query heads."""
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
