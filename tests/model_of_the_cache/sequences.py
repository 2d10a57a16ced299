"""The pages of one sequence: attach, grow, publish, recycle, release."""

import dataclasses

from tests.model_of_the_cache.groups import Group
from tests.model_of_the_cache.lookup import Hit
from tests.model_of_the_cache.lookup import key_of
from tests.model_of_the_cache.pool import NULL
from tests.model_of_the_cache.pool import Pool


@dataclasses.dataclass
class Sequence:
  """The sequence of a slot or a request.

  Attributes:
    pages: page ids in order, one list a group; the null page before a window or
      a chunk.
    tokens: the tokens whose K/V is final.
    root: the start of its keys, such as its salt.
    prompt: tokens with which it was admitted.
    junction: where it diverged from tokens cached in some groups.
    shared: tokens of two heads that other prompts share.
    num_skipped: for each group, the leading columns that were released.
  """

  pages: list[list[int]]
  tokens: list[int]
  root: tuple
  prompt: int = 0
  junction: int = 0
  shared: tuple[int, ...] = (0, 0)
  num_skipped: list[int] = dataclasses.field(default_factory=list)

  @property
  def empty(self) -> bool:
    """True if the sequence holds no page, not even a null page."""
    return not any(self.pages)


def missing(tables: list[list[int]], columns: list[int]) -> list[int]:
  """Counts the pages to pop until each table has the given columns."""
  rows = zip(tables, columns, strict=True)
  return [max(num_columns - len(pages), 0) for pages, num_columns in rows]


def fill(
  pool: Pool, pages: list[int], stop_column: int, pool_index: int = 0
) -> None:
  """Appends fresh pages of a pool up to a column."""
  num_pages = stop_column - len(pages)
  pages.extend([pool.pop(pool_index) for _ in range(num_pages)])


def publish(
  pool: Pool,
  group: Group,
  index: int,
  sequence: Sequence,
  columns: range,
  merge: bool = False,
) -> None:
  """Publishes the full pages that can be part of a hit.

  Args:
    pool: the pool.
    group: the group with this index.
    index: the index of the group.
    sequence: the owner of the pages.
    columns: the columns of the pages; all are full.
    merge: True to replace a page by an older one with the same key.
  """
  pages = sequence.pages[index]
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
    key = key_of(sequence.root, index, prefix)
    if page in pool.keys:
      # A fork that shares the page published it, or truncate came back to it.
      assert pool.keys[page] == key
      continue
    older = pool.find(key)
    pool.published += 1
    # An offloaded page replaces no page.
    if merge and older is not None and not pool.is_offloaded(older):
      pool.merged += 1
      pool.hold([older])
      pool.release([page])
      pages[column] = older
    else:
      pool.keys[page] = key
      pool.reasons[page] = group.reason(
        (column + 1) * group.size,
        sequence.prompt,
        [sequence.junction, *sequence.shared],
      )


def recycle(pool: Pool, group: Group, pages: list[int], tokens: int) -> int:
  """Releases pages that no token after these tokens attends to.

  The last such page is popped first. Returns the number of released pages.
  """
  num_skipped = group.passed_pages(pages, tokens)
  released = [page for page in pages[:num_skipped] if page != NULL]
  pool.release(released[::-1], forgets=True)
  pages[:num_skipped] = [NULL] * num_skipped
  return len(released)


def release(pool: Pool, sequence: Sequence) -> None:
  """Releases all pages, group by group, the last page first."""
  for pages in sequence.pages:
    pool.release(pages[::-1])


def attach(pool: Pool, hits: list[Hit]) -> list[Hit]:
  """Holds the pages of hits; returns the hits with pages on the device.

  All hits on the device are held before any page returns from the host.
  """
  pages = [page for hit in hits for page in hit.all_pages()]
  ids = iter(pool.hold_hits(pages))
  return [
    hit._replace(pages=[[next(ids) for _ in pages] for pages in hit.pages])
    for hit in hits
  ]
