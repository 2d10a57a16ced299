"""Computes rows a tile at a time, so that no row's bits depend on other rows.

The rounding of a matrix product depends on its number of rows, because
libraries choose a kernel by this number. Sums over the last axis also round
differently if there are few rows, and fusion by XLA can change rounding. To
give every program the same bits, a loop computes one tile of rows in each
iteration. XLA compiles the body of the loop only for the shape of a tile.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv._src.arrays import sharding
from jaxkv._src.exact import gradient

RowWise = Callable[..., Any]
"""`(weights, *rows) -> rows`. The rows are pytrees of arrays [X, ...]. The
function computes each row of the result from `weights` and that row alone."""


def in_tiles(
  function: RowWise, weights: Any, rows: tuple[Any, ...], *, tile: int
) -> Any:
  """Computes `function(weights, *rows)`, a tile of rows at a time.

  The gradient is that of one call of `function`, which must not close over
  arrays, on all rows, without tiles. `rows` are pytrees of arrays [X, ...], and
  so is the result. Rounding depends on `tile`, the number of rows per tile.
  """

  def tiled(weights: Any, *rows: Any) -> Any:
    return loop(function, weights, rows, tile=tile)

  return gradient.with_gradient(tiled, function, weights, *rows)


def loop(
  function: RowWise, weights: Any, rows: tuple[Any, ...], *, tile: int
) -> Any:
  """Computes `in_tiles`, without support for gradients."""
  # `custom_vmap` replaces the rule of `vmap`, which would batch the loop's body
  # and so change the shapes of its products.
  batchable = jax.custom_batching.custom_vmap(
    functools.partial(_loop, function, tile)
  )
  batchable.def_vmap(functools.partial(_loop_of_batch, function, tile))
  return batchable(weights, rows)


def _loop_of_batch(
  function: RowWise,
  tile: int,
  batch_size: int,
  batched: tuple[Any, Any],
  weights: Any,
  rows: tuple[Any, ...],
) -> tuple[Any, Any]:
  """Implements `loop` under `vmap`; all outputs are batched."""
  rows = jax.tree.map(
    lambda x, has_axis: (
      x if has_axis else jnp.broadcast_to(x, (batch_size, *x.shape))
    ),
    rows,
    batched[1],
  )
  # If the elements of the batch have different weights, each needs a loop.
  if any(jax.tree.leaves(batched[0])):

    def loop_of_element(index: Array) -> Any:
      element = jax.tree.map(
        lambda x, has_axis: x[index] if has_axis else x,
        (weights, rows),
        (batched[0], jax.tree.map(lambda _: True, rows)),
      )
      return loop(function, *element, tile=tile)

    out = lax.map(loop_of_element, jnp.arange(batch_size, dtype=jnp.int32))
  else:
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows)
    out = loop(function, weights, flat, tile=tile)
    out = jax.tree.map(lambda x: x.reshape(batch_size, -1, *x.shape[1:]), out)
  return out, jax.tree.map(lambda _: True, out)


def _loop(
  function: RowWise, tile: int, weights: Any, rows: tuple[Any, ...]
) -> Any:
  """Computes `loop` outside of `vmap`."""
  count = jax.tree.leaves(rows)[0].shape[0]
  if not count:
    return function(weights, *rows)
  # Padding to tile + 1 rows makes `start` below depend on the index of the
  # iteration. Otherwise XLA would move the body out of the loop and fuse it
  # with the operations around it.
  padding = max(tile + 1 - count, 0)
  if padding:
    rows = jax.tree.map(lambda x: _pad(x, padding), rows)
  # The barrier hides constants from XLA, such as weights that a jitted function
  # closes over. XLA would transpose constants, which changes rounding.
  weights, rows = lax.optimization_barrier((weights, rows))
  last_start = count + padding - tile

  def compute_tile(index: Array) -> tuple[Any, Array]:
    # The last tile can start early, and then overlaps the tile before it.
    start = jnp.minimum(index * tile, last_start)
    part = jax.tree.map(
      lambda x: lax.dynamic_slice_in_dim(x, start, tile), rows
    )
    return function(weights, *part), start

  shapes = jax.eval_shape(compute_tile, jnp.zeros((), jnp.int32))[0]
  out = jax.tree.map(
    lambda x: jnp.zeros((count + padding, *x.shape[1:]), x.dtype), shapes
  )

  def put_tile(index: Array, out: Any) -> Any:
    result, start = compute_tile(index)
    return jax.tree.map(
      lambda x, part: lax.dynamic_update_slice_in_dim(x, part, start, 0),
      out,
      result,
    )

  # If the number of iterations were a constant, XLA might unroll the loop.
  num_tiles = _opaque(-(-count // tile), rows)
  out, num_tiles, _ = sharding.match_varying_axes(
    (out, num_tiles, (rows, weights))
  )
  out = lax.fori_loop(jnp.zeros_like(num_tiles), num_tiles, put_tile, out)
  return jax.tree.map(lambda x: x[:count], out)


def _pad(x: Array, padding: int) -> Array:
  # `jnp.pad` refuses PRNG keys, so they are padded with the first key.
  if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
    filler = jnp.broadcast_to(x[:1], (padding, *x.shape[1:]))
    return jnp.concatenate([x, filler])
  return jnp.pad(x, ((0, padding),) + ((0, 0),) * (x.ndim - 1))


def _opaque(constant: int, tree: Any) -> Array:
  """Returns a number as int32[] that XLA cannot recognize as a constant."""
  for leaf in jax.tree.leaves(tree):
    # With `ravel`, XLA would gather an array that is sharded over devices.
    if jnp.issubdtype(leaf.dtype, jnp.floating):
      value = lax.convert_element_type(leaf[(0,) * leaf.ndim], jnp.float32)
      bits = lax.bitcast_convert_type(value, jnp.int32)
      break
    if jnp.issubdtype(leaf.dtype, jnp.integer):
      bits = leaf[(0,) * leaf.ndim].astype(jnp.int32)
      break
  else:
    raise TypeError("`rows` must have an array of numbers.")
  # The condition is always true (no sign bit), but XLA does not prove that.
  return jnp.where(bits & jnp.int32(2**31 - 1) >= 0, constant, 0)
