"""Shardings of a decoder's parameters over the axes of a mesh.

Along `MeshAxes.model`, each layer has two all-reduces, after the output
projections of attention and of the MLP; a `DeltaNet` has only the second. The
table has the split dimension of each split array between asterisks;
`models.decoder.params` defines the letters. All other arrays are replicated,
such as untied embeddings, norms and routers.

The output head is split by vocabulary, and so are the logits, which the sampler
does not gather. Tied embeddings serve as the head, and need another all-reduce
after the lookup. If the number of devices does not divide V, the head is
replicated.

| layer             | split arrays                                             |
|-------------------|----------------------------------------------------------|
| `Attention`       | `query`, `query_gate` [E, *H*, D], `query_bias` [*H*, D] |
|                   | `key`, `value` [E, *K*, D], their biases [*K*, D]        |
|                   | `sinks` [*H*], `output` [*H*, D, E]                      |
| `LatentAttention` | `query` [rank, *H*, D], `key`, `value` [latent, *H*, D]  |
|                   | `output` [*H*, value, E]                                 |
| `DeltaNet`        | none                                                     |
| `Mlp`             | `gate`, `up` [E, *F*], `down` [*F*, E]                   |
| `Experts`         | `expert_gate`, `expert_up` [X, E, *F*]                   |
|                   | their biases [X, *F*], `expert_down` [X, *F*, E]         |
|                   | the shared MLP, like an `Mlp`                            |
| the head          | `unembed` [E, *V*], or tied `embed` [*V*, E]             |

Along `MeshAxes.experts`, the arrays of `Experts` are split along X, the number
of experts; the shared MLP is replicated.
"""

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkv._src.arrays import arguments
from jaxkv._src.models.decoder.params import Params
from jaxkv._src.sharding.mesh_axes import MeshAxes

# The split dimension of each array, without the leading axis of repetitions.
_ATTENTION = {
  "query": 1,
  "query_gate": 1,
  "query_bias": 0,
  "key": 1,
  "key_bias": 0,
  "value": 1,
  "value_bias": 0,
  "sinks": 0,
  "output": 0,
}
# `latent` is not split, because the pages of latents are replicated.
_LATENT_ATTENTION = {"query": 1, "key": 1, "value": 1, "output": 0}
# The channels of the convolution are all queries, then all keys, then all
# values, so the heads of a device are not contiguous in the stored states. If
# any array were split by heads, XLA would also split the pages of states, and
# move all of them in each call.
_DELTA_NET: dict[str, int] = {}
# Along `axes.model`, experts are split along F and not along X. `ragged_dot`
# reads the weights of all experts, so if X were split, XLA would gather them on
# a GPU or TPU.
_MLP = {
  "gate": 1,
  "up": 1,
  "down": 0,
  "shared_gate": 1,
  "shared_up": 1,
  "shared_down": 0,
  "expert_gate": 2,
  "expert_gate_bias": 1,
  "expert_up": 2,
  "expert_up_bias": 1,
  "expert_down": 1,
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
  everywhere = axes.everywhere()
  if axes.model is None and axes.experts is None:
    return jax.tree.map(lambda _: everywhere, params)
  if not isinstance(params, Mapping) or "layers" not in params:
    raise ValueError(
      '`params` must be a dict with "layers", as from init_params, got '
      f"{type(params).__name__}."
    )

  def of_layer(path: tuple[Any, ...], layer: Params) -> Params:
    prefix = f"params['layers']{jax.tree_util.keystr(path)}"
    split = _split_dimensions(layer) if axes.model else {}
    places = {}
    for name, leaf in layer.items():
      axis_of = {split[name]: axes.model} if name in split else {}
      if axes.experts and name.startswith("expert_"):
        axis_of[0] = axes.experts
      spec = _spec(f"{prefix}[{name!r}]", leaf, axis_of, axes)
      places[name] = NamedSharding(axes.mesh, spec)
    return places

  shardings = {
    name: jax.tree.map(lambda _: everywhere, part)
    for name, part in params.items()
    if name != "layers"
  }
  # With tied embeddings there is no `unembed`.
  head, dimension = ("unembed", 1) if "unembed" in params else ("embed", 0)
  divides = head in params
  divides = divides and params[head].shape[dimension] % axes.num_parts == 0
  if axes.model and divides:
    spec = P(*[None] * dimension, axes.model)
    shardings[head] = NamedSharding(axes.mesh, spec)
  if axes.experts and not _has_experts(params["layers"]):
    raise ValueError(
      "`axes.experts` must be None for a decoder without experts, got "
      f"{axes.experts!r}."
    )
  shardings["layers"] = jax.tree_util.tree_map_with_path(
    of_layer, params["layers"], is_leaf=lambda node: isinstance(node, Mapping)
  )
  return shardings


def _has_experts(layers: Any) -> bool:
  paths = jax.tree_util.tree_leaves_with_path(layers)
  return any("expert_gate" in jax.tree_util.keystr(path) for path, _ in paths)


def _split_dimensions(layer: Params) -> dict[str, int]:
  """Returns the split dimension of each split array of a layer."""
  # Several kinds of layers have a "query". Each name below is in only one kind.
  if "latent" in layer:
    return _LATENT_ATTENTION | _MLP
  if "convolution" in layer:
    return _DELTA_NET | _MLP
  return _ATTENTION | _MLP


def _spec(
  name: str, leaf: Any, axis_of: dict[int, str | None], axes: MeshAxes
) -> P:
  """Returns the spec of an array, from the mesh axis of each dimension."""
  # `axis_of` does not count the first dimension, the repetitions of the layer.
  places = {dimension + 1: axis for dimension, axis in axis_of.items()}
  for dimension, axis in places.items():
    size = axes.mesh.shape[axis]
    if leaf.shape[dimension] % size:
      arguments.refuse(
        ValueError,
        name,
        f"an array whose dimension {dimension} is a multiple of the "
        f"{size} devices of the axis {axis!r}",
        tuple(leaf.shape),
        "use fewer devices, and data-parallel shards for the rest"
        if axis == axes.model
        else "use fewer devices",
      )
  return P(*map(places.get, range(max(places, default=-1) + 1)))
