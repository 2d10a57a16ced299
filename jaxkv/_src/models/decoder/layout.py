"""Where layers stand: in groups and memory of a cache, and in loops.

Layers whose caches behave alike could share a group. But a page has room for
one memory layer of each layer of its group, so groups should have equally many
layers. Here layer i is in group i % C, in memory layer i // C, where C is the
period of the layers' caches: 1 if all are alike, 6 if every sixth layer has no
window. If the period does not divide L, the last memory layer is not full.

A loop over layers runs a pattern of P layers R times. A stretch of layers has
such a pattern; a decoder has as few stretches as possible.
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

PoolKey = tuple[str, tuple[int, ...]]
"""What memory a layer needs: layers of one pool need the same."""

_MOST = 16
"""The most layers of a pattern; a longer one is not looked for."""


@dataclasses.dataclass(frozen=True)
class Stretch:
  """Layers `first ..`, a pattern that repeats.

  Attributes:
    first: the number of its first layer.
    pattern: P layers.
    repetitions: R.
  """

  first: int
  pattern: tuple[Layer, ...]
  repetitions: int


def kind_of(layer: Layer) -> GroupKind:
  """What a cache must keep for a layer."""
  attention = layer.attention
  if isinstance(attention, DeltaNet):
    return Recurrent()
  if isinstance(attention, Attention) and attention.window is not None:
    return SlidingWindow(attention.window)
  return FullAttention()


def pool_of(attention: Any) -> PoolKey:
  """What memory a kind of attention needs."""
  if isinstance(attention, Attention):
    return "keys and values", (attention.num_kv_heads, attention.head_dim)
  if isinstance(attention, LatentAttention):
    return "latents", (attention.latent_dim, attention.rotated_dim)
  return "states", dataclasses.astuple(attention)


@functools.cache
def period(decoder: Decoder) -> int:
  """C, the number of layer groups."""
  return _period(
    [(kind_of(layer), pool_of(layer.attention)) for layer in decoder.layers]
  )


@functools.cache
def groups(decoder: Decoder) -> tuple[GroupKind, ...]:
  """For `CacheConfig.groups`: C of them."""
  return tuple(kind_of(layer) for layer in decoder.layers[: period(decoder)])


@functools.cache
def group_pools(decoder: Decoder) -> tuple[int, ...]:
  """The number of the pool of each group."""
  first = decoder.layers[: period(decoder)]
  numbers = {key: number for number, key in enumerate(pools(decoder))}
  return tuple(numbers[pool_of(layer.attention)] for layer in first)


@functools.cache
def num_memory_layers(decoder: Decoder) -> int:
  """Memory layers of each pool."""
  return -(-len(decoder.layers) // period(decoder))


@functools.cache
def pools(decoder: Decoder) -> tuple[PoolKey, ...]:
  """The pools of a decoder's memory, each once."""
  return tuple(
    dict.fromkeys(pool_of(layer.attention) for layer in decoder.layers)
  )


@functools.cache
def stretches(decoder: Decoder) -> tuple[Stretch, ...]:
  """The loops of a decoder, from the first layer to the last."""
  layers, found, first = decoder.layers, [], 0
  while first < len(layers):
    size, times = _longest(layers[first:], period(decoder))
    found.append(Stretch(first, layers[first : first + size], times))
    first += size * times
  return tuple(found)


def _period(items: list) -> int:
  """The shortest pattern that a list repeats, its last time perhaps in part."""
  for period in range(1, len(items)):
    if all(one == items[i % period] for i, one in enumerate(items)):
      return period
  return len(items)


def _longest(layers: tuple[Layer, ...], period: int) -> tuple[int, int]:
  """Pattern and repetitions at the beginning that cover the most layers.

  A pattern is a multiple of the period, so that its layers are always in the
  same groups. If none repeats, one period stands alone.
  """
  best = (min(period, len(layers)), 1)
  for size in range(period, min(_MOST, len(layers) // 2) + 1, period):
    times = 1
    while layers[size * times : size * (times + 1)] == layers[:size]:
      times += 1
    if times > 1 and size * times > best[0] * best[1]:
      best = (size, times)
  return best
