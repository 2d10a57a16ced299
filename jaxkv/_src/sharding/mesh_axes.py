"""The axes of a mesh over which a rollout is split."""

import dataclasses
from typing import Any

from jax.sharding import AxisType
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkv._src.arrays.arguments import check_type


@dataclasses.dataclass(frozen=True)
class MeshAxes:
  """A mesh, and the names of the axes over which a rollout is split.

  The docstring of `jaxkv.sharding` describes the axes, which can have the types
  Auto and Explicit. The devices can belong to several processes.

  Attributes:
    mesh: the devices.
    data: the axis over which X shards are distributed; None for one rollout.
    model: the axis over which K/V heads and parameters are split; None to
      replicate them. Without `data` and `model`, each device has a copy of one
      rollout.
    experts: the axis over which the experts of each layer are distributed,
      which must be `data`; None for all experts in each shard.

  Raises:
    TypeError: `mesh` is not a `jax.sharding.Mesh`.
    ValueError: an axis is not in the mesh, `data` and `model` are the same, or
      `experts` is another axis than `data`.

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
    hint = "make it with jax.make_mesh"
    check_type("mesh", self.mesh, Mesh, "a jax.sharding.Mesh", hint)
    for name in ("data", "model"):
      axis = getattr(self, name)
      if axis is not None and axis not in self.mesh.axis_names:
        raise ValueError(
          f"`{name}` must be an axis of the mesh, one of "
          f"{self.mesh.axis_names}, got {axis!r}."
        )
    if self.data is not None and self.data == self.model:
      raise ValueError(
        "`data` and `model` must be two axes of the mesh, got "
        f"{self.data!r} for both."
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
    types = (AxisType.Auto,) * len(self.mesh.axis_names)
    return Mesh(self.mesh.devices, self.mesh.axis_names, axis_types=types)

  def by_shard(self) -> NamedSharding:
    """Returns the sharding of arrays whose first dimension is the shards."""
    return NamedSharding(self.mesh, P(self.data) if self.data else P())

  def everywhere(self) -> NamedSharding:
    """Returns the sharding of replicated arrays."""
    return NamedSharding(self.mesh, P())


def check_axes(axes: Any) -> None:
  """Raises TypeError unless `axes` is a MeshAxes."""
  hint = "make it with jaxkv.sharding.MeshAxes(mesh, data=..., model=...)"
  check_type("axes", axes, MeshAxes, "a MeshAxes", hint)
