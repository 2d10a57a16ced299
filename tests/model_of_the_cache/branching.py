"""fork, truncate: sequences share pages, and roll back."""

import copy
import dataclasses
import itertools

from jaxkv import Status
from tests.model_of_the_cache.slots import Slots


class Branching(Slots):
  """The verbs fork and truncate."""

  def fork(self, src, dst, mask=None):
    """Shares full pages; reads sources as they were before the call."""
    before = copy.deepcopy(self.slots)
    codes, copies, named = [], [], set()
    for index, (source, target) in enumerate(zip(src, dst, strict=True)):
      code = self._check_fork(before, source, target, named)
      if mask is not None and not mask[index]:
        code = Status.SKIPPED
      owed = self._nothing_owed()
      if code == Status.OK:
        named.add(target)
        tokens = len(before[source].tokens)
        partial = self._partial(tokens)
        if self._stateless(before[source], tokens):
          code = Status.RECYCLED
        elif sum(partial) > len(self.pool.free):
          code = Status.OUT_OF_PAGES
        else:
          owed = self._share(before[source], target, partial)
      codes.append(code)
      copies.append(owed)
    return {"code": self._note(codes), "copies": _columns(copies)}

  def _check_fork(self, before, source, target, named):
    if not (self._in_range(source) and self._in_range(target)):
      return Status.BAD_SLOT
    if before[source].empty or not before[source].tokens:
      return Status.SLOT_EMPTY
    if not before[target].empty or target in named:
      return Status.SLOT_IN_USE
    return Status.OK

  def _partial(self, tokens):
    """Returns, for each group, True if the last page is not full."""
    return [tokens % group.size > 0 for group in self.groups]

  def _share(self, source, target, partial):
    """Fills a slot from another one; returns the copies to make."""
    tables, owed = [], self._nothing_owed()
    for number, group in enumerate(self.groups):
      pages, full = source.pages[number], group.full_pages(len(source.tokens))
      self.pool.hold(pages[:full])
      tables.append(pages[:full])
    num_skipped = [
      min(n, len(pages)) for n, pages in zip(source.gone, tables, strict=True)
    ]
    for number, pages in enumerate(tables):
      if partial[number]:
        owed[number] = (source.pages[number][len(pages)], self.pool.pop())
        pages.append(owed[number][1])
    self.slots[target] = dataclasses.replace(
      source, pages=tables, tokens=list(source.tokens), gone=num_skipped
    )
    return owed

  def truncate(self, lengths, mask=None):
    """Rolls all slots back, in order."""
    return self.truncate_slots(lengths, range(self.config.num_slots), mask)

  def truncate_slots(self, lengths, slots, mask=None):
    """Rolls slots back; all pages are released before a copy gets a page."""
    room, codes, plans = len(self.pool.free), [], []
    named = self._named_slots(slots, mask)
    for slot, length, code in zip(slots, lengths, named, strict=True):
      code = code or self._check_truncate(slot, length)
      shared = []
      if code == Status.OK:
        shared = self._shared_groups(slot, length)
        if sum(shared) > room:
          code = Status.OUT_OF_PAGES
        else:
          room -= sum(shared)
          plans.append((slot, length, shared))
      codes.append(code)
    for plan in plans:
      self._cut(*plan)
    owed = {slot: self._copied(slot, *details) for slot, *details in plans}
    copies = [
      pair
      for slot, code in zip(slots, codes, strict=True)
      for pair in (self._nothing_owed() if code else owed[slot])
    ]
    return {"code": self._note(codes), "copies": _columns([copies])}

  def _check_truncate(self, slot, length):
    if self.slots[slot].empty:
      return Status.SLOT_EMPTY
    if not 0 <= length <= len(self.slots[slot].tokens):
      return Status.BAD_LENGTH
    lost = length > 0 and self._lost(self.slots[slot], length)
    return Status.RECYCLED if lost else Status.OK

  def _lost(self, sequence, length):
    """Returns True if a shorter sequence would need a released page."""
    config, num_skipped = self.config, sequence.gone
    if self._stateless(sequence, length):
      return True
    for group, skipped in zip(self.groups, num_skipped, strict=True):
      if group.skipped_pages(length) < skipped:
        return True
    # Keys continue from the last position where all groups end a page. If it
    # moves back, its key and the tokens after it are read from a group's pages.
    align = config.alignment
    if (
      not config.prefix_caching
      or length // align == len(sequence.tokens) // align
    ):
      return False
    aligned, source = length // align * align, config.token_group
    if self.groups[source].holds_states:
      return aligned < length
    return max(aligned - 1, 0) // self.groups[source].size < num_skipped[source]

  def _reopens(self, slot, length):
    """Returns, for each group, True if a full page will be written again."""
    before = len(self.slots[slot].tokens)
    return [
      partial and group.full_pages(length) < group.full_pages(before)
      for group, partial in zip(self.groups, self._partial(length), strict=True)
    ]

  def _shared_groups(self, slot, length):
    """Returns, for each group, True if the reopened page has other users."""
    tables, reopens = self.slots[slot].pages, self._reopens(slot, length)
    return [
      reopens[number]
      and self.pool.refs[tables[number][group.full_pages(length)]] > 1
      for number, group in enumerate(self.groups)
    ]

  def _cut(self, slot, length, shared):
    """Releases pages; a shared last page stays in the table nevertheless."""
    sequence, reopens = self.slots[slot], self._reopens(slot, length)
    for number, pages in enumerate(sequence.pages):
      keep, copied = self.groups[number].pages_for(length), shared[number]
      if reopens[number] and not copied:
        self.pool.forget(pages[keep - 1])
      self.pool.release(pages[keep - copied :][::-1])
      pages[keep:] = []
      sequence.gone[number] = min(sequence.gone[number], keep)
    sequence.tokens = sequence.tokens[:length]

  def _copied(self, slot, length, shared):
    """Replaces shared last pages by fresh ones; returns the copies to make."""
    owed = self._nothing_owed()
    for group, copied in enumerate(shared):
      if copied:
        pages = self.slots[slot].pages[group]
        owed[group] = (pages[-1], self.pool.pop())
        pages[-1] = owed[group][1]
    return owed


def _columns(rows):
  """Lists the copies of all rows as `Copies(src, dst)` does."""
  pairs = list(itertools.chain(*rows))
  return {"src": [s for s, _ in pairs], "dst": [d for _, d in pairs]}
