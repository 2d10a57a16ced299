"""The pages in host memory of a manager, with the rules of `pool.host_pages`.

Host page h, 0 .. N2 - 1, has the number N + 1 + h in the lists of `HostPool`.
"""

from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.pool.host_pages import Moves
from jaxkv._src.host.atomic import UndoLog
from jaxkv._src.host.free_list import FreeList

COUNTERS: tuple[str, ...] = ("saved", "restored", "forgotten", "dropped")
"""The counters `<name>_pages` of `jaxkv.Stats`."""


class SavedPages:
  """The queue of the host pages, and the moves that the engine has to make.

  Attributes:
    saves: True if evicted pages are saved; False if `CacheConfig.host_policy`
      restores none.
    queue: all host pages in the order in which they will be overwritten, as
      1 .. N2.
    moves: device page, host page saved to and host page restored from, 0 .. N2
      - 1 or `Moves.NONE`, for each move since `take_moves`.
    counts: `COUNTERS` since the manager was made.
  """

  def __init__(self, config: CacheConfig, undo_log: UndoLog):
    self._undo_log, self._num_pages = undo_log, config.num_pages
    self._num_host_pages = count = config.host_pages
    self.saves = config.max_restored_pages > 0
    self.queue = FreeList(range(1, count + 1), count + 1, undo_log)
    self.moves: list[tuple[int, int, int]] = []
    self.counts = dict.fromkeys(COUNTERS, 0)

  def is_on_host(self, page: int) -> bool:
    """True for the number of a host page."""
    return page > self._num_pages

  def next_targets(self, count: int) -> list[int]:
    """Returns the numbers of the next host pages to overwrite, at most N2.

    They go to the back of the queue.
    """
    pages = self.queue.pop(min(count, self._num_host_pages))
    self.queue.push_back(pages)
    return [self._num_pages + page for page in pages]

  def to_front(self, numbers: Sequence[int]) -> None:
    """Makes host pages the next to be overwritten, in the given order."""
    pages = [number - self._num_pages for number in numbers]
    self.queue.remove(pages)
    self.queue.push_front(pages)

  def count(self, name: str, amount: int) -> None:
    """Adds to a counter."""
    self._undo_log.save_key(self.counts, name)
    self.counts[name] += amount

  def record(
    self,
    pages: Iterable[int],
    saved_to: dict[int, int],
    restored_from: dict[int, int],
  ) -> None:
    """Records a move of each page; the dictionaries have host page numbers."""
    self._undo_log.save_length(self.moves)
    for page in pages:
      targets = saved_to.get(page), restored_from.get(page)
      if targets != (None, None):
        saved, restored = (
          Moves.NONE if number is None else number - self._num_pages - 1
          for number in targets
        )
        self.moves.append((page, saved, restored))

  def take_moves(self) -> Moves:
    """Returns the moves since the last call, as arrays of numpy."""
    moves = as_arrays(self.moves, self._num_pages)
    self._undo_log.replace(self, moves=[])
    return moves


def as_arrays(moves: list[tuple[int, int, int]], num_pages: int) -> Moves:
  """Returns moves, see `SavedPages.moves`, as arrays of numpy."""
  # Whole multiples of N, so that few shapes are compiled.
  size = max(1, -(-len(moves) // num_pages)) * num_pages
  rows = np.zeros((size, 3), np.int32)
  rows[: len(moves)] = np.array(moves, np.int32).reshape(-1, 3)
  page, saved_to, restored_from = rows.T.copy()
  # Typed Any: the arrays are of numpy here, and of jax on a device.
  make: Any = Moves
  return make(
    page=page,
    saved_to=saved_to,
    restored_from=restored_from,
    count=np.int32(len(moves)),
  )
