"""Weight maps: the checkpoint tensors from which each parameter is made."""

import dataclasses
import re
from collections.abc import Callable
from collections.abc import Mapping

import numpy as np

from jaxkv._src.models.decoder.description import Decoder

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


def plain(name: str, *shape: int) -> Source:
  """Returns the source of a parameter that is stored without conversion."""
  return Source(((name, shape),), lambda x: x)


def linear(name: str, inputs: int, outputs: int) -> Source:
  """Returns the source of a matrix [inputs, outputs], stored transposed."""
  # torch.nn.Linear stores its weight as [outputs, inputs].
  return Source(((name, (outputs, inputs)),), np.transpose)


def head_inputs(name: str, inputs: int, heads: int, dim: int) -> Source:
  """Returns the source of [inputs, heads, dim] from [heads * dim, inputs]."""
  return Source(
    ((name, (heads * dim, inputs)),),
    lambda w: w.reshape(heads, dim, inputs).transpose(2, 0, 1),
  )


def head_outputs(name: str, heads: int, dim: int, outputs: int) -> Source:
  """Returns the source of [heads, dim, outputs] from [outputs, heads * dim]."""
  return Source(
    ((name, (outputs, heads * dim)),),
    lambda w: w.T.reshape(heads, dim, outputs),
  )


def head_bias(name: str, heads: int, dim: int) -> Source:
  """Returns the source of [heads, dim] from [heads * dim]."""
  return Source(((name, (heads * dim,)),), lambda b: b.reshape(heads, dim))


def stacked(names: list[str], inputs: int, outputs: int) -> Source:
  """Returns the source of [X, inputs, outputs] from X stored matrices."""
  return Source(
    tuple((name, (outputs, inputs)) for name in names),
    lambda *weights: np.stack([w.T for w in weights]),
  )


def weight_map(
  decoder: Decoder, layer: Callable[[int], Sources], *unused: str
) -> WeightMap:
  """Returns a weight map with the usual names of tensors outside layers.

  Args:
    decoder: the decoder.
    layer: see `WeightMap`.
    *unused: regular expressions for names of further tensors to ignore.
  """
  v, e = decoder.vocab_size, decoder.embed_dim
  sources = {
    "embed": plain("model.embed_tokens.weight", v, e),
    "final_norm": plain("model.norm.weight", e),
  }
  # Rotary frequencies, which old checkpoints store, are ignored. So is the head
  # of a tied model, which repeats the embedding.
  patterns = [r".*\.rotary_emb\.inv_freq", *unused]
  if decoder.tied_embeddings:
    patterns.append(r"lm_head\.weight")
  else:
    sources["unembed"] = linear("lm_head.weight", e, v)
  pattern = re.compile("|".join(patterns))
  return WeightMap(decoder=decoder, top=sources, layer=layer, unused=pattern)
