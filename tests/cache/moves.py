"""Random moves for a cache, drawn from the oracle's state.

Random slots and pages would mostly be refused, which tests little. So a legal
move names existing slots and pages. `spoiled` makes a move illegal by one bad
or repeated number.
"""

import dataclasses
from typing import Any
from typing import Protocol

import numpy as np

from tests.cache.setups import Setup
from tests.model_of_the_cache.sequences import Sequence
from tests.model_of_the_cache.verbs import Oracle

ARGUMENTS = {
  "allocate": ("num_tokens",),
  "allocate_slots": ("num_tokens", "slots", "mask"),
  "commit": ("tokens", "num_tokens"),
  "commit_slots": ("tokens", "num_tokens", "slots", "mask"),
  "match": ("tokens", "lengths", "salts", "mask"),
  "admit": (
    *("slots", "tokens", "lengths", "salts", "mask"),
    *("num_tokens", "keep_free", "shared_tokens"),
  ),
  "touch": ("pages", "mask"),
  "pin": ("tokens", "lengths", "salts", "mask"),
  "unpin": ("pages", "mask"),
  "evict": ("pages", "mask"),
  "fork": ("src", "dst", "mask"),
  "truncate": ("lengths", "mask"),
  "truncate_slots": ("lengths", "slots", "mask"),
  "recycle": ("lengths",),
  "recycle_slots": ("lengths", "slots", "mask"),
  "free_slots": ("slots", "mask"),
  "free_mask": ("mask",),
  "reset_prefix_cache": (),
  "new_epoch": (),
  "num_common_prefix_pages": (),
}

WEIGHTS = {
  "allocate": 4,
  "allocate_slots": 2,
  "commit": 6,
  "commit_slots": 3,
  "match": 2,
  "admit": 8,
  "touch": 2,
  "pin": 2,
  "unpin": 3,
  "evict": 1,
  "fork": 4,
  "truncate": 4,
  "truncate_slots": 2,
  "recycle": 4,
  "recycle_slots": 2,
  "free_slots": 3,
  "free_mask": 3,
  "reset_prefix_cache": 1,
  "new_epoch": 1,
  "num_common_prefix_pages": 1,
}

PAGES = (2, 3)
"""Shape of the pages that `touch`, `unpin` and `evict` are given."""

FREED = 2
"""Slots that `free` is given by number."""

SALTS = ((0, 0, 0, 0), (0, 0, 0, 1), (7, 2**32 - 1, 0, 5))


class Draws(Protocol):
  """A source of choices: hypothesis or a seeded generator."""

  def integer(self, low: int, high: int) -> int:
    """Returns an integer from low to high, both included."""
    ...


