"""The slots of the oracle: sequences that start, are found, grow and end."""

import dataclasses

from jaxkv import CacheConfig
from jaxkv import Code
from tests.model_of_the_cache.oracle_groups import groups_of
from tests.model_of_the_cache.oracle_pool import NULL
from tests.model_of_the_cache.oracle_pool import Pool


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
    gone: for each group, the columns that were given back.
  """

  pages: list[list[int]]
  tokens: list[int]
  root: tuple
  prompt: int = 0
  junction: int = 0
  gone: list[int] = dataclasses.field(default_factory=list)

  @property
  def empty(self) -> bool:
    """Whether the slot can be given to a new sequence."""
    return not any(self.pages)


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
    return Sequence(
      [[] for _ in self.groups],
      [],
      (self.epoch, salt),
      gone=[0 for _ in self.groups],
    )

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
    wanted = self._pages_for(total, encoder)
    if max(total, encoder) > self.config.slot_tokens or (
      count and self._overfull(wanted)
    ):
      return Code.SLOT_FULL, 0
    if count == 0:
      return Code.OK, 0
    tables = self._grown(sequence.pages, wanted, sequence.empty)
    need = self._missing(tables, wanted)
    if need > len(self.pool.free):
      return Code.OUT_OF_PAGES, 0
    if sequence.empty:
      sequence = self.slots[slot] = self._start(None)
    sequence.pages = self._filled(tables, wanted)
    return Code.OK, need

  def _overfull(self, wanted: list[int]) -> bool:
    """Whether scratch pages do not fit into the table."""
    most = [self.config.slot_tokens // group.size for group in self.groups]
    return any(n > m for n, m in zip(wanted, most, strict=True))

  def _grown(self, tables, wanted, begins):
    rows = zip(self.groups, tables, wanted, strict=True)
    return [group.grown(pages, stop, begins) for group, pages, stop in rows]

  def _missing(self, tables, wanted) -> int:
    rows = zip(tables, wanted, strict=True)
    return sum(max(stop - len(pages), 0) for pages, stop in rows)

  def _filled(self, tables, wanted):
    """Tables with fresh pages up to the columns wanted."""
    return [
      pages + [self.pool.pop() for _ in range(stop - len(pages))]
      for pages, stop in zip(tables, wanted, strict=True)
    ]

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
      max(len(pages) - group.scratch, 0) * group.size
      for group, pages in held
      if not group.is_cross
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
    sequence = self.slots[slot]
    for number, (group, pages) in enumerate(
      zip(self.groups, sequence.pages, strict=True)
    ):
      behind = min(group.skipped_pages(length), len(pages))
      sequence.gone[number] = max(sequence.gone[number], behind)
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
