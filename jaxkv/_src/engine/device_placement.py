"""Device placement of the arrays of a new rollout."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def beside(tree: Any, memory: jax.Array) -> Any:
  """Commits uncommitted arrays to the device or all devices of `memory`.

  Otherwise, the first call of a jitted function would return committed arrays,
  so the second call would compile again. Committed arrays stay on their
  devices. Nothing moves if `memory` is traced, uncommitted, or on several
  devices without a mesh.
  """
  if isinstance(memory, Tracer) or not memory.committed:
    return tree
  where = memory.sharding
  if isinstance(where, NamedSharding):
    where = NamedSharding(where.mesh, P())
  elif len(where.device_set) > 1:
    return tree
  leaves, structure = jax.tree.flatten(tree)
  free = [
    number
    for number, leaf in enumerate(leaves)
    if not isinstance(leaf, Tracer) and not leaf.committed
  ]
  moved = jax.device_put([leaves[number] for number in free], where)
  for number, leaf in zip(free, moved, strict=True):
    leaves[number] = leaf
  return jax.tree.unflatten(structure, leaves)


def without_shared_arrays(tree: Any, arguments: Any) -> Any:
  """Copies the arrays that `tree` shares with the caller's arguments.

  Otherwise, donating the tree would delete arrays that the caller may use
  again. Traced arrays cannot be donated and are not copied.
  """
  shared = {
    id(leaf)
    for leaf in jax.tree.leaves(arguments)
    if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
  }
  return jax.tree.map(
    lambda leaf: jnp.copy(leaf) if id(leaf) in shared else leaf, tree
  )
