"""Divides the layers of a model into layer groups and pools.

Layers of one kind that store data of one shape form a group. A page holds data
of all layers of its group. The part of a page for one layer is a memory layer,
whose index is the rank of the layer in its group. Groups whose pages have the
same shape share a pool: they store data of one shape in equally many layers.
"""

import dataclasses
from collections.abc import Hashable
from collections.abc import Sequence
from typing import NamedTuple

from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.group_kinds import GroupKind


class LayerGroups(NamedTuple):
  """The layer groups of a model, in the order of the first layer of each.

  Attributes:
    kinds: the kind of each group, with its pool.
    num_layers: the number of layers of each group.
    locations: the group and the memory layer of each layer.
  """

  kinds: tuple[GroupKind, ...]
  num_layers: tuple[int, ...]
  locations: tuple[tuple[int, int], ...]

  @property
  def by_pool(self) -> tuple[int, ...]:
    """A group of each pool; other groups of the pool are equal in shape."""
    pools = [group_kind.pool for group_kind in self.kinds]
    return tuple(pools.index(pool) for pool in range(1 + max(pools)))

  def check(self, config: CacheConfig, remedy: str) -> None:
    """Raises ValueError unless a cache has these groups, in these pools."""
    # The page size of a group is the cache's choice. A wrong window would free
    # pages that the layers still read.
    kinds = tuple(
      dataclasses.replace(group_kind, page_size=None)
      for group_kind in config.groups
    )
    if kinds != self.kinds:
      raise ValueError(
        f"`config.groups` must be {self.kinds}, the kinds and pools of the "
        f"layers, got {config.groups}; {remedy}."
      )


def group_layers(
  kinds: Sequence[GroupKind], shapes: Sequence[Hashable]
) -> LayerGroups:
  """Divides layers into groups and pools.

  `shapes` has a key of each layer's data, equal for data of the same shape.
  """
  layers: dict[tuple[GroupKind, Hashable], int] = {}
  locations = []
  for need in zip(kinds, shapes, strict=True):
    rank = layers.get(need, 0)
    layers[need] = rank + 1
    # A dict keeps the order of insertion, which is that of first layers.
    locations.append((list(layers).index(need), rank))
  pools: dict[tuple[Hashable, int], int] = {}
  group_kinds = []
  for (group_kind, shape), num_layers in layers.items():
    # Pages of one shape need equally many layers, besides data of one shape.
    pool = pools.setdefault((shape, num_layers), len(pools))
    group_kinds.append(dataclasses.replace(group_kind, pool=pool))
  return LayerGroups(
    kinds=tuple(group_kinds),
    num_layers=tuple(layers.values()),
    locations=tuple(locations),
  )
