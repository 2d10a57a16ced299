"""The slots of the oracle: sequences that start, are found, grow and end."""

import dataclasses
import itertools

from jaxkv import CacheConfig
from jaxkv import Code
from tests.oracle_pool import Pool


def ceil_div(numerator: int, denominator: int) -> int:
  """Quotient rounded up."""
  return -(-numerator // denominator)


@dataclasses.dataclass
class Sequence:
  """What one slot holds.

  Attributes:
    pages: page ids in order, one list a group.
    tokens: the committed tokens.
    root: what its keys begin with: the epoch it started in and its salt.
  """

  pages: list[list[int]]
  tokens: list[int]
  root: tuple

  @property
  def empty(self) -> bool:
    """Whether the slot can be given to a new sequence."""
    return not self.pages[0]


class Sequences:
  """See `oracle.Oracle`, which adds the rarer verbs.

  Attributes:
    pool: the pages.
    slots: one `Sequence` a slot.
    epoch, error: as in `CacheState`.
    queries, hits: tokens that `admit` was asked for, and found.
    failed: rows that did not get what they asked for.
  """

  def __init__(self, config: CacheConfig):
    self.config = config
    self.pool = Pool(config)
    self.epoch = 0
    self.error = Code.OK
    self.queries = self.hits = self.failed = 0
    self.slots = [self._start(None) for _ in range(config.num_slots)]

  def _start(self, salt) -> Sequence:
    """A sequence of nothing; without a salt it has that of zeros."""
    groups = range(self.config.num_groups)
    salt = (0, 0, 0, 0) if salt is None else tuple(salt)
    return Sequence([[] for _ in groups], [], (self.epoch, salt))

  def _pages_for(self, tokens: int) -> int:
    return ceil_div(tokens, self.config.page_size)

  def _in_range(self, slot: int) -> bool:
    return 0 <= slot < self.config.num_slots

  def _note(self, codes: list[Code]) -> list[Code]:
    """Counts failures and makes the first stick; a misuse replaces pressure."""
    for code in codes:
      if code in (Code.OK, Code.SKIPPED):
        continue
      self.failed += 1
      if self.error == Code.OK or (
        self.error == Code.OUT_OF_PAGES and code != Code.OUT_OF_PAGES
      ):
        self.error = code
    return codes

  # --- growing ---------------------------------------------------------------

  def allocate(self, num_tokens):
    """Room for so many more tokens, slot by slot, group by group."""
    done = [self._allocate(*row) for row in enumerate(num_tokens)]
    codes = self._note([code for code, _ in done])
    return {"code": codes, "num_new_pages": [new for _, new in done]}

  def _allocate(self, slot, count):
    sequence = self.slots[slot]
    if count < 0:
      return Code.BAD_LENGTH, 0
    if count == 0:
      return Code.OK, 0
    wanted = self._pages_for(len(sequence.tokens) + count)
    if wanted > self.config.pages_per_slot:
      return Code.SLOT_FULL, 0
    need = max(wanted - len(sequence.pages[0]), 0)
    if need * self.config.num_groups > len(self.pool.free):
      return Code.OUT_OF_PAGES, 0
    if sequence.empty:
      sequence = self.slots[slot] = self._start(None)
    for pages in sequence.pages:
      pages.extend(self.pool.pop() for _ in range(need))
    return Code.OK, need * self.config.num_groups

  def commit(self, tokens, counts):
    """Makes tokens final and publishes the pages that became full."""
    done = [
      self._commit(slot, row, count)
      for slot, (row, count) in enumerate(zip(tokens, counts, strict=True))
    ]
    codes = self._note([code for code, _ in done])
    return {"code": codes, "num_published": [n for _, n in done]}

  def _commit(self, slot, row, count):
    sequence, size = self.slots[slot], self.config.page_size
    if count != 0 and sequence.empty:
      return Code.SLOT_EMPTY, 0
    if not 0 <= count <= len(row):
      return Code.BAD_LENGTH, 0
    if len(sequence.tokens) + count > len(sequence.pages[0]) * size:
      return Code.NO_ROOM, 0
    before = len(sequence.tokens) // size
    sequence.tokens = sequence.tokens + list(row[:count])
    if not self.config.prefix_caching:
      return Code.OK, 0
    full = range(before, len(sequence.tokens) // size)
    for index in full:
      prefix = tuple(sequence.tokens[: (index + 1) * size])
      for group, pages in enumerate(sequence.pages):
        self._publish(pages, index, (sequence.root, group, prefix))
    return Code.OK, len(full) * self.config.num_groups

  def _publish(self, pages, index, key):
    """Makes a page findable, or puts an older equal one in its place."""
    older = self.pool.find(key)
    self.pool.published += 1
    if self.config.merge_duplicates and older is not None:
      self.pool.merged += 1
      self.pool.hold(older)
      self.pool.release([pages[index]])
      pages[index] = older
    else:
      self.pool.publish(pages[index], key)

  # --- finding ---------------------------------------------------------------

  def match(self, tokens, lengths, salts=None):
    """Longest cached prefix of each row; changes nothing."""
    hits = [self._match(*row) for row in self._rows(tokens, lengths, salts)]
    return {
      "num_cached": [len(hit[0]) * self.config.page_size for hit in hits],
      "pages": self._padded(hits, len(tokens[0]) // self.config.page_size),
    }

  def _match(self, row, length, salt):
    """Pages of the longest prefix that every group has, one list a group.

    At least one token is left over: its query is needed for the next one.
    """
    root, size = self._start(salt).root, self.config.page_size
    hit: list[list[int]] = [[] for _ in range(self.config.num_groups)]
    if not 1 <= length <= len(row):
      return hit
    for end in range(size, length, size):
      found = [
        self.pool.find((root, group, tuple(row[:end])))
        for group in range(self.config.num_groups)
      ]
      if None in found:
        break
      for pages, page in zip(hit, found, strict=True):
        pages.append(page)
    return hit

  def _rows(self, tokens, lengths, salts):
    return zip(tokens, lengths, salts or [None] * len(tokens), strict=True)

  def _padded(self, hits, columns):
    """Pages as [G, R, columns], NO_PAGE behind each hit."""
    no_page = self.config.no_page
    return [
      [hit[g] + [no_page] * (columns - len(hit[g])) for hit in hits]
      for g in range(self.config.num_groups)
    ]

  def admit(self, slots, tokens, lengths, salts=None, mask=None):
    """Starts sequences; every lookup sees the cache before the call."""
    codes, plans, named = [], {}, set()
    room, woken = len(self.pool.free), set()
    rows = list(self._rows(tokens, lengths, salts))
    for index, (row, length, salt) in enumerate(rows):
      code = self._check_admit(slots[index], length, len(row), named)
      if mask is not None and not mask[index]:
        code = Code.SKIPPED
      if code == Code.OK:
        named.add(slots[index])
        hit = self._match(row, length, salt)
        need, wakes = self._cost(hit, length, woken)
        if need + len(wakes) > room:
          code = Code.OUT_OF_PAGES
        else:
          room -= need + len(wakes)
          woken |= wakes
          plans[index] = hit
      codes.append(code)
    for hit in plans.values():
      for page in itertools.chain(*hit):
        self.pool.hold(page)
    cached = [0] * len(rows)
    for index, hit in plans.items():
      cached[index] = self._attach(slots[index], hit, *rows[index])
    return {"code": self._note(codes), "num_cached": cached}

  def _cost(self, hit, length, woken):
    """Pages to pop, and free pages among the hits that nobody woke before."""
    need = sum(self._pages_for(length) - len(found) for found in hit)
    hits = set(itertools.chain(*hit))
    return need, {page for page in hits if not self.pool.refs[page]} - woken

  def _check_admit(self, slot, length, columns, named):
    if not self._in_range(slot):
      return Code.BAD_SLOT
    if not self.slots[slot].empty or slot in named:
      return Code.SLOT_IN_USE
    if not 1 <= length <= columns:
      return Code.BAD_LENGTH
    full = self._pages_for(length) > self.config.pages_per_slot
    return Code.SLOT_FULL if full else Code.OK

  def _attach(self, slot, hit, row, length, salt):
    """Fills a slot with a hit and fresh pages; the tokens that are there."""
    cached = len(hit[0]) * self.config.page_size
    sequence = self.slots[slot] = self._start(salt)
    sequence.tokens = list(row[:cached])
    for table, found in zip(sequence.pages, hit, strict=True):
      fresh = self._pages_for(length) - len(found)
      table += found + [self.pool.pop() for _ in range(fresh)]
    self.queries += length
    self.hits += cached
    return cached

  # --- ending ----------------------------------------------------------------

  def free_slots(self, slots):
    """`jaxkv.free` with slot numbers."""
    return {"code": self._note([self._free(slot) for slot in slots])}

  def free_mask(self, mask):
    """`jaxkv.free` with a mask over all slots."""
    codes = [
      self._free(slot) if named else Code.SKIPPED
      for slot, named in enumerate(mask)
    ]
    return {"code": self._note(codes)}

  def _free(self, slot):
    if not self._in_range(slot):
      return Code.BAD_SLOT
    if self.slots[slot].empty:
      return Code.SLOT_EMPTY
    for pages in self.slots[slot].pages:
      self.pool.release(pages[::-1])
    self.slots[slot] = self._start(None)
    return Code.OK
