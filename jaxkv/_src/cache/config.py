"""Static sizes and options of a cache."""

import dataclasses
import functools
import math

from jaxkv._src.arrays.arguments import as_count
from jaxkv._src.arrays.arguments import check_bool
from jaxkv._src.arrays.arguments import refuse
from jaxkv._src.cache.group_kinds import FullAttention
from jaxkv._src.cache.group_kinds import GroupKind
from jaxkv._src.cache.group_kinds import GroupSizes

_CAN_BE_0 = ("offload_pages", "page_bytes")


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheConfig:
  """The static sizes and options of a cache, fixed when a program is compiled.

  A config is hashable, so it can be a static argument of `jax.jit`.

  Attributes:
    num_pages: N, pages in the pool. Page 0 is the null page, which holds no
      tokens, so `num_pages - 1` pages are usable.
    page_size: S, tokens per page. A group can have larger pages, whose size is
      a multiple of S tokens. Sequences are hashed in blocks of S tokens.
    num_slots: B, the maximal number of sequences in the cache at a time.
    pages_per_slot: M, columns of a slot's row in the page table. A sequence has
      at most `pages_per_slot * page_size` tokens.
    groups: the kinds of the G layer groups. Every group has a separate page
      table; all groups share one pool.
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
      selects one prefix every k tokens.
    offload_pages: N2, the number of offloaded pages, 0 for none. Cached pages
      that the device evicts are saved there. See `jaxkv.kv.move`.
    offload_policy: the pages that can return from offload memory. "always":
      all. "never": none. A `OffloadPolicy`: pages whose return takes less time
      than computing their tokens again. A lookup treats other offloaded pages
      as not cached. If no page can return, evicted pages are not saved.
    page_bytes: bytes of a page over all layers, `jaxkv.kv.page_bytes(kv)`. Only
      a `OffloadPolicy` needs this number; 0 if it is not known.

  Raises:
    TypeError: a field without choices has the wrong type, or `groups` is empty.
    ValueError: a field is out of range, is not one of its choices, or cannot be
      combined with another field.
  """

  num_pages: int
  page_size: int
  num_slots: int
  pages_per_slot: int
  groups: tuple[GroupKind, ...] = (FullAttention(),)
  prefix_caching: bool = True
  free_policy: str = "unhashed_first"
  prefix_rules: str = "current"
  merge_duplicates: bool = False
  use_eagle: bool = False
  prefix_retention_interval: int | None = None
  offload_pages: int = 0
  offload_policy: str | OffloadPolicy = "always"
  page_bytes: int = 0

  def __post_init__(self):
    minima = {"num_pages": 2} | dict.fromkeys(_CAN_BE_0, 0)
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      name = f"CacheConfig.{field.name}"
      if field.type is int:
        # An int in place of a NumPy integer, which would decide dtypes.
        count = as_count(name, value, minima.get(field.name, 1))
        object.__setattr__(self, field.name, count)
      if field.type is bool:
        check_bool(name, value)
    _check_choice("free_policy", self.free_policy, ("unhashed_first", "lru"))
    _check_choice("prefix_rules", self.prefix_rules, ("current", "classic"))
    self._check_offload_policy()
    self._check_groups()
    self._check_sizes()
    self._check_retention()
    self._check_caching()

  def _check_offload_policy(self):
    if not isinstance(self.offload_policy, OffloadPolicy):
      choices = "always", "never"
      _check_choice(
        "offload_policy", self.offload_policy, choices, "an OffloadPolicy"
      )
    elif not self.page_bytes:
      raise ValueError(
        "`CacheConfig.page_bytes` must be at least 1 with an OffloadPolicy, "
        "got 0; use jaxkv.kv.page_bytes(kv) of a kv made with "
        'offload_policy="always".'
      )

  def _check_sizes(self):
    # The ring of a free queue has up to 4 positions for each page. Positions
    # must be below NOWHERE, 2**30, because the queue uses larger numbers as
    # marks.
    if max(self.num_numbers, self.slot_tokens) > 2**28:
      raise ValueError(
        "`CacheConfig.num_pages` and `offload_pages` together, and "
        "`pages_per_slot * page_size`, must be at most 2**28, got "
        f"{self.num_numbers} and {self.slot_tokens}; use larger pages."
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

  def _check_caching(self):
    needs_keys = {
      "merge_duplicates": "equal pages are recognized by their keys",
      "offload_pages": "only cached pages move to offload memory",
    }
    for name, reason in needs_keys.items():
      if getattr(self, name) and not self.prefix_caching:
        raise ValueError(
          f"`CacheConfig.{name}` needs prefix_caching=True: {reason}."
        )

  def _check_retention(self):
    interval = self.prefix_retention_interval
    if interval is None:
      return
    name = "CacheConfig.prefix_retention_interval"
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
  def page_sizes(self) -> tuple[int, ...]:
    """The page size of each group, in tokens."""
    return tuple(kind.page_size or self.page_size for kind in self.groups)

  @functools.cached_property
  def sizes(self) -> GroupSizes:
    """The functions that convert token counts to page counts of each group."""
    return GroupSizes(self.groups, self.page_sizes, self.slot_tokens)

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
  def publishes_by_prompt(self) -> bool:
    """True if the published pages of a sequence depend on its prompt length."""
    return self.prefix_retention_interval is not None

  @property
  def no_page(self) -> int:
    """NO_PAGE = N: the entry of a page-table column without a page."""
    # Out of range, so that a scatter drops the update. JAX would wrap a
    # negative index to a page.
    return self.num_pages

  @functools.cached_property
  def max_restored_pages(self) -> int:
    """The largest number of pages to restore for a page's worth of tokens."""
    if isinstance(self.offload_policy, OffloadPolicy):
      min_page_size = min(self.page_sizes)
      return self.offload_policy.max_pages(self.page_bytes, min_page_size)
    return self.num_groups if self.offload_policy == "always" else 0

  @property
  def preferred_pages(self) -> int | None:
    """N, below which a lookup prefers pages; None without offload pages."""
    return self.num_pages if self.offload_pages else None

  @property
  def num_numbers(self) -> int:
    """The number of page numbers: N, or N + 1 + N2 with offload pages."""
    # Offload page h has the number N + 1 + h, because N is NO_PAGE.
    return self.num_pages + (
      1 + self.offload_pages if self.offload_pages else 0
    )

  @property
  def slot_tokens(self) -> int:
    """The tokens for which one slot has room, M * S."""
    return self.pages_per_slot * self.page_size


def _check_choice(
  name: str, value: object, choices: tuple[str, ...], extra: str = ""
) -> None:
  if value not in choices:
    extra = extra and f" or {extra}"
    raise ValueError(
      f"`CacheConfig.{name}` must be one of {choices}{extra}, got {value!r}."
    )
