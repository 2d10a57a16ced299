"""Divides a decoder's layers into layer groups, memory pools and loops.

`layer_groups` has the rules of groups, pools and memory layers. For example, a
decoder in which every sixth layer has full attention, and the others have a
window, has two groups in two pools.

A segment is a run of layers in which a pattern of P layers repeats R times. A
`lax.scan` over the repeats runs the segment, so XLA compiles the pattern
only once.
"""

import dataclasses
import functools
from typing import Any

from jaxkv._src.cache.group_kinds import FullAttention
from jaxkv._src.cache.group_kinds import GroupKind
from jaxkv._src.cache.group_kinds import Recurrent
from jaxkv._src.cache.group_kinds import SlidingWindow
from jaxkv._src.kv.layer_groups import LayerGroups
from jaxkv._src.kv.layer_groups import group_layers
from jaxkv._src.models.decoder.description import Attention
from jaxkv._src.models.decoder.description import Decoder
from jaxkv._src.models.decoder.description import DeltaNet
from jaxkv._src.models.decoder.description import LatentAttention
from jaxkv._src.models.decoder.description import Layer

_MAX_PATTERN = 16
"""The maximum length P of a repeated pattern, which bounds the search."""


@dataclasses.dataclass(frozen=True)
class Segment:
  """Consecutive layers that repeat a pattern.

  Attributes:
    first: index of the first layer.
    pattern: the P layers of one repeat.
    num_repeats: R, the number of repeats.
  """

  first: int
  pattern: tuple[Layer, ...]
  num_repeats: int


def kind_of(layer: Layer) -> GroupKind:
  """Returns the kind of layer group that a layer needs."""
  attention = layer.attention
  if isinstance(attention, DeltaNet):
    return Recurrent()
  if isinstance(attention, Attention) and attention.window is not None:
    return SlidingWindow(attention.window)
  return FullAttention()


def shape_of(layer: Layer) -> tuple[str, Any]:
  """Returns the kind of a layer's data, and its sizes or the `DeltaNet`."""
  attention = layer.attention
  if isinstance(attention, Attention):
    return "keys and values", (attention.num_kv_heads, attention.head_dim)
  if isinstance(attention, LatentAttention):
    return "latents", (attention.latent_dim, attention.rotated_dim)
  return "states", attention


@functools.cache
def groups_of(decoder: Decoder) -> LayerGroups:
  """Returns the layer groups of a decoder."""
  kinds = [kind_of(layer) for layer in decoder.layers]
  return group_layers(kinds, [shape_of(layer) for layer in decoder.layers])


@functools.cache
def segments(decoder: Decoder) -> tuple[Segment, ...]:
  """Cuts the layers of a decoder into segments, from first to last."""
  layers = decoder.layers
  result = []
  first_layer = 0
  while first_layer < len(layers):
    pattern_size, num_repeats = _longest_segment(layers[first_layer:])
    pattern = layers[first_layer : first_layer + pattern_size]
    result.append(Segment(first_layer, pattern, num_repeats))
    first_layer += pattern_size * num_repeats
  return tuple(result)


def _longest_segment(layers: tuple[Layer, ...]) -> tuple[int, int]:
  """Returns P and R of the longest segment that begins at the first layer."""
  best = (1, 1)
  for length in range(1, 1 + min(_MAX_PATTERN, len(layers) // 2)):
    times = 1
    while layers[length * times : length * (times + 1)] == layers[:length]:
      times += 1
    if times > 1 and length * times > best[0] * best[1]:
      best = (length, times)
  return best
