"""Static sizes and options of a cache."""

import dataclasses
import functools
import math
from typing import Any

from jaxkv._src.arrays.arguments import as_count
from jaxkv._src.arrays.arguments import check_bool
from jaxkv._src.arrays.arguments import refuse
from jaxkv._src.cache.group_kinds import FullAttention
from jaxkv._src.cache.group_kinds import GroupKind
from jaxkv._src.cache.group_kinds import GroupSizes
from jaxkv._src.cache.page_numbers import PageNumbers

_MINIMA = {"num_pages": 2, "offload_pages": 0, "page_bytes": 0}
"""The minima of the fields that have a number for each pool."""
_CHOICES = {
  "free_policy": ("unhashed_first", "lru"),
  "prefix_rules": ("current", "classic"),
}


@dataclasses.dataclass(frozen=True)
class OffloadPolicy:
  """The speeds that decide whether pages return from offload memory.

  A page returns from offload memory only if the copy takes less time than
  computing its tokens again. `python -m jaxkv doctor` estimates both speeds.

  Attributes:
    bytes_per_second: the speed of copies from offload memory to the device.
    tokens_per_second: the speed at which the model processes prompts.

  Raises:
    TypeError: a speed is not a number.
    ValueError: a speed is not finite, or not above 0.

  Examples:
    A token of Llama-3-8B has 131,072 bytes of K/V. A TPU v6e processes 22,900
    tokens per second, and moves 16.4 GB, or 125,000 tokens, per second:

    >>> OffloadPolicy(16.4e9, 22_900).max_pages(16 * 131_072, page_size=16)
    5
  """

  bytes_per_second: float
  tokens_per_second: float

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      name = f"OffloadPolicy.{field.name}"
      if isinstance(value, bool) or not isinstance(value, int | float):
        refuse(TypeError, name, "a number", value)
      if not 0 < value < math.inf:
        refuse(ValueError, name, "finite and above 0", value)

  def max_pages(self, page_bytes: int, page_size: int) -> int:
    """Returns the maximal number of pages to restore for `page_size` tokens.

    Each group can have a page for the same tokens. Copying all of these pages
    must take less time than computing the tokens.

    Args:
      page_bytes: bytes of a page over all layers.
      page_size: tokens per page.
    """
    seconds = page_size / self.tokens_per_second
    return math.ceil(seconds * self.bytes_per_second / page_bytes) - 1


