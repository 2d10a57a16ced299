"""Rows computed a tile at a time, so that they do not depend on each other.

A product of matrices rounds in another way when it has another number of rows:
libraries choose their kernels by it. So do sums over the last axis of few rows,
and loops that XLA fuses in other ways. Where a row must be the same numbers in
every program, all rows go through one piece of compiled code, of one shape: the
body of a loop, which takes a tile of them in each trip.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv._src.arrays import sharding

RowWise = Callable[..., Any]
"""`(weights, *rows) -> rows`: of pytrees of arrays with one leading axis, whose
rows have nothing to do with each other; `weights` are what all of them read."""


def in_tiles(
  function: RowWise, weights: Any, rows: tuple[Any, ...], *, tile: int
) -> Any:
  """`function(weights, *rows)`, a tile of rows at a time.

  The gradient is that of the function of all rows at once.

  Args:
    function: of arrays; it closes over none.
    weights: a pytree of arrays.
    rows: pytrees of arrays [X, ...].
    tile: static; rows of a trip. Part of the numbers: another tile rounds
      in another way.

  Returns:
    Arrays [X, ...].
  """

  def tiled(weights: Any, *rows: Any) -> Any:
    return loop(function, weights, rows, tile=tile)

  return with_gradient(tiled, function, weights, *rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def with_gradient(
  function: Callable[..., Any], like: Callable[..., Any], *arguments: Any
) -> Any:
  """`function(*arguments)`, with the gradient of another function.

  Args:
    function: what is computed; it closes over no arrays.
    like: the same up to rounding, and differentiable; it closes over none, too.
    *arguments: pytrees of arrays.
  """
  del like
  return function(*arguments)


def _forward(function: Any, like: Any, *arguments: Any) -> Any:
  del like
  return function(*arguments), arguments


def _backward(function: Any, like: Any, arguments: Any, grads: Any) -> Any:
  del function
  return jax.vjp(like, *arguments)[1](grads)


with_gradient.defvjp(_forward, _backward)


def loop(
  function: RowWise, weights: Any, rows: tuple[Any, ...], *, tile: int
) -> Any:
  """`function(weights, *rows)`, a tile of rows at a time; not differentiable.

  Args:
    function: of arrays [tile, ...]; it closes over none.
    weights: a pytree of arrays.
    rows: pytrees of arrays [X, ...].
    tile: static; see `in_tiles`.

  Returns:
    Arrays [X, ...].
  """
  # Under `vmap` its own loop would be batched, and with it the products.
  one = jax.custom_batching.custom_vmap(
    functools.partial(_loop, function, tile)
  )
  one.def_vmap(functools.partial(_loops, function, tile))
  return one(weights, rows)


def _loops(
  function: RowWise,
  tile: int,
  size: int,
  batched: tuple[Any, Any],
  weights: Any,
  rows: tuple[Any, ...],
) -> tuple[Any, Any]:
  """`loop` of some values of weights and rows, and that all it gives is."""
  rows = jax.tree.map(
    lambda x, own: x if own else jnp.broadcast_to(x, (size, *x.shape)),
    rows,
    batched[1],
  )
  if any(jax.tree.leaves(batched[0])):

    def one(number: Array) -> Any:
      own = jax.tree.map(
        lambda x, many: x[number] if many else x,
        (weights, rows),
        (batched[0], jax.tree.map(lambda _: True, rows)),
      )
      return loop(function, *own, tile=tile)

    out = lax.map(one, jnp.arange(size, dtype=jnp.int32))
  else:
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows)
    out = loop(function, weights, flat, tile=tile)
    out = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), out)
  return out, jax.tree.map(lambda _: True, out)


def _loop(
  function: RowWise, tile: int, weights: Any, rows: tuple[Any, ...]
) -> Any:
  """`loop`, not under `vmap`."""
  count = jax.tree.leaves(rows)[0].shape[0]
  if not count:
    return function(weights, *rows)
  # More rows than a tile: if all trips read the same rows, XLA would compute
  # the body before the loop, and fuse it with what is around it.
  spare = max(tile + 1 - count, 0)
  if spare:
    rows = jax.tree.map(lambda x: _padded(x, spare), rows)
  # It must not see constants either, such as weights that a user's function
  # closes over: it would transpose them, and compile other products.
  weights, rows = lax.optimization_barrier((weights, rows))
  last = count + spare - tile

  def some(number: Array) -> tuple[Any, Array]:
    # The last tile begins earlier, rather than being padded.
    start = jnp.minimum(number * tile, last)
    own = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, tile), rows)
    return function(weights, *own), start

  shapes = jax.eval_shape(some, jnp.zeros((), jnp.int32))[0]
  out = jax.tree.map(
    lambda x: jnp.zeros((count + spare, *x.shape[1:]), x.dtype), shapes
  )

  def trip(number: Array, out: Any) -> Any:
    own, start = some(number)
    return jax.tree.map(
      lambda x, part: lax.dynamic_update_slice_in_dim(x, part, start, 0),
      out,
      own,
    )

  # With a number of trips that it knows, XLA might unroll the loop.
  trips = _unknown(-(-count // tile), rows)
  out, trips, _ = sharding.match_varying_axes((out, trips, (rows, weights)))
  out = lax.fori_loop(jnp.zeros_like(trips), trips, trip, out)
  return jax.tree.map(lambda x: x[:count], out)


def _padded(x: Array, spare: int) -> Array:
  if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
    return jnp.concatenate([x, jnp.broadcast_to(x[:1], (spare, *x.shape[1:]))])
  return jnp.pad(x, ((0, spare),) + ((0, 0),) * (x.ndim - 1))


def _unknown(number: int, tree: Any) -> Array:
  """int32[]: a number, of which XLA cannot tell that it is always the same."""
  for leaf in jax.tree.leaves(tree):
    if jnp.issubdtype(leaf.dtype, jnp.floating):
      value = lax.convert_element_type(leaf.ravel()[0], jnp.float32)
      bits = lax.bitcast_convert_type(value, jnp.int32)
      break
    if jnp.issubdtype(leaf.dtype, jnp.integer):
      bits = leaf.ravel()[0].astype(jnp.int32)
      break
  else:
    raise TypeError("`tree` must have an array of numbers.")
  return jnp.where(bits & jnp.int32(2**31 - 1) >= 0, number, 0)
