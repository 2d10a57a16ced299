"""The slots of the oracle: sequences that start, are found, grow and end."""

import dataclasses
import itertools
from typing import NamedTuple

from jaxkv import CacheConfig
from jaxkv import Code
from tests.oracle_groups import groups_of
from tests.oracle_lookup import longest_prefix
from tests.oracle_pool import NULL
from tests.oracle_pool import Pool


@dataclasses.dataclass
class Sequence:
  """What one slot holds.

  Attributes:
    pages: page ids in order, one list a group; the null page where a window
      or a chunk has moved on.
    tokens: the committed tokens.
    root: what its keys begin with: the epoch it started in and its salt.
    prompt: tokens that it was admitted with.
    junction: where it turned off from what was cached in some groups.
  """

  pages: list[list[int]]
  tokens: list[int]
  root: tuple
  prompt: int = 0
  junction: int = 0

  @property
  def empty(self) -> bool:
    """Whether the slot can be given to a new sequence."""
    return not any(self.pages)

  def num_null(self) -> list[int]:
    """For each group how many pages are not there any more."""
    return [pages.count(NULL) for pages in self.pages]


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


class Sequences:
  """See `oracle.Oracle`, which adds the rarer verbs.

  Attributes:
    groups: of layers.
    pool: the pages.
    slots: one `Sequence` a slot.
    epoch, error: as in `CacheState`.
    queries, hits: tokens that `admit` was asked for, and found.
    failed: rows that did not get what they asked for.
  """

  def __init__(self, config: CacheConfig):
    self.config = config
    self.groups = groups_of(config)
    self.pool = Pool(config)
    self.epoch = 0
    self.error = Code.OK
    self.queries = self.hits = self.failed = 0
    self.slots = [self._start(None) for _ in range(config.num_slots)]

  def _start(self, salt) -> Sequence:
    """A sequence of nothing; without a salt it has that of zeros."""
    salt = (0, 0, 0, 0) if salt is None else tuple(salt)
    return Sequence([[] for _ in self.groups], [], (self.epoch, salt))

  def _pages_for(self, tokens: int, encoder: int = 0) -> list[int]:
    """Pages for so many tokens, for each group."""
    return [group.pages_for(tokens, encoder) for group in self.groups]

  def _in_range(self, slot: int) -> bool:
    return 0 <= slot < self.config.num_slots

  def _first_named(self, slots) -> list[bool]:
    """Whether each slot is one, and no earlier row names it."""
    return [
      self._in_range(slot) and slot not in slots[:row]
      for row, slot in enumerate(slots)
    ]

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
    return self.allocate_slots(num_tokens, range(self.config.num_slots))

  def allocate_slots(self, num_tokens, slots, num_encoder_tokens=None):
    """`jaxkv.allocate` with slot numbers."""
    encoders = num_encoder_tokens or [0] * len(num_tokens)
    rows = zip(slots, num_tokens, encoders, strict=True)
    done = [
      self._allocate(*row) if first else (Code.BAD_SLOT, 0)
      for row, first in zip(rows, self._first_named(slots), strict=True)
    ]
    codes = self._note([code for code, _ in done])
    return {"code": codes, "num_new_pages": [new for _, new in done]}

  def _allocate(self, slot, count, encoder):
    sequence = self.slots[slot]
    if min(count, encoder) < 0:
      return Code.BAD_LENGTH, 0
    total = len(sequence.tokens) + count
    if max(total, encoder) > self.config.slot_tokens:
      return Code.SLOT_FULL, 0
    if count == 0:
      return Code.OK, 0
    wanted = self._pages_for(total, encoder)
    need = [
      max(pages - len(held), 0)
      for pages, held in zip(wanted, sequence.pages, strict=True)
    ]
    if sum(need) > len(self.pool.free):
      return Code.OUT_OF_PAGES, 0
    if sequence.empty:
      sequence = self.slots[slot] = self._start(None)
    for pages, count in zip(sequence.pages, need, strict=True):
      pages.extend(self.pool.pop() for _ in range(count))
    return Code.OK, sum(need)

  def commit(self, tokens, counts):
    """Makes tokens final and publishes the pages that became full."""
    return self.commit_slots(tokens, counts, range(self.config.num_slots))

  def commit_slots(self, tokens, counts, slots):
    """`jaxkv.commit` with slot numbers."""
    done = [
      self._commit(slot, row, count) if first else (Code.BAD_SLOT, 0)
      for slot, row, count, first in zip(
        slots, tokens, counts, self._first_named(slots), strict=True
      )
    ]
    codes = self._note([code for code, _ in done])
    return {"code": codes, "num_published": [n for _, n in done]}

  def room(self, slot: int) -> int:
    """Tokens for which every group of a slot has pages."""
    held = zip(self.groups, self.slots[slot].pages, strict=True)
    return min(
      len(pages) * group.size for group, pages in held if not group.is_cross
    )

  def _commit(self, slot, row, count):
    sequence = self.slots[slot]
    if count != 0 and sequence.empty:
      return Code.SLOT_EMPTY, 0
    if not 0 <= count <= len(row):
      return Code.BAD_LENGTH, 0
    if len(sequence.tokens) + count > self.room(slot):
      return Code.NO_ROOM, 0
    before = len(sequence.tokens)
    sequence.tokens = sequence.tokens + list(row[:count])
    published = self.pool.published
    if self.config.prefix_caching:
      for number in range(self.config.num_groups):
        self._settle(sequence, number, before)
    return Code.OK, self.pool.published - published

  def _settle(self, sequence, number, before):
    """Publishes what can be of use of one group's pages."""
    group, pages = self.groups[number], sequence.pages[number]
    start = group.settled_pages(before)
    for column in range(start, group.settled_pages(len(sequence.tokens))):
      prefix = tuple(sequence.tokens[: (column + 1) * group.size])
      useful = group.is_published(column, sequence.prompt, sequence.junction)
      page = pages[column]
      if page != NULL and page not in self.pool.keys:
        self.pool.born[page] = self.pool.clock
        self.pool.clock += 1
      if page != NULL and useful:
        self._publish(pages, column, (sequence.root, number, prefix))

  def _publish(self, pages, column, key):
    """Makes a page findable, or puts an older equal one in its place."""
    if pages[column] in self.pool.keys:
      # A fork that shares it came here first, or it was rolled back to.
      assert self.pool.keys[pages[column]] == key
      return
    older = self.pool.find(key)
    self.pool.published += 1
    if self.config.merge_duplicates and older is not None:
      self.pool.merged += 1
      self.pool.hold(older)
      self.pool.release([pages[column]])
      pages[column] = older
    else:
      self.pool.publish(pages[column], key)

  # --- finding ---------------------------------------------------------------

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
        need, wakes = self._cost(hit, begun, encoder, woken)
        if need + len(wakes) > left - keep[index]:
          code = Code.OUT_OF_PAGES
        else:
          left -= need + len(wakes)
          woken |= wakes
          plans[index] = hit, begun, encoder
      codes.append(code)
    for hit, *_ in plans.values():
      for page in hit.all_pages():
        self.pool.hold(page)
    cached = [0] * len(rows)
    for index, (hit, begun, encoder) in plans.items():
      row, length, salt = rows[index]
      pages = self._pages_for(begun, encoder)
      self._attach(slots[index], hit, row, pages, salt)
      self.slots[slots[index]].prompt = length
      self.queries += length
      self.hits += hit.tokens
      cached[index] = hit.tokens
    return {"code": self._note(codes), "num_cached": cached}

  def _cost(self, hit, begun, encoder, woken):
    """Pages to pop, and free pages among the hits that nobody woke before."""
    found = [group.full_pages(hit.tokens) for group in self.groups]
    need = sum(self._pages_for(begun, encoder)) - sum(found)
    hits = set(hit.all_pages())
    return need, {page for page in hits if not self.pool.refs[page]} - woken

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
    for number, first in enumerate(hit.first):
      pages = [NULL] * first + hit.pages[number]
      fresh = total[number] - len(pages)
      sequence.pages[number] = pages + [self.pool.pop() for _ in range(fresh)]

  # --- moving on -------------------------------------------------------------

  def recycle(self, lengths=None):
    """Gives back what windows and chunks left behind, the last page first."""
    if lengths is None:
      lengths = [len(sequence.tokens) for sequence in self.slots]
    given = [self._recycle(*row) for row in enumerate(lengths)]
    return {"num_pages": given}

  def _recycle(self, slot, length):
    """The same for one slot; no sequence is longer than its slot."""
    length, given = min(max(length, 0), self.config.slot_tokens), 0
    for group, pages in zip(self.groups, self.slots[slot].pages, strict=True):
      behind = min(group.skipped_pages(length), len(pages))
      gone = [page for page in pages[:behind] if page != NULL]
      self.pool.release(gone[::-1])
      pages[:behind] = [NULL] * behind
      given += len(gone)
    return given

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
      self.pool.release([page for page in pages[::-1] if page != NULL])
    self.slots[slot] = self._start(None)
    return Code.OK
