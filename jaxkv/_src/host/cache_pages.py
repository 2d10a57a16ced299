"""The pages that a manager returns to schedulers."""

import dataclasses
from typing import Any


@dataclasses.dataclass(slots=True)
class CachePages:
  """Page ids by group, with the null page 0 outside windows.

  Attributes:
    pages: a list of page ids for each group.
    unhashed: by group, the ids of the pages that an allocation took and did not
      publish.
    shared_prefix_boundary: the length of a prefix, longer than the hit, that
      some groups, but not all, have cached; 0 for none, or if not looked up.
    lookup: the hashed tokens of a lookup, for the allocation that follows.
  """

  # Only ids are compared, so results of different calls can be equal.
  pages: tuple[list[int], ...]
  unhashed: tuple[list[int], ...] = dataclasses.field(
    default=(), compare=False, repr=False
  )
  shared_prefix_boundary: int = dataclasses.field(
    default=0, compare=False, repr=False
  )
  lookup: Any = dataclasses.field(default=None, compare=False, repr=False)

  def __add__(self, other: "CachePages") -> "CachePages":
    """Concatenates the pages of each group."""
    if len(self.pages) != len(other.pages):
      raise ValueError(
        f"CachePages must have {len(self.pages)} groups to be added, got "
        f"{len(other.pages)}."
      )

    def joined(left, right):
      return tuple(a + b for a, b in zip(left, right, strict=True))

    # `lookup` and the boundary are those of one lookup, so a sum has neither.
    parts = (part.get_unhashed_page_ids_all_groups() for part in (self, other))
    return CachePages(joined(self.pages, other.pages), joined(*parts))

  def get_page_ids(self) -> tuple[list[int], ...]:
    """Returns page ids by group."""
    return self.pages

  def get_unhashed_page_ids(self) -> list[int]:
    """Returns `unhashed` of the first group."""
    return [*self.unhashed[0]] if self.unhashed else []

  def get_unhashed_page_ids_all_groups(self) -> tuple[list[int], ...]:
    """Returns `unhashed`, by group."""
    return self.unhashed or self.new_empty().pages

  def new_empty(self) -> "CachePages":
    """Returns a `CachePages` with the same number of groups, all empty."""
    return CachePages(tuple([] for _ in self.pages))
