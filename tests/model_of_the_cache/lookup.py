"""Finds the longest prefix that every group can continue.

The model tests every possible length, where the reference systems scan pages
from either end. It differs from them on purpose for a window of one token, for
which they require a page that no token attends to, and for chunks that end
inside a page.
"""

import itertools
from collections.abc import Callable
from typing import NamedTuple

from jaxkv import SlidingWindow
from tests.model_of_the_cache.groups import Group
from tests.model_of_the_cache.pool import NULL
from tests.model_of_the_cache.pool import Pool

Cached = Callable[[int, int], bool]
"""`(group, column) -> bool`: True if the page is cached."""


class Hit(NamedTuple):
  """A cached prefix.

  Attributes:
    tokens: the number of tokens.
    num_skipped: for each group, the leading columns that are not needed.
    pages: for each group, the pages of the other columns.
    junction: tokens of a longer prefix that only some kinds have; 0 for none.
  """

  tokens: int
  num_skipped: list[int]
  pages: list[list[int]]
  junction: int = 0

  def all_pages(self) -> list[int]:
    """Returns the pages of all groups, group by group."""
    return list(itertools.chain(*self.pages))

  def tables(self) -> list[list[int]]:
    """Returns, for each group, a table that begins with this hit."""
    rows = zip(self.num_skipped, self.pages, strict=True)
    return [[NULL] * count + pages for count, pages in rows]


def miss(groups: list[Group]) -> Hit:
  """Returns an empty hit."""
  return Hit(0, [0 for _ in groups], [[] for _ in groups])


def key_of(root: tuple, group_index: int, prefix: list[int]) -> tuple:
  """Returns the key of a page: its group and all tokens up to its end."""
  return root, group_index, tuple(prefix)


def find(groups: list[Group], pool: Pool, root: tuple, tokens: list) -> Hit:
  """Finds the longest cached prefix that leaves a token to compute.

  The next token is sampled from the logits of that token.
  """
  pages = {
    (group_index, column): pool.find(
      key_of(root, group_index, tokens[: (column + 1) * group.size])
    )
    for group_index, group in enumerate(groups)
    for column in range(group.full_pages(len(tokens)))
  }
  pages = _worth_restoring(pool, pages, groups)
  if pool.restored_tokens is not None:
    pages = _worth_in_all(pool, pages, groups, len(tokens))
  length, junction = _longest(groups, pages, len(tokens))
  num_skipped = [group.skipped_pages(length) for group in groups]
  needed = [
    [pages[index, column] for column in range(count, group.full_pages(length))]
    for index, (group, count) in enumerate(
      zip(groups, num_skipped, strict=True)
    )
  ]
  return Hit(length, num_skipped, needed, junction)


def _longest(groups: list[Group], pages: dict, length: int) -> tuple[int, int]:
  """Returns `longest_prefix` of the pages that were found."""
  return longest_prefix(groups, lambda *place: pages.get(place), length)


def _worth_in_all(
  pool: Pool, pages: dict, groups: list[Group], length: int
) -> dict:
  """Drops all pages on the host if the whole hit is not worth their return."""
  on_device = {
    place: page
    for place, page in pages.items()
    if page is not None and not pool.is_offloaded(page)
  }
  num_tokens, _ = _longest(groups, pages, length)
  cost = 0.0
  for index, group in enumerate(groups):
    for column in range(
      group.skipped_pages(num_tokens), group.full_pages(num_tokens)
    ):
      page = pages[index, column]
      if pool.is_offloaded(page):
        cost += pool.restored_tokens[pool.pool_of[page]]
  gained = num_tokens - _longest(groups, on_device, length)[0]
  return pages if cost < gained else on_device


