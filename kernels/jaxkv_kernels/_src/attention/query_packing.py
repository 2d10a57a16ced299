"""Cuts packed queries into tiles, and packs the outputs of tiles.

The docstring of the package `attention` defines the letters.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

# The maximum number of queries of a tile. Each tile reads the context of its
# sequence, so larger tiles cause fewer reads. Smaller tiles waste less work on
# a decoding sequence, which needs a whole tile for one query.
TILE = 32


class QueryTiles(NamedTuple):
  """Tiles of packed queries, each with queries of one sequence.

  Attributes:
    sequences: the sequence of each tile.
    starts: the position of each tile's first query in its sequence.
    counts: the number of queries of each tile.
    run_starts: the position, in a tile's sequence, of the first query that this
      sequence has in any tile.
    source: the packed row of each column of a tile; T for padding.
    flat: the index of each packed row in the tiles, flattened to [Z * size];
      Z * size for a row without a tile.
  """

  sequences: jax.Array  # int32[Z]
  starts: jax.Array  # int32[Z]
  counts: jax.Array  # int32[Z]
  run_starts: jax.Array  # int32[Z]
  source: jax.Array  # int32[Z, size]
  flat: jax.Array  # int32[T]

  def pack(self, q: jax.Array) -> jax.Array:
    """Returns packed [T, ...] as tiles [Z, size, ...], padded with zeros."""
    return jnp.asarray(q).at[self.source].get(mode="fill", fill_value=0)

  def unpack(
    self, out: jax.Array, lse: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Returns tiles [Z, size, H, Dv], [Z, size, H] as [T, H, Dv], [T, H]."""
    chex.assert_equal_shape_prefix([out, lse], 3)
    out = out.reshape(-1, *out.shape[2:])
    lse = lse.reshape(-1, *lse.shape[2:])
    return (
      out.at[self.flat].get(mode="fill", fill_value=0),
      lse.at[self.flat].get(mode="fill", fill_value=-jnp.inf),
    )


def row_of(ends: jax.Array, items: jax.Array) -> jax.Array:
  """Returns the range that contains each item; ranges are consecutive.

  Args:
    ends: int32[B], one past each range's last item, ascending.
    items: int32[X], indices of items.

  Returns:
    int32[X], the number of the range; B for an item past all ranges.
  """
  # An unrolled search is one kernel. A loop would start several in each step.
  row = jnp.searchsorted(ends, items, side="right", method="scan_unrolled")
  return row.astype(jnp.int32)


def tile_queries(
  kv_lens: jax.Array,
  cu_q_lens: jax.Array,
  rows: int,
  max_query_len: int,
  *,
  size: int = TILE,
) -> QueryTiles:
  """Cuts packed queries into tiles; a run is the queries of one sequence.

  Args:
    kv_lens: int32[B], tokens of each sequence, including its queries.
    cu_q_lens: int32[B + 1]; `cu_q_lens[b]:cu_q_lens[b + 1]` is the run of b.
    rows: T, the number of packed rows.
    max_query_len: the maximum length of a run; further queries are dropped.
    size: the maximum number of queries of a tile.

  Returns:
    Z tiles: `sequences`, `starts` and `counts`, int32[Z], have the sequence of
    each tile, the position of its first query and the number of its queries.
    `pack(q)` returns packed [T, ...] as tiles [Z, S, ...], where S is at
    most `size`; `unpack(out, lse)` returns tiles [Z, S, H, Dv] and [Z, S, H] as
    packed arrays.
  """
  batch = kv_lens.shape[0]
  size = min(size, max_query_len, max(rows, 1))
  # This many tiles suffice, because each sequence has at most one partial tile.
  num = -(-rows // size) + batch - 1
  num = max(1, min(num, batch * -(-max_query_len // size), rows))
  runs = jnp.maximum(cu_q_lens[1:] - cu_q_lens[:-1], 0)
  lengths = jnp.minimum(runs, max_query_len)
  per_run = (lengths + size - 1) // size
  ends = jnp.cumsum(per_run, dtype=jnp.int32)
  first_tiles = ends - per_run
  index = jnp.arange(num, dtype=jnp.int32)
  sequence = row_of(ends, index)
  is_used = sequence < batch
  # Unused tiles get the last sequence, because index B would be out of range.
  sequence = jnp.minimum(sequence, batch - 1)
  first_query = (index - first_tiles[sequence]) * size
  count = jnp.where(
    is_used, jnp.clip(lengths[sequence] - first_query, 0, size), 0
  )
  column = jnp.arange(size, dtype=jnp.int32)[None]
  source = (cu_q_lens[sequence] + first_query)[:, None] + column
  source = jnp.where(column < count[:, None], source, rows)
  row = jnp.arange(rows, dtype=jnp.int32)
  run = row_of(cu_q_lens[1:], row)
  offset = row - cu_q_lens[jnp.minimum(run, batch - 1)]
  # A run's tiles are consecutive, so a query has the same offset in its run as
  # in the run's flattened tiles.
  flat = first_tiles[jnp.minimum(run, batch - 1)] * size + offset
  run_start = kv_lens[sequence] - runs[sequence]
  has_tile = (run < batch) & (offset >= 0) & (offset < max_query_len)
  return QueryTiles(
    sequences=sequence,
    starts=run_start + first_query,
    counts=count,
    run_starts=run_start,
    source=source,
    flat=jnp.where(has_tile, flat, num * size),
  )
