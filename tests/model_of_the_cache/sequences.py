"""The pages of one sequence: found, grown, published, recycled, given back."""

import dataclasses

from tests.model_of_the_cache.groups import Group
from tests.model_of_the_cache.lookup import Hit
from tests.model_of_the_cache.lookup import key_of
from tests.model_of_the_cache.pool import NULL
from tests.model_of_the_cache.pool import Pool


@dataclasses.dataclass
class Sequence:
  """What a slot or a request holds.

  Attributes:
    pages: page ids in order, one list a group; the null page where a window
      or a chunk has moved on.
    tokens: those that have their keys and values.
    root: what its keys begin with, such as its salt.
    prompt: tokens that it was admitted with.
    junction: where it diverged from what was cached in some groups.
    gone: for each group, the columns that were given back.
  """

  pages: list[list[int]]
  tokens: list[int]
  root: tuple
  prompt: int = 0
  junction: int = 0
  gone: list[int] = dataclasses.field(default_factory=list)

  @property
  def empty(self) -> bool:
    """Whether it holds no page, not even a null page."""
    return not any(self.pages)


def missing(tables: list[list[int]], wanted: list[int]) -> int:
  """Pages to pop until each table has the columns wanted."""
  rows = zip(tables, wanted, strict=True)
  return sum(max(stop - len(pages), 0) for pages, stop in rows)


def fill(pool: Pool, pages: list[int], stop: int) -> None:
  """Appends fresh pages up to a column."""
  pages.extend([pool.pop() for _ in range(stop - len(pages))])


def publish(
  pool: Pool,
  group: Group,
  number: int,
  sequence: Sequence,
  columns: range,
  merge: bool = False,
) -> None:
  """Makes pages findable that can be of use.

  Args:
    pool: the pages.
    group: the group of this number.
    number: of the group.
    sequence: whose pages.
    columns: of the pages; they are full.
    merge: whether an older page with the same key takes a page's place.
  """
  pages = sequence.pages[number]
  for column in columns:
    page = pages[column]
    if page == NULL:
      continue
    if page not in pool.keys:
      pool.born[page] = pool.clock
      pool.clock += 1
    if not group.is_published(column, sequence.prompt, sequence.junction):
      continue
    prefix = sequence.tokens[: (column + 1) * group.size]
    key = key_of(sequence.root, number, prefix)
    if page in pool.keys:
      # A fork that shares it came here first, or it was rolled back to.
      assert pool.keys[page] == key
      continue
    older = pool.find(key)
    pool.published += 1
    if merge and older is not None:
      pool.merged += 1
      pool.hold([older])
      pool.release([page])
      pages[column] = older
    else:
      pool.keys[page] = key


def recycle(pool: Pool, group: Group, pages: list[int], tokens: int) -> int:
  """Gives back pages that no token behind these tokens attends to.

  The last page of it is the first to be used again.

  Returns:
    How many pages were given back.
  """
  behind = min(group.skipped_pages(tokens), len(pages))
  given = [page for page in pages[:behind] if page != NULL]
  pool.release(given[::-1])
  pages[:behind] = [NULL] * behind
  return len(given)


def release(pool: Pool, sequence: Sequence) -> None:
  """Gives everything back, group by group, the last page first."""
  for pages in sequence.pages:
    pool.release(pages[::-1])


def attach(pool: Pool, hit: Hit) -> list[list[int]]:
  """Tables that begin with a hit, whose pages they hold."""
  pool.hold(hit.all_pages())
  return hit.tables()
