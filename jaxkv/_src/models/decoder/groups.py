"""Divides a decoder's layers into layer groups, memory pools and loops.

Layers of one layer group share a page table. Layer i of L is in group i % C,
where the number of groups C is the period: the length of the shortest pattern
that the windows and the cached data of the layers repeat. For example, C is 6
if every sixth layer has full attention and the others have a window.

A page stores data of all layers of its group. The part of a page for one layer
is a memory layer: layer i uses memory layer i // C. All pages have the same
number of memory layers. If C does not divide L, some groups leave their last
memory layer unused. A pool is the memory for the pages of all groups whose
layers store the same kind and size of data.

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
from jaxkv._src.models.decoder.description import Attention
from jaxkv._src.models.decoder.description import Decoder
from jaxkv._src.models.decoder.description import DeltaNet
from jaxkv._src.models.decoder.description import LatentAttention
from jaxkv._src.models.decoder.description import Layer

PoolKey = tuple[str, Any]
"""The kind of data that a pool stores, and either sizes or, for states, the
`DeltaNet`. Layers with equal keys share a pool."""

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


def pool_key(attention: Any) -> PoolKey:
  """Returns the key of the pool that a token mixer needs."""
  if isinstance(attention, Attention):
    return "keys and values", (attention.num_kv_heads, attention.head_dim)
  if isinstance(attention, LatentAttention):
    return "latents", (attention.latent_dim, attention.rotated_dim)
  return "states", attention


@functools.cache
def period(decoder: Decoder) -> int:
  """Returns C, the number of layer groups."""
  # All pages of a group are in one pool, so layers that need different pools
  # must be in different groups.
  needs = [
    (kind_of(layer), pool_key(layer.attention)) for layer in decoder.layers
  ]
  # The last repeat can be incomplete.
  for period in range(1, len(needs)):
    if all(need == needs[i % period] for i, need in enumerate(needs)):
      return period
  return len(needs)


@functools.cache
def group_kinds(decoder: Decoder) -> tuple[GroupKind, ...]:
  """Returns the kinds of the C layer groups, for `CacheConfig.groups`."""
  return tuple(kind_of(layer) for layer in decoder.layers[: period(decoder)])


@functools.cache
def pool_of_group(decoder: Decoder) -> tuple[int, ...]:
  """Returns each layer group's index into `pools`."""
  first_period = decoder.layers[: period(decoder)]
  index = {key: pool_index for pool_index, key in enumerate(pools(decoder))}
  return tuple(index[pool_key(layer.attention)] for layer in first_period)


def num_memory_layers(decoder: Decoder) -> int:
  """Returns the number of memory layers of a page, the same in all pools."""
  return -(-len(decoder.layers) // period(decoder))


@functools.cache
def pools(decoder: Decoder) -> tuple[PoolKey, ...]:
  """Returns the keys of all pools, in the order of the first layer of each."""
  return tuple(
    dict.fromkeys(pool_key(layer.attention) for layer in decoder.layers)
  )


@functools.cache
def segments(decoder: Decoder) -> tuple[Segment, ...]:
  """Cuts the layers of a decoder into segments, from first to last."""
  layers = decoder.layers
  result = []
  first_layer = 0
  while first_layer < len(layers):
    pattern_size, num_repeats = _longest_segment(
      layers[first_layer:], period(decoder)
    )
    pattern = layers[first_layer : first_layer + pattern_size]
    result.append(Segment(first_layer, pattern, num_repeats))
    first_layer += pattern_size * num_repeats
  return tuple(result)


def _longest_segment(layers: tuple[Layer, ...], period: int) -> tuple[int, int]:
  """Returns P and R of the longest segment that begins at the first layer.

  If no pattern repeats, R is 1 and P is `period` or the number of layers left.
  """
  best = (min(period, len(layers)), 1)
  # The group is a static index in the compiled loop, so a layer of the pattern
  # must be in the same group in each repeat. That holds if the pattern's length
  # is a multiple of the period.
  longest = min(_MAX_PATTERN, len(layers) // 2)
  for length in range(period, longest + 1, period):
    times = 1
    while layers[length * times : length * (times + 1)] == layers[:length]:
      times += 1
    if times > 1 and length * times > best[0] * best[1]:
      best = (length, times)
  return best
