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
from jaxkv_kernels._src.attention.triton import compat

# Pieces that a program reads at once, to wait for memory only once.
_PIECES = 16


def merge_pieces(
  out: jax.Array,
  totals: jax.Array,
  begins: jax.Array,
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
    totals: float32[O, K, 2, >=Y], `top` and `total` of `online_softmax`.
    begins: int32[Z + 1]; tile z has `begins[z + 1] - begins[z]` pieces.
    max_pieces: the maximum number of pieces of a tile. The results of tile z
      begin at index `z * max_pieces`, and O is Z * max_pieces.
    rows: Y.
    interpret: as for `compat.call`.

  Returns:
    (float32[Z, K, Y, Dv], float32[Z, K, Y] natural log-sum-exps), 0 and -inf
    for rows without keys.
  """
  chex.assert_shape(totals, (*out.shape[:2], 2, None))
  tiles, (kv_heads, _, dim) = begins.size - 1, out.shape[1:]
  # If each tile has at most one piece, no kernel is needed. Results of absent
  # pieces are unwritten memory, which may contain NaN.
  if max_pieces == 1:
    has_piece = (begins[1:] > begins[:-1])[:, None, None]
    top, total = totals[:, :, 0, :rows], totals[:, :, 1, :rows]
    total = jnp.where(has_piece, total, jnp.float32(0))
    has_piece = (total != 0)[..., None]
    out = jnp.where(has_piece, out[:, :, :rows], jnp.float32(0))
    return out, online_softmax.log_sum_exp(top, total)
  inputs = out, totals, begins
  return compat.call(
    functools.partial(_kernel, max_pieces=max_pieces),
    inputs,
    name="jaxkv_merge",
    grid=(tiles * kv_heads, rows),
    out_shape=(
      query_tiles.float32((tiles, kv_heads, rows, dim), inputs),
      query_tiles.float32((tiles, kv_heads, rows), inputs),
    ),
    num_warps=4,
    num_stages=2,
    interpret=interpret,
  )


def _kernel(refs, out_ref, lse_ref, *, max_pieces: int) -> None:
  """Merges all pieces of one query row, `_PIECES` at a time."""
  pieces_ref, totals_ref, begins_ref = refs
  dim = pieces_ref.shape[3]
  kv_heads = jnp.int32(pieces_ref.shape[1])
  tile = lax.div(pl.program_id(0), kv_heads)
  head = lax.rem(pl.program_id(0), kv_heads)
  row = pl.program_id(1)
  begin = begins_ref[tile]
  end = begins_ref[tile + 1]
  first = tile * max_pieces
  index = jnp.arange(_PIECES, dtype=jnp.int32)
  column = jnp.arange(pl.next_power_of_2(dim), dtype=jnp.int32)
  inside = column < dim

  def step(turn, carry):
    top, total, weighted = carry
    offset = turn * _PIECES + index
    exists = offset < end - begin
    piece = jnp.where(exists, first + offset, 0)
    tops, shares = (
      plt.load(totals_ref.at[piece, head, i, row], mask=exists, other=other)
      for i, other in ((0, LOWEST), (1, 0.0))
    )
    higher = jnp.maximum(top, jnp.max(tops))
    shrink = jnp.exp2(top - higher)
    weights = shares * jnp.exp2(tops - higher)
    # Absent pieces have weight 0, but 0 * NaN is NaN, so they are not read.
    pieces = plt.load(
      pieces_ref.at[piece[:, None], head, row, column[None]],
      mask=(weights != 0)[:, None] & inside[None],
      other=0.0,
    )
    total = total * shrink + jnp.sum(weights)
    update = jnp.sum(weights[:, None] * pieces, axis=0)
    return higher, total, weighted * shrink + update

  carry = (
    jnp.float32(LOWEST),
    jnp.float32(0),
    jnp.zeros(column.shape, jnp.float32),
  )
  turns = lax.div(end - begin + (_PIECES - 1), jnp.int32(_PIECES))
  top, total, weighted = lax.fori_loop(0, turns, step, carry)
  lse_ref[tile, head, row] = online_softmax.log_sum_exp(top, total)
  out = online_softmax.normalise(total, weighted)
  plt.store(out_ref.at[tile, head, row, column], out, mask=inside)
