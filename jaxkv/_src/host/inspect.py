"""Reads a manager: its requests, pages, events and statistics."""

import itertools

from jaxkv._src.cache.group_kinds import FullAttention
from jaxkv._src.cache.pool.offload_pages import Moves
from jaxkv._src.host import allocate
from jaxkv._src.host.atomic import atomic
from jaxkv._src.host.cache_pages import CachePages
from jaxkv._src.host.state import HostState
from jaxkv._src.host.telemetry import Drained
from jaxkv._src.host.telemetry import PrefixCacheStats


class Inspection:
  """The methods of `CacheManager` that allocate, publish and free nothing."""

  def __init__(self, state: HostState):
    self.config = state.config
    self.undo_log = state.undo_log
    self._state = state

  def holds_pages(self, request_id: str) -> bool:
    """True if a request holds pages."""
    return request_id in self._state.held

  @atomic
  def request_ids(self) -> list[str]:
    """Returns the requests that hold pages."""
    return list(self._state.held)

  @property
  @atomic
  def is_full(self) -> bool:
    """True if no slot is vacant, so that no further request is admitted."""
    return not self._state.vacant

  @atomic
  def num_published_tokens(self, request_id: str) -> int:
    """Returns the number of a request's final tokens; 0 without pages."""
    held = self._state.held.get(request_id)
    return 0 if held is None else held.length

  def num_needed_pages(
    self,
    request_id: str,
    num_tokens: int,
    num_state_tokens: int | None = None,
    num_encoder_tokens: int = 0,
    *,
    capped: bool = True,
  ) -> int:
    """Counts the pages that a request needs in addition to those that it holds.

    Args:
      request_id: a request, with or without pages.
      num_tokens: tokens that need pages.
      num_state_tokens: tokens that need states in recurrent groups; None for
        `num_tokens`.
      num_encoder_tokens: encoder tokens that need pages.
      capped: True to count at most `most_pages` for a group without states.
    """
    if num_state_tokens is None:
      num_state_tokens = num_tokens
    columns = [len(pages) for pages in self.get_page_ids(request_id)]
    return allocate.num_needed_pages(
      self._state,
      columns,
      (num_tokens, num_state_tokens, num_encoder_tokens),
      is_new=not columns[self._state.options.first_self_group],
      capped=capped,
    )

  @atomic
  def get_page_ids(self, request_id: str) -> tuple[list[int], ...]:
    """Returns a request's pages by group; empty lists if it holds none."""
    held = self._state.held.get(request_id)
    if held is None:
      return self.create_empty_page_list().pages
    return tuple(table[:] for table in held.tables)

  def create_empty_page_list(self) -> CachePages:
    """Returns empty pages, with a list for each group."""
    return CachePages(tuple([[] for _ in self._state.groups]))

  @atomic
  def get_num_common_prefix_pages(self, request_id: str) -> list[int]:
    """Counts a request's leading pages that all requests hold, by group.

    The count is 0 for groups other than `FullAttention`.
    """
    state = self._state
    references, pins = state.pool.ref_count, state.pool.pin_count

    def is_common(page: int) -> bool:
      return references[page] - pins[page] == len(state.held)

    common = [0] * self.config.num_groups
    held = state.held.get(request_id)
    for group, kind in enumerate(self.config.groups):
      if held is not None and isinstance(kind, FullAttention):
        pages = itertools.takewhile(is_common, held.tables[group])
        common[group] = len(list(pages))
    return common

  @atomic
  def make_prefix_cache_stats(self) -> PrefixCacheStats:
    """Returns the statistics of the prefix cache since the last call."""
    return self._state.take_statistics()

  @atomic
  def take_events(self) -> Drained:
    """Returns the events of the prefix cache since the last call.

    Raises:
      ValueError: `num_events` is 0.
    """
    if self._state.events is None:
      raise ValueError(
        "`num_events` must be at least 1 for events; make the CacheManager "
        "with the number of events between two readings."
      )
    return self._state.events.drain()

  @atomic
  def take_new_page_ids(self) -> list[int]:
    """Returns the pages allocated since the last call, sorted, for zeroing.

    Raises:
      ValueError: `track_new_pages` is False.
    """
    if self._state.pool.new is None:
      raise ValueError(
        "`track_new_pages` must be True for take_new_page_ids, got False; make "
        "the CacheManager with track_new_pages=True."
      )
    return self._state.pool.take_new()

  @atomic
  def take_moves(self) -> Moves:
    """Returns the moves between device and offload memory since the last call.

    Perform them with `jaxkv.kv.move` before anything is written to the pages
    that were allocated since the last call. The NumPy arrays of the result are
    int32[X], where X is a multiple of `num_pages`, except for `count`.

    Raises:
      ValueError: `offload_pages` is 0.
    """
    if self._state.pool.saved is None:
      raise ValueError(
        "`offload_pages` must be at least 1 for moves; make the CacheManager "
        "with the number of offload pages."
      )
    return self._state.pool.saved.take_moves()

  @atomic
  def free_queue(self) -> list[int]:
    """Returns the free pages in eviction order."""
    return self._state.pool.queue.in_order()

  @atomic
  def cached_page_ids(self) -> set[int]:
    """Returns the pages that a lookup can find.

    Offload page h has the number `num_pages + 1 + h`.
    """
    return set(self._state.pool.cached_pages())

  @property
  @atomic
  def num_free_pages(self) -> int:
    """The number of free pages."""
    return self._state.pool.num_free

  @property
  def usage(self) -> float:
    """The fraction of usable pages, without the null page, that are held."""
    return 1 - self.num_free_pages / (self.config.total_pages - 1)
