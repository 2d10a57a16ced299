"""Pages of a request, as schedulers pass them around."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class CachePages:
  """Page ids by group; the null page 0 where a window has moved on.

  Attributes:
    pages: a list of page ids for each group.
    unhashed: those of them that were not cached when they were handed out.
  """

  pages: tuple[list[int], ...]
  unhashed: tuple[list[int], ...] = dataclasses.field(
    default=(), compare=False, repr=False
  )

  def __add__(self, other: "CachePages") -> "CachePages":
    """Pages of both, group by group."""
    if len(self.pages) != len(other.pages):
      raise ValueError(
        f"CachePages of {len(self.pages)} and {len(other.pages)} groups cannot "
        "be added."
      )
    return CachePages(
      _joined(self.pages, other.pages), _joined(self._new(), other._new())
    )

  def get_page_ids(self) -> tuple[list[int], ...]:
    """Page ids by group."""
    return self.pages

  def get_unhashed_page_ids(self) -> list[int]:
    """Ids of the first group's pages that were not cached when handed out."""
    new = self._new()
    return list(new[0]) if new else []

  def get_unhashed_page_ids_all_groups(self) -> tuple[list[int], ...]:
    """The same for every group."""
    return self._new()

  def new_empty(self) -> "CachePages":
    """No pages, for as many groups."""
    return CachePages(tuple([] for _ in self.pages))

  def _new(self) -> tuple[list[int], ...]:
    return self.unhashed or tuple([] for _ in self.pages)


def new_pages(
  pages: list[list[int]], begin: list[int], stop: list[int]
) -> CachePages:
  """Columns begin to stop of each group's pages, none of them cached yet."""
  columns = zip(pages, begin, stop, strict=True)
  new = tuple([row[first:last] for row, first, last in columns])
  return CachePages(new, new)


def _joined(
  one: tuple[list[int], ...], other: tuple[list[int], ...]
) -> tuple[list[int], ...]:
  return tuple(a + b for a, b in zip(one, other, strict=True))
