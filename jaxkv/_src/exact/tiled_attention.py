"""Attention whose bits do not depend on the other queries of a call.

A tile is a few consecutive queries of one sequence. A row is one or more
consecutive tiles of a sequence, and its keys are gathered once. The query of a
decode step is one row. Every call runs the same loop, which computes
`_ROWS` rows at once, one tile of each. So decode steps, chunks of prompts and a
trainer's whole sequences round equally.
"""

import dataclasses
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp

import jaxkv_kernels as kernels
from jaxkv._src.arrays import arguments
from jaxkv._src.exact import row_loop

# The number of queries of a tile, times the number of query heads for each K/V
# head. A larger number makes prompts cheaper and decoding more expensive.
# Rounding depends on this number.
_TILE_HEADS = 8

# Rows per iteration. Reductions over fewer rows would round differently.
_ROWS = 8

# The maximum number of tiles in a row, which does not affect the results. With
# more, the first tiles of a row would take as long as its last, longest tile.
_MAX_TILES = 16


class TokenRows(NamedTuple):
  """New tokens of sequences, and the pages of their keys and values.

  Attributes:
    pools: keys and values [N, K, S, D]; None for the values of latents.
    page_table: int32[B, M], the page ids of each sequence.
    starts: int32[B], the position of each sequence's first new token.
    num_tokens: int32[B], the number of new tokens of each sequence.
  """

  pools: tuple[jax.Array, jax.Array | None]
  page_table: jax.Array
  starts: jax.Array
  num_tokens: jax.Array


def check_exact(page_size: int, options: kernels.AttentionOptions) -> None:
  """Raises ValueError if exact attention does not support a call."""
  # Other page sizes would change the block size, and so the order of sums.
  if kernels.BLOCK_TOKENS % page_size:
    expected = (
      f"of a page size that divides {kernels.BLOCK_TOKENS} with exact=True"
    )
    arguments.refuse(ValueError, "kv", expected, page_size)
  reason = "exact=True supports only causal queries"
  options.refuse(reason, "tree_mask")


def attend_packed(
  sequences: TokenRows, q: jax.Array, call: dict[str, Any]
) -> tuple[jax.Array, jax.Array]:
  """Computes causal attention of queries packed one sequence after another.

  `call` has the other arguments of `kernels.paged_attention_padded`.

  Returns:
    For queries [T, H, D], the attention [T, H, Dv] and float32[T, H], its
    log-sum-exps.
  """
  num_queries = q.shape[0]
  ends = jnp.cumsum(sequences.num_tokens, dtype=jnp.int32)
  tiles = kernels.tile_queries(
    sequences.starts + sequences.num_tokens,
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
  """Computes causal attention of queries [B, T, H, D]; see `attend_packed`."""
  batch, columns = q.shape[:2]
  width = _width(batch * columns, columns, _tile(sequences, q))
  num_rows = -(-columns // width)
  q = jnp.pad(q, ((0, 0), (0, num_rows * width - columns), (0, 0), (0, 0)))
  first_columns = jnp.arange(num_rows, dtype=jnp.int32)[None] * width
  # If `num_tokens` were above T, the padding of the last row would count as
  # queries.
  num_tokens = jnp.minimum(sequences.num_tokens, columns)
  rows = TokenRows(
    sequences.pools,
    jnp.repeat(sequences.page_table, num_rows, axis=0),
    (sequences.starts[:, None] + first_columns).ravel(),
    jnp.clip(num_tokens[:, None] - first_columns, 0, width).ravel(),
  )
  q = q.reshape(batch * num_rows, width, *q.shape[2:])
  out, lse = _read(rows, q, call)
  out = out.reshape(batch, -1, *out.shape[2:])[:, :columns]
  return out, lse.reshape(batch, -1, lse.shape[-1])[:, :columns]


def _tile(sequences: TokenRows, q: jax.Array) -> int:
  """Returns the number of queries per tile."""
  return max(2, _TILE_HEADS * sequences.pools[0].shape[1] // q.shape[-2])


def _width(queries: int, longest: int, tile: int) -> int:
  """Returns the number of queries in a row, a multiple of `tile`."""
  # With this many tiles per row, `_ROWS` rows have room for all queries, so the
  # loop needs one iteration.
  tiles_of_row = -(-queries // (tile * _ROWS))
  return tile * max(min(tiles_of_row, -(-longest // tile), _MAX_TILES), 1)


def _read(
  rows: TokenRows, q: jax.Array, call: dict[str, Any]
) -> tuple[jax.Array, jax.Array]:
  """Computes attention of queries [Z, Y, H, D], in Z rows of Y queries."""
  call = call | {"query_tile": _tile(rows, q)}
  options = call["options"]
  offset = call["page_offset"]
  # Python numbers must stay static, so they must not be leaves of `weights`.
  static_options = options.numbers()
  options = dataclasses.replace(options, **dict.fromkeys(static_options))

  def attend_rows(weights: Any, q: jax.Array, *context: jax.Array) -> Any:
    pools, options, offset = weights
    options = dataclasses.replace(options, **static_options)
    keywords = call | {"options": options, "page_offset": offset}
    return kernels.paged_attention_padded(q, *pools, *context, **keywords)

  context = (rows.page_table, rows.starts, rows.num_tokens)
  weights = (rows.pools, options, offset)
  return row_loop.loop(attend_rows, weights, (q, *context), tile=_ROWS)
