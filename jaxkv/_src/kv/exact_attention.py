"""Attention whose numbers do not depend on what else a call computes.

Queries stand in tiles of a few of one sequence, and the tiles in rows. A fixed
number of rows is computed at once, a tile of each at a time, by one piece of
compiled code. A query that decodes has a row to itself. So the same products of
the same shapes serve decode steps, chunks of prompts and a trainer's whole
sequences; and what a row has gathered serves all of its tiles.
"""

import dataclasses
from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp

import jaxkv_kernels as kernels
from jaxkv._src.arrays import arguments
from jaxkv._src.exact import row_loop
from jaxkv._src.kv.memory import KVPages
from jaxkv._src.kv.view import AnyView
from jaxkv._src.kv.view import PackedView
from jaxkv._src.kv.view import View
from jaxkv._src.kv.view import rows_of
from jaxkv_kernels._src.attention import query_packing
from jaxkv_kernels._src.attention.options import refuse_options
from jaxkv_kernels._src.attention.xla.backend import BLOCK_TOKENS

# Query heads of a tile and K/V head: more make prompts cheap, fewer decoding.
_TILE_HEADS = 8

# Rows that are computed at once. Reductions over fewer are compiled in another
# way.
_ROWS = 8

# The most tiles of a row. It changes no bit; with more, tiles wait for others
# of their row that see more.
_MOST_TILES = 16


class _QueryRows(NamedTuple):
  """Queries [Z, Y, H, D], Y in a row, and where their sequences live."""

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
    arguments.refuse(ValueError, "kv", wanted, f"one of {size}")
  if not causal:
    arguments.refuse(ValueError, "causal", "True with exact=True", causal)
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
  tile = max(2, _TILE_HEADS * kv.num_kv_heads // q.shape[2])
  call = call | {"query_tile": tile}
  if not isinstance(view, PackedView):
    return _rectangle(kv, rows_of(view), q, tile, call)
  decode = rows_of(view.decode)
  single = decode.page_table.shape[0]
  ones = dataclasses.replace(decode, counts=jnp.minimum(decode.counts, 1))
  out, lse = _rectangle(kv, ones, q[0, :single, None], tile, call)
  out, lse = out[:, 0], lse[:, 0]
  if view.prefill is not None:
    more = _packed(kv, view.prefill, q[0, single:], tile, call)
    out = jnp.concatenate([out, more[0]])
    lse = jnp.concatenate([lse, more[1]])
  return out[None], lse[None]


def _packed(
  kv: KVPages, rows: View, q: jax.Array, tile: int, call: dict[str, Any]
) -> tuple[jax.Array, jax.Array]:
  """Queries [T, H, D], one sequence's after another's."""
  ends = jnp.cumsum(rows.counts, dtype=jnp.int32)
  places = query_packing.tile(
    rows.starts + rows.counts,
    jnp.concatenate([jnp.zeros_like(ends, shape=(1,)), ends]),
    q.shape[0],
    q.shape[0],
    size=_width(q.shape[0], q.shape[0], tile),
  )
  own = _QueryRows(
    query_packing.pack(q, places),
    jnp.take(rows.page_table, places.sequences, axis=0, mode="clip"),
    places.starts,
    places.counts,
  )
  return query_packing.unpack(*_read(kv, own, call), places)


def _rectangle(
  kv: KVPages, rows: View, q: jax.Array, tile: int, call: dict[str, Any]
) -> tuple[jax.Array, jax.Array]:
  """Queries [B, T, H, D]."""
  batch, columns = q.shape[:2]
  width = _width(batch * columns, columns, tile)
  number = -(-columns // width)
  q = jnp.pad(q, ((0, 0), (0, number * width - columns), (0, 0), (0, 0)))
  first = jnp.arange(number, dtype=jnp.int32)[None] * width
  own = _QueryRows(
    q.reshape(batch * number, width, *q.shape[2:]),
    jnp.repeat(rows.page_table, number, axis=0),
    (rows.starts[:, None] + first).ravel(),
    jnp.clip(rows.counts[:, None] - first, 0, width).ravel(),
  )
  out, lse = _read(kv, own, call)
  out = out.reshape(batch, -1, *out.shape[2:])[:, :columns]
  return out, lse.reshape(batch, -1, lse.shape[-1])[:, :columns]


def _width(queries: int, longest: int, tile: int) -> int:
  """Queries of a row, where so many make up sequences of at most `longest`."""
  tiles_of_row = -(-queries // (tile * _ROWS))
  return tile * max(min(tiles_of_row, -(-longest // tile), _MOST_TILES), 1)


def _read(
  kv: KVPages, rows: _QueryRows, call: dict[str, Any]
) -> tuple[jax.Array, jax.Array]:
  """[Z, Y, H, Dv]; float32[Z, Y, H]."""
  attention: Callable[..., Any] = kernels.paged_attention_padded
  pools = (kv.k, kv.v)
  if kv.v is None:
    attention, pools = kernels.mla_attention_padded, (kv.k,)
  options, offset = call["options"], call["page_offset"]
  # Python numbers must stay static.
  numbers = options.numbers()
  options = dataclasses.replace(options, **dict.fromkeys(numbers))

  def some(weights: Any, q: jax.Array, *where: jax.Array) -> Any:
    pools, options, offset = weights
    options = dataclasses.replace(options, **numbers)
    own = call | {"options": options, "page_offset": offset}
    return attention(q, *pools, *where, **own)

  return row_loop.loop(some, (pools, options, offset), tuple(rows), tile=_ROWS)
