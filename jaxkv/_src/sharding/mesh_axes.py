"""The axes of a mesh over which a rollout is split."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkv._src.arrays.sharding import auto_mesh


@dataclasses.dataclass(frozen=True)
class MeshAxes:
  """A mesh, and the names of the axes over which a rollout is split.

  The devices can belong to several processes. The functions of
  `jaxkv.sharding` accept axes of the types Auto and Explicit.

  Attributes:
    mesh: the devices.
    data: the axis over which X shards are distributed, each with its own cache,
      memory and queue; None for a single rollout.
    model: the axis over which K/V heads and the model's parameters are split;
      None to replicate them.
    experts: the axis over which the experts of each layer are distributed,
      which must be `data`; None for all experts in each shard. With this axis,
      the shards step together, because they exchange tokens in these layers.

  Raises:
    TypeError: `mesh` is not a `jax.sharding.Mesh`.
    ValueError: an axis is not in the mesh, `data` and `model` are the same or
      both None, or `experts` is another axis than `data`.

  Examples:
    >>> import jax
    >>> MeshAxes(jax.make_mesh((1,), ("data",)), data="data").num_shards
    1
  """

  mesh: Mesh
  data: str | None = None
  model: str | None = None
  experts: str | None = None

  def __post_init__(self) -> None:
    if not isinstance(self.mesh, Mesh):
      raise TypeError(
        f"`mesh` must be a jax.sharding.Mesh, got {type(self.mesh).__name__}; "
        "make it with jax.make_mesh."
      )
    for name in ("data", "model"):
      axis = getattr(self, name)
      if axis is not None and axis not in self.mesh.axis_names:
        raise ValueError(
          f"`{name}` must be an axis of the mesh, one of "
          f"{self.mesh.axis_names}, got {axis!r}."
        )
    if self.data == self.model:
      raise ValueError(
        "`data` and `model` must be two axes of the mesh, or one of them None, "
        f"got {self.data!r} for both."
      )
    if self.experts not in (None, self.data):
      raise ValueError(
        f"`experts` must be None or the axis `data`, {self.data!r}, got "
        f"{self.experts!r}; along `model`, each expert is split by its inner "
        "dimension."
      )

  @property
  def num_shards(self) -> int:
    """The number of devices along `data`, which divides X; 1 without `data`."""
    return 1 if self.data is None else self.mesh.shape[self.data]

  @property
  def num_parts(self) -> int:
    """The number of devices along `model`; 1 if it is None."""
    return 1 if self.model is None else self.mesh.shape[self.model]

  @property
  def auto(self) -> Mesh:
    """The same mesh with axes of type Auto."""
    return auto_mesh(self.mesh)

  def by_shard(self) -> NamedSharding:
    """Returns the sharding of arrays whose first dimension is the shards."""
    return NamedSharding(self.mesh, P(self.data) if self.data else P())

  def everywhere(self) -> NamedSharding:
    """Returns the sharding of replicated arrays."""
    return NamedSharding(self.mesh, P())


def on_auto_axes(function: Callable, arguments: Any, axes: MeshAxes) -> Any:
  """Calls `function(*arguments)` with all axes of the mesh as Auto.

  The rollout loop does not have the annotations that Explicit axes require.
  """
  auto = axes.auto

  def without_axes(leaf: Any) -> Any:
    place = jax.typeof(leaf).sharding
    if AxisType.Explicit not in place.mesh.axis_types:
      return leaf
    return lax.with_sharding_constraint(leaf, NamedSharding(auto, place.spec))

  arguments = jax.tree.map(without_axes, arguments)
  with jax.sharding.use_abstract_mesh(auto.abstract_mesh):
    return function(*arguments)


def placed(tree: Any, shardings: Any) -> Any:
  """Reshards arrays; `shardings` is a tree of NamedSharding, or one for all."""

  def place(leaf: Any, where: NamedSharding) -> Any:
    if AxisType.Explicit in where.mesh.axis_types:
      return jax.sharding.reshard(leaf, where)
    return lax.with_sharding_constraint(leaf, where)

  if isinstance(shardings, NamedSharding):
    return jax.tree.map(lambda leaf: place(leaf, shardings), tree)
  return jax.tree.map(place, tree, shardings)
