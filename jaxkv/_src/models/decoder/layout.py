"""Where layers stand: in groups and memory of a cache, and in loops.

Layers whose caches behave alike could share a group. But a page has room for
one memory layer of each layer of its group, so groups should have equally many
layers. Here layer i is in group i % C, in memory layer i // C, where C is the
period of the layers' caches: 1 if all are alike, 6 if every sixth layer has no
window. If the period does not divide L, the last memory layer is not full.

A layer with cross-attention needs pages for an encoder's tokens, too. So behind
the C groups stands one more for each layer of the period that has it, and the
layers use it in turn, like the first C. One group for all of them would need L
memory layers, of which the other groups would use L / C.

A loop over layers runs a pattern of P layers R times. A stretch of layers has
such a pattern; a decoder has as few stretches as possible.
"""

import dataclasses
import functools
from typing import Any

from jaxkv._src.cache.group_kinds import CrossAttention
from jaxkv._src.cache.group_kinds import FullAttention
from jaxkv._src.cache.group_kinds import GroupKind
from jaxkv._src.cache.group_kinds import Recurrent
from jaxkv._src.cache.group_kinds import SlidingWindow
from jaxkv._src.models.decoder.description import Attention
from jaxkv._src.models.decoder.description import DeltaNet
from jaxkv._src.models.decoder.description import LatentAttention
from jaxkv._src.models.decoder.description import Layer
from jaxkv._src.models.decoder.description import Stack

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
def period(stack: Stack) -> int:
  """C, the groups of the sequences' own tokens."""
  return _period(
    [
      (kind_of(layer), pool_of(layer.attention), _cross_pool(layer))
      for layer in stack.layers
    ]
  )


@functools.cache
def groups(stack: Stack) -> tuple[GroupKind, ...]:
  """For `CacheConfig.groups`: C of them, and those of an encoder."""
  first = stack.layers[: period(stack)]
  return (
    *(kind_of(layer) for layer in first),
    *(CrossAttention() for layer in first if layer.cross is not None),
  )


@functools.cache
def group_pools(stack: Stack) -> tuple[int, ...]:
  """The number of the pool of each group."""
  first = stack.layers[: period(stack)]
  keys = [pool_of(layer.attention) for layer in first]
  keys += [pool_of(layer.cross) for layer in first if layer.cross is not None]
  return tuple(pools(stack).index(key) for key in keys)


@functools.cache
def cross_group(stack: Stack, number: int) -> int | None:
  """The group of a layer's cross-attention; None without."""
  place = number % period(stack)
  if stack.layers[place].cross is None:
    return None
  before = [layer.cross is not None for layer in stack.layers[:place]]
  return period(stack) + sum(before)


@functools.cache
def num_memory_layers(stack: Stack) -> int:
  """Memory layers of each pool."""
  return -(-len(stack.layers) // period(stack))


@functools.cache
def pools(stack: Stack) -> tuple[PoolKey, ...]:
  """The pools of a decoder's memory, each once."""
  own = [pool_of(layer.attention) for layer in stack.layers]
  cross = [_cross_pool(layer) for layer in stack.layers]
  return tuple(dict.fromkeys(own + [key for key in cross if key is not None]))


@functools.cache
def stretches(stack: Stack) -> tuple[Stretch, ...]:
  """The loops of a decoder, from the first layer to the last."""
  layers, found, first = stack.layers, [], 0
  while first < len(layers):
    size, times = _longest(layers[first:], period(stack))
    found.append(Stretch(first, layers[first : first + size], times))
    first += size * times
  return tuple(found)


def _cross_pool(layer: Layer) -> PoolKey | None:
  return None if layer.cross is None else pool_of(layer.cross)


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
