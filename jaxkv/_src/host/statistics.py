"""How often requests found something of themselves, and what was evicted."""

import dataclasses
from typing import Any

from jaxkv._src.host.requests import skips_lookup
from jaxkv._src.host.requests import status_of


@dataclasses.dataclass
class PrefixCacheStats:
  """Requests that got their first pages since the last reading.

  Attributes:
    requests: how many.
    queries: tokens that they were looked up with.
    hits: those of them that were cached.
    preempted_requests, preempted_queries, preempted_hits: the same of requests
      that had been preempted, which are not counted above.
    reset: whether the cache was reset in between.
    lifetime, idle: pages evicted in between by their ages, see
      `jaxkv.Residency`; empty without `track_residency`.
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

  def record(self, request: Any, num_tokens: int, num_hits: int) -> None:
    """Counts a request, unless nothing of it is ever looked up."""
    if skips_lookup(request):
      return
    if status_of(request) == "preempted":
      self.preempted_requests += 1
      self.preempted_queries += num_tokens
      self.preempted_hits += num_hits
    else:
      self.requests += 1
      self.queries += num_tokens
      self.hits += num_hits
