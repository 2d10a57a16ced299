"""Assembles parameters from the tensors of a checkpoint."""

import dataclasses
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxkv._src.models.decoder import groups
from jaxkv._src.models.decoder import params as leaves
from jaxkv._src.models.loading.lazy_tensor import Tensors
from jaxkv._src.models.loading.tokenizer import Tokenizer
from jaxkv._src.models.loading.weight_maps import Source
from jaxkv._src.models.loading.weight_maps import WeightMap

_MAX_NAMES = 3
"""The maximum number of tensors that an error message lists."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
  """An open checkpoint of any format. Its tensors are read on demand.

  Attributes:
    name: name of the file or folder, for error messages.
    dtype: returns the checkpoint's dtype; raises ValueError if it is not
      supported.
    weight_map: returns the `WeightMap` for parameters of a given dtype.
    tensors: the tensors, by their names in Hugging Face's format.
    stop_tokens: ids of the tokens that end a text or a chat message.
    max_length: the longest sequence that the model was trained for, in tokens.
    open_tokenizer: reads and returns the tokenizer.
  """

  name: str
  dtype: Callable[[], Any]
  weight_map: Callable[[Any], WeightMap]
  tensors: Tensors
  stop_tokens: tuple[int, ...]
  max_length: int
  open_tokenizer: Callable[[], Tokenizer]


def check(weight_map: WeightMap, tensors: Tensors, file: str) -> None:
  """Raises ValueError unless the tensors' names, shapes and dtypes fit."""
  shapes: dict[str, tuple[int, ...]] = {}
  missing: dict[str, None] = {}
  for source in sources_of(weight_map):
    shapes |= dict(source.tensors)
    missing |= {name: None for name, _ in source.tensors if name not in tensors}
    # Stops early, because a damaged config.json can imply billions of tensors.
    if len(missing) > 2 * _MAX_NAMES:
      break
  if missing:
    raise ValueError(
      f"{file} lacks tensors: {_listing(list(missing))}; get it again."
    )
  # Unknown tensors, such as a bias, are refused, because a model that ignored
  # them would compute wrong results.
  unknown = [
    name
    for name in tensors
    if name not in shapes and not weight_map.unused.fullmatch(name)
  ]
  if unknown:
    raise ValueError(
      f"{file} has tensors that are not known: {_listing(unknown)}; its "
      "architecture is not the one that its configuration names."
    )
  for name, shape in shapes.items():
    tensor = tensors[name]
    if tensor.shape != shape:
      raise ValueError(
        f"tensor {name} in {file} must have shape {list(shape)}, as its "
        f"configuration says, got {list(tensor.shape)}."
      )
    if not jax.numpy.issubdtype(tensor.dtype, jax.numpy.floating):
      raise ValueError(
        f"tensor {name} in {file} must hold floats, got {tensor.dtype.name}; "
        "such quantized weights are not supported."
      )


def assemble(
  weight_map: WeightMap,
  tensors: Tensors,
  tick: Callable[[], Any] = lambda: None,
) -> leaves.Params:
  """Reads the tensors, which `check` accepts, and assembles the parameters.

  Calls `tick` after each `Source` is read.
  """
  dtype = weight_map.decoder.dtype

  def array(
    leaf: leaves.Leaf, sources: list[Source], is_stacked: bool
  ) -> jax.Array:
    # A stacked array is filled layer by layer and in its final dtype. So at
    # most one source is in memory in addition to the parameters.
    out = np.empty(leaf.shape, leaf.dtype or dtype)
    slices = out if is_stacked else out[None]
    for layer_slice, source in zip(slices, sources, strict=True):
      arrays = (tensors[name].read() for name, _ in source.tensors)
      layer_slice[...] = source.convert(*arrays)
      tick()
    return jax.device_put(out)

  tree = leaves.leaves_of(weight_map.decoder)
  params: leaves.Params = {
    name: array(tree[name], [source], False)
    for name, source in weight_map.top.items()
  }
  segments = []
  for pattern, segment in zip(
    tree["layers"], groups.segments(weight_map.decoder), strict=True
  ):
    layers = []
    for first_layer, layer in enumerate(pattern, segment.first):
      repeats = [
        weight_map.layer(first_layer + repeat * len(pattern))
        for repeat in range(segment.num_repeats)
      ]
      layers.append(
        {
          name: array(leaf, [sources[name] for sources in repeats], True)
          for name, leaf in layer.items()
        }
      )
    segments.append(tuple(layers))
  params["layers"] = tuple(segments)
  return params


def sources_of(weight_map: WeightMap) -> Iterator[Source]:
  """Yields the sources of all parameters."""
  yield from weight_map.top.values()
  for index in range(weight_map.decoder.num_layers):
    yield from weight_map.layer(index).values()


def _listing(names: list[str]) -> str:
  suffix = " and more" if len(names) > _MAX_NAMES else ""
  return ", ".join(names[:_MAX_NAMES]) + suffix
