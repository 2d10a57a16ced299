"""Arrays inside `shard_map`: the mesh axes over which they vary."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax import lax


def zeros_like(array: Array) -> Array:
  """Zeros (False for bool) that vary over the same mesh axes as an array.

  A loop's carry must vary over the same axes of a `shard_map` at its start as
  after a trip. `jnp.zeros_like` makes a constant, which varies over none.
  """
  return array & False if array.dtype == jnp.bool_ else array ^ array


def match_varying_axes(tree: Any) -> Any:
  """Makes all arrays vary over every mesh axis that one of them varies over.

  Inside `shard_map` the carry of a loop must not start to vary on the way. A
  state made inside the shard is at first the same on all devices and tokens are
  not, or the other way round. Outside of `shard_map` nothing is done.
  """
  axes = frozenset().union(*map(_axes, jax.tree.leaves(tree)))
  if not axes:
    return tree

  def widened(leaf: Any) -> Any:
    missing = tuple(axes - _axes(leaf))
    return lax.pcast(leaf, missing, to="varying") if missing else leaf

  return jax.tree.map(widened, tree)


def _axes(leaf: Any) -> frozenset[str]:
  return jax.typeof(leaf).manual_axis_type.varying
