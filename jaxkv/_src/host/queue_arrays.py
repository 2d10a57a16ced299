"""The free queue of a manager in the form that it has on a device."""

from typing import Any

import numpy as np

from jaxkv._src.arrays.indexing import NOWHERE
from jaxkv._src.cache.pool import free_queue
from jaxkv._src.cache.pool.free_queue import FreeQueue


def from_order(num_pages: int, order: list[int]) -> FreeQueue:
  """Returns a queue of the pages, with arrays of numpy."""
  # No entry is stale, so the queue is the ring's beginning.
  pages = np.array(order, np.int32)
  ring = np.zeros((free_queue.capacity(num_pages),), np.int32)
  position = np.full((num_pages,), NOWHERE, np.int32)
  ring[: len(pages)] = pages
  position[pages] = np.arange(len(pages))
  head, count = np.int32(0), np.int32(len(pages))
  make: Any = FreeQueue
  return make(
    ring=ring, position=position, head=head, span=count, num_free=count
  )


def in_order(queue: Any) -> list[int]:
  """Returns the pages of a queue of numpy in eviction order."""
  # A page that left the middle of the queue leaves a stale entry. The page's
  # position no longer names the place of the entry.
  capacity = len(queue.ring)
  place = (int(queue.head) + np.arange(int(queue.span))) % capacity
  pages = queue.ring[place]
  return pages[queue.position[pages] == place].tolist()
