"""Sequences in slots, and helpers of all verbs."""

import dataclasses

from jaxkv import CacheConfig
from jaxkv import StateRetention
from jaxkv import Status
from tests.model_of_the_cache import sequences
from tests.model_of_the_cache.groups import Group
from tests.model_of_the_cache.groups import Rules
from tests.model_of_the_cache.pool import NULL
from tests.model_of_the_cache.pool import Pool
from tests.model_of_the_cache.sequences import Sequence


def groups_of(config: CacheConfig) -> list[Group]:
  """Returns the groups of a cache."""
  states = isinstance(config.prefix_retention_interval, StateRetention)
  rules = Rules(
    page_size=config.page_size,
    align=config.alignment,
    classic=config.prefix_rules == "classic",
    draft=config.use_eagle,
    retention=None if states else config.prefix_retention_interval,
    states=config.prefix_retention_interval if states else None,
  )
  return [
    Group(
      dataclasses.replace(group, page_size=page_size, pool=0), page_size, rules
    )
    for group, page_size in zip(config.groups, config.page_sizes, strict=True)
  ]


def _listed(counts: int | tuple[int, ...]) -> tuple[int, ...]:
  return counts if isinstance(counts, tuple) else (counts,)


class Slots:
  """Sequences in slots, and helpers of all verbs.

  Attributes:
    groups: the groups of layers.
    pool: the pages.
    slots: one `Sequence` a slot.
    epoch, error: as in `CacheState`.
    queries, hits: tokens that `admit` looked up, and found.
    unusable: further tokens that only some groups had.
    failed: the number of failed rows.
  """

  def __init__(self, config: CacheConfig):
    self.config = config
    self.groups = groups_of(config)
    self.pool = Pool(
      _listed(config.num_pages),
      config.free_policy == "unhashed_first",
      _listed(config.offload_pages or (0,) * config.num_pools),
      config.max_restored_pages,
      config.restored_tokens,
    )
    self.epoch = 0
    self.error = Status.OK
    self.queries = self.hits = self.unusable = self.failed = 0
    self.slots = [self._start(None) for _ in range(config.num_slots)]

  def _start(self, salt) -> Sequence:
    """Returns an empty sequence; no salt equals a salt of zeros."""
    salt = (0, 0, 0, 0) if salt is None else tuple(salt)
    return Sequence(
      [[] for _ in self.groups],
      [],
      (self.epoch, salt),
      num_skipped=[0 for _ in self.groups],
    )

  def room(self, slot: int) -> int:
    """Counts the tokens for which every group of a slot has pages."""
    rows = zip(self.groups, self.slots[slot].pages, strict=True)
    return min(len(pages) * group.size for group, pages in rows)

  def _in_range(self, slot: int) -> bool:
    return 0 <= slot < self.config.num_slots

  def _named_slots(self, slots, mask) -> list[Status]:
    """Returns SKIPPED for masked rows, BAD_SLOT for repeated or bad slots."""
    codes = []
    named = set()
    for row, slot in enumerate(slots):
      if mask is not None and not mask[row]:
        codes.append(Status.SKIPPED)
        continue
      good = self._in_range(slot) and slot not in named
      codes.append(Status.OK if good else Status.BAD_SLOT)
      named.add(slot)
    return codes

  def _note(self, codes: list[Status]) -> list[Status]:
    """Counts failures and records the first; a mistake replaces pressure."""
    for code in codes:
      if code in (Status.OK, Status.SKIPPED):
        continue
      self.failed += 1
      if self.error == Status.OK or (
        self.error == Status.OUT_OF_PAGES and code != Status.OUT_OF_PAGES
      ):
        self.error = code
    return codes

  def _pages_for(self, tokens: int) -> list[int]:
    """Counts the columns of each group for tokens."""
    return [group.pages_for(tokens) for group in self.groups]

  def _grown(self, tables, columns, is_new, length=2**40):
    """Returns the tables before their last columns are popped."""
    rows = zip(self.groups, tables, columns, strict=True)
    return [
      group.grown(pages, stop_column, is_new, length)
      for group, pages, stop_column in rows
    ]

  def _fill(self, tables, columns):
    for group, pages in enumerate(tables):
      pool = self.config.groups[group].pool
      sequences.fill(self.pool, pages, columns[group], pool)
    return tables

  def _pop(self, group):
    """Pops a page for a group."""
    return self.pool.pop(self.config.groups[group].pool)

  def _by_pool(self, counts) -> list[int]:
    """Sums a number of each group over the groups of each pool."""
    sums = [0 for _ in self.pool.free]
    for group, count in zip(self.config.groups, counts, strict=True):
      sums[group.pool] += count
    return sums

  def _fits(self, need, room) -> bool:
    """Returns True if every pool has room."""
    return all(n <= left for n, left in zip(need, room, strict=True))

  def _nothing_owed(self):
    return [(self.config.no_page,) * 2] * self.config.num_groups

  def _stateless(self, sequence, length):
    """Returns True if the state after `length` tokens is not in a page."""
    for group, pages in zip(self.groups, sequence.pages, strict=True):
      if not group.holds_states or length == 0:
        continue
      if pages[(length - 1) // group.size] == NULL:
        return True
      if length < len(sequence.tokens) and length % group.size:
        return True
    return False
