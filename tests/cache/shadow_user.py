"""A user of the cache with a shadow memory of the content of every page.

The user writes tokens into the pages of the page table, makes the copies that
verbs return, and commits. After every call, each page of a hit or a sequence
must hold exactly the expected tokens. `tests/model_of_the_cache` checks which
pages these are.
"""

import collections
import copy
import dataclasses
import random
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import jaxkv
from jaxkv import Status
from tests.cache import pair
from tests.cache.moves import ARGUMENTS
from tests.cache.moves import WEIGHTS
from tests.cache.moves import Moves
from tests.cache.setups import Setup
from tests.cache.shadow_memory import FalseContent
from tests.cache.shadow_memory import Names
from tests.cache.shadow_memory import ShadowMemory
from tests.cache.shadow_memory import num_skipped_tokens

UNSALTED = (0, 0, 0, 0)

_BETWEEN_LAWS = 50
"""Calls after which the invariants are tested, which takes long."""

OTHERS = {"clear_error": 3, "draft": 5, "look": 1}
"""Weights of steps that `Moves` does not have; `draft` calls no verb."""


@dataclasses.dataclass
class Written:
  """The content of a slot, as its user expects it.

  Attributes:
    tokens: the committed tokens.
    names: the names of their K/V.
    root: the name before the first token.
    epoch: the version of the weights at its start.
    empty: True if it holds no page.
    lost: True if no page held its last state.
  """

  tokens: list[int]
  names: list[int]
  root: int
  epoch: int
  empty: bool = True
  lost: bool = False

  def copy(self) -> "Written":
    """Returns a copy for another slot."""
    return copy.deepcopy(self)


@dataclasses.dataclass(frozen=True)
class Seen:
  """The references, pins and cached pages of a pool, as `Moves` reads them."""

  refs: list[int]
  pins: list[int]
  keys: list[int]


class Dice:
  """Draws from a seeded generator, faster than numpy's."""

  def __init__(self, seed: int):
    self._random = random.Random(seed).random

  def integer(self, low: int, high: int) -> int:
    """Returns an integer from low to high, both included."""
    return low + int(self._random() * (high + 1 - low))


