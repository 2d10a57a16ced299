"""Weight maps: the checkpoint tensors from which each parameter is made."""

import dataclasses
import math
import re
from collections.abc import Callable
from collections.abc import Mapping

import numpy as np

from jaxkv._src.models.decoder.description import Decoder
from jaxkv._src.models.decoder.description import Layer
from jaxkv._src.models.decoder.params import Leaf
from jaxkv._src.models.decoder.params import layer_leaves
from jaxkv._src.models.decoder.params import leaves_of

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Source:
  """The checkpoint tensors of one parameter, and their conversion.

  For repeated layers, each layer has its own source, and `assemble` stacks the
  parameters along a new first axis.

  Attributes:
    tensors: names and shapes of the checkpoint tensors.
    convert: converts the arrays of `tensors`, in this order, to the parameter.
  """

  tensors: tuple[tuple[str, Shape], ...]
  convert: Callable[..., np.ndarray]


Sources = Mapping[str, Source]

Name = str | Source
"""The name of a parameter's tensor in the checkpoint, without the prefix of the
layer. In the name of an expert's tensor, "{}" stands for the expert's number. A
`Source` with such names replaces it for a tensor in an unusual layout."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightMap:
  """The map from the tensors of a checkpoint to the parameters of a decoder.

  Attributes:
    decoder: the decoder.
    top: sources of the parameters outside layers.
    layer: returns the sources of a layer's parameters, given its index.
    unused: matches the names of tensors to ignore.
  """

  decoder: Decoder
  top: Sources
  layer: Callable[[int], Sources]
  unused: re.Pattern[str]


def unchanged(name: str, *shape: int) -> Source:
  """Returns the source of a parameter that is stored without conversion."""
  return Source(((name, shape),), lambda array: array)


def _source(name: Name, prefix: str, leaf: Leaf) -> Source:
  """Returns the source of a parameter, by default in the layout of torch.

  torch stores a projection as a matrix [outputs, inputs], and each expert
  separately. Other parameters are vectors.
  """
  if isinstance(name, Source):
    tensors = tuple((prefix + part, shape) for part, shape in name.tensors)
    return dataclasses.replace(name, tensors=tensors)
  if "{}" in name:
    count, *shape = leaf.shape
    expert = dataclasses.replace(leaf, shape=tuple(shape))
    parts = [_source(name.format(i), prefix, expert) for i in range(count)]
    return Source(
      tuple(part.tensors[0] for part in parts),
      lambda *arrays: np.stack([parts[0].convert(array) for array in arrays]),
    )
  num_elements = math.prod(leaf.shape)
  inputs = leaf.fan_in
  shape = (num_elements // inputs, inputs) if inputs else (num_elements,)
  return Source(
    ((prefix + name, shape),), lambda array: array.T.reshape(leaf.shape)
  )


def weight_map(
  decoder: Decoder,
  names_of: Callable[[Layer], Mapping[str, Name]],
  *unused: str,
) -> WeightMap:
  """Returns a weight map with the usual names of tensors outside layers.

  `names_of` returns a `Name` for at least each parameter of a layer. Tensors
  whose names match one of the regular expressions `unused` are ignored.
  """
  v, e = decoder.vocab_size, decoder.embed_dim
  names: dict[str, Name] = {
    "embed": unchanged("model.embed_tokens.weight", v, e),
    "final_norm": "model.norm.weight",
    "unembed": "lm_head.weight",
  }
  leaves = leaves_of(decoder)
  del leaves["layers"]

  def layer(index: int) -> Sources:
    names = names_of(decoder.layers[index])
    return {
      name: _source(names[name], f"model.layers.{index}.", leaf)
      for name, leaf in layer_leaves(decoder.layers[index], e).items()
    }

  # Rotary frequencies, which old checkpoints store, are ignored. So is the head
  # of a tied model, which repeats the embedding.
  patterns = [r".*\.rotary_emb\.inv_freq", *unused]
  if decoder.tied_embeddings:
    patterns.append(r"lm_head\.weight")
  return WeightMap(
    decoder=decoder,
    top={name: _source(names[name], "", leaf) for name, leaf in leaves.items()},
    layer=layer,
    unused=re.compile("|".join(patterns)),
  )
