"""What schedulers get from a manager: pages and statistics."""

import dataclasses
from typing import Any
from typing import NamedTuple

from jaxkv._src.host.lookup import Prompt
from jaxkv._src.host.request import KnownRequest
from jaxkv._src.host.request import first_tokens


class Lookup(NamedTuple):
  """What a lookup hashed, so that the allocation need not.

  Attributes:
    token_ids: the sequence as it was then.
    salt, items: of the request, see `KnownRequest`.
    prompt: the hashed tokens on the device.
  """

  token_ids: list[int]
  salt: bytes
  items: tuple[Any, ...]
  prompt: Prompt

  def serves(self, request: KnownRequest, num_tokens: int) -> bool:
    """Whether these are still the request's first tokens."""
    if self.salt != request.salt or self.items != request.items:
      return False
    if num_tokens == len(self.token_ids) == request.num_tokens:
      if isinstance(request.token_ids, list):
        return self.token_ids == request.token_ids
    if num_tokens > len(self.token_ids):
      return False
    return self.token_ids[:num_tokens] == first_tokens(request, num_tokens)


@dataclasses.dataclass(frozen=True)
class CachePages:
  """Page ids by group; the null page 0 where a window has moved on.

  Attributes:
    pages: a list of page ids for each group.
    unhashed: the ids that were not cached when the call that gave them ended.
    shared_prefix_boundary: of a lookup: tokens that some groups had cached when
      not all had; 0 where they agreed.
    lookup: of a lookup: the hashed tokens, for the allocation that follows.
  """

  pages: tuple[list[int], ...]
  unhashed: tuple[list[int], ...] = dataclasses.field(
    default=(), compare=False, repr=False
  )
  shared_prefix_boundary: int = dataclasses.field(
    default=0, compare=False, repr=False
  )
  lookup: "Lookup | None" = dataclasses.field(
    default=None, compare=False, repr=False
  )

  def __add__(self, other: "CachePages") -> "CachePages":
    """Pages of both, group by group."""
    if len(self.pages) != len(other.pages):
      raise ValueError(
        f"CachePages must have {len(self.pages)} groups to be added, got "
        f"{len(other.pages)}."
      )

    def joined(one, two):
      return tuple(a + b for a, b in zip(one, two, strict=True))

    unhashed = (one.get_unhashed_page_ids_all_groups() for one in (self, other))
    return CachePages(joined(self.pages, other.pages), joined(*unhashed))

  def get_page_ids(self) -> tuple[list[int], ...]:
    """Page ids by group."""
    return self.pages

  def get_unhashed_page_ids(self) -> list[int]:
    """Ids of the first group's pages that the call did not leave cached."""
    return [*self.unhashed[0]] if self.unhashed else []

  def get_unhashed_page_ids_all_groups(self) -> tuple[list[int], ...]:
    """Ids that the call did not leave cached, by group."""
    return self.unhashed or self.new_empty().pages

  def new_empty(self) -> "CachePages":
    """No pages, for the same number of groups."""
    return CachePages(tuple([] for _ in self.pages))


class PoppedPages(NamedTuple):
  """Pages of a request that is gone, still in the slot where it stood.

  Attributes:
    slot: the slot.
    pages: page ids by group.
    request_id: the request.
  """

  slot: int
  pages: tuple[list[int], ...]
  request_id: str


@dataclasses.dataclass
class PrefixCacheStats:
  """Prefix-cache hits of the requests admitted since the last reading.

  Attributes:
    requests: requests that got their first pages.
    queries: tokens that they were looked up with.
    hits: queried tokens that were cached.
    preempted_requests, preempted_queries, preempted_hits: the same for requests
      that had been preempted, which are not counted above.
    reset: whether the cache was reset.
    lifetime, idle: evicted pages by age, see `jaxkv.telemetry.Residency`; empty
      without `track_residency`.
  """

  requests: int = 0
  queries: int = 0
  hits: int = 0
  preempted_requests: int = 0
  preempted_queries: int = 0
  preempted_hits: int = 0
  reset: bool = False
  lifetime: list[int] = dataclasses.field(default_factory=list)
  idle: list[int] = dataclasses.field(default_factory=list)

  def counting(
    self, request: KnownRequest, num_hits: int
  ) -> "PrefixCacheStats":
    """The statistics with a request, unless it skips the lookup."""
    if request.skips_lookup:
      return self
    prefix = "preempted_" if request.status == "preempted" else ""
    added = {"requests": 1, "queries": request.num_tokens, "hits": num_hits}
    changes = {
      prefix + name: getattr(self, prefix + name) + amount
      for name, amount in added.items()
    }
    return dataclasses.replace(self, **changes)
