"""Mesh axes over which arrays vary inside `shard_map`."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax import lax


def zeros_like(array: Array) -> Array:
  """Returns zeros that vary over the same mesh axes as an int or bool array.

  The first carry of a loop needs such zeros, because the carry must vary over
  the same axes in every iteration.
  """
  # `jnp.zeros_like` makes a constant, which varies over no axis.
  return array & False if array.dtype == jnp.bool_ else array ^ array


def match_varying_axes(tree: Any) -> Any:
  """Makes all arrays vary over every mesh axis over which any of them varies.

  Returns the tree unchanged outside of `shard_map`.
  """
  # For example, the tokens may differ between devices while the state is the
  # same on all of them. In a loop that combines the two, the carry would start
  # to vary in the first iteration, which JAX refuses.
  axes = frozenset().union(*map(_axes, jax.tree.leaves(tree)))
  if not axes:
    return tree

  def widen(leaf: Any) -> Any:
    missing = tuple(axes - _axes(leaf))
    return lax.pcast(leaf, missing, to="varying") if missing else leaf

  return jax.tree.map(widen, tree)


def any_shard(condition: Array, axis: str | None) -> Array:
  """Returns bool[]: True if a condition, bool[], holds on any device.

  `axis` is an axis of the surrounding `shard_map`; None for this device alone.
  """
  if axis is None:
    return condition
  return largest_of_shards(condition.astype(jnp.int32), axis) > 0


def largest_of_shards(value: Array, axis: str | None) -> Array:
  """Returns the maximum of a number over all devices along an axis."""
  return value if axis is None else lax.pmax(value, axis)


def _axes(leaf: Any) -> frozenset[str]:
  return jax.typeof(leaf).manual_axis_type.varying
