"""The pages of one sequence: attach, grow, publish, recycle, release."""

import dataclasses

from tests.model_of_the_cache.groups import Group
from tests.model_of_the_cache.lookup import Hit
from tests.model_of_the_cache.lookup import key_of
from tests.model_of_the_cache.pool import NULL
from tests.model_of_the_cache.pool import Pool


@dataclasses.dataclass
class Sequence:
  """The pages and tokens of a slot or a request.

  Attributes:
    pages: page ids in order, one list a group; the null page where a window or
      a chunk has moved on.
    tokens: the tokens with keys and values.
    root: the first part of its keys, such as its salt.
    prompt: the tokens that it was admitted with.
    junction: the length at which it left a prefix that some groups had.
    gone: the number of released leading columns of each group.
  """

  pages: list[list[int]]
  tokens: list[int]
  root: tuple
  prompt: int = 0
  junction: int = 0
  gone: list[int] = dataclasses.field(default_factory=list)

  @property
  def empty(self) -> bool:
    """True if it holds no page, not even a null page."""
    return not any(self.pages)


def missing(tables: list[list[int]], columns: list[int]) -> int:
  """Returns the pages to pop until each table has its columns."""
  rows = zip(tables, columns, strict=True)
  return sum(max(stop - len(pages), 0) for pages, stop in rows)


def fill(pool: Pool, pages: list[int], stop: int) -> None:
  """Appends new pages up to a column."""
  pages.extend([pool.pop() for _ in range(stop - len(pages))])


def publish(
  pool: Pool,
  group: Group,
  number: int,
  sequence: Sequence,
  columns: range,
  merge: bool = False,
) -> None:
  """Publishes pages that can be part of a hit.

  Args:
    pool: the pages.
    group: the group.
    number: the index of the group.
    sequence: the sequence of the pages.
    columns: the columns of the pages, which are full.
    merge: True to replace a page by an older one with the same key.
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
      # Published by a fork that shares it, or before a rollback.
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
  """Releases pages to which no later token attends; returns their number.

  The last of these pages is reused first.
  """
  num_skipped = min(group.skipped_pages(tokens), len(pages))
  pages_to_free = [page for page in pages[:num_skipped] if page != NULL]
  pool.release(pages_to_free[::-1])
  pages[:num_skipped] = [NULL] * num_skipped
  return len(pages_to_free)


def release(pool: Pool, sequence: Sequence) -> None:
  """Releases all pages, group by group, the last page first."""
  for pages in sequence.pages:
    pool.release(pages[::-1])


def attach(pool: Pool, hit: Hit) -> list[list[int]]:
  """Holds the pages of a hit; returns tables that begin with them."""
  pool.hold(hit.all_pages())
  return hit.tables()
