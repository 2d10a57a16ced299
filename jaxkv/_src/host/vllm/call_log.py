"""Reads the blocks that each call cached from the core's event log."""

from collections.abc import Sequence
from typing import Any

from jaxkv._src.cache.telemetry import STORED
from jaxkv._src.host.types import CachePages
from jaxkv._src.host.vllm.events import EventReader
from jaxkv._src.host.vllm.events import KVCacheEvent
from jaxkv._src.host.vllm.page_cache import PageCache


class CallLog:
  """Reads the event log after each call that cached blocks.

  Log rows do not name a request, so they are read before another request caches
  anything. `expect` names the request before its call, so that the next call
  reads the rows of an interrupted one.
  """

  def __init__(self, cache: PageCache, reader: EventReader):
    self._cache = cache
    self._reader = reader
    self._logged = cache.config.event_log > 0
    # The request of the last call, and how many of its tokens were cached.
    self._unread: tuple[Any, int] | None = None
    # Columns that requests with external tokens began with.
    self._attached: dict[str, list[int]] = {}
    # States that were cached: group, page and the tokens before its end.
    self._states: dict[str, list[tuple[int, int, int]]] = {}

  def expect(self, request: Any) -> None:
    """Names the request whose pages the next call may cache."""
    if self._logged:
      before = self._cache.num_published_tokens(request.request_id)
      self._unread = request, before

  def read(self, hit: CachePages | None = None, behind: int = 0) -> None:
    """Reads the rows of the last call, unless they are read already.

    Args:
      hit: pages with which its request began.
      behind: tokens with which it began; 0 if it began before, or with none.
    """
    if self._unread is None:
      return
    request, before = self._unread
    after = self._cache.num_published_tokens(request.request_id)
    size = self._cache.config.page_size
    if behind or after // size > before // size:
      self._read_rows(request, before, after, hit, behind)
    self._unread = None

  def forget(self, request: Any) -> None:
    """Reads the pending rows of a request that is about to lose its pages."""
    self.read()
    self._attached.pop(request.request_id, None)
    self._states.pop(request.request_id, None)

  def events(self) -> list[KVCacheEvent]:
    """Returns the events that `take` would return."""
    self.read()
    if self._logged:
      rows, _ = self._cache.read_log()
      self._reader.read(rows)
    return self._reader.queue

  def take(self) -> list[KVCacheEvent]:
    """Returns the events since the last call."""
    self.events()
    return self._reader.take()

  def take_states(self) -> dict[str, list[tuple[int, int, int]]]:
    """Returns states cached since the last call, of requests with pages.

    For each request: group, page, and tokens up to the page's end.
    """
    self.read()
    states, self._states = self._states, {}
    return states

  def _read_rows(
    self,
    request: Any,
    before: int,
    after: int,
    hit: CachePages | None,
    behind: int,
  ) -> None:
    rows, columns = self._cache.read_log(before, after, behind)
    name, first = request.request_id, columns.first
    if behind:
      self._attached[name] = _most(columns.skipped, _lengths(hit, first))
    first = _most(first, self._attached.get(name, first))
    spans = list(zip(first, columns.stop, strict=True))
    self._reader.read(rows, request, spans)
    for row in rows:
      kind = self._cache.config.groups[row.group]
      if row.kind == STORED and kind.holds_states:
        end = (row.column + 1) * self._cache.config.page_sizes[row.group]
        state = row.group, row.page, end
        self._states.setdefault(name, []).append(state)
    if len(self._reader.names) > 2 * self._cache.config.num_pages:
      self._reader.forget_all_but(self._cache.cached_keys())


def _lengths(hit: CachePages | None, like: Sequence[int]) -> list[int]:
  return [len(column) for column in hit.pages] if hit else [0] * len(like)


def _most(one: Sequence[int], other: Sequence[int]) -> list[int]:
  return [max(pair) for pair in zip(one, other, strict=True)]
