"""The offloaded pages of a `CacheManager`; see `cache/pool/offload_pages`.

Offload page h, 0 <= h < `CacheConfig.offload_pages`, has the number N + 1 + h
in `HostPool` and in the methods of `SavedPages`, 1 + h in `SavedPages.queue`,
and h in `SavedPages.moves`. N is `CacheConfig.num_pages`.
"""

from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.pool.offload_pages import Moves
from jaxkv._src.host.atomic import UndoLog
from jaxkv._src.host.free_list import FreeList

SAVED_COUNTERS: tuple[str, ...] = ("saved", "restored", "forgotten", "dropped")
"""The names of the counters; `jaxkv.Stats` calls them `saved_pages` etc."""


class SavedPages:
  """The queue of offload pages, and the moves to and from offload memory.

  Attributes:
    saves: True if evicted pages are saved; False if
      `CacheConfig.offload_policy` never restores a page.
    queue: all offload pages, in the order in which they will be overwritten.
    moves: the moves since the last `take_moves`, in order. Each is a device
      page, the offload page to which it is saved, and the offload page from
      which it is restored; `Moves.NONE` for no offload page.
    num_taken: the number of moves that `take_moves` returned before.
    counts: the value of each counter in `SAVED_COUNTERS`.
  """

  def __init__(self, config: CacheConfig, undo_log: UndoLog):
    self._undo_log = undo_log
    self._num_pages = config.total_pages
    self._num_offload_pages = count = config.num_offload_pages
    self.saves = config.max_restored_pages > 0
    self.queue = FreeList(range(1, count + 1), count + 1, undo_log)
    self.moves: list[tuple[int, int, int]] = []
    self.num_taken = 0
    self.counts = dict.fromkeys(SAVED_COUNTERS, 0)

  def is_offloaded(self, page: int) -> bool:
    """True for the number of an offload page."""
    return page > self._num_pages

  def next_targets(self, count: int) -> list[int]:
    """Returns `count` offload pages to overwrite, or all if there are fewer.

    The pages move from the front of the queue to its back.
    """
    pages = self.queue.pop(min(count, self._num_offload_pages))
    # At the back, because their new contents are the latest.
    self.queue.push_back(pages)
    return [self._num_pages + page for page in pages]

  def to_front(self, page_ids: Sequence[int]) -> None:
    """Moves offload pages to the front of the queue, in the given order."""
    pages = [page_id - self._num_pages for page_id in page_ids]
    self.queue.remove(pages)
    self.queue.push_front(pages)

  def count(self, name: str, amount: int) -> None:
    """Adds `amount` to the counter `name`."""
    self._undo_log.save_key(self.counts, name)
    self.counts[name] += amount

  def record(
    self,
    pages: Iterable[int],
    saved_to: dict[int, int],
    restored_from: dict[int, int],
  ) -> None:
    """Records a move of each page that is in `saved_to` or `restored_from`.

    Both dictionaries map device pages to offload pages.
    """
    self._undo_log.save_length(self.moves)
    for page in pages:
      targets = saved_to.get(page), restored_from.get(page)
      if targets != (None, None):
        # `Moves` count offload pages from 0. The first one is N + 1, as N is
        # `CacheConfig.no_page`.
        saved, restored = (
          Moves.NONE if page_id is None else page_id - self._num_pages - 1
          for page_id in targets
        )
        self.moves.append((page, saved, restored))

  def take_moves(self) -> Moves:
    """Returns the moves since the last call, as NumPy arrays."""
    moves = as_arrays(self.moves, self._num_pages, self.num_taken)
    num_taken = self.num_taken + len(self.moves)
    self._undo_log.replace(self, moves=[], num_taken=num_taken)
    return moves


def as_arrays(
  moves: list[tuple[int, int, int]], num_pages: int, start: int
) -> Moves:
  """Converts moves, in the form of `SavedPages.moves`, to NumPy arrays."""
  # The arrays are padded to a multiple of N, so that programs that take them
  # are compiled for few shapes.
  num_rows = max(1, -(-len(moves) // num_pages)) * num_pages
  rows = np.zeros((num_rows, 3), np.int32)
  rows[: len(moves)] = np.array(moves, np.int32).reshape(-1, 3)
  page, saved_to, restored_from = rows.T.copy()
  # `Any`, because the fields of `Moves` are annotated as JAX arrays.
  make: Any = Moves
  return make(
    page=page,
    saved_to=saved_to,
    restored_from=restored_from,
    count=np.int32(len(moves)),
    start=np.uint32(start % 2**32),
  )
