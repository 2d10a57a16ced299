"""The verbs of `jaxkv` over slots: their correct results and states.

A verb takes the arguments of the real verb as lists, and returns the expected
result as a dict. Keys are tuples of the tokens themselves, and the free queue
is a list. Rows are served one by one, so a batch equals one call a row by
construction.
"""

import copy
import itertools

from jaxkv import Status
from tests.model_of_the_cache import lookup
from tests.model_of_the_cache import sequences
from tests.model_of_the_cache.branching import Branching
from tests.model_of_the_cache.lookup import Hit
from tests.model_of_the_cache.pool import NULL
from tests.model_of_the_cache.slots import Slots


class Arriving(Slots):
  """match, admit, pin: the verbs that look up cached prefixes."""

  def match(self, tokens, lengths, salts=None, mask=None):
    """Finds the longest cached prefix of each row; changes nothing."""
    rows = self._rows(tokens, lengths, salts)
    hits = [
      self._match(*row) if counts else lookup.miss(self.groups)
      for row, counts in zip(rows, _all(mask, tokens), strict=True)
    ]
    return {
      "num_cached_tokens": [hit.tokens for hit in hits],
      "pages": self._padded(hits, len(tokens[0]) // self.config.page_size),
    }

  def _rows(self, tokens, lengths, salts):
    return zip(tokens, lengths, salts or [None] * len(tokens), strict=True)

  def _match(self, row, length, salt) -> Hit:
    if not 1 <= length <= len(row):
      return lookup.miss(self.groups)
    root = self._start(salt).root
    return lookup.find(self.groups, self.pool, root, row[:length])

  def _padded(self, hits, columns):
    """Returns pages as [R, G, columns], NO_PAGE where none is needed."""
    no_page = self.config.no_page
    padded = []
    for hit in hits:
      padded.append([])
      for num_skipped, needed in zip(hit.num_skipped, hit.pages, strict=True):
        pages = [no_page] * num_skipped + needed
        padded[-1].append(pages + [no_page] * (columns - len(pages)))
    return padded

  def admit(
    self,
    slots,
    tokens,
    lengths,
    salts=None,
    mask=None,
    num_tokens=None,
    keep_free=None,
    shared_tokens=None,
  ):
    """Starts sequences; every lookup sees the cache before the call."""
    codes = []
    plans = {}
    named = set()
    left = self.pool.room()
    woken = set()
    rows = list(self._rows(tokens, lengths, salts))
    room = num_tokens or lengths
    keep = keep_free or [0] * len(rows)
    shared = shared_tokens or [(0, 0)] * len(rows)
    for index, (row, length, salt) in enumerate(rows):
      smallest = min(length - 1, room[index] - 1, keep[index], *shared[index])
      fits = smallest >= 0 and length <= len(row)
      code = self._check_admit(slots[index], length, fits, named)
      if mask is not None and not mask[index]:
        code = Status.SKIPPED
      if code == Status.OK:
        named.add(slots[index])
        hit = self._match(row, length, salt)
        num_admitted = min(hit.tokens + room[index], length)
        pages = self._pages_for(num_admitted)
        room_left = [count - keep[index] for count in left]
        code, cost = self._price(hit, pages, room_left, woken)
        if code == Status.OK:
          left = [count - used for count, used in zip(left, cost, strict=True)]
          plans[index] = hit, pages
      codes.append(code)
    # All hits are held before any page is popped.
    hits = sequences.attach(self.pool, [hit for hit, _ in plans.values()])
    cached = [0] * len(rows)
    for (index, (_, columns)), hit in zip(plans.items(), hits, strict=True):
      row, length, salt = rows[index]
      sequence = self.slots[slots[index]] = self._start(salt)
      sequence.tokens = list(row[: hit.tokens])
      sequence.prompt = length
      sequence.junction = hit.junction
      sequence.shared = tuple(shared[index])
      sequence.num_skipped = list(hit.num_skipped)
      grown = self._grown(hit.tables(), columns, True)
      sequence.pages = self._fill(grown, columns)
      self.queries += length
      self.hits += hit.tokens
      self.unusable += max(hit.junction - hit.tokens, 0)
      cached[index] = hit.tokens
    return {"code": self._note(codes), "num_cached_tokens": cached}

  def _check_admit(self, slot, length, fits, named):
    if not self._in_range(slot):
      return Status.BAD_SLOT
    if not self.slots[slot].empty or slot in named:
      return Status.SLOT_IN_USE
    if not fits:
      return Status.BAD_LENGTH
    return Status.SLOT_FULL if length > self.config.slot_tokens else Status.OK

  def _price(self, hit, columns, left, woken):
    """Returns a code, and the number of pages that leave each free queue.

    These are fresh pages, and free hits that no earlier row attached.
    """
    tables = self._grown(hit.tables(), columns, True)
    need = self._by_pool(sequences.missing(tables, columns))
    hits = set(hit.all_pages())
    wakes = self._cost(hits) - woken
    counts = zip(need, self.pool.count(wakes), strict=True)
    need = [fresh + woken for fresh, woken in counts]
    if not self._fits(need, left):
      return Status.OUT_OF_PAGES, []
    woken |= wakes
    return Status.OK, need

  def _cost(self, hits):
    """Returns the hits that cost a free page: free ones, and offload pages."""
    pool = self.pool
    return {
      page for page in hits if pool.is_offloaded(page) or not pool.refs[page]
    }

  def pin(self, tokens, lengths, salts=None, mask=None):
    """Pins the longest cached prefix of each row."""
    codes = []
    hits = []
    left = self.pool.room()
    woken = set()
    rows = self._rows(tokens, lengths, salts)
    for index, (row, length, salt) in enumerate(rows):
      hit = self._match(row, length, salt)
      code = Status.OK if hit.tokens else Status.NOT_CACHED
      if not 1 <= length <= len(row):
        code = Status.BAD_LENGTH
      if mask is not None and not mask[index]:
        code = Status.SKIPPED
      wakes = self._cost(hit.all_pages()) - woken
      cost = self.pool.count(wakes)
      if code == Status.OK and not self._fits(cost, left):
        code = Status.OUT_OF_PAGES
      if code == Status.OK:
        left = [count - used for count, used in zip(left, cost, strict=True)]
        woken |= wakes
      codes.append(code)
      hits.append(hit if code == Status.OK else lookup.miss(self.groups))
    hits = sequences.attach(self.pool, hits)
    for hit in hits:
      for page in hit.all_pages():
        self.pool.pins[page] += 1
    return {
      "code": self._note(codes),
      "num_cached_tokens": [hit.tokens for hit in hits],
      "pages": self._padded(hits, len(tokens[0]) // self.config.page_size),
    }


class Growing(Slots):
  """allocate, commit: the verbs that make sequences longer."""

  def allocate(self, num_tokens):
    """Makes room for more tokens, slot by slot, group by group."""
    return self.allocate_slots(num_tokens, range(self.config.num_slots))

  def allocate_slots(self, num_tokens, slots, mask=None):
    """`jaxkv.allocate` with slot numbers."""
    rows = zip(slots, num_tokens, strict=True)
    done = [
      (code, 0) if code else self._allocate(*row)
      for row, code in zip(rows, self._named_slots(slots, mask), strict=True)
    ]
    codes = self._note([code for code, _ in done])
    return {"code": codes, "num_new_pages": [new for _, new in done]}

  def _allocate(self, slot, count):
    sequence = self.slots[slot]
    if count < 0:
      return Status.BAD_LENGTH, 0
    length = len(sequence.tokens) + count
    columns = self._pages_for(length)
    if length > self.config.slot_tokens:
      return Status.SLOT_FULL, 0
    if count == 0:
      return Status.OK, 0
    num_tokens = len(sequence.tokens)
    tables = self._grown(sequence.pages, columns, sequence.empty, num_tokens)
    need = sequences.missing(tables, columns)
    if not self._fits(self._by_pool(need), self.pool.room()):
      return Status.OUT_OF_PAGES, 0
    if sequence.empty:
      sequence = self.slots[slot] = self._start(None)
    sequence.pages = self._fill(tables, columns)
    return Status.OK, sum(need)

  def commit(self, tokens, num_tokens):
    """Makes tokens final and publishes the pages that became full."""
    return self.commit_slots(tokens, num_tokens, range(self.config.num_slots))

  def commit_slots(self, tokens, num_tokens, slots, mask=None):
    """`jaxkv.commit` with slot numbers."""
    done = [
      (code, 0) if code else self._commit(slot, row, count)
      for slot, row, count, code in zip(
        slots, tokens, num_tokens, self._named_slots(slots, mask), strict=True
      )
    ]
    codes = self._note([code for code, _ in done])
    return {"code": codes, "num_published_pages": [n for _, n in done]}

  def _commit(self, slot, row, count):
    sequence = self.slots[slot]
    if count != 0 and sequence.empty:
      return Status.SLOT_EMPTY, 0
    if not 0 <= count <= len(row):
      return Status.BAD_LENGTH, 0
    if len(sequence.tokens) + count > self.room(slot):
      return Status.NO_ROOM, 0
    old_length = len(sequence.tokens)
    sequence.tokens = sequence.tokens + list(row[:count])
    published = self.pool.published
    if self.config.prefix_caching:
      for index, group in enumerate(self.groups):
        columns = range(
          group.settled_pages(old_length),
          group.settled_pages(len(sequence.tokens)),
        )
        merge = self.config.merge_duplicates
        sequences.publish(self.pool, group, index, sequence, columns, merge)
    return Status.OK, self.pool.published - published


class Ending(Slots):
  """recycle, free, unpin, evict and others: the verbs that release pages."""

  def recycle(self, lengths=None):
    """Releases pages before windows and chunks, the last page first."""
    if lengths is None:
      lengths = [len(sequence.tokens) for sequence in self.slots]
    return self.recycle_slots(lengths, range(self.config.num_slots))

  def recycle_slots(self, lengths, slots, mask=None):
    """`jaxkv.recycle` with slot numbers."""
    codes = [
      code or self._not_final(slot, length)
      for slot, length, code in zip(
        slots, lengths, self._named_slots(slots, mask), strict=True
      )
    ]
    released = [
      0 if code else self._recycle(slot, length)
      for slot, length, code in zip(slots, lengths, codes, strict=True)
    ]
    return {"code": self._note(codes), "num_recycled_pages": released}

  def _not_final(self, slot, length):
    """Returns BAD_LENGTH for a length past the final tokens."""
    final = len(self.slots[slot].tokens)
    return Status.BAD_LENGTH if length > final else Status.OK

  def _recycle(self, slot, length):
    """Recycles one slot."""
    length = max(length, 0)
    released = 0
    sequence = self.slots[slot]
    for index, group in enumerate(self.groups):
      pages = sequence.pages[index]
      num_skipped = group.passed_pages(pages, length)
      sequence.num_skipped[index] = max(
        sequence.num_skipped[index], num_skipped
      )
      released += sequences.recycle(self.pool, group, pages, length)
    return released

  def free_slots(self, slots, mask=None):
    """`jaxkv.free` with slot numbers."""
    if self.groups[0].rules.states is not None:
      freed = {
        slot: self.slots[slot]
        for slot, counts in zip(slots, _all(mask, slots), strict=True)
        if counts and self._in_range(slot)
      }
      for slot, sequence in freed.items():
        self._recycle(slot, len(sequence.tokens))
    codes = [
      self._free(slot) if counts else Status.SKIPPED
      for slot, counts in zip(slots, _all(mask, slots), strict=True)
    ]
    return {"code": self._note(codes)}

  def free_mask(self, mask):
    """`jaxkv.free` with a mask over all slots."""
    return self.free_slots(range(self.config.num_slots), mask)

  def _free(self, slot):
    if not self._in_range(slot):
      return Status.BAD_SLOT
    if self.slots[slot].empty:
      return Status.SLOT_EMPTY
    sequences.release(self.pool, self.slots[slot])
    self.slots[slot] = self._start(None)
    return Status.OK

  def touch(self, pages, mask=None):
    """Pins pages, lists [X][P], that are held or cached."""
    return self._by_page(self._masked(pages, mask), self._touch)

  def _touch(self, page):
    if not self.pool.refs[page] and page not in self.pool.keys:
      return Status.NOT_CACHED
    self.pool.hold([page])
    self.pool.pins[page] += 1
    return Status.OK

  def evict(self, pages, mask=None):
    """Drops the keys of pages; the pages keep their queue positions."""
    return self._by_page(self._masked(pages, mask), self._evict)

  def _evict(self, page):
    if page not in self.pool.keys:
      return Status.NOT_CACHED
    self.pool.forget(page)
    return Status.OK

  def unpin(self, pages, mask=None):
    """Removes pins, in each row the last page first."""
    codes = []
    for row in self._masked(pages, mask):
      backwards = [self._named(page, self._unpin) for page in row[::-1]]
      codes.append(backwards[::-1])
      results = zip(row, codes[-1], strict=True)
      ok = [page for page, code in results if code == Status.OK]
      self.pool.release(ok[::-1])
    self._note(list(itertools.chain(*codes)))
    return {"code": codes}

  def _unpin(self, page):
    """Removes a pin, but not yet its reference."""
    if self.pool.pins[page] == 0:
      return Status.NOT_PINNED
    self.pool.pins[page] -= 1
    return Status.OK

  def _masked(self, pages, mask):
    """Returns the pages, NO_PAGE where they are masked out."""
    if mask is None:
      return pages
    return [
      [
        p if counts else self.config.no_page
        for p, counts in zip(*row, strict=True)
      ]
      for row in zip(pages, mask, strict=True)
    ]

  def _by_page(self, pages, verb):
    codes = [[self._named(page, verb) for page in row] for row in pages]
    self._note(list(itertools.chain(*codes)))
    return {"code": codes}

  def _named(self, page, verb):
    if page == self.config.no_page:
      return Status.SKIPPED
    is_page = page in self.pool.pool_of and page < self.pool.num_pages
    if verb == self._evict and self.config.offload_pages:
      is_page |= self.pool.num_pages < page < self.config.num_numbers
    if not is_page:
      return Status.BAD_PAGE
    return verb(page)

  def reset_prefix_cache(self):
    """Forgets all cached pages if none is held."""
    code = Status.OK if self.pool.reset() else Status.STILL_HELD
    return {"code": self._note([code])[0]}

  def new_epoch(self):
    """Starts an epoch, whose lookups find no page published before."""
    self.epoch += 1
    self.pool.stale_before = self.pool.clock
    return {"epoch": self.epoch}

  def num_common_prefix_pages(self):
    """Counts the leading pages that all sequences share, for each group."""
    running = [slot.pages for slot in self.slots if not slot.empty]
    common = []
    for tables in zip(*running, strict=True):
      columns = zip(*tables, strict=False)
      is_shared = [
        len(set(column)) == 1 and NULL not in column for column in columns
      ]
      common.append([*is_shared, False].index(False))
    return common or [0] * self.config.num_groups


class Oracle(Arriving, Growing, Branching, Ending):
  """A cache with all verbs."""

  def copy(self) -> "Oracle":
    """Returns a deep copy."""
    return copy.deepcopy(self)


def _all(mask, rows):
  """Returns the mask, all True for None."""
  return [True] * len(rows) if mask is None else mask
