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
    old_slots = copy.deepcopy(self.slots)
    codes = []
    copies = []
    named = set()
    for index, (source, target) in enumerate(zip(src, dst, strict=True)):
      code = self._check_fork(old_slots, source, target, named)
      if mask is not None and not mask[index]:
        code = Status.SKIPPED
      owed = self._nothing_owed()
      if code == Status.OK:
        named.add(target)
        tokens = len(old_slots[source].tokens)
        partial = self._partial(tokens)
        if self._stateless(old_slots[source], tokens):
          code = Status.RECYCLED
        elif not self._fits(self._by_pool(partial), self.pool.room()):
          code = Status.OUT_OF_PAGES
        else:
          owed = self._share(old_slots[source], target, partial)
      codes.append(code)
      copies.append(owed)
    return {"code": self._note(codes), "copies": _columns(copies)}

  def _check_fork(self, old_slots, source, target, named):
    if not (self._in_range(source) and self._in_range(target)):
      return Status.BAD_SLOT
    if old_slots[source].empty or not old_slots[source].tokens:
      return Status.SLOT_EMPTY
    if not old_slots[target].empty or target in named:
      return Status.SLOT_IN_USE
    return Status.OK

  def _partial(self, tokens):
    """Returns, for each group, True if the last page is not full."""
    return [tokens % group.size > 0 for group in self.groups]

  def _share(self, source, target, partial):
    """Fills a slot from another one; returns the copies to make."""
    tables = []
    owed = self._nothing_owed()
    for index, group in enumerate(self.groups):
      pages = source.pages[index][: group.full_pages(len(source.tokens))]
      self.pool.hold(pages)
      tables.append(pages)
    num_skipped = [
      min(n, len(pages))
      for n, pages in zip(source.num_skipped, tables, strict=True)
    ]
    for index, pages in enumerate(tables):
      if partial[index]:
        owed[index] = (source.pages[index][len(pages)], self._pop(index))
        pages.append(owed[index][1])
    self.slots[target] = dataclasses.replace(
      source, pages=tables, tokens=list(source.tokens), num_skipped=num_skipped
    )
    return owed

  def truncate(self, lengths, mask=None):
    """Rolls all slots back, in order."""
    return self.truncate_slots(lengths, range(self.config.num_slots), mask)

  def truncate_slots(self, lengths, slots, mask=None):
    """Rolls slots back; all pages are released before a copy gets a page."""
    room = self.pool.room()
    codes = []
    plans = []
    named = self._named_slots(slots, mask)
    for slot, length, code in zip(slots, lengths, named, strict=True):
      code = code or self._check_truncate(slot, length)
      shared = []
      if code == Status.OK:
        shared = self._shared_groups(slot, length)
        need = self._by_pool(shared)
        if not self._fits(need, room):
          code = Status.OUT_OF_PAGES
        else:
          room = [left - count for left, count in zip(room, need, strict=True)]
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
    if self._stateless(sequence, length):
      return True
    num_skipped = sequence.num_skipped
    for group, skipped in zip(self.groups, num_skipped, strict=True):
      if group.skipped_pages(length) < skipped:
        return True
    # Keys continue from the last position where all groups end a page. If it
    # moves back, its key and the tokens after it are read from a group's pages.
    align = self.config.alignment
    moves_back = length // align < len(sequence.tokens) // align
    if not self.config.prefix_caching or not moves_back:
      return False
    aligned = length // align * align
    index = self.config.token_group
    if self.groups[index].holds_states:
      return aligned < length
    return max(aligned - 1, 0) // self.groups[index].size < num_skipped[index]

  def _reopens(self, slot, length):
    """Returns, for each group, True if a full page will be written again."""
    old_length = len(self.slots[slot].tokens)
    return [
      partial and group.full_pages(length) < group.full_pages(old_length)
      for group, partial in zip(self.groups, self._partial(length), strict=True)
    ]

  def _shared_groups(self, slot, length):
    """Returns, for each group, True if the reopened page has other users."""
    tables = self.slots[slot].pages
    reopens = self._reopens(slot, length)
    return [
      reopens[index]
      and self.pool.refs[tables[index][group.full_pages(length)]] > 1
      for index, group in enumerate(self.groups)
    ]

  def _cut(self, slot, length, shared):
    """Releases pages; a shared last page stays in the table nevertheless."""
    sequence = self.slots[slot]
    reopens = self._reopens(slot, length)
    for index, pages in enumerate(sequence.pages):
      keep = self.groups[index].pages_for(length)
      if reopens[index] and not shared[index]:
        self.pool.forget(pages[keep - 1])
      self.pool.release(pages[keep - shared[index] :][::-1])
      pages[keep:] = []
      sequence.num_skipped[index] = min(sequence.num_skipped[index], keep)
    sequence.tokens = sequence.tokens[:length]

  def _copied(self, slot, length, shared):
    """Replaces shared last pages by fresh ones; returns the copies to make."""
    owed = self._nothing_owed()
    for group, copied in enumerate(shared):
      if copied:
        pages = self.slots[slot].pages[group]
        owed[group] = (pages[-1], self._pop(group))
        pages[-1] = owed[group][1]
    return owed


def _columns(rows):
  """Lists the copies of all rows as `Copies(src, dst)` does."""
  pairs = list(itertools.chain(*rows))
  return {"src": [s for s, _ in pairs], "dst": [d for _, d in pairs]}
