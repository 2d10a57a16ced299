"""The static sizes and options of a cache."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheConfig:
  """Everything about a cache that is fixed when a program is compiled.

  Hashable, so that it can be a static field of the state and a static
  argument of a jitted function.

  Attributes:
    num_pages: N, pages in the pool; page 0 is the null page and is never
      handed out, so `num_pages - 1` can be used.
    page_size: S, tokens a page.
    num_slots: B, sequences that can be held at once.
    pages_per_slot: M, pages that one sequence can hold in one group; a slot
      has room for `pages_per_slot * page_size` tokens.
    num_groups: G, groups of layers. Every group has a page table of its own
      and all draw from one pool.
    prefix_caching: whether full pages are hashed and found again. Switched
      off, the state has no keys, no tokens and no index at all.
    unhashed_first: where a page without a key goes when its last reference is
      given back: True, to the front of the free queue (it is useless, so it
      is used first); False, to the back like every other page.
    merge_duplicates: whether a page that becomes full while an equal one is
      already cached is replaced by that one in its page table, so that it
      goes back to the pool at once.
    seed: the secret of the page keys. Whoever does not know it cannot make
      two prefixes collide.

  Raises:
    TypeError: a size is not an int.
    ValueError: a size is too small.
  """

  num_pages: int
  page_size: int
  num_slots: int
  pages_per_slot: int
  num_groups: int = 1
  prefix_caching: bool = True
  unhashed_first: bool = True
  merge_duplicates: bool = False
  seed: int = 0

  def __post_init__(self):
    smallest = {
      "num_pages": 2,
      "page_size": 1,
      "num_slots": 1,
      "pages_per_slot": 1,
      "num_groups": 1,
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
    if max(self.num_pages, self.slot_tokens) > 2**28:
      raise ValueError(
        "CacheConfig.num_pages and pages_per_slot * page_size must be at most "
        f"2**28 (every index is below 2**30), got {self.num_pages} and "
        f"{self.slot_tokens}."
      )
    if self.num_groups * self.num_slots * self.pages_per_slot >= 2**31:
      raise ValueError(
        "CacheConfig.num_groups * num_slots * pages_per_slot must be below "
        "2**31 (pages are counted in int32); make slots shorter or fewer."
      )
    if self.merge_duplicates and not self.prefix_caching:
      raise ValueError(
        "CacheConfig.merge_duplicates needs prefix_caching=True: without keys "
        "no two pages are known to be equal."
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