class User:
  """A user of the cache; `Moves` takes it for an oracle.

  Attributes:
    setup: the setup of the cache.
    config: the cache's config.
    verbs: the verbs to call; tests of broken caches replace some.
    state: the cache.
    memory: the shadow memory.
    names: the names of all contents.
    slots: the expected content of each slot.
    epoch: the version of the weights.
    calls: the number of calls.
    counts: the number of events of each kind.
  """

  def __init__(self, setup: Setup, verbs: dict[str, Callable] = pair.VERBS):
    self.setup = setup
    self.config = setup.config
    self.verbs = verbs
    self.state = jaxkv.init(self.config)
    self.memory = ShadowMemory(self.config)
    self.names = Names()
    self.epoch = self.calls = 0
    self.slots = [self._nothing() for _ in range(self.config.num_slots)]
    self.counts: collections.Counter[str] = collections.Counter()

  def _nothing(self) -> Written:
    return Written([], [], self._root(UNSALTED), self.epoch)

  def _root(self, salt) -> int:
    return self.names.of("salt", tuple(salt))

  # --- readings for `Moves` ---------------------------------------------------

  @property
  def pool(self) -> Seen:
    """The current pool."""
    memory = self.memory
    keys = np.flatnonzero(memory.cached).tolist()
    return Seen(memory.refs.tolist(), memory.pins.tolist(), keys)

  def room(self, slot: int) -> int:
    """Returns the tokens for which a slot has pages."""
    return self.memory.room(slot)

  def match(self, tokens, lengths, salts, mask=None) -> dict:
    """Looks up prompts, and checks the content of the hits."""
    self.counts["match"] += 1
    mask = [True] * len(tokens) if mask is None else mask
    named = {"tokens": tokens, "lengths": lengths, "salts": salts, "mask": mask}
    hit = self.verbs["match"](
      self.state, **pair.arrays("match", tuple(named.values()))
    )
    hit = jax.device_get(hit)
    self._check_found(hit, **named)
    return {"num_cached_tokens": hit.num_cached_tokens.tolist()}

  # --- calls -----------------------------------------------------------------

  def move(self, verb: str, arguments: tuple) -> None:
    """Makes one call and checks all pages that a reader relies on.

    Raises:
      FalseContent: a page does not hold the expected content.
    """
    try:
      self._move(verb, arguments)
    except FalseContent as error:
      error.add_note(f"call {self.calls} of {self.config}: {verb}{arguments}")
      raise

  def _move(self, verb: str, arguments: tuple) -> None:
    self.calls += 1
    if verb == "match":
      self.match(*arguments)
      return
    self.counts[verb] += 1
    named = dict(zip(ARGUMENTS[verb], arguments, strict=True))
    if verb in ("commit", "commit_slots"):
      self._compute(**named)
    got = self.verbs[verb](self.state, **pair.arrays(verb, arguments))
    if verb in pair.QUERIES:
      return
    self.state, out = got
    out = jax.device_get(out)
    self.memory.look(self.state, getattr(out, "moves", None))
    self._note_codes(out)
    short = verb.removesuffix("_slots").removesuffix("_mask")
    update = getattr(self, f"_after_{short}", None)
    if update:
      update(out, **named)
    self._settle()

  def _settle(self) -> None:
    """Updates the user and checks all pages after a call."""
    num_used = self.memory.used[:, 0]
    for written, used in zip(self.slots, num_used.tolist(), strict=True):
      if written.empty and used:
        written.epoch = self.epoch
      written.empty = not used
    self._check_slots()
    if self.calls % _BETWEEN_LAWS == 0:
      self._check_laws()

  def _note_codes(self, out) -> None:
    codes, counts = np.unique(getattr(out, "code", []), return_counts=True)
    for code, count in zip(codes.tolist(), counts.tolist(), strict=True):
      self.counts[Status(int(code)).name] += count

  def _rows(self, out, slots=None) -> list[tuple[int, int]]:
    """Returns the rows that succeeded, and their slots."""
    slots = range(self.config.num_slots) if slots is None else slots
    codes = enumerate(out.code.tolist())
    return [(row, slots[row]) for row, code in codes if code == Status.OK]

  def _after_commit(self, out, tokens, num_tokens, slots=None, **_):
    for row, slot in self._rows(out, slots):
      written = self.slots[slot]
      new = tokens[row][: num_tokens[row]]
      written.names += self._continued(written, new)
      written.tokens += new
      if new:
        written.lost = self._has_no_state(slot)

  def _has_no_state(self, slot: int) -> bool:
    """True if the last state of a slot has a null page."""
    last_token = len(self.slots[slot].tokens) - 1
    return any(
      group_kind.holds_states
      and self.memory.table[slot, group, last_token // page_size] == 0
      for group, group_kind, page_size in self._groups()
    )

  def _groups(self):
    config = self.config
    indices = range(config.num_groups)
    return zip(indices, config.groups, config.page_sizes, strict=True)

  def _after_admit(self, out, slots, tokens, lengths, salts, **_):
    for row, slot in self._rows(out, slots):
      cached = int(out.num_cached_tokens[row])
      self._check_length(cached, lengths[row])
      root = self._root(salts[row])
      cached_tokens = tokens[row][:cached]
      names = self.names.continued(root, cached_tokens, self.epoch)
      self.slots[slot] = Written(cached_tokens, names, root, self.epoch)
      self.counts["hits"] += cached > 0
      self.counts["hit tokens"] += cached

  def _after_fork(self, out, src, dst, **_):
    old_slots = list(self.slots)
    for row, slot in self._rows(out, dst):
      self.slots[slot] = old_slots[src[row]].copy()
    self.counts["copies"] += self.memory.copy(*out.copies)

  def _after_truncate(self, out, lengths, slots=None, **_):
    for row, slot in self._rows(out, slots):
      written = self.slots[slot]
      if lengths[row] == 0:
        self.slots[slot] = self._nothing()
      elif lengths[row] < len(written.tokens):
        del written.tokens[lengths[row] :], written.names[lengths[row] :]
        written.lost = False
    self.counts["copies"] += self.memory.copy(*out.copies)

  def _after_free(self, out, slots=None, **_):
    for _, slot in self._rows(out, slots):
      self.slots[slot] = self._nothing()

  def _after_new_epoch(self, out):
    self.epoch += 1
    _need(int(out.epoch) == self.epoch, "an epoch was left out")

  def _after_touch(self, out, pages, **_):
    self.memory.pin(np.asarray(pages)[out.code == Status.OK])

  def _after_unpin(self, out, pages, **_):
    self.memory.unpin(np.asarray(pages)[out.code == Status.OK])

  def _after_pin(self, out, **named):
    self._check_found(out, **named)
    is_hit = out.num_cached_tokens > 0
    _need(np.array_equal(out.code == Status.OK, is_hit), "nothing was pinned")
    pages = out.pages[is_hit]
    self.memory.pin(pages[pages < self.config.no_page])

  # --- writing ---------------------------------------------------------------

  def _continued(self, written: Written, tokens: list[int]) -> list[int]:
    previous_name = written.names[-1] if written.names else written.root
    # Of sequences older than an epoch, pages written before and behind it may
    # be merged; nobody hits them.
    merges = self.config.merge_duplicates
    epoch = written.epoch if merges else self.epoch
    return self.names.continued(previous_name, tokens, epoch)

  def _compute(self, tokens, num_tokens, slots=None, mask=None):
    """Writes the tokens to be committed that have room."""
    slots = range(len(self.slots)) if slots is None else slots
    done = set()
    for row, slot in enumerate(slots):
      asked = mask is None or mask[row]
      if asked and 0 <= slot < len(self.slots) and slot not in done:
        done.add(slot)
        written = self.slots[slot]
        room = self.room(slot) - len(written.tokens)
        new = tokens[row][: max(0, min(num_tokens[row], room))]
        # A state is written in place, so not before the tokens are known.
        final = len(new) == num_tokens[row]
        self._write(slot, self._continued(written, new), states=final)

  def _write(self, slot: int, names: list[int], states: bool = True):
    start = len(self.slots[slot].tokens)
    for group, group_kind, _ in self._groups():
      if group_kind.holds_states and states:
        self.memory.write_states(slot, group, start, names)
      elif not group_kind.holds_states:
        self.memory.write_expert_ids(slot, group, start, names)

  def draft(self, draws: Dice) -> None:
    """Writes tokens that are not committed, and states after them."""
    for slot, written in enumerate(self.slots):
      room = self.room(slot) - len(written.tokens)
      count = draws.integer(0, room) if room > 0 else 0
      if count:
        garbage = self.names.of("draft", draws.integer(0, 9))
        self._write(slot, [garbage] * count, states=False)

  # --- checks ----------------------------------------------------------------

  def _check_slots(self):
    """Checks that the pages hold the K/V of every committed token."""
    totals = [len(written.tokens) for written in self.slots]
    lengths = self.memory.length
    _need(lengths.tolist() == totals, f"lengths are {lengths}, not {totals}")
    slot_tokens = self.config.slot_tokens
    names = np.zeros((len(totals), slot_tokens), np.int64)
    for slot, written in enumerate(self.slots):
      names[slot, : totals[slot]] = written.names
    lost = np.asarray([written.lost for written in self.slots])
    for group, group_kind, page_size in self._groups():
      pages = self.memory.table[:, group, : slot_tokens // page_size]
      wrong = self.memory.wrong(group, pages, names, lengths)
      _need(not wrong.any(), f"group {group} holds other tokens")
      if group_kind.holds_states:
        lacking = self.memory.lacks_state(group, names) & ~lost
        _need(not lacking.any(), f"group {group} lacks a state")
      else:
        missing = self.memory.missing(group)
        _need(not missing.any(), f"group {group} lacks pages that it needs")
    self.counts["sequences checked"] += int(np.sum(lengths > 0))

  def _check_length(self, num_hit: int, length: int):
    fits = 0 <= num_hit < max(length, 1)
    fits &= num_hit % self.config.alignment == 0
    _need(fits, f"{num_hit} tokens of {length} found")

  def _check_found(self, hit, tokens, lengths, salts, mask):
    """Checks that the pages of a hit hold the K/V of its tokens."""
    cached = hit.num_cached_tokens
    names = np.zeros((len(cached), self.setup.columns), np.int64)
    for row, count in enumerate(cached.tolist()):
      self._check_length(count, lengths[row] if mask[row] else 0)
      names[row, :count] = self.names.continued(
        self._root(salts[row]), tokens[row][:count], self.epoch
      )
      self.counts["hits"] += count > 0
      self.counts["hit tokens"] += count
    for group, group_kind, page_size in self._groups():
      pages = hit.pages[:, group, : self.setup.columns // page_size]
      column = np.arange(pages.shape[1])[None]
      num_skipped = num_skipped_tokens(group_kind, cached) // page_size
      num_full = cached // page_size
      needed = (column >= num_skipped[:, None]) & (column < num_full[:, None])
      real = (pages > 0) & (pages != self.config.no_page)
      _need(np.array_equal(needed, real), f"group {group} hits other columns")
      wrong = self.memory.wrong(group, pages, names, cached)
      _need(not wrong.any(), f"false hit in group {group}: {pages}")

  def _check_laws(self):
    self.counts["check_invariants"] += 1
    laws = jax.device_get(pair.invariants(self.state))
    broken = [name for name, holds in laws.items() if not holds]
    _need(not broken, f"broken: {broken}")

  # --- other verbs -----------------------------------------------------------

  def clear_error(self, draws: Dice) -> None:
    """Clears the sticky error."""
    del draws
    self.state, _ = jaxkv.clear_error(self.state)

  def look(self, draws: Dice) -> None:
    """Checks all queries."""
    group = draws.integer(0, self.config.num_groups - 1)
    ones = [1] * len(self.slots)
    view = jaxkv.view(self.state, group=group, num_tokens=ones)
    agrees = np.array_equal(view.page_table, self.memory.table[:, group])
    agrees &= np.array_equal(view.starts, self.memory.length)
    _need(agrees, "a view is of other pages")
    refs = self.memory.refs
    numbers = self.config.numbers
    pages = np.split(np.arange(numbers.total), numbers.first_pages[1:])
    used = max(np.mean(refs[pool[1:]] > 0) for pool in pages)
    is_equal = np.isclose(float(jaxkv.usage(self.state)), used)
    _need(is_equal, f"{used} of the pages are used")
    for index, pool in enumerate(pages):
      free = sorted(jaxkv.free_pages(self.state, pool=index))
      _need(free == pool[1:][refs[pool[1:]] == 0].tolist(), "free pages")
    _need(jaxkv.cached_pages(self.state) == self.pool.keys, "cached pages")
    jaxkv.stats(self.state)


def _need(holds: Any, message: str) -> None:
  if not holds:
    raise FalseContent(message)


def stroll(
  user: User, seed: int, calls: int, weights: dict[str, int] = WEIGHTS
) -> None:
  """Makes random calls, one in six of them with a bad argument."""
  draws = Dice(seed)
  stop_call = user.calls + calls
  weights = weights | OTHERS
  verbs = [verb for verb, weight in weights.items() for _ in range(weight)]
  oracle: Any = user
  while user.calls < stop_call:
    verb = verbs[draws.integer(0, len(verbs) - 1)]
    if verb in OTHERS:
      user.calls += 1
      user.counts[verb] += 1
      getattr(user, verb)(draws)
      continue
    moves = Moves(draws, oracle, user.setup)
    arguments = moves.make(verb)
    if arguments is None:
      continue
    if draws.integer(0, 5) == 0:
      arguments = moves.spoiled(verb, arguments)
    user.move(verb, arguments)
