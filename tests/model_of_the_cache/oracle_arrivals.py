"""Sequences that come to the oracle, with whatever of them is cached."""

import itertools
from typing import NamedTuple

from jaxkv import Code
from tests.model_of_the_cache.oracle_lookup import longest_prefix
from tests.model_of_the_cache.oracle_pool import NULL
from tests.model_of_the_cache.oracle_sequences import Sequences


class Hit(NamedTuple):
  """A cached prefix.

  Attributes:
    tokens: how long it is.
    first: for each group, the columns of it that are not needed.
    pages: for each group, those that are.
    junction: see `Sequence`.
  """

  tokens: int
  first: list[int]
  pages: list[list[int]]
  junction: int = 0

  def all_pages(self) -> list[int]:
    """Of all groups, group by group."""
    return list(itertools.chain(*self.pages))


class Arrivals(Sequences):
  """See `oracle.Oracle`."""

  def match(self, tokens, lengths, salts=None):
    """Longest cached prefix of each row; changes nothing."""
    hits = [self._match(*row) for row in self._rows(tokens, lengths, salts)]
    return {
      "num_cached": [hit.tokens for hit in hits],
      "pages": self._padded(hits, len(tokens[0]) // self.config.page_size),
    }

  def _match(self, row, length, salt):
    """The longest prefix from which every group can go on.

    At least one token is left over: its query is needed for the next one.
    """
    if not 1 <= length <= len(row):
      return self._miss()
    root = self._start(salt).root
    known = {
      (number, column): self.pool.find(
        (root, number, tuple(row[: (column + 1) * group.size]))
      )
      for number, group in enumerate(self.groups)
      for column in range(group.full_pages(length))
    }

    def cached(number: int, column: int) -> bool:
      return known.get((number, column)) is not None

    tokens, junction = longest_prefix(self.groups, cached, length)
    first = [group.skipped_pages(tokens) for group in self.groups]
    pages = [
      [
        known[number, column]
        for column in range(begin, group.full_pages(tokens))
      ]
      for number, (group, begin) in enumerate(
        zip(self.groups, first, strict=True)
      )
    ]
    return Hit(tokens, first, pages, junction)

  def _miss(self):
    return Hit(0, [0 for _ in self.groups], [[] for _ in self.groups])

  def _rows(self, tokens, lengths, salts):
    return zip(tokens, lengths, salts or [None] * len(tokens), strict=True)

  def _padded(self, hits, columns):
    """Pages as [G, R, columns], NO_PAGE before and behind those needed."""
    no_page = self.config.no_page
    padded = []
    for number in range(self.config.num_groups):
      padded.append([])
      for hit in hits:
        pages = [no_page] * hit.first[number] + hit.pages[number]
        padded[-1].append(pages + [no_page] * (columns - len(pages)))
    return padded

  def admit(
    self,
    slots,
    tokens,
    lengths,
    salts=None,
    mask=None,
    room=None,
    keep_free=None,
    num_encoder_tokens=None,
  ):
    """Starts sequences; every lookup sees the cache before the call."""
    codes, plans, named = [], {}, set()
    left, woken = len(self.pool.free), set()
    rows = list(self._rows(tokens, lengths, salts))
    room, keep = room or lengths, keep_free or [0] * len(rows)
    encoders = num_encoder_tokens or [0] * len(rows)
    for index, (row, length, salt) in enumerate(rows):
      encoder = encoders[index]
      least = min(length - 1, room[index] - 1, keep[index], encoder)
      fits = least >= 0 and length <= len(row)
      code = self._check_admit(slots[index], max(length, encoder), fits, named)
      if mask is not None and not mask[index]:
        code = Code.SKIPPED
      if code == Code.OK:
        named.add(slots[index])
        hit = self._match(row, length, salt)
        begun = min(hit.tokens + room[index], length)
        pages = self._pages_for(begun, encoder)
        code, cost = self._price(hit, pages, left - keep[index], woken)
        if code == Code.OK:
          left -= cost
          plans[index] = hit, pages
      codes.append(code)
    for hit, *_ in plans.values():
      for page in hit.all_pages():
        self.pool.hold(page)
    cached = [0] * len(rows)
    for index, (hit, pages) in plans.items():
      row, length, salt = rows[index]
      self._attach(slots[index], hit, row, pages, salt)
      self.slots[slots[index]].prompt = length
      self.queries += length
      self.hits += hit.tokens
      cached[index] = hit.tokens
    return {"code": self._note(codes), "num_cached": cached}

  def _price(self, hit, wanted, left, woken):
    """Whether there is room, and what leaves the free list then.

    That are pages to pop, and hits in it that no earlier row woke.
    """
    if self._overfull(wanted):
      return Code.SLOT_FULL, 0
    need = self._missing(self._grown(self._found(hit), wanted, True), wanted)
    hits = set(hit.all_pages())
    wakes = {page for page in hits if not self.pool.refs[page]} - woken
    if need + len(wakes) > left:
      return Code.OUT_OF_PAGES, 0
    woken |= wakes
    return Code.OK, need + len(wakes)

  def _check_admit(self, slot, length, fits, named):
    if not self._in_range(slot):
      return Code.BAD_SLOT
    if not self.slots[slot].empty or slot in named:
      return Code.SLOT_IN_USE
    if not fits:
      return Code.BAD_LENGTH
    return Code.SLOT_FULL if length > self.config.slot_tokens else Code.OK

  def _attach(self, slot, hit, row, total, salt):
    """Fills a slot with a hit and fresh pages for the first tokens behind."""
    sequence = self.slots[slot] = self._start(salt)
    sequence.tokens = list(row[: hit.tokens])
    sequence.junction = hit.junction
    sequence.gone = list(hit.first)
    tables = self._grown(self._found(hit), total, True)
    sequence.pages = self._filled(tables, total)

  def _found(self, hit):
    """Tables that begin with a hit."""
    rows = zip(hit.first, hit.pages, strict=True)
    return [[NULL] * first + pages for first, pages in rows]
