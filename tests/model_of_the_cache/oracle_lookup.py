"""The longest prefix from which all groups of the oracle can go on.

SEMANTICS 4.5, with the lookup of one kind said as what it finds instead of how:
scans from either end find the same, as `test_oracle.py` shows. On purpose it
differs where a window of one token asks the reference systems for a page that
nobody looks at, and for chunks that end inside of pages.
"""

import dataclasses
from collections.abc import Callable

from jaxkv import SlidingWindow
from tests.model_of_the_cache.oracle_groups import Group
from tests.model_of_the_cache.reference_kinds import lookup

Cached = Callable[[int, int], bool]
"""Number of a group and a column -> whether its page is cached."""


def longest_prefix(
  groups: list[Group], cached: Cached, length: int
) -> tuple[int, int]:
  """Tokens found of a sequence of `length`, of which one is left over.

  Returns:
    They, and the junction: how many tokens a kind had within what the kinds
    asked before it have, where that is more; else 0.
  """
  search = _Search(groups, cached, length)
  if len(groups) == 1:
    draft = groups[0].config.draft_model
    found = search.longest(groups[0], length - 1, draft)
  else:
    found = search.all_agree(length - 1)
  # A hit on nothing is no hit.
  used = [
    group.full_pages(found) - group.skipped_pages(found) for group in groups
  ]
  found = found if any(used) else 0
  return found, search.most if search.most > found else 0


class _Search:
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
    config = groups[0].config
    self.cached, self.draft = cached, config.draft_model
    self.align, self.classic = config.alignment, config.classic
    self.known = length // config.page_size * config.page_size
    members: dict[Group, list[int]] = {}
    for number, group in enumerate(groups):
      members.setdefault(group, []).append(number)
    order = sorted(members, key=lambda group: not group.is_full)
    self.members = {group: members[group] for group in order}
    self.full: dict[Group, int] = {}
    self.most = 0
    self.verified: set[Group] = set()

  def longest(self, group: Group, bound: int, drop: bool) -> int:
    """Tokens of the longest prefix of one kind, at most `bound`.

    With `drop` a page behind it must be cached too, within the bound.
    """
    kind = group.kind
    drop &= not group.holds_states
    if drop and isinstance(kind, SlidingWindow) and kind.window > 1:
      return self._scanned(group, bound)
    last = group.full_pages(bound) - drop
    ends = range(self.align, last * group.size + 1, self.align)
    found = [end for end in ends if self._is_hit(group, end, drop)]
    return max(found, default=0)

  def _scanned(self, group: Group, bound: int) -> int:
    """The same for a window, as the text has it.

    It aligns a prefix shorter than the window twice: before and after the last
    page is left out.
    """
    # Which pages are found is of no interest here.
    rules = dataclasses.replace(group.rules(), classic=False)
    found = lookup(
      group.kind,
      lambda column: [1] if self._cached(group, column) else None,
      bound,
      True,
      rules,
    )
    return len(found) * group.size

  def _cached(self, group: Group, column: int) -> bool:
    """Whether all equal groups have a page."""
    return all(self.cached(number, column) for number in self.members[group])

  def _is_hit(self, group: Group, tokens: int, drop: bool) -> bool:
    asked = range(group.skipped_pages(tokens), group.full_pages(tokens) + drop)
    return all(self._cached(group, column) for column in asked)

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
      drop = self.draft and group not in self.verified
      # The classic rule looks no further, and leaves a page out every time.
      bound = current
      if drop and not self.classic and not group.holds_states:
        bound = min(current + group.size, self.known)
      found = self.longest(group, bound, drop)
      if drop and not self.classic:
        self.verified.add(group)
      elif found < current:
        self.verified.clear()
      if group.is_full:
        self.full[group] = found
      current = found
      self.most = max(self.most, current)
    return current
