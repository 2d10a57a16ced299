"""Merging the results of units of work, as one small kernel.

In XLA, merging a number of pieces known only at run time takes a scan, with at
least one kernel for each step. Here a program has one row of queries and reads
the pieces that exist. Written in Pallas-Triton; the interpreter runs it
unchanged.
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

# Pieces that a program reads at once, with one wait for memory.
_PIECES = 16


def merge_pieces(
  out: jax.Array,
  totals: jax.Array,
  begins: jax.Array,
  *,
  most: int | None,
  rows: int,
  interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
  """Merges the results of pieces into results of tiles.

  A tile's pieces are merged in their order, by the sums of their softmaxes. A
  NaN in a piece stays in its tile.

  Args:
    out: float32[O, K, >=Y, Dv], anything where no piece wrote a result.
    totals: float32[O, K, 2, >=Y], `top` and `total` of `online_softmax`.
    begins: int32[Z + 1], where each tile's pieces begin.
    most: the most pieces of a tile. The pieces of tile z are the first of
      `z * most <= o < (z + 1) * most`, and O = Z * most. None: they are
      `begins[z] <= o < begins[z + 1]`.
    rows: Y.
    interpret: if true, runs in Pallas's interpreter.

  Returns:
    (float32[Z, K, Y, Dv], float32[Z, K, Y] natural log-sum-exps), 0 and -inf
    for rows without keys.
  """
  chex.assert_shape(totals, (*out.shape[:2], 2, None))
  tiles, (kv_heads, _, dim) = begins.size - 1, out.shape[1:]
  if most == 1:
    some = (begins[1:] > begins[:-1])[:, None, None]
    top, total = totals[:, :, 0, :rows], totals[:, :, 1, :rows]
    total = jnp.where(some, total, jnp.float32(0))
    some = (total != 0)[..., None]
    out = jnp.where(some, out[:, :, :rows], jnp.float32(0))
    return out, online_softmax.log_sum_exp(top, total)
  inputs = out, totals, begins
  return compat.call(
    functools.partial(_kernel, most=most),
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


def _kernel(refs, out_ref, lse_ref, *, most: int | None) -> None:
  """Merges all pieces of one row of queries, `_PIECES` at a time."""
  pieces_ref, totals_ref, begins_ref = refs
  dim = pieces_ref.shape[3]
  kv_heads = jnp.int32(pieces_ref.shape[1])
  tile = lax.div(pl.program_id(0), kv_heads)
  head = lax.rem(pl.program_id(0), kv_heads)
  row = pl.program_id(1)
  begin = begins_ref[tile]
  end = begins_ref[tile + 1]
  first = begin if most is None else tile * most
  index = jnp.arange(_PIECES, dtype=jnp.int32)
  column = jnp.arange(pl.next_power_of_2(dim), dtype=jnp.int32)
  inside = column < dim

  def step(turn, carry):
    top, total, weighted = carry
    nth = turn * _PIECES + index
    real = nth < end - begin
    piece = jnp.where(real, first + nth, 0)
    tops, shares = (
      plt.load(totals_ref.at[piece, head, i, row], mask=real, other=other)
      for i, other in ((0, LOWEST), (1, 0.0))
    )
    higher = jnp.maximum(top, jnp.max(tops))
    shrink = jnp.exp2(top - higher)
    weights = shares * jnp.exp2(tops - higher)
    # A weight of zero does not keep NaN out.
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
