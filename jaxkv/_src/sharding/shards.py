"""Runs a function once for each shard."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkv._src.sharding.mesh_axes import MeshAxes
from jaxkv._src.sharding.mesh_axes import check_axes
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
  check_axes(axes)
  specs = (P(),) * len(shared)
  return run_shards(function, split, *shared, axes=axes, specs=specs)


def run_shards(
  function: Callable,
  split: Any,
  *shared: Any,
  axes: MeshAxes,
  specs: tuple[Any, ...],
) -> Any:
  """Implements `each_shard`; `shared` can be split along `axes.data`.

  `specs` has the `PartitionSpec`s along `axes.data` of each of `shared`.
  """
  for leaf in jax.tree.leaves(split):
    check_shards(leaf, axes)

  def of_device(split: Any, *shared: Any) -> Any:
    if jax.tree.leaves(split)[0].shape[0] > 1:
      return lax.map(lambda shard: function(shard, *shared), split)
    shard = jax.tree.map(lambda leaf: leaf[0], split)
    return jax.tree.map(lambda leaf: leaf[None], function(shard, *shared))

  call = function
  if axes.data is not None:
    call = jax.shard_map(
      of_device,
      mesh=axes.auto,
      axis_names={axes.data},
      in_specs=(P(axes.data), *specs),
      out_specs=P(axes.data),
      # JAX cannot check varying axes if another axis has the type Auto.
      check_vma=False,
    )
  # The rollout loop does not have the annotations that Explicit axes require.
  arguments = jax.tree.map(
    lambda leaf: _on_auto_axes(leaf, axes), (split, *shared)
  )
  with jax.sharding.use_abstract_mesh(axes.auto.abstract_mesh):
    results = call(*arguments)
  return placed(results, tree_shardings(results, axes))


def _on_auto_axes(leaf: Any, axes: MeshAxes) -> Any:
  """Returns an array whose sharding has no axis of type Explicit."""
  sharding = jax.typeof(leaf).sharding
  if AxisType.Explicit not in sharding.mesh.axis_types:
    return leaf
  where = NamedSharding(axes.auto, sharding.spec)
  return lax.with_sharding_constraint(leaf, where)


def placed(tree: Any, shardings: Any) -> Any:
  """Reshards arrays; `shardings` is a tree of NamedSharding, or one for all."""

  def place(leaf: Any, where: NamedSharding) -> Any:
    if AxisType.Explicit in where.mesh.axis_types:
      return jax.sharding.reshard(leaf, where)
    return lax.with_sharding_constraint(leaf, where)

  return jax.tree.map(place, tree, jax.tree.broadcast(shardings, tree))
