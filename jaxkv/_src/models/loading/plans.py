"""Which tensors a parameter is made of, and how."""

import dataclasses
import re
from collections.abc import Callable
from collections.abc import Mapping

import numpy as np

from jaxkv._src.models.decoder.description import Decoder

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Part:
  """One parameter of a layer, without the axis of repetitions.

  Attributes:
    tensors: the names and shapes of the stored tensors it is made of.
    make: makes it of their arrays, in this order.
  """

  tensors: tuple[tuple[str, Shape], ...]
  make: Callable[..., np.ndarray]


Parts = Mapping[str, Part]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """How a checkpoint becomes parameters.

  Attributes:
    decoder: what it is.
    top: the parameters outside layers.
    layer: the parameters of a layer, by its number.
    unused: names of tensors that may be there and are not used.
  """

  decoder: Decoder
  top: Parts
  layer: Callable[[int], Parts]
  unused: re.Pattern[str]


def plain(name: str, *shape: int) -> Part:
  """A tensor as it is."""
  return Part(((name, shape),), lambda x: x)


def linear(name: str, inputs: int, outputs: int) -> Part:
  """[inputs, outputs] of a stored [outputs, inputs]."""
  return Part(((name, (outputs, inputs)),), np.transpose)


def into_heads(name: str, inputs: int, heads: int, dim: int) -> Part:
  """[inputs, heads, dim] of a stored [heads * dim, inputs]."""
  return Part(
    ((name, (heads * dim, inputs)),),
    lambda w: w.reshape(heads, dim, inputs).transpose(2, 0, 1),
  )


def out_of_heads(name: str, heads: int, dim: int, outputs: int) -> Part:
  """[heads, dim, outputs] of a stored [outputs, heads * dim]."""
  return Part(
    ((name, (outputs, heads * dim)),),
    lambda w: w.T.reshape(heads, dim, outputs),
  )


def head_bias(name: str, heads: int, dim: int) -> Part:
  """[heads, dim] of a stored [heads * dim]."""
  return Part(((name, (heads * dim,)),), lambda b: b.reshape(heads, dim))


def stacked(names: list[str], inputs: int, outputs: int) -> Part:
  """[X, inputs, outputs] of X stored [outputs, inputs]."""
  return Part(
    tuple((name, (outputs, inputs)) for name in names),
    lambda *all: np.stack([w.T for w in all]),
  )


def top_parts(decoder: Decoder) -> dict[str, Part]:
  """The embedding, the last norm and the output projection."""
  v, e = decoder.vocab_size, decoder.embed_dim
  parts = {
    "embed": plain("model.embed_tokens.weight", v, e),
    "final_norm": plain("model.norm.weight", e),
  }
  if not decoder.tied_embeddings:
    parts["unembed"] = linear("lm_head.weight", e, v)
  return parts


def unused_names(decoder: Decoder, *others: str) -> re.Pattern[str]:
  """Tensors that older programs wrote and nobody needs."""
  patterns = [r".*\.rotary_emb\.inv_freq", *others]
  if decoder.tied_embeddings:
    patterns.append(r"lm_head\.weight")
  return re.compile("|".join(patterns))