@dataclasses.dataclass(frozen=True)
class StateRetention:
  """Keeps the recurrent states that later prompts probably need.

  A state takes as many bytes as hundreds of tokens of keys and values. So with
  this value of `CacheConfig.prefix_retention_interval`, a sequence does not
  keep a state at every page end, but:

  - at the last page end from which the same prompt can continue, and at the one
    before it, from which a prompt with another end can continue;
  - at the ends of heads that waiting prompts share, see `admit`;
  - where the pages of attention groups matched its prompt, but no state was
    there, because other prompts probably diverge there too;
  - every `interval` tokens;
  - at its last page end, until a longer sequence continues from there.

  If the pool had to evict a page before, the states of the first item are given
  up as soon as the sequence continues past them. Those of the next three items
  leave only by eviction.

  A sequence holds at most two states if `recycle` comes before each `allocate`:
  the last one at a page end, and the running state, which moves from page to
  page with the sequence. So a call of the model must compute all tokens for
  which `allocate` made room. Other kept states are in free pages, and stay
  cached until they are evicted. The other groups publish every page.

  Attributes:
    interval: the number of tokens, a multiple of `CacheConfig.alignment`, or 0
      for no states at regular intervals.

  Raises:
    TypeError: `interval` is not an int.
    ValueError: `interval` is negative.
  """

  interval: int = 0

  def __post_init__(self):
    interval = as_count("StateRetention.interval", self.interval, 0)
    object.__setattr__(self, "interval", interval)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheConfig:
  """The static sizes and options of a cache, fixed when a program is compiled.

  A config is hashable, so it can be a static argument of `jax.jit`.

  Attributes:
    num_pages: N, pages in the pool. Page 0 is the null page, which holds no
      tokens, so `num_pages - 1` pages are usable. A tuple has the pages of each
      pool, and then `GroupKind.pool` gives the pool of a group's pages. All
      pools share one numbering: the first page of a pool follows the last page
      of the pool before. The first page of each pool is not usable.
    page_size: S, tokens per page. A group can have larger pages, whose size is
      a multiple of S tokens. Sequences are hashed in blocks of S tokens.
    num_slots: B, the maximal number of sequences in the cache at a time.
    pages_per_slot: M, columns of a slot's row in the page table. A sequence has
      at most `pages_per_slot * page_size` tokens.
    groups: the kinds of the G layer groups. Every group has a separate page
      table. Groups of one pool share its pages.
    prefix_caching: True to let sequences share full pages with the same tokens
      and prefix. If False, the state has no keys and no prefix index.
    free_policy: the end of the free queue to which a page that is not cached
      returns. "unhashed_first": the front, so that it is reused before any
      cached page is evicted. "lru": the back, as for cached pages.
    prefix_rules: the rules by which pages are published and found. "current":
      the rules of vLLM since 0.25, which publish only pages that a hit can use.
      "classic": the rules of earlier versions and of eSurge, which publish
      every full page. With `use_eagle`, the classic rules can shorten a hit by
      more than one page.
    merge_duplicates: True to store equal pages once. If a page becomes full and
      a page with the same tokens and prefix is already cached, the sequence
      gets the cached page instead and releases its new page.
    use_eagle: True to shorten every hit by its last page. The model computes
      the tokens of that page again, because a draft model (EAGLE) needs their
      hidden states.
    prefix_retention_interval: selects the prefixes for which sliding-window and
      recurrent groups publish pages. None selects prefixes of every length. 0
      selects the hits of a prompt that repeats this one, and the longest prefix
      that some groups, but not all, had cached at the lookup, rounded down to
      multiples of `alignment` tokens. With `use_eagle`, it also selects the
      hits of a prompt that begins with this one. A number k above 0 also
      selects one prefix every k tokens. A `StateRetention` selects the states
      that are worth their memory.
    offload_pages: N2, the number of offloaded pages, 0 for none. Cached pages
      that the device evicts are saved there. See `jaxkv.kv.move`. With several
      pools, a tuple with the offloaded pages of each pool.
    offload_policy: the pages that can return from offload memory. "always":
      all. "never": none. An `OffloadPolicy`: pages whose return takes less time
      than computing their tokens again. A lookup treats other offloaded pages
      as not cached. If no page can return, evicted pages are not saved. With
      one pool, the policy compares the pages of each column with its tokens.
      With several pools, it compares all offloaded pages of a hit with the
      tokens by which they make the hit longer.
    page_bytes: bytes of a page over all layers, `jaxkv.kv.page_bytes(kv)`; a
      tuple with several pools. Only an `OffloadPolicy` needs these numbers; 0
      if they are not known.

  Raises:
    TypeError: a field without choices has the wrong type, or `groups` is empty.
    ValueError: a field is out of range, is not one of its choices, or cannot be
      combined with another field.
  """

  num_pages: int | tuple[int, ...]
  page_size: int
  num_slots: int
  pages_per_slot: int
  groups: tuple[GroupKind, ...] = (FullAttention(),)
  prefix_caching: bool = True
  free_policy: str = "unhashed_first"
  prefix_rules: str = "current"
  merge_duplicates: bool = False
  use_eagle: bool = False
  prefix_retention_interval: int | StateRetention | None = None
  offload_pages: int | tuple[int, ...] = 0
  offload_policy: str | OffloadPolicy = "always"
  page_bytes: int | tuple[int, ...] = 0

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      name = f"CacheConfig.{field.name}"
      # An int in place of a NumPy integer, which would decide dtypes.
      if field.type is int:
        object.__setattr__(self, field.name, as_count(name, value, 1))
      if field.name in _MINIMA:
        counts = _as_counts(name, value, _MINIMA[field.name])
        object.__setattr__(self, field.name, counts)
      if field.type is bool:
        check_bool(name, value)
    for name, choices in _CHOICES.items():
      if (value := getattr(self, name)) not in choices:
        refuse(ValueError, f"CacheConfig.{name}", f"one of {choices}", value)
    self._check_groups()
    self._check_pools()
    self._check_offload_policy()
    self._check_sizes()
    self._check_retention()
    self._check_caching()

  def _check_offload_policy(self):
    policy = self.offload_policy
    if not isinstance(policy, OffloadPolicy):
      choices = "always", "never"
      if policy not in choices:
        requirement = f"one of {choices} or an OffloadPolicy"
        refuse(ValueError, "CacheConfig.offload_policy", requirement, policy)
    elif not all(by_pool(self.page_bytes)):
      raise ValueError(
        "`CacheConfig.page_bytes` must be at least 1 with an OffloadPolicy, "
        f"got {self.page_bytes}; use jaxkv.kv.page_bytes(kv) of a kv made with "
        'offload_policy="always".'
      )

  def _check_sizes(self):
    # The ring of a free queue has up to 4 positions for each page. Positions
    # must be below NOWHERE, 2**30, because the queue uses larger numbers as
    # marks.
    most_numbers = max(
      self.num_numbers, self.num_pools * max(self.numbers.sizes)
    )
    if max(most_numbers, self.slot_tokens) > 2**28:
      raise ValueError(
        "`CacheConfig.num_pages` and `offload_pages` together, the largest "
        "pool times the number of pools, and `pages_per_slot * page_size`, "
        f"must be at most 2**28, got {most_numbers} and {self.slot_tokens}; "
        "use larger pages."
      )
    # `loops.for_each` numbers the columns of all rows together, in int32.
    if self.num_groups * self.num_slots * self.pages_per_slot >= 2**31:
      raise ValueError(
        "`CacheConfig.num_slots * pages_per_slot` must be below 2**31 for all "
        f"groups together, got {self.num_groups} * {self.num_slots} * "
        f"{self.pages_per_slot}; make slots shorter or fewer."
      )

  def _check_groups(self):
    if not isinstance(self.groups, tuple) or not self.groups:
      expected = "a tuple of one or more group kinds"
      refuse(TypeError, "CacheConfig.groups", expected, self.groups)
    for kind in self.groups:
      if not isinstance(kind, GroupKind):
        raise TypeError(
          f"`CacheConfig.groups` must hold group kinds, got {kind!r}; use "
          "FullAttention(), SlidingWindow(window) or a subclass of GroupKind."
        )
    # A slot must hold a whole number of pages of every group. Pages must end at
    # multiples of `page_size` tokens, because only these positions have keys.
    for group_page_size in self.page_sizes:
      if group_page_size % self.page_size or self.slot_tokens % group_page_size:
        raise ValueError(
          "`page_size` of a group must be a multiple of CacheConfig.page_size "
          f"({self.page_size}) and divide the slot's {self.slot_tokens} "
          f"tokens, got {group_page_size}."
        )

  def _check_pools(self):
    num_pools = self.num_pools
    pools = [kind.pool for kind in self.groups]
    if max(pools) >= num_pools:
      raise ValueError(
        "`GroupKind.pool` must be the index of a pool in "
        f"CacheConfig.num_pages, got {max(pools)} with num_pages="
        f"{self.num_pages}; give num_pages a number for each pool."
      )
    unused = sorted(set(range(num_pools)) - set(pools))
    if unused:
      raise ValueError(
        "`CacheConfig.num_pages` must have a number for each pool of `groups`, "
        f"got {self.num_pages}, but no group has GroupKind.pool={unused[0]}."
      )
    for name in ("offload_pages", "page_bytes"):
      counts = getattr(self, name)
      if counts and len(by_pool(counts)) != num_pools:
        expected = f"a tuple with a number for each of {num_pools} pools"
        refuse(ValueError, f"CacheConfig.{name}", expected, counts)
    offload_sizes = by_pool(self.offload_pages)
    if any(offload_sizes) and not all(offload_sizes):
      expected = "above 0 for all pools, or 0: a hit needs pages of all pools"
      refuse(
        ValueError, "CacheConfig.offload_pages", expected, self.offload_pages
      )
    self._check_shapes_of_pages()

  def _check_shapes_of_pages(self):
    # With one pool, the K/V memory has arrays for each shape, in which some
    # pages are unused.
    if self.num_pools == 1:
      return
    shapes: dict[int, tuple[int, bool]] = {}
    for kind, page_size in zip(self.groups, self.page_sizes, strict=True):
      shape = page_size, kind.holds_states
      if shapes.setdefault(kind.pool, shape) != shape:
        raise ValueError(
          "`GroupKind.pool` must differ for groups whose pages differ in size "
          f"or in kind of data, got pool {kind.pool} for {kind} too; give it "
          "another pool."
        )

  def _check_caching(self):
    needs_keys = {
      "merge_duplicates": "equal pages are recognized by their keys",
      "offload_pages": "only cached pages move to offload memory",
    }
    for name, reason in needs_keys.items():
      value = getattr(self, name)
      if any(by_pool(value)) and not self.prefix_caching:
        raise ValueError(
          f"`CacheConfig.{name}` needs prefix_caching=True: {reason}."
        )

  def _check_retention(self):
    interval = self.prefix_retention_interval
    if interval is None:
      return
    name = "CacheConfig.prefix_retention_interval"
    if isinstance(interval, StateRetention):
      interval = interval.interval
    else:
      interval = as_count(name, interval, 0)
      object.__setattr__(self, "prefix_retention_interval", interval)
    if interval % self.alignment:
      expected = f"a multiple of {self.alignment}, because hits end there"
      refuse(ValueError, name, expected, interval)
    if self.prefix_rules == "classic":
      refuse(ValueError, name, 'None with prefix_rules="classic"', interval)

  @property
  def num_groups(self) -> int:
    """G, the number of groups."""
    return len(self.groups)

  @functools.cached_property
  def numbers(self) -> PageNumbers:
    """The numbers of all pages on the device."""
    return PageNumbers(by_pool(self.num_pages))

  @functools.cached_property
  def offload_numbers(self) -> PageNumbers:
    """The numbers of offloaded pages; number q is N + q in the index."""
    # The first page of a pool is not used, so each pool has one number more.
    sizes = by_pool(self.offload_pages)
    return PageNumbers(tuple(size + 1 for size in sizes))

  @property
  def total_pages(self) -> int:
    """N, the pages of all pools."""
    return self.numbers.total

  @property
  def num_offload_pages(self) -> int:
    """N2, the offloaded pages of all pools."""
    return self.offload_numbers.total - len(self.offload_numbers.sizes)

  @property
  def num_pools(self) -> int:
    """P, the number of pools."""
    return self.numbers.num_pools

  @functools.cached_property
  def groups_of_pools(self) -> tuple[tuple[int, ...], ...]:
    """The groups of each pool."""
    pools = [kind.pool for kind in self.groups]
    return tuple(
      tuple(group for group, other in enumerate(pools) if other == pool)
      for pool in range(self.num_pools)
    )

  @functools.cached_property
  def page_sizes(self) -> tuple[int, ...]:
    """The page size of each group, in tokens."""
    return tuple(kind.page_size or self.page_size for kind in self.groups)

  @functools.cached_property
  def rules(self) -> tuple[GroupKind, ...]:
    """The kinds without their pools: equal for groups with equal rules."""
    return tuple(dataclasses.replace(kind, pool=0) for kind in self.groups)

  @functools.cached_property
  def sizes(self) -> GroupSizes:
    """The functions that convert token counts to page counts of each group."""
    return GroupSizes(self.rules, self.page_sizes, self.slot_tokens)

  @functools.cached_property
  def alignment(self) -> int:
    """A, the least common multiple of page sizes. Hits end at its multiples."""
    return math.lcm(*self.page_sizes)

  @property
  def token_group(self) -> int:
    """The group whose index entries give back the tokens of a sequence."""
    # Prefers a group that keeps all pages, because skipped pages are lost.
    keeps = [not kind.skips_pages for kind in self.groups]
    return keeps.index(True) if True in keeps else 0

  @property
  def skips_pages(self) -> bool:
    """True if at least one group has `GroupKind.skips_pages`."""
    return any(kind.skips_pages for kind in self.groups)

  @property
  def state_retention(self) -> StateRetention | None:
    """`prefix_retention_interval`, if it is a `StateRetention`."""
    retention = self.prefix_retention_interval
    if isinstance(retention, StateRetention) and self.prefix_caching:
      return retention
    return None

  @property
  def publishes_by_prompt(self) -> bool:
    """True if the published pages of a sequence depend on its prompt length."""
    return self.prefix_retention_interval is not None

  @property
  def no_page(self) -> int:
    """NO_PAGE = N: the entry of a page-table column without a page."""
    # Out of range, so that a scatter drops the update. JAX would wrap a
    # negative index to a page.
    return self.total_pages

  @functools.cached_property
  def max_restored_pages(self) -> int:
    """The largest number of pages to restore for a page's worth of tokens.

    With several pools, an `OffloadPolicy` judges whole hits instead, see
    `restored_tokens`.
    """
    policy = self.offload_policy
    page_bytes = self.page_bytes
    if isinstance(policy, OffloadPolicy) and isinstance(page_bytes, int):
      return policy.max_pages(page_bytes, min(self.page_sizes))
    return 0 if policy == "never" else self.num_groups

  @functools.cached_property
  def restored_tokens(self) -> tuple[float, ...] | None:
    """For each pool, the tokens computed in the time of restoring a page.

    None with one pool, or without an `OffloadPolicy`.
    """
    policy = self.offload_policy
    if not isinstance(policy, OffloadPolicy) or self.num_pools == 1:
      return None
    return tuple(
      num_bytes / policy.bytes_per_second * policy.tokens_per_second
      for num_bytes in by_pool(self.page_bytes)
    )

  @property
  def preferred_pages(self) -> int | None:
    """N, below which a lookup prefers pages; None without offload pages."""
    return self.total_pages if self.offload_pages else None

  @property
  def num_numbers(self) -> int:
    """The number of page numbers: N, or with offload pages N + N2 + P."""
    # With one pool, offload page h has the number N + 1 + h. N is NO_PAGE.
    if not self.offload_pages:
      return self.total_pages
    return self.total_pages + self.offload_numbers.total

  @property
  def slot_tokens(self) -> int:
    """The tokens for which one slot has room, M * S."""
    return self.pages_per_slot * self.page_size


def _as_counts(name: str, value: Any, minimum: int) -> int | tuple[int, ...]:
  """Converts a number, or one for each pool.

  A tuple of one number or of zeros becomes an int.
  """
  if not isinstance(value, tuple):
    return as_count(name, value, minimum)
  counts = tuple(as_count(name, count, minimum) for count in value)
  if not counts:
    refuse(ValueError, name, "a number, or one for each pool", value)
  return counts if any(counts) and counts[1:] else counts[0]


def by_pool(counts: int | tuple[int, ...]) -> tuple[int, ...]:
  """Returns the number of each pool; an int is the number of the only one."""
  return (counts,) if isinstance(counts, int) else counts
