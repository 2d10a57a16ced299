"""Where the arrays of a new rollout lie: beside its K/V memory."""

from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def beside(tree: Any, memory: jax.Array) -> Any:
  """A tree whose arrays lie on the devices on which the memory lies.

  Arrays that were put on a device, or computed from such arrays, stay where
  they are. The others, which jax may move, go to the device of the memory, or
  to each device of its mesh. Otherwise they would be moved by the first call of
  a program, and the second one, with all arrays in place, be compiled again.

  Args:
    tree: any pytree.
    memory: an array. If it is traced or was not put anywhere, nothing is moved.

  Returns:
    The tree.
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
