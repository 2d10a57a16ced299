"""New blocks that a worker must zero before they are read."""

from collections.abc import Sequence

from jaxkv._src.host.types import CachePages


class ZeroingList:
  """Ids of new blocks, by group, until `take`. `groups` are the zeroed ones."""

  def __init__(self, zeroed: Sequence[bool]):
    self.groups = [group for group, zeroes in enumerate(zeroed) if zeroes]
    self._ids: dict[int, list[int]] = {group: [] for group in self.groups}

  def add(self, new: CachePages) -> None:
    """Adds the pages of an allocation."""
    for group in self.groups:
      self._ids[group] += new.pages[group]

  def add_loaded(
    self,
    held: Sequence[Sequence[int]],
    new: CachePages,
    hit: CachePages | None,
    skipped_groups: Sequence[int],
  ) -> None:
    """Adds the blocks for external tokens of a request that begins.

    They are those of `held` that are neither in `new` nor in `hit`. Other
    writers fill the blocks of `skipped_groups`.
    """
    for group in set(self.groups) - set(skipped_groups):
      found = set(hit.pages[group]) if hit else set()
      before = held[group][: len(held[group]) - len(new.pages[group])]
      self._ids[group] += [n for n in before if n and n not in found]

  def add_from(
    self, held: Sequence[Sequence[int]], first: Sequence[int]
  ) -> None:
    """Adds a request's blocks from a column on, by group."""
    for group in self.groups:
      self._ids[group] += held[group][first[group] :]

  def take(self) -> list[int]:
    """Returns the ids since the last call, group by group."""
    taken = [number for ids in self._ids.values() for number in ids]
    self._ids = {group: [] for group in self.groups}
    return taken
