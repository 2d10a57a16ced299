"""The devices of an engine, and its weights on them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType
from jax.sharding import Mesh
from jax.sharding import NamedSharding

from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.engine.hooks import is_exact
from jaxkv._src.service.served_model import ServedModel
from jaxkv._src.sharding.mesh_axes import MeshAxes
from jaxkv._src.sharding.mesh_axes import check_axes
from jaxkv._src.sharding.param_shardings import param_shardings
from jaxkv._src.sharding.rollouts import check_placed


def axes_of(
  params: Any, model: ServedModel, axes: MeshAxes | None
) -> MeshAxes | None:
  """Returns the mesh of an engine, with axes of type Auto.

  Without `axes`, it is the mesh on which the parameters are sharded; None if
  they are on one device.

  Raises:
    TypeError: `axes` is not a MeshAxes.
    ValueError: an engine cannot serve the model on these devices.
  """
  if axes is None:
    leaves = _arrays_on_several_devices(params)
    if not leaves:
      return None
    mesh = getattr(leaves[0].sharding, "mesh", None)
    if not isinstance(mesh, Mesh):
      raise ValueError(
        "`params` must be on one device, or have NamedShardings, got "
        f"{leaves[0].sharding}."
      )
    axes = MeshAxes(mesh)
  check_axes(axes)
  if axes.experts is not None:
    raise ValueError(
      f"`axes.experts` must be None for an engine, got {axes.experts!r}; use "
      "the functions of jaxkv.sharding."
    )
  devices = axes.mesh.devices.flat
  if any(device.process_index != jax.process_index() for device in devices):
    raise ValueError(
      "`axes.mesh` must have devices of this process alone for an engine; use "
      "the functions of jaxkv.sharding for a mesh of several processes."
    )
  may_split_sums = axes.num_parts > 1 or axes.data is None
  if axes.mesh.size > 1 and may_split_sums and is_exact(model.call):
    raise ValueError(
      '`model` must have numerics="fast" on several devices without '
      '`axes.data`, got "exact": the last bits of a sum would depend on them.'
    )
  return dataclasses.replace(axes, mesh=_auto(axes.mesh))


class Weights:
  """The weights of an engine, as committed arrays on its devices.

  Attributes:
    is_released: True between `release` and `replace`.
  """

  def __init__(self, params: Any, model: ServedModel, axes: MeshAxes | None):
    """Places the first weights.

    On a mesh, arrays keep their shardings. Arrays that are not on a mesh yet
    are split if `param_shardings` can split them, and replicated otherwise.

    Raises:
      ValueError: parameters are on the devices of another mesh, or cannot be
        split.
    """
    # After uncommitted arrays, those of `replace` would compile the loop again.
    self._params = _placed_first(params, model, axes)
    self.is_released = False

  def read(self) -> Any:
    """Returns the weights; raises RuntimeError after `release`."""
    if self.is_released:
      raise RuntimeError(
        "The engine has released its weights; call `update_weights`, or make "
        "another engine if it is closed."
      )
    return self._params

  def placed(self, params: Any) -> Any:
    """Returns new weights with the dtypes and shardings of the first ones."""

    def as_first(path: Any, old: Any, new: Any) -> Any:
      if new.shape != old.shape:
        raise ValueError(
          f"`params{jax.tree_util.keystr(path)}` must have the shape "
          f"{[*old.shape]} of the first weights, got {[*new.shape]}."
        )
      # Other dtypes would compile again, and change the log-probs.
      return new.astype(old.dtype, copy=False)

    params = jax.tree_util.tree_map_with_path(as_first, self._params, params)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, self._params)
    return jax.device_put(params, shardings)

  def replace(self, params: Any) -> None:
    """Holds the weights that `placed` returned."""
    self._params = params
    self.is_released = False

  def release(self) -> None:
    """Keeps only the shapes, dtypes and shardings of the weights."""
    self._params = jax.tree.map(
      lambda leaf: jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=leaf.sharding
      ),
      self._params,
    )
    self.is_released = True


def kv_maker(
  params: Any, model: ServedModel, axes: MeshAxes | None, cache: CacheConfig
) -> Callable[[], Any]:
  """Returns a function that makes K/V memory beside the first parameters."""
  if axes is not None:
    return lambda: model.init_kv(cache)
  device = _device_of(params)
  return lambda: jax.device_put(model.init_kv(cache), device)


def _placed_first(
  params: Any, model: ServedModel, axes: MeshAxes | None
) -> Any:
  if axes is None:
    return jax.device_put(params, _device_of(params))
  devices = set(axes.mesh.devices.flat)
  for leaf in _arrays_on_several_devices(params):
    if leaf.devices() != devices:
      raise ValueError(
        "`params` must be on the devices of one mesh, that of `axes`, got an "
        f"array on {len(leaf.devices())} others; place them with "
        "jax.device_put(params, jaxkv.sharding.param_shardings(params, "
        "axes=axes))."
      )
  leaves, structure = jax.tree.flatten(params)
  shardings = [_own_sharding(leaf, axes.mesh) for leaf in leaves]
  if None in shardings:
    new_shardings = param_shardings(
      params, axes=MeshAxes(axes.mesh) if model.decoder is None else axes
    )
    pairs = zip(shardings, jax.tree.leaves(new_shardings), strict=True)
    shardings = [
      old_sharding or new_sharding for old_sharding, new_sharding in pairs
    ]
  params = structure.unflatten(jax.device_put(leaves, shardings))
  if axes.data is not None:
    check_placed(params, axes)
  return params


def _device_of(params: Any) -> Any:
  """Returns the device of the parameters, or the default one."""
  leaves = jax.tree.leaves(params)
  if not leaves or not isinstance(leaves[0], jax.Array):
    return jax.devices()[0]
  return leaves[0].device


def _arrays_on_several_devices(params: Any) -> list[jax.Array]:
  leaves = [x for x in jax.tree.leaves(params) if isinstance(x, jax.Array)]
  return [leaf for leaf in leaves if len(leaf.sharding.device_set) > 1]


def _own_sharding(leaf: Any, mesh: Mesh) -> NamedSharding | None:
  """Returns the sharding of an array that is on the devices of a mesh.

  None if they are in another order, in which no program could use both.
  """
  sharding = getattr(leaf, "sharding", None)
  if not isinstance(sharding, NamedSharding):
    return None
  if [*_auto(sharding.mesh).devices.flat] != [*mesh.devices.flat]:
    return None
  return NamedSharding(_auto(sharding.mesh), sharding.spec)


def _auto(mesh: Any) -> Mesh:
  """Returns a mesh with axes of type Auto.

  The rollout loop does not have the annotations that Explicit axes require.
  """
  types = (AxisType.Auto,) * len(mesh.axis_names)
  return Mesh(mesh.devices, mesh.axis_names, axis_types=types)
