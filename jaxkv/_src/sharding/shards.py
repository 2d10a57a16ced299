"""Runs a function once for each shard."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxkv._src.sharding.mesh_axes import MeshAxes
from jaxkv._src.sharding.state_shardings import check_shards


def each_shard(
  function: Callable, split: Any, *shared: Any, axes: MeshAxes
) -> Any:
  """Calls `function(split, *shared)` for each shard, without communication.

  A device with several shards runs them one after another. Without `axes.data`
  the function is called once, on the arguments as they are.

  Args:
    function: returns a pytree of arrays.
    split: arrays [X, ...], of which each shard gets [...].
    *shared: arrays that are the same on all shards.
    axes: the mesh.

  Returns:
    The results, [X, ...].

  Raises:
    ValueError: the size of the axis does not divide the number of shards.
  """
  if axes.data is None:
    return function(split, *shared)
  for leaf in jax.tree.leaves(split):
    check_shards("state", leaf, axes)

  def of_device(split: Any, *shared: Any) -> Any:
    if jax.tree.leaves(split)[0].shape[0] > 1:
      return lax.map(lambda shard: function(shard, *shared), split)
    shard = jax.tree.map(lambda leaf: leaf[0], split)
    return jax.tree.map(lambda leaf: leaf[None], function(shard, *shared))

  by_shard = P(axes.data)
  return jax.shard_map(
    of_device,
    mesh=axes.auto,
    axis_names={axes.data},
    in_specs=(by_shard, *(P() for _ in shared)),
    out_specs=by_shard,
    # JAX does not support it where the compiler splits other axes.
    check_vma=False,
  )(split, *shared)
