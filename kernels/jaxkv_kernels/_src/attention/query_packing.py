"""Packed queries as rows of a rectangle, and back.

A sequence's run of queries is cut into tiles of Q queries, each of which
becomes one row that attends on its own. N tiles always suffice:
`ceil(T / Q) + B - 1`, since every sequence wastes less than one tile.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# A tile reads its sequence's whole context, so a larger one reads less often;
# a single decode token occupies one too, so a smaller one wastes less.
TILE = 32


class Packing(NamedTuple):
  """Which queries each tile holds, and where each query went.

  Attributes:
    sequences: the sequence a tile belongs to. int32[N]
    starts: absolute position of its first query. int32[N]
    counts: how many queries it holds. int32[N]
    run_starts: absolute position of its sequence's first query. int32[N]
    source: rows of the packed array, T where there is none. int32[N, Q]
    flat: tile * Q + column of each packed row, N * Q for none. int32[T]
  """

  sequences: jax.Array
  starts: jax.Array
  counts: jax.Array
  run_starts: jax.Array
  source: jax.Array
  flat: jax.Array


def row_of(ends: jax.Array, items: jax.Array) -> jax.Array:
  """int32[I]: the row of each item, where rows stand one after the other.

  Unrolled, the search is one kernel; as a loop it would be some for every bit
  of B.

  Args:
    ends: int32[B], one past each row's last item, ascending.
    items: int32[I]; B comes out for one past all rows.
  """
  row = jnp.searchsorted(ends, items, side="right", method="scan_unrolled")
  return row.astype(jnp.int32)


def tile(
  kv_lens: jax.Array, cu_q_lens: jax.Array, rows: int, max_query_len: int
) -> Packing:
  """Cuts the runs `cu_q_lens` of T = `rows` packed queries into tiles.

  Args:
    kv_lens: int32[B].
    cu_q_lens: int32[B + 1].
    rows: T.
    max_query_len: queries of a run past this many are left out.

  Returns:
    The tiles.
  """
  batch = kv_lens.shape[0]
  size = min(TILE, max_query_len, max(rows, 1))
  num = -(-rows // size) + batch - 1
  num = max(1, min(num, batch * -(-max_query_len // size), rows))
  runs = jnp.maximum(cu_q_lens[1:] - cu_q_lens[:-1], 0)
  kept = jnp.minimum(runs, max_query_len)
  per_run = (kept + size - 1) // size
  ends = jnp.cumsum(per_run, dtype=jnp.int32)
  begins = ends - per_run
  index = jnp.arange(num, dtype=jnp.int32)
  sequence = row_of(ends, index)
  real = sequence < batch
  sequence = jnp.minimum(sequence, batch - 1)
  done = (index - begins[sequence]) * size
  count = jnp.where(real, jnp.clip(kept[sequence] - done, 0, size), 0)
  column = jnp.arange(size, dtype=jnp.int32)[None]
  source = (cu_q_lens[sequence] + done)[:, None] + column
  source = jnp.where(column < count[:, None], source, rows)
  row = jnp.arange(rows, dtype=jnp.int32)
  owner = row_of(cu_q_lens[1:], row)
  at = row - cu_q_lens[jnp.minimum(owner, batch - 1)]
  flat = begins[jnp.minimum(owner, batch - 1)] * size + at
  run_start = kv_lens[sequence] - runs[sequence]
  found = (owner < batch) & (at >= 0) & (at < max_query_len)
  return Packing(
    sequences=sequence,
    starts=run_start + done,
    counts=count,
    run_starts=run_start,
    source=source,
    flat=jnp.where(found, flat, num * size),
  )


def pack(q: jax.Array, tiles: Packing) -> jax.Array:
  """Packed [T, ...] to tiles [N, Q, ...], zeros where there is no query."""
  return jnp.asarray(q).at[tiles.source].get(mode="fill", fill_value=0)


def unpack(
  out: jax.Array, lse: jax.Array, tiles: Packing
) -> tuple[jax.Array, jax.Array]:
  """Packing [N, Q, H, Dv], [N, Q, H] back to packed [T, H, Dv], [T, H]."""
  out = out.reshape(-1, *out.shape[2:])
  lse = lse.reshape(-1, *lse.shape[2:])
  return (
    out.at[tiles.flat].get(mode="fill", fill_value=0),
    lse.at[tiles.flat].get(mode="fill", fill_value=-jnp.inf),
  )
