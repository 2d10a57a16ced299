"""Shardings of a decoder's parameters over the axes of a mesh.

Along `MeshAxes.model`, each layer has two all-reduces, after the output
projections of attention and of the MLP; a `DeltaNet` has only the second. Tied
embeddings need another one after the lookup. `models.decoder.params` defines
the names of the arrays, and the letters of their shapes.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkv._src.arrays import arguments
from jaxkv._src.models.decoder.params import Params
from jaxkv._src.sharding.mesh_axes import MeshAxes
from jaxkv._src.sharding.mesh_axes import check_axes

# The split dimension of each array, counted from the last one. Other arrays are
# replicated, such as norms, routers, and `latent`, because the pages of latents
# are replicated too.
_ATTENTION = {
  "query": -2,  # [E or rank, H, D]
  "query_gate": -2,  # [E, H, D]
  "query_bias": -2,  # [H, D]
  "key": -2,  # [E, K, D] or [latent, H, D]
  "key_bias": -2,  # [K, D]
  "value": -2,  # [E, K, D] or [latent, H, D]
  "value_bias": -2,  # [K, D]
  "sinks": -1,  # [H]
  "output": -3,  # [H, D, E]
}
# For `Mlp`, and with a prefix for the experts and the shared MLP of `Experts`.
# Along `axes.model`, experts are split along F and not along X. `ragged_dot`
# reads the weights of all experts, so if X were split, XLA would gather them on
# a GPU or TPU.
_MLP = {
  "gate": -1,  # [E, F] or [X, E, F]
  "up": -1,  # [E, F] or [X, E, F]
  "down": -2,  # [F, E] or [X, F, E]
  "gate_bias": -1,  # [X, F]
  "up_bias": -1,  # [X, F]
}


def param_shardings(params: Any, *, axes: MeshAxes) -> Any:
  """Returns the shardings of the parameters of `jaxkv.models`.

  Along `axes.model`, attention heads and the inner dimension of MLPs and of
  experts are split, and XLA partitions `jaxkv.models.forward` with two
  all-reduces of activations for each layer. The output head is split by
  vocabulary, if the size of the axis divides V. Along `axes.experts`, each
  device gets an equal part of the experts. Other parameters are replicated.

  Args:
    params: from `jaxkv.models.init_params` or `jaxkv.models.load`, or their
      shapes. If `axes.model` and `axes.experts` are None, any pytree, which is
      replicated.
    axes: the mesh.

  Returns:
    A `NamedSharding` for each array, in a tree like `params`, for
    `jax.device_put`.

  Raises:
    ValueError: `params` are not those of a decoder, the size of an axis does
      not divide a dimension of a layer's split array, such as the number of K/V
      heads, or `axes.experts` is set for a decoder without experts.

  Examples:
    >>> import jax
    >>> from jaxkv import models, sharding
    >>> config = models.llama(
    ...   vocab_size=11, num_layers=2, embed_dim=8, num_heads=4,
    ...   num_kv_heads=2, head_dim=2, mlp_dim=16
    ... )
    >>> params = models.init_params(jax.random.key(0), config)
    >>> axes = sharding.MeshAxes(jax.make_mesh((1,), ("model",)), model="model")
    >>> layer = sharding.param_shardings(params, axes=axes)["layers"][0][0]
    >>> layer["key"].spec == P(None, None, "model")  # [R, E, K, D]
    True
  """
  check_axes(axes)
  everywhere = axes.everywhere()
  if axes.model is None and axes.experts is None:
    return jax.tree.map(lambda _: everywhere, params)
  if not isinstance(params, Mapping) or "layers" not in params:
    raise ValueError(
      '`params` must be a dict with "layers", as from init_params, got '
      f"{type(params).__name__}."
    )

  layers = [layer for segment in params["layers"] for layer in segment]
  if axes.experts and not any("expert_gate" in layer for layer in layers):
    raise ValueError(
      "`axes.experts` must be None for a decoder without experts, got "
      f"{axes.experts!r}."
    )
  shardings = jax.tree.map(lambda _: everywhere, dict(params))
  shardings["layers"] = jax.tree_util.tree_map_with_path(
    functools.partial(_of_layer, axes=axes),
    params["layers"],
    is_leaf=lambda node: isinstance(node, Mapping),
  )
  # With tied embeddings there is no `unembed`.
  head, dimension = ("unembed", 1) if "unembed" in params else ("embed", 0)
  divides = head in params
  divides = divides and params[head].shape[dimension] % axes.num_parts == 0
  if axes.model and divides:
    spec = P(*[None] * dimension, axes.model)
    shardings[head] = NamedSharding(axes.mesh, spec)
  return shardings


def _of_layer(path: tuple[Any, ...], layer: Params, axes: MeshAxes) -> Params:
  """Returns the shardings of the parameters of a layer."""
  # Only a `DeltaNet` has a convolution. Its channels are all queries, then all
  # keys, then all values, so the heads of a device are not contiguous in the
  # stored states. If any array were split by heads, XLA would also split the
  # pages of states, and move all of them in each call.
  split = _MLP if "convolution" in layer else _ATTENTION | _MLP
  shardings = {}
  for name, leaf in layer.items():
    part = name.removeprefix("expert_").removeprefix("shared_")
    axis_of = {}
    if axes.model and part in split:
      axis_of[len(leaf.shape) + split[part]] = axes.model
    # X is the dimension after the repeats of the layer.
    if axes.experts and name.startswith("expert_"):
      axis_of[1] = axes.experts
    where = f"params['layers']{jax.tree_util.keystr(path)}[{name!r}]"
    _check_divides(where, leaf, axis_of, axes)
    spec = P(*map(axis_of.get, range(max(axis_of, default=-1) + 1)))
    shardings[name] = NamedSharding(axes.mesh, spec)
  return shardings


def _check_divides(
  name: str, leaf: Any, axis_of: dict[int, str], axes: MeshAxes
) -> None:
  """Raises ValueError unless mesh axes divide the dimensions of an array."""
  for dimension, axis in axis_of.items():
    num_devices = axes.mesh.shape[axis]
    if leaf.shape[dimension] % num_devices:
      arguments.refuse(
        ValueError,
        name,
        f"an array whose dimension {dimension} is a multiple of the "
        f"{num_devices} devices of the axis {axis!r}",
        tuple(leaf.shape),
        "use fewer devices along this axis",
      )
