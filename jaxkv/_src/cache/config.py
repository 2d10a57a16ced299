"""The static sizes and options of a cache."""

import dataclasses
import math

from jaxkv._src.cache.groups.kinds import FullAttention
from jaxkv._src.cache.groups.kinds import GroupKind


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheConfig:
  """Everything about a cache that is fixed when a program is compiled.

  Hashable, so that it can be a static field of the state and a static
  argument of a jitted function.

  Attributes:
    num_pages: N, pages in the pool; page 0 is the null page and is never
      handed out, so `num_pages - 1` can be used.
    page_size: S, tokens a page. Where groups have pages of their own sizes,
      those are multiples of it, and it is the step in which keys are made.
    num_slots: B, sequences that can be held at once.
    pages_per_slot: M, pages of that size for which one sequence has room in
      each group: `pages_per_slot * page_size` tokens.
    groups: the kinds of G groups of layers. Every group has a page table of
      its own and all draw from one pool.
    prefix_caching: whether full pages are hashed and found again. Switched
      off, the state has no keys, no tokens and no index at all.
    unhashed_first: where a page without a key goes when its last reference is
      given back: True, to the front of the free queue (it is useless, so it
      is used first); False, to the back like every other page.
    merge_duplicates: whether a page that becomes full while an equal one is
      already cached is replaced by that one in its page table, so that it
      goes back to the pool at once.
    draft_model: whether hits leave out the last page found, because a draft
      model (EAGLE) needs its hidden states computed again.
    classic: whether prefixes are handled as vLLM did before 0.25: full pages
      are published even where no hit can use them (before the window at the
      end of an aligned prefix), and every kind of group leaves a page out for
      the draft model whenever it shortens a prefix.
    retention: which of the prefixes that a window could go on from are kept.
      None, all; 0, the latest: those at the end of the prompt, and where an
      earlier sequence turned off; k, those and every k tokens.
    event_log: events that are kept until `drain_events` reads them: pages
      published and taken out. 0 for no log.
    track_new_pages: whether `take_new_pages` tells which pages were handed
      out.
    track_residency: whether `residency` tells how old evicted pages were.
    seed: the secret of the page keys. Whoever does not know it cannot make
      two prefixes collide.

  Raises:
    TypeError: a size is not an int, or a switch not a bool.
    ValueError: a size is too small.
  """

  num_pages: int
  page_size: int
  num_slots: int
  pages_per_slot: int
  groups: tuple[GroupKind, ...] = (FullAttention(),)
  prefix_caching: bool = True
  unhashed_first: bool = True
  merge_duplicates: bool = False
  draft_model: bool = False
  classic: bool = False
  retention: int | None = None
  event_log: int = 0
  track_new_pages: bool = False
  track_residency: bool = False
  seed: int = 0

  def __post_init__(self):
    smallest = {
      "num_pages": 2,
      "page_size": 1,
      "num_slots": 1,
      "pages_per_slot": 1,
      "event_log": 0,
      "seed": 0,
    }
    for name, least in smallest.items():
      value = getattr(self, name)
      if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
          f"CacheConfig.{name} must be an int, got {value!r} of type "
          f"{type(value).__name__}."
        )
      if value < least:
        raise ValueError(
          f"CacheConfig.{name} must be at least {least}, got {value}."
        )
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.type is bool and not isinstance(value, bool):
        raise TypeError(
          f"CacheConfig.{field.name} must be True or False, got {value!r}."
        )
    self._check_groups()
    self._check_encoder()
    if max(self.num_pages, self.slot_tokens) > 2**28:
      raise ValueError(
        "CacheConfig.num_pages and pages_per_slot * page_size must be at most "
        f"2**28 (every index is below 2**30), got {self.num_pages} and "
        f"{self.slot_tokens}."
      )
    if self.num_groups * self.num_slots * self.pages_per_slot >= 2**31:
      raise ValueError(
        "CacheConfig.num_slots * pages_per_slot must be below 2**31 for all "
        "groups together (pages are counted in int32); make slots shorter or "
        "fewer."
      )
    self._check_retention()
    self._check_caching()

  def _check_groups(self):
    if not isinstance(self.groups, tuple) or not self.groups:
      raise TypeError(
        "CacheConfig.groups must be a tuple of group kinds, one or more, got "
        f"{self.groups!r}."
      )
    for kind in self.groups:
      if not isinstance(kind, GroupKind):
        raise TypeError(
          f"CacheConfig.groups holds {kind!r}, which is no GroupKind; use "
          "FullAttention(), SlidingWindow(window) or a kind of your own."
        )
    for size in self.page_sizes:
      if size % self.page_size or self.slot_tokens % size:
        raise ValueError(
          f"A group's page_size must be a multiple of CacheConfig.page_size "
          f"({self.page_size}) and a divisor of the slot's {self.slot_tokens} "
          f"tokens, got {size}."
        )

  def _check_caching(self):
    needs_keys = {
      "merge_duplicates": "without keys no two pages are known to be equal",
      "event_log": "nothing is ever published without it",
      "track_residency": "nothing is ever evicted without it",
    }
    for name, reason in needs_keys.items():
      if getattr(self, name) and not self.prefix_caching:
        raise ValueError(
          f"CacheConfig.{name} needs prefix_caching=True: {reason}."
        )

  def _check_encoder(self):
    encoders = [kind for kind in self.groups if kind.holds_encoder]
    if encoders and self.prefix_caching:
      raise ValueError(
        f"CacheConfig.groups holds {encoders[0]}, which needs "
        "prefix_caching=False: what a decoder computes depends on the "
        "encoder's input, of which page keys know nothing."
      )
    if len(encoders) == self.num_groups:
      raise ValueError(
        f"CacheConfig.groups holds {encoders[0]} and no group for the tokens "
        "of the sequences themselves; add one, such as FullAttention()."
      )

  def _check_retention(self):
    if self.retention is None:
      return
    if isinstance(self.retention, bool) or not isinstance(self.retention, int):
      raise TypeError(
        f"CacheConfig.retention must be None or an int, got {self.retention!r}."
      )
    if self.retention < 0 or self.retention % self.alignment:
      raise ValueError(
        f"CacheConfig.retention must be a multiple of {self.alignment}, the "
        f"tokens of which every hit is one, got {self.retention}."
      )
    if self.classic:
      raise ValueError(
        "CacheConfig.retention and classic contradict each other; choose one."
      )

  @property
  def num_groups(self) -> int:
    """G, how many groups there are."""
    return len(self.groups)

  @property
  def page_sizes(self) -> tuple[int, ...]:
    """Tokens a page, by group."""
    return tuple(kind.page_size or self.page_size for kind in self.groups)

  @property
  def alignment(self) -> int:
    """Tokens of which every hit is a multiple: whole pages in all groups."""
    return math.lcm(*self.page_sizes)

  @property
  def text_group(self) -> int:
    """The group whose pages tell what a sequence's tokens were.

    One that never leaves pages behind, if there is one.
    """
    keeps = [
      type(kind).num_skipped is GroupKind.num_skipped and not kind.holds_encoder
      for kind in self.groups
    ]
    return keeps.index(True) if True in keeps else self.lead_group

  @property
  def lead_group(self) -> int:
    """The first group that has a page of every sequence."""
    return [kind.holds_encoder for kind in self.groups].index(False)

  @property
  def holds_states(self) -> bool:
    """Whether some group holds states instead of tokens."""
    return any(kind.holds_states for kind in self.groups)

  @property
  def holds_encoder(self) -> bool:
    """Whether some group holds tokens of an encoder."""
    return any(kind.holds_encoder for kind in self.groups)

  @property
  def recycles(self) -> bool:
    """Whether some group leaves pages behind while a sequence runs."""
    return any(
      type(kind).num_skipped is not GroupKind.num_skipped
      for kind in self.groups
    )

  @property
  def no_page(self) -> int:
    """NO_PAGE: what a page table holds where no page was ever attached.

    It is out of range on purpose: a scatter drops it. A negative number would
    name the last page.
    """
    return self.num_pages

  @property
  def slot_tokens(self) -> int:
    """Tokens for which one slot has room, M * S."""
    return self.pages_per_slot * self.page_size
