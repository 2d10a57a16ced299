"""Where the arrays of a new rollout lie, and whose they are."""

from typing import Any

import jax
import jax.numpy as jnp
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


def own(tree: Any, given: Any) -> Any:
  """A tree that shares no array with what a caller gave.

  Otherwise the first program that takes the tree's arrays away, by donation,
  would take the caller's, which may be meant for further rollouts.

  Args:
    tree: any pytree.
    given: any pytree. Traced arrays may be shared: they cannot be taken away.

  Returns:
    The tree, with copies in place of the caller's arrays.
  """
  theirs = {
    id(leaf)
    for leaf in jax.tree.leaves(given)
    if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
  }
  return jax.tree.map(
    lambda leaf: jnp.copy(leaf) if id(leaf) in theirs else leaf, tree
  )
