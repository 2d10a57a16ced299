"""Attention whose numbers do not depend on what else a call computes.

Queries of one sequence stand in tiles of a few, and the tiles in rows. A fixed
number of rows is computed at once, a tile of each at a time, by one piece of
compiled code. A query that decodes has a row to itself. So the same products of
the same shapes serve decode steps, chunks of prompts and a trainer's whole
sequences; and all tiles of a row use the keys that the row has gathered.
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

# Query heads of a tile and K/V head: more make prompts cheap, fewer decoding.
_TILE_HEADS = 8

# Rows that are computed at once. Reductions over fewer are compiled in another
# way.
_ROWS = 8

# The most tiles of a row. It changes no bit; with more, tiles wait for others
# of their row that see more.
_MOST_TILES = 16


class TokenRows(NamedTuple):
  """New tokens of sequences, and where their keys and values are.

  Attributes:
    pools: keys and values [N, K, S, D]; one pool for latents.
    page_table: int32[B, M].
    starts: int32[B], position of each sequence's first new token.
    counts: int32[B], new tokens.
  """

  pools: tuple[jax.Array, ...]
  page_table: jax.Array
  starts: jax.Array
  counts: jax.Array


def check_exact(
  page_size: int, options: kernels.AttentionOptions, causal: bool
) -> None:
  """Raises ValueError unless there is an exact attention for a call."""
  if kernels.BLOCK_TOKENS % page_size:
    wanted = (
      f"of a page size that divides {kernels.BLOCK_TOKENS} with exact=True"
    )
    arguments.refuse(ValueError, "kv", wanted, f"one of {page_size}")
  if not causal:
    arguments.refuse(ValueError, "causal", "True with exact=True", causal)
  reason = "no other program has such queries, with exact=True"
  options.refuse(reason, "tree_mask")


def attend_packed(
  sequences: TokenRows, q: jax.Array, call: dict[str, Any]
) -> tuple[jax.Array, jax.Array]:
  """Causal attention of queries that stand one sequence after another.

  Args:
    sequences: the sequences of the queries.
    q: [T, H, D].
    call: further arguments of `kernels.paged_attention_padded`.

  Returns:
    [T, H, Dv]; float32[T, H], log-sum-exps.
  """
  num_queries = q.shape[0]
  ends = jnp.cumsum(sequences.counts, dtype=jnp.int32)
  tiles = kernels.tile_queries(
    sequences.starts + sequences.counts,
    jnp.concatenate([jnp.zeros_like(ends, shape=(1,)), ends]),
    num_queries,
    num_queries,
    size=_width(num_queries, num_queries, _tile(sequences, q)),
  )
  table = jnp.take(sequences.page_table, tiles.sequences, axis=0, mode="clip")
  rows = TokenRows(sequences.pools, table, tiles.starts, tiles.counts)
  return tiles.unpack(*_read(rows, tiles.pack(q), call))


def attend_rectangle(
  sequences: TokenRows, q: jax.Array, call: dict[str, Any]
) -> tuple[jax.Array, jax.Array]:
  """Causal attention of queries with an axis of columns.

  Args:
    sequences: the sequences of the queries.
    q: [B, T, H, D].
    call: further arguments of `kernels.paged_attention_padded`.

  Returns:
    [B, T, H, Dv]; float32[B, T, H], log-sum-exps.
  """
  batch, columns = q.shape[:2]
  width = _width(batch * columns, columns, _tile(sequences, q))
  num_rows = -(-columns // width)
  q = jnp.pad(q, ((0, 0), (0, num_rows * width - columns), (0, 0), (0, 0)))
  first = jnp.arange(num_rows, dtype=jnp.int32)[None] * width
  # Columns are padded to whole tiles: a count beyond them is not of this call.
  counts = jnp.minimum(sequences.counts, columns)
  rows = TokenRows(
    sequences.pools,
    jnp.repeat(sequences.page_table, num_rows, axis=0),
    (sequences.starts[:, None] + first).ravel(),
    jnp.clip(counts[:, None] - first, 0, width).ravel(),
  )
  q = q.reshape(batch * num_rows, width, *q.shape[2:])
  out, lse = _read(rows, q, call)
  out = out.reshape(batch, -1, *out.shape[2:])[:, :columns]
  return out, lse.reshape(batch, -1, lse.shape[-1])[:, :columns]


def _tile(sequences: TokenRows, q: jax.Array) -> int:
  """Returns the queries of a tile."""
  return max(2, _TILE_HEADS * sequences.pools[0].shape[1] // q.shape[-2])


def _width(queries: int, longest: int, tile: int) -> int:
  """Queries of a row, where so many make up sequences of at most `longest`."""
  tiles_of_row = -(-queries // (tile * _ROWS))
  return tile * max(min(tiles_of_row, -(-longest // tile), _MOST_TILES), 1)


def _read(
  rows: TokenRows, q: jax.Array, call: dict[str, Any]
) -> tuple[jax.Array, jax.Array]:
  """Queries [Z, Y, H, D] to [Z, Y, H, Dv]; float32[Z, Y, H]."""
  attention: Callable[..., Any] = kernels.paged_attention_padded
  if len(rows.pools) == 1:
    attention = kernels.mla_attention_padded
  call = call | {"query_tile": _tile(rows, q)}
  options, offset = call["options"], call["page_offset"]
  # Python numbers must stay static.
  numbers = options.numbers()
  options = dataclasses.replace(options, **dict.fromkeys(numbers))

  def attend_rows(weights: Any, q: jax.Array, *where: jax.Array) -> Any:
    pools, options, offset = weights
    options = dataclasses.replace(options, **numbers)
    named = call | {"options": options, "page_offset": offset}
    return attention(q, *pools, *where, **named)

  where = (rows.page_table, rows.starts, rows.counts)
  weights = (rows.pools, options, offset)
  return row_loop.loop(attend_rows, weights, (q, *where), tile=_ROWS)
