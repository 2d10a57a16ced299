"""The longest prefix that all groups have cached (SEMANTICS 4.5)."""

from typing import Any
from typing import NamedTuple

from tests.model_of_the_cache.reference_kinds import Rules
from tests.model_of_the_cache.reference_kinds import ceil_div
from tests.model_of_the_cache.reference_kinds import lookup
from tests.model_of_the_cache.reference_kinds import name
from tests.model_of_the_cache.reference_pool import NULL
from tests.model_of_the_cache.reference_pool import ReferencePool


class Hit(NamedTuple):
  """Pages by group, tokens that they cover, and the junction."""

  pages: tuple[list[int], ...]
  tokens: int
  junction: int


class _Alike(NamedTuple):
  """Equal groups, which are looked up together."""

  group: Any
  members: list[int]


def longest_hit(
  groups: list[Any],
  keys: list[tuple],
  limit: int,
  pool: ReferencePool,
  rules: Rules,
) -> Hit:
  """The hit of a sequence with these keys, of at most `limit` tokens."""
  search = _Search(groups, keys, pool, rules)
  if rules.hybrid:
    tokens = search.all_agree(limit)
  else:
    tokens = search.look(search.alike[0], limit, drop=rules.eagle)
  pages = tuple(search.pages[index] for index in range(len(groups)))
  # Defect 4: a chunked group alone "hits" skipped pages of an empty cache.
  # Next to a full group a hit always has a page.
  if not any(page for column in pages for page in column):
    return Hit(tuple([] for _ in groups), 0, search.junction(0))
  return Hit(pages, tokens, search.junction(tokens))


class _Search:
  """One lookup.

  Attributes:
    alike: groups by kind, full attention first, else as they come.
    pages: group -> its pages in the longest hit so far.
    full_hits: hits of full attention, which is looked up only once.
    verified: places in `alike` that have dropped their page for the draft
      model at the present candidate.
    longest: longest hit that was seen on the way.
  """

  def __init__(self, groups, keys, pool, rules):
    self.keys, self.pool, self.rules = keys, pool, rules
    members: dict[Any, list[int]] = {}
    for index, group in enumerate(groups):
      members.setdefault(group, []).append(index)
    alike = [_Alike(group, list_) for group, list_ in members.items()]
    self.alike = sorted(alike, key=lambda a: name(a.group) != "FullAttention")
    self.pages: dict[int, list[int]] = {}
    self.full_hits: dict[int, int] = {}
    self.verified: set[int] = set()
    self.longest = 0

  def junction(self, tokens: int) -> int:
    """Where more was cached in some groups than in all; 0 for nowhere."""
    if self.rules.classic or not self.rules.hybrid:
      return 0
    return self.longest if self.longest > tokens else 0

  def look(self, alike: _Alike, limit: int, drop: bool) -> int:
    """Looks up equal groups; tokens of their hit."""
    size, step = alike.group.page_size, self.rules.hash_size

    def find(place: int) -> list[int] | None:
      last = (place + 1) * size // step - 1
      if last >= len(self.keys):
        return None
      key = self.keys[last]
      found = [self.pool.find((index, key)) for index in alike.members]
      return None if None in found else [page for page in found if page]

    columns = lookup(alike.group, find, limit, drop, self.rules)
    for row, index in enumerate(alike.members):
      self.pages[index] = [c[row] if c else NULL for c in columns]
    return len(columns) * size

  def all_agree(self, limit: int) -> int:
    """Shortens a candidate until no group wants it shorter; its tokens."""
    hit, simple = limit, len(self.alike) == 2 and self._is_full(self.alike[0])
    while True:
      current = self._one_round(hit)
      if current >= hit:
        break
      hit = current
      if simple:
        break
    self._trim(hit)
    return hit

  def _one_round(self, current: int) -> int:
    """Asks every group once; what is left of the candidate."""
    for which, alike in enumerate(self.alike):
      if which in self.full_hits:
        current = min(current, self.full_hits[which])
        continue
      drop = self.rules.eagle and which not in self.verified
      found = self.look(alike, self._bound(alike, current, drop), drop)
      if self._is_full(alike):
        self.full_hits[which] = found
      # Classic drops a page anew in every round, whatever was verified.
      if drop and not self.rules.classic:
        self.verified.add(which)
      elif found < current:
        self.verified.clear()
      current = found
      self.longest = max(self.longest, current)
    return current

  def _is_full(self, alike):
    return name(alike.group) == "FullAttention"

  def _bound(self, alike, current, drop):
    """A page that will be dropped may lie behind the candidate (C)."""
    if self.rules.classic or not drop or name(alike.group) == "Recurrent":
      return current
    known = len(self.keys) * self.rules.hash_size
    return min(current + alike.group.page_size, known)

  def _trim(self, hit):
    """Full groups may have found more.

    Classic trims only the first kind of them, so that requests compute tokens
    into pages that others hold; here it trims all.
    """
    for alike in self.alike:
      if self._is_full(alike):
        for index in alike.members:
          del self.pages[index][ceil_div(hit, alike.group.page_size) :]
