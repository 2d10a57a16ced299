"""Merges the results of units of work, as one small Pallas-Triton kernel.

A unit of work is a piece of the keys of a tile of queries. The number of pieces
is known only at run time. XLA would need a loop with a kernel for each step.
Here each program merges one query row, and reads only the pieces that exist.
The docstring of the package `attention` defines the letters.
"""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from jaxkv_kernels._src.attention import online_softmax
from jaxkv_kernels._src.attention import query_tiles
from jaxkv_kernels._src.attention.online_softmax import LOWEST

# Pieces that a program reads at once, to wait for memory only once.
_PIECES = 16


def merge_pieces(
  out: jax.Array,
  totals: jax.Array,
  first_units: jax.Array,
  *,
  max_pieces: int,
  rows: int,
  interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
  """Merges the results of pieces into results of tiles.

  A tile's pieces are merged in order, weighted by the sums of their softmaxes.
  A NaN in a piece does not affect other tiles.

  Args:
    out: float32[O, K, >=Y, Dv], results of pieces. Indices without a piece can
      have any contents.
    totals: float32[O, K, 2, >=Y], `m` and `l` of `online_softmax`.
    first_units: int32[Z + 1]; tile z has `first_units[z + 1] -
      first_units[z]` pieces.
    max_pieces: the maximum number of pieces of a tile. The results of tile z
      begin at index `z * max_pieces`, and O is Z * max_pieces.
    rows: Y.
    interpret: as in `CallOptions`.

  Returns:
    (float32[Z, K, Y, Dv], float32[Z, K, Y] natural log-sum-exps), 0 and -inf
    for rows without keys.
  """
  chex.assert_shape(totals, (*out.shape[:2], 2, None))
  tiles = first_units.size - 1
  _, kv_heads, _, dim = out.shape
  # If each tile has at most one piece, no kernel is needed. Results of absent
  # pieces are unwritten memory, which may contain NaN.
  if max_pieces == 1:
    has_piece = (first_units[1:] > first_units[:-1])[:, None, None]
    l = totals[:, :, 1, :rows]
    l = jnp.where(has_piece, l, jnp.float32(0))
    has_piece = (l != 0)[..., None]
    out = jnp.where(has_piece, out[:, :, :rows], jnp.float32(0))
    return out, online_softmax.log_sum_exp(totals[:, :, 0, :rows], l)
  inputs = out, totals, first_units
  return pl.pallas_call(
    functools.partial(_kernel, max_pieces=max_pieces),
    name="jaxkv_merge",
    grid=(tiles * kv_heads, rows),
    out_shape=(
      query_tiles.float32((tiles, kv_heads, rows, dim), inputs),
      query_tiles.float32((tiles, kv_heads, rows), inputs),
    ),
    compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
    interpret=bool(interpret),
  )(inputs)


def _kernel(refs, out_ref, lse_ref, *, max_pieces: int) -> None:
  """Merges all pieces of one query row, `_PIECES` at a time."""
  pieces_ref, totals_ref, begins_ref = refs
  dim = pieces_ref.shape[3]
  kv_heads = jnp.int32(pieces_ref.shape[1])
  tile = lax.div(pl.program_id(0), kv_heads)
  head = lax.rem(pl.program_id(0), kv_heads)
  row = pl.program_id(1)
  first_unit = begins_ref[tile]
  end_unit = begins_ref[tile + 1]
  first_result = tile * max_pieces
  index = jnp.arange(_PIECES, dtype=jnp.int32)
  column = jnp.arange(pl.next_power_of_2(dim), dtype=jnp.int32)
  inside = column < dim

  def step(turn, carry):
    m, l, weighted = carry
    offset = turn * _PIECES + index
    exists = offset < end_unit - first_unit
    piece = jnp.where(exists, first_result + offset, 0)
    part_m, part_l = (
      plt.load(
        totals_ref.at[piece, head, i, row], mask=exists, other=fill_value
      )
      for i, fill_value in ((0, LOWEST), (1, 0.0))
    )
    next_m = jnp.maximum(m, jnp.max(part_m))
    alpha = jnp.exp2(m - next_m)
    weights = part_l * jnp.exp2(part_m - next_m)
    # Absent pieces have weight 0, but 0 * NaN is NaN, so they are not read.
    pieces = plt.load(
      pieces_ref.at[piece[:, None], head, row, column[None]],
      mask=(weights != 0)[:, None] & inside[None],
      other=0.0,
    )
    l = l * alpha + jnp.sum(weights)
    update = jnp.sum(weights[:, None] * pieces, axis=0)
    return next_m, l, weighted * alpha + update

  carry = (
    jnp.float32(LOWEST),
    jnp.float32(0),
    jnp.zeros(column.shape, jnp.float32),
  )
  turns = lax.div(end_unit - first_unit + (_PIECES - 1), jnp.int32(_PIECES))
  m, l, weighted = lax.fori_loop(0, turns, step, carry)
  lse_ref[tile, head, row] = online_softmax.log_sum_exp(m, l)
  out = online_softmax.normalise(l, weighted)
  plt.store(out_ref.at[tile, head, row, column], out, mask=inside)
