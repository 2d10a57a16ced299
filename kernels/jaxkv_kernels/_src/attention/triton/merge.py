"""Results of pieces of work put together, as one small kernel.

In XLA a merge whose pieces are counted at run time is a scan, a kernel or more
for each of its steps. Here a program has one row of queries and reads the
pieces that there are. Pallas-Triton: the interpreter runs it as it stands.

| letter | size of |
|---|---|
| O | places for results of pieces |
| W | tiles of queries |
| R | query rows of a tile |
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from jaxkv_kernels._src.attention import online_softmax
from jaxkv_kernels._src.attention import query_tiles
from jaxkv_kernels._src.attention.online_softmax import LOWEST
from jaxkv_kernels._src.attention.triton import compat

# Pieces that a program reads at once, so that it waits for memory once.
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
  """Results of pieces to results of tiles, by the sums of their softmaxes.

  A tile's pieces are put together in their order, and what they hold stays in
  the tile, NaN too.

  Args:
    out: float32[O, K, >=R, Dv], anything where no piece put its result.
    totals: `top` and `total` of `online_softmax`. float32[O, K, 2, >=R]
    begins: int32[W + 1], the differences of which are the pieces of a tile.
    most: places of a tile, O = W * most, the first of which are its pieces';
      None: a tile's pieces are in its places begins[w] <= o < begins[w + 1].
    rows: R.
    interpret: anything that is true runs it in Pallas's interpreter.

  Returns:
    (float32[W, K, R, Dv], float32[W, K, R], natural log-sum-exps), 0 and -inf
    where nothing is.
  """
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
  """One row of queries: all of its pieces, some at a time."""
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
    place = jnp.where(real, first + nth, 0)
    tops, shares = (
      plt.load(totals_ref.at[place, head, i, row], mask=real, other=other)
      for i, other in ((0, LOWEST), (1, 0.0))
    )
    higher = jnp.maximum(top, jnp.max(tops))
    shrink = jnp.exp2(top - higher)
    weights = shares * jnp.exp2(tops - higher)
    # A weight of zero does not keep NaN out.
    pieces = plt.load(
      pieces_ref.at[place[:, None], head, row, column[None]],
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
