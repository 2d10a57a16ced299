"""The shardings of the arrays of a rollout."""

import dataclasses
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkv._src.engine.state import RolloutState
from jaxkv._src.engine.state import check_rollout
from jaxkv._src.kv.kv_pages import KVPages
from jaxkv._src.kv.offload_memory import PINNED_HOST
from jaxkv._src.sharding.mesh_axes import MeshAxes
from jaxkv._src.sharding.mesh_axes import check_axes


def state_shardings(state: RolloutState, *, axes: MeshAxes) -> RolloutState:
  """Returns the shardings of a rollout.

  Along `axes.data`, each array is split into its shards. Along `axes.model`,
  K/V pages are split by heads, and all other arrays, including latents and
  recurrent states, are replicated. Pass the shardings to `jax.device_put`,
  `jax.jit(out_shardings=)` or `jax.ShapeDtypeStruct`.

  Args:
    state: the rollout, from `jaxkv.sharding.init`, or its shapes from
      `jax.eval_shape`.
    axes: the mesh.

  Returns:
    A `NamedSharding` for each array, in a tree like `state`.

  Raises:
    ValueError: the size of `axes.model` does not divide the number of K/V
      heads, or the size of `axes.data` does not divide the number of shards.

  Examples:
    >>> import jaxkv, jax.numpy as jnp
    >>> from jaxkv import rollout, sharding
    >>> sizes = jaxkv.CacheConfig(
    ...   num_pages=9, page_size=4, num_slots=2, pages_per_slot=4
    ... )
    >>> kv = jaxkv.kv.init(sizes, num_layers=1, num_kv_heads=2, head_dim=8)
    >>> state = rollout.init(
    ...   jaxkv.init(sizes), kv, rollout.Requests([[5, 7]], [2]),
    ...   jax.random.key(0), rollout.RolloutConfig(max_new_tokens=4),
    ... )
    >>> axes = sharding.MeshAxes(jax.make_mesh((1,), ("model",)), model="model")
    >>> shardings = sharding.state_shardings(state, axes=axes)
    >>> shardings.memory.kv.k.spec == P(None, "model")
    True
  """
  check_axes(axes)
  check_rollout(state)
  check_shards(state.key, axes)
  shardings = tree_shardings(state, axes)
  memory = shardings.memory
  if memory.offload is not None:
    # Offloaded pages have the same partition specs as pages in `kv`.
    offloaded: Any = tuple(
      NamedSharding(axes.mesh, sharding.spec, memory_kind=PINNED_HOST)
      for sharding in jax.tree.leaves(memory.kv)
    )
    offload = dataclasses.replace(memory.offload, pages=offloaded)
    memory = dataclasses.replace(memory, offload=offload)
  return dataclasses.replace(shardings, memory=memory)


def tree_shardings(tree: Any, axes: MeshAxes) -> Any:
  """Implements `state_shardings` for any pytree, without offload memory."""
  by_shard = axes.by_shard()
  # The axes of `KVPages` after shards: pages, heads, tokens, elements.
  by_head = NamedSharding(axes.mesh, P(*by_shard.spec, None, axes.model))

  def places(node: Any) -> Any:
    if not (axes.model and isinstance(node, KVPages) and node.v is not None):
      return jax.tree.map(lambda _: by_shard, node)
    num_heads = node.k.shape[-3]
    if num_heads % axes.num_parts:
      raise ValueError(
        f"`axes.model` must be an axis whose size divides {num_heads} K/V "
        f"heads, got {axes.model!r} of {axes.num_parts} devices; use fewer, "
        "and `axes.data` for the rest."
      )
    return jax.tree.map(lambda _: by_head, node)

  return jax.tree.map(
    places, tree, is_leaf=lambda node: isinstance(node, KVPages)
  )


def check_shards(leaf: Any, axes: MeshAxes) -> None:
  """Raises ValueError unless `leaf` [X, ...] can be split by `axes.data`."""
  if axes.data is None:
    return
  if not leaf.shape or leaf.shape[0] % axes.num_shards:
    raise ValueError(
      f"`state` must have a multiple of {axes.num_shards} shards, the size of "
      f"the axis {axes.data!r}, got arrays of shape {[*leaf.shape]}; make it "
      "with jaxkv.sharding.init, or use a mesh of another size."
    )


def check_one_shard_each(state: RolloutState, axes: MeshAxes) -> None:
  """Raises unless each device along `axes.data` has one shard of a rollout."""
  if axes.data is None:
    raise ValueError("`axes` must have the axis `data`, got None.")
  check_rollout(state)
  if state.key.shape != (axes.num_shards,):
    raise ValueError(
      "`state` must have one shard for each device of `axes.data`, got "
      f"arrays of {[*state.key.shape]} shards for {axes.num_shards} devices; "
      "make it with jaxkv.sharding.init. Several shards on a device run one "
      "after another, and cannot exchange sequences or prompts."
    )
