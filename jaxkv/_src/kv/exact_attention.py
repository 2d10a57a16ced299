"""Attention whose numbers do not depend on what else a call computes.

Queries stand in tiles of a few of one sequence, and a fixed number of tiles is
read at once, by one piece of compiled code. A query that decodes has a tile to
itself. So the same products of the same shapes serve decode steps, chunks of
prompts and a trainer's whole sequences.
"""

from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp

import jaxkv_kernels as kernels
from jaxkv._src import tiles
from jaxkv._src.kv.memory import KVPages
from jaxkv._src.kv.view import AnyView
from jaxkv._src.kv.view import PackedView
from jaxkv._src.kv.view import View
from jaxkv._src.kv.view import rows_of
from jaxkv_kernels._src import check
from jaxkv_kernels._src.attention import query_packing
from jaxkv_kernels._src.attention.options import refuse_options
from jaxkv_kernels._src.attention.xla.backend import BLOCK_TOKENS

# Query rows of a tile and K/V head: more make prompts cheap, fewer decoding.
_QUERY_ROWS = 8

# Tiles that are read at once. Reductions over fewer rows are compiled in
# another way.
_TILES = 16


class _Tiles(NamedTuple):
  """Queries [Z, Y, H, D], Y in a tile, and where their sequences live."""

  queries: jax.Array
  page_table: jax.Array  # int32[Z, M]
  starts: jax.Array  # int32[Z]
  counts: jax.Array  # int32[Z]


def check_exact(
  kv: KVPages, options: kernels.AttentionOptions, causal: bool
) -> None:
  """Raises ValueError unless there is an exact attention for a call."""
  size = kv.k.shape[2]
  if BLOCK_TOKENS % size:
    wanted = f"of a page size that divides {BLOCK_TOKENS} with exact=True"
    check.refuse(ValueError, "kv", wanted, f"one of {size}")
  if not causal:
    check.refuse(ValueError, "causal", "True with exact=True", causal)
  why = "no other program has such queries"
  refuse_options(options, f"{why}, with exact=True", "tree_mask")


def attend_exact(
  kv: KVPages, view: AnyView, q: jax.Array, call: dict[str, Any]
) -> tuple[jax.Array, jax.Array]:
  """Causal attention; see `attention.attend`.

  Args:
    kv: the pages.
    view: the rows; `shared` and plans are not used.
    q: [B, T, H, D].
    call: further arguments of `kernels.paged_attention_padded`.

  Returns:
    [B, T, H, Dv]; float32[B, T, H].
  """
  size = max(2, _QUERY_ROWS * kv.num_kv_heads // q.shape[2])
  if not isinstance(view, PackedView):
    return _rectangle(kv, rows_of(view), q, size, call)
  decode = rows_of(view.decode)
  single = decode.page_table.shape[0]
  ones = jnp.minimum(decode.counts, 1)
  parts, places = [_of_rows(decode, q[0, :single, None], size, ones)], None
  if view.prefill is not None:
    rows, columns = view.prefill, q.shape[1] - single
    begins = jnp.zeros((1,), jnp.int32)
    ends = jnp.cumsum(rows.counts, dtype=jnp.int32)
    places = query_packing.tile(
      rows.starts + rows.counts,
      jnp.concatenate([begins, ends]),
      columns,
      columns,
      size=size,
    )
    parts.append(
      _Tiles(
        _widened(query_packing.pack(q[0, single:], places), size),
        jnp.take(rows.page_table, places.sequences, axis=0, mode="clip"),
        places.starts,
        places.counts,
      )
    )
  together = jax.tree.map(lambda *xs: jnp.concatenate(xs), *parts)
  out, lse = _read(kv, together, call)
  outs, lses = [out[:single, 0]], [lse[:single, 0]]
  if places is not None:
    width = places.source.shape[1]
    more = query_packing.unpack(
      out[single:, :width], lse[single:, :width], places
    )
    outs.append(more[0])
    lses.append(more[1])
  return jnp.concatenate(outs)[None], jnp.concatenate(lses)[None]


def _rectangle(
  kv: KVPages, rows: View, q: jax.Array, size: int, call: dict[str, Any]
) -> tuple[jax.Array, jax.Array]:
  """Queries [B, T, H, D]."""
  batch, columns = q.shape[:2]
  out, lse = _read(kv, _of_rows(rows, q, size, rows.counts), call)
  out = out.reshape(batch, -1, *out.shape[2:])[:, :columns]
  return out, lse.reshape(batch, -1, lse.shape[-1])[:, :columns]


def _of_rows(rows: View, q: jax.Array, size: int, counts: jax.Array) -> _Tiles:
  """Tiles of queries [B, T, H, D], a row after another."""
  batch, columns = q.shape[:2]
  number = -(-columns // size)
  q = jnp.pad(q, ((0, 0), (0, number * size - columns), (0, 0), (0, 0)))
  first = jnp.arange(number, dtype=jnp.int32)[None] * size
  starts = rows.starts[:, None] + first
  return _Tiles(
    q.reshape(batch * number, size, *q.shape[2:]),
    jnp.repeat(rows.page_table, number, axis=0),
    starts.reshape(-1),
    jnp.clip(counts[:, None] - first, 0, size).reshape(-1),
  )


def _widened(q: jax.Array, size: int) -> jax.Array:
  """Tiles [Z, X, H, D] of fewer queries, as [Z, size, H, D]."""
  return jnp.pad(q, ((0, 0), (0, size - q.shape[1]), (0, 0), (0, 0)))


def _read(
  kv: KVPages, queries: _Tiles, call: dict[str, Any]
) -> tuple[jax.Array, jax.Array]:
  """[Z, Y, H, Dv]; float32[Z, Y, H]."""
  attention: Callable[..., Any] = kernels.paged_attention_padded
  pools = (kv.k, kv.v)
  if kv.v is None:
    attention, pools = kernels.mla_attention_padded, (kv.k,)
  return tiles.loop(
    lambda q, *where: attention(q, *pools, *where, **call),
    tuple(queries),
    tile=_TILES,
    beside=(pools, call["options"], call["page_offset"]),
  )