@dataclasses.dataclass
class Moves:
  """Draws arguments, as lists; each method is named after its verb."""

  draws: Draws
  oracle: Oracle
  setup: Setup

  def make(self, verb: str) -> tuple | None:
    """Returns the arguments of a legal move, or None if there is none."""
    return getattr(self, verb)()

  def possible(self, verb: str) -> bool:
    """True if `make` may find a move."""
    running = self._slots(empty=False)
    pool = self.oracle.pool
    needs = {
      "commit": running,
      "commit_slots": running,
      "admit": self._slots(empty=True),
      "touch": running or pool.keys,
      "pin": pool.keys,
      "unpin": any(pool.pins),
      "evict": pool.keys,
      "fork": running and self._slots(empty=True),
      "truncate": running,
      "truncate_slots": running,
      "recycle": running,
      "free_slots": len(running) >= FREED,
      "free_mask": running,
      "reset_prefix_cache": not any(pool.refs),
    }
    return bool(needs.get(verb, True))

  # --- choices ---------------------------------------------------------------

  def _choose(self, items):
    return items[self.draws.integer(0, len(items) - 1)]

  def _often(self) -> bool:
    return self.draws.integer(0, 3) > 0

  def _some(self, items, count) -> list:
    """Chooses up to `count` different items."""
    items = list(items)
    chosen = []
    for _ in range(self.draws.integer(min(1, len(items)), count)):
      if items:
        chosen.append(items.pop(self.draws.integer(0, len(items) - 1)))
    return chosen

  def _slots(self, empty: bool) -> list[int]:
    slots = enumerate(self.oracle.slots)
    return [slot for slot, sequence in slots if sequence.empty == empty]

  def _token(self, text, index) -> int:
    """Returns a token of a text; texts share prefixes up to hit ends."""
    branch = index // self.setup.config.alignment
    return 10 * (text >> branch % 3 & 1) + index % 3

  def _text(self, tokens) -> int:
    """Chooses a text, mostly one that begins with the tokens."""
    fits = [
      text
      for text in range(8)
      if all(self._token(text, i) == token for i, token in enumerate(tokens))
    ]
    if fits and self._often():
      return self._choose(fits)
    return self.draws.integer(0, 7)

  def _prompts(self):
    """Draws tokens, lengths and salts of R rows."""
    columns = self.setup.columns
    texts = [self.draws.integer(0, 7) for _ in range(self.setup.rows)]
    limit = min(columns, self.setup.config.slot_tokens)
    return (
      [[self._token(text, i) for i in range(columns)] for text in texts],
      [self.draws.integer(1, limit) for _ in texts],
      [SALTS[max(0, self.draws.integer(-6, 2))] for _ in texts],
    )

  def _grid(self, pages) -> list[list[int]]:
    """Arranges pages in the shape PAGES, at random places."""
    rows, columns = PAGES
    grid = [[self.setup.config.no_page] * columns for _ in range(rows)]
    for page in pages:
      row = self.draws.integer(0, rows - 1)
      grid[row][self.draws.integer(0, columns - 1)] = page
    return grid

  def _masked_grid(self, pages):
    """Arranges pages, with a mask that is mostly True."""
    rows, columns = PAGES
    mask = [
      [self._often() or self._often() for _ in range(columns)]
      for _ in range(rows)
    ]
    return self._grid(pages), mask

  # --- verbs over all slots --------------------------------------------------

  def allocate(self):
    """Allocates a few tokens in some slots."""
    return ([self._num_tokens(sequence) for sequence in self.oracle.slots],)

  def _num_tokens(self, sequence: Sequence) -> int:
    room = self.setup.config.slot_tokens - len(sequence.tokens)
    limit = max(self.setup.config.page_sizes) * 2
    return max(0, min(self.draws.integer(-2, limit), room))

  def commit(self):
    """Commits some of the tokens that have room."""
    return self._all_continued(range(self.setup.config.num_slots))

  def _all_continued(self, slots):
    done = [self._continued(slot) for slot in slots]
    return [row for row, _ in done], [count for _, count in done]

  def _continued(self, slot: int):
    sequence = self.oracle.slots[slot]
    columns = self.setup.columns
    num_held = len(sequence.tokens)
    room = min(columns, self.oracle.room(slot) - num_held)
    count = 0
    if room:
      count = max(0, min(room, self.draws.integer(-1, columns)))
    text = self._text(sequence.tokens) if count else 0
    return [self._token(text, num_held + i) for i in range(columns)], count

  def truncate(self):
    """Rolls some slots back."""
    lengths = []
    mask = []
    for sequence in self.oracle.slots:
      lengths.append(self.draws.integer(0, len(sequence.tokens)))
      mask.append(not sequence.empty and self._often())
    return (lengths, mask) if any(mask) else None

  def recycle(self):
    """Recycles mostly up to the lengths, else to any number."""
    slots = range(self.setup.config.num_slots)
    return ([self._recycle_length(slot) for slot in slots],)

  def _recycle_length(self, slot: int) -> int:
    limit = self.setup.config.slot_tokens + 2
    elsewhere = self.draws.integer(-2, limit)
    return len(self.oracle.slots[slot].tokens) if self._often() else elsewhere

  def free_mask(self):
    """Ends some sequences."""
    slots = range(self.setup.config.num_slots)
    chosen = self._some(self._slots(empty=False), max(2, len(slots) // 2))
    return ([slot in chosen for slot in slots],) if chosen else None

  # --- verbs over named slots ------------------------------------------------

  def _order(self) -> list[int]:
    """Returns R different slots in random order."""
    slots = list(range(self.setup.config.num_slots))
    return [
      slots.pop(self.draws.integer(0, len(slots) - 1))
      for _ in range(self.setup.rows)
    ]

  def allocate_slots(self):
    """Allocates a few tokens in slots of random order."""
    slots = self._order()
    num_tokens = [self._num_tokens(self.oracle.slots[slot]) for slot in slots]
    return num_tokens, slots, self._mask()

  def _mask(self) -> list[bool]:
    """Returns a mask of R rows that is mostly True."""
    return [self._often() or self._often() for _ in range(self.setup.rows)]

  def truncate_slots(self):
    """Rolls slots back in random order."""
    slots = self._order()
    lengths = [
      self.draws.integer(0, len(self.oracle.slots[slot].tokens))
      for slot in slots
    ]
    return lengths, slots, self._mask()

  def recycle_slots(self):
    """Recycles slots in random order."""
    slots = self._order()
    return [self._recycle_length(slot) for slot in slots], slots, self._mask()

  def commit_slots(self):
    """Commits some of the tokens that have room, slots in random order."""
    slots = self._order()
    return *self._all_continued(slots), slots, self._mask()

  def match(self):
    """Looks prompts up."""
    return *self._prompts(), self._mask()

  def admit(self):
    """Starts sequences in empty slots."""
    free = self._slots(empty=True)
    if not free:
      return None
    slots = self._some(free, self.setup.rows)
    mask = [row < len(slots) for row in range(self.setup.rows)]
    slots += [free[0]] * (self.setup.rows - len(slots))
    tokens, lengths, salts = self._prompts()
    room = [
      length if self._often() else self.draws.integer(1, length)
      for length in lengths
    ]
    keep = [
      0
      if self._often()
      else self.draws.integer(0, self.setup.config.total_pages)
      for _ in lengths
    ]
    heads = None
    if self.setup.config.state_retention:
      heads = [
        [self.draws.integer(0, length) * self._often() for _ in range(2)]
        for length in lengths
      ]
    return slots, tokens, lengths, salts, mask, room, keep, heads

  def pin(self):
    """Pins cached prompts."""
    tokens, lengths, salts = self._prompts()
    hits = self.oracle.match(tokens, lengths, salts)["num_cached_tokens"]
    mask = [hit > 0 and self._often() for hit in hits]
    return (tokens, lengths, salts, mask) if any(mask) else None

  def fork(self):
    """Forks sequences to empty slots."""
    sources = self._slots(empty=False)
    targets = self._slots(empty=True)
    if not sources or not targets:
      return None
    dst = self._some(targets, self.setup.rows)
    mask = [row < len(dst) for row in range(self.setup.rows)]
    dst += [targets[0]] * (self.setup.rows - len(dst))
    src = [self._choose(sources) for _ in range(self.setup.rows)]
    return src, dst, mask

  def free_slots(self):
    """Ends sequences in random order."""
    slots = self._some(self._slots(empty=False), FREED)
    if len(slots) < FREED:
      return None
    return slots, [True, self._often()]

  # --- verbs over named pages ------------------------------------------------

  def touch(self):
    """Pins pages that are held or cached."""
    pool = self.oracle.pool
    pages = [
      page
      for page in range(1, self.setup.config.total_pages)
      if pool.refs[page] or page in pool.keys
    ]
    return self._masked_grid(self._some(pages, 3)) if pages else None

  def unpin(self):
    """Removes existing pins."""
    pins = [
      page
      for page, pins in enumerate(self.oracle.pool.pins)
      for _ in range(pins)
    ]
    return self._masked_grid(self._some(pins, 4)) if pins else None

  def evict(self):
    """Drops existing keys."""
    pages = sorted(self.oracle.pool.keys)
    return self._masked_grid(self._some(pages, 2)) if pages else None

  # --- verbs over everything -------------------------------------------------

  def reset_prefix_cache(self):
    """Drops all keys, sometimes although pages are held."""
    if any(self.oracle.pool.refs) and self._often():
      return None
    return ()

  def new_epoch(self):
    """Starts a new version of the weights."""
    return ()

  def num_common_prefix_pages(self):
    """Queries the common prefix."""
    return ()

  # --- illegal moves ---------------------------------------------------------

  def spoiled(self, verb: str, arguments: tuple) -> tuple:
    """Returns the move with one bad or repeated number."""
    config = self.setup.config
    named = dict(zip(ARGUMENTS[verb], arguments, strict=True))
    choices = [
      name
      for name, value in named.items()
      if name not in ("mask", "salts") and value is not None
    ]
    if not choices:
      return arguments
    if "mask" in named and self._often():
      named["mask"] = np.ones_like(named["mask"]).tolist()
    values = (-(2**31), -1, 0, 1, 2, config.num_slots, config.total_pages - 1)
    values += (config.total_pages, self.setup.columns, config.slot_tokens)
    values += (self.setup.columns + 1, config.total_pages + 1, 2**30, 2**31 - 1)
    name = self._choose(choices)
    array = named[name] = _copied(named[name])
    row = self.draws.integer(0, len(array) - 1)
    if isinstance(array[row], list):
      array = array[row]
      row = self.draws.integer(0, len(array) - 1)
    if self._often():
      # One too many and one too few of what is legal, too.
      neighbors = [array[row] - 1, array[row] + 1]
      array[row] = self._choose((*values, *neighbors, *neighbors))
    else:
      array[row] = self._choose(array)
    return tuple(named.values())


def _copied(nested: Any) -> Any:
  if isinstance(nested, list):
    return [_copied(item) for item in nested]
  return nested
