"""Runs a function once for each shard."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxkv._src.sharding.mesh_axes import MeshAxes
from jaxkv._src.sharding.mesh_axes import on_auto_axes
from jaxkv._src.sharding.mesh_axes import placed
from jaxkv._src.sharding.state_shardings import check_shards
from jaxkv._src.sharding.state_shardings import tree_shardings


def each_shard(
  function: Callable, split: Any, *shared: Any, axes: MeshAxes
) -> Any:
  """Calls `function(split, *shared)` for each shard, inside `jit`.

  Shards communicate only where `function` calls a collective operation. A
  device with several shards runs `function` for one after another. Without
  `axes.data`, `function` is called once, with the whole arrays. For example:

    update = functools.partial(
      sharding.each_shard, rollout.update_weights, axes=axes
    )
    state = jax.jit(update, donate_argnums=0)(state)

  To add prompts, use `jaxkv.sharding.submit`: with `rollout.submit`, several
  shards can use the same id, and `rebalance` does not move such sequences.

  Args:
    function: a function that returns a pytree of arrays, such as a rollout.
    split: a pytree of arrays [X, ...]; shard i gets element i of each.
    *shared: arrays that are the same on all shards.
    axes: the mesh.

  Returns:
    The results, [X, ...], on the devices of their shards.

  Raises:
    ValueError: the size of `axes.data` does not divide X.
  """
  return run_shards(function, split, *shared, axes=axes)


def run_shards(
  function: Callable,
  split: Any,
  *shared: Any,
  axes: MeshAxes,
  specs: tuple[Any, ...] | None = None,
) -> Any:
  """Implements `each_shard`; see `map_shards` for `specs`."""

  def of_all(split: Any, *shared: Any) -> Any:
    return map_shards(function, split, *shared, axes=axes, specs=specs)

  results = on_auto_axes(of_all, (split, *shared), axes)
  return placed(results, tree_shardings(results, axes))


def map_shards(
  function: Callable,
  split: Any,
  *shared: Any,
  axes: MeshAxes,
  specs: tuple[Any, ...] | None = None,
) -> Any:
  """Implements `run_shards`, inside of `on_auto_axes`.

  `specs` has, for each of `shared`, its `PartitionSpec`s along `axes.data`;
  None if all are replicated.
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
    in_specs=(by_shard, *(specs or (P() for _ in shared))),
    out_specs=by_shard,
    # JAX cannot check varying axes if another axis has the type Auto.
    check_vma=False,
  )(split, *shared)