def _worth_restoring(pool: Pool, pages: dict, groups: list[Group]) -> dict:
  """Drops pages on the host that are not worth their return.

  The pages of a column return together in the groups that need all pages, if
  all groups have one page size.
  """
  one_size = len({group.size for group in groups}) == 1

  def needs_all(index):
    return one_size and not groups[index].kind.skips_pages

  def price(index, column):
    together = [
      page
      for (group, other_column), page in pages.items()
      if other_column == column
      and (group == index or (needs_all(group) and needs_all(index)))
    ]
    return sum(
      page is not None and pool.is_offloaded(page) for page in together
    )

  return {
    key: None
    if page is not None
    and pool.is_offloaded(page)
    and price(*key) > pool.max_restored
    else page
    for key, page in pages.items()
  }


def longest_prefix(
  groups: list[Group], cached: Cached, length: int
) -> tuple[int, int]:
  """Returns the cached tokens of a sequence of `length`, and the junction."""
  search = Search(groups, cached, length)
  if len(groups) == 1:
    drop = groups[0].rules.draft
    num_tokens = search.longest(groups[0], length - 1, drop)
  else:
    num_tokens = search.all_agree(length - 1)
  # A prefix of which no group needs a page counts as a miss.
  used = [
    group.full_pages(num_tokens) - group.skipped_pages(num_tokens)
    for group in groups
  ]
  num_tokens = num_tokens if any(used) else 0
  return num_tokens, search.most if search.most > num_tokens else 0


class Search:
  """One lookup.

  Attributes:
    members: the indices of equal groups; full attention first, otherwise in
      order.
    known: tokens in pages that have a key.
    full: hits of full attention, which is looked up only once.
    most: the longest prefix that a kind had on the way.
    verified: groups that had one page more than the current candidate.
  """

  def __init__(self, groups: list[Group], cached: Cached, length: int):
    self.cached = cached
    self.rules = groups[0].rules
    self.known = length // self.rules.page_size * self.rules.page_size
    members: dict[Group, list[int]] = {}
    for index, group in enumerate(groups):
      members.setdefault(group, []).append(index)
    order = sorted(members, key=lambda group: not group.is_full)
    self.members = {group: members[group] for group in order}
    self.full: dict[Group, int] = {}
    self.most = 0
    self.verified: set[Group] = set()

  def longest(self, group: Group, bound: int, drop: bool) -> int:
    """Returns the tokens of the longest prefix of one kind.

    Args:
      group: a group of this kind.
      bound: no page may end after this many tokens.
      drop: True if a page after the prefix must be cached too.
    """
    align = self.rules.align
    ends = range(align, bound // align * align + 1, align)
    hits = [n for n in ends if self._is_hit(group, n, bound, drop)]
    return max(hits, default=0)

  def _is_hit(self, group: Group, tokens: int, bound: int, drop: bool) -> bool:
    stop_column = group.full_pages(tokens)
    if drop and not group.holds_states:
      stop_column += 1 + self._lost_to_alignment(group, tokens)
    if stop_column * group.size > bound:
      return False
    return all(
      self.cached(index, column)
      for index in self.members[group]
      for column in range(group.skipped_pages(tokens), stop_column)
    )

  def _lost_to_alignment(self, group: Group, tokens: int) -> int:
    """Counts the pages that a prefix shorter than its window loses in addition.

    vLLM aligns such a prefix twice: before and after it drops the last page.
    Page sizes other than the alignment lose a whole aligned piece.
    """
    is_window = isinstance(group.kind, SlidingWindow)
    if not is_window or group.size == self.rules.align:
      return 0
    is_shorter = group.full_pages(tokens) < group.window_pages
    return self.rules.align // group.size if is_shorter else 0

  def all_agree(self, limit: int) -> int:
    """Shortens a candidate until all kinds have it."""
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
      # The classic rule looks no further, and drops a page in every round.
      bound = current
      if drop and not self.rules.classic and not group.holds_states:
        bound = min(current + group.size, self.known)
      num_tokens = self.longest(group, bound, drop)
      if drop and not self.rules.classic:
        self.verified.add(group)
      elif num_tokens < current:
        self.verified.clear()
      if group.is_full:
        self.full[group] = num_tokens
      current = num_tokens
      self.most = max(self.most, current)
    return current
