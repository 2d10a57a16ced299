"""The longest prefix from which every group can go on.

Said as what is found, not how: the reference systems scan pages from either
end. On purpose it differs from them where a window of one token asks them for
a page that nobody looks at, and for chunks that end inside of pages.
"""

import itertools
from collections.abc import Callable
from typing import NamedTuple

from jaxkv import SlidingWindow
from tests.model_of_the_cache.groups import Group
from tests.model_of_the_cache.pool import NULL
from tests.model_of_the_cache.pool import Pool

Cached = Callable[[int, int], bool]
"""Number of a group and a column -> whether its page is cached."""


class Hit(NamedTuple):
  """A cached prefix.

  Attributes:
    tokens: how long it is.
    first: for each group, the columns of it that are not needed.
    pages: for each group, those that are.
    junction: how many tokens a kind had within what the kinds asked before it
      have, where that is more than all have; else 0.
  """

  tokens: int
  first: list[int]
  pages: list[list[int]]
  junction: int = 0

  def all_pages(self) -> list[int]:
    """Of all groups, group by group."""
    return list(itertools.chain(*self.pages))

  def tables(self) -> list[list[int]]:
    """For each group a table that begins with this hit."""
    rows = zip(self.first, self.pages, strict=True)
    return [[NULL] * first + pages for first, pages in rows]


def miss(groups: list[Group]) -> Hit:
  """A hit of nothing."""
  return Hit(0, [0 for _ in groups], [[] for _ in groups])


def key_of(root: tuple, number: int, prefix: list[int]) -> tuple:
  """The key of a page: its group and every token up to its last one."""
  return root, number, tuple(prefix)


def find(groups: list[Group], pool: Pool, root: tuple, tokens: list) -> Hit:
  """The longest cached prefix of a sequence, one token of which is left over.

  The query of that one is needed for the next token.
  """
  pages = {
    (number, column): pool.find(
      key_of(root, number, tokens[: (column + 1) * group.size])
    )
    for number, group in enumerate(groups)
    for column in range(group.full_pages(len(tokens)))
  }

  def cached(number: int, column: int) -> bool:
    return pages.get((number, column)) is not None

  length, junction = longest_prefix(groups, cached, len(tokens))
  first = [group.skipped_pages(length) for group in groups]
  needed = [
    [pages[number, column] for column in range(begin, group.full_pages(length))]
    for number, (group, begin) in enumerate(zip(groups, first, strict=True))
  ]
  return Hit(length, first, needed, junction)


def longest_prefix(
  groups: list[Group], cached: Cached, length: int
) -> tuple[int, int]:
  """Tokens found of a sequence of `length`, and the junction."""
  search = Search(groups, cached, length)
  if len(groups) == 1:
    drop = groups[0].rules.draft
    found = search.longest(groups[0], length - 1, drop)
  else:
    found = search.all_agree(length - 1)
  # A hit on nothing is no hit.
  used = [
    group.full_pages(found) - group.skipped_pages(found) for group in groups
  ]
  found = found if any(used) else 0
  return found, search.most if search.most > found else 0


class Search:
  """One lookup.

  Attributes:
    members: the numbers of equal groups; full attention first, else as they
      come.
    known: tokens in pages that have a key.
    full: hits of full attention, which is looked up only once.
    most: the longest prefix that a kind had on the way.
    verified: groups that had one page more than the present candidate.
  """

  def __init__(self, groups: list[Group], cached: Cached, length: int):
    self.cached, self.rules = cached, groups[0].rules
    self.known = length // self.rules.page_size * self.rules.page_size
    members: dict[Group, list[int]] = {}
    for number, group in enumerate(groups):
      members.setdefault(group, []).append(number)
    order = sorted(members, key=lambda group: not group.is_full)
    self.members = {group: members[group] for group in order}
    self.full: dict[Group, int] = {}
    self.most = 0
    self.verified: set[Group] = set()

  def longest(self, group: Group, bound: int, drop: bool) -> int:
    """Tokens of the longest prefix of one kind.

    Args:
      group: its kind.
      bound: no page ends behind it.
      drop: whether a page behind the prefix must be cached too.
    """
    align = self.rules.align
    ends = range(align, bound // align * align + 1, align)
    found = [end for end in ends if self._is_hit(group, end, bound, drop)]
    return max(found, default=0)

  def _is_hit(self, group: Group, tokens: int, bound: int, drop: bool) -> bool:
    begin, end = group.skipped_pages(tokens), group.full_pages(tokens)
    if drop and not group.holds_states:
      end += 1 + self._lost_to_alignment(group, tokens)
    if end * group.size > bound:
      return False
    return all(
      self.cached(number, column)
      for number in self.members[group]
      for column in range(begin, end)
    )

  def _lost_to_alignment(self, group: Group, tokens: int) -> int:
    """Pages that a prefix shorter than its window loses in addition.

    The text aligns such a prefix twice: before and after the last page is left
    out. Other page sizes than the alignment lose a whole aligned piece.
    """
    kind, size = group.kind, group.size
    if not isinstance(kind, SlidingWindow) or size == self.rules.align:
      return 0
    shorter = group.full_pages(tokens) < group.window_pages
    return self.rules.align // size if shorter else 0

  def all_agree(self, limit: int) -> int:
    """Shortens a candidate until no kind wants it shorter."""
    hit = limit
    while (current := self._one_round(hit)) < hit:
      hit = current
      if len(self.members) == 2 and next(iter(self.members)).is_full:
        break
    return hit

  def _one_round(self, current: int) -> int:
    for group in self.members:
      if group in self.full:
        current = min(current, self.full[group])
        continue
      drop = self.rules.draft and group not in self.verified
      # The classic rule looks no further, and leaves a page out every time.
      bound = current
      if drop and not self.rules.classic and not group.holds_states:
        bound = min(current + group.size, self.known)
      found = self.longest(group, bound, drop)
      if drop and not self.rules.classic:
        self.verified.add(group)
      elif found < current:
        self.verified.clear()
      if group.is_full:
        self.full[group] = found
      current = found
      self.most = max(self.most, current)
    return current
