"""Converts the free queue of a manager to a `FreeQueue`, and back."""

from typing import Any

import numpy as np

from jaxkv._src.arrays.indexing import NOWHERE
from jaxkv._src.cache.page_numbers import PageNumbers
from jaxkv._src.cache.pool import free_queue
from jaxkv._src.cache.pool.free_queue import FreeQueue


def from_order(num_pages: int, order: list[int]) -> FreeQueue:
  """Returns the queue of one pool, of NumPy arrays, in eviction order."""
  # No entry is stale, so the entries fill the beginning of the ring.
  pages = np.array(order, np.int32)
  numbers = PageNumbers((num_pages,))
  ring = np.zeros((free_queue.capacity(numbers),), np.int32)
  position = np.full((num_pages,), NOWHERE, np.int32)
  ring[: len(pages)] = pages
  position[pages] = np.arange(len(pages))
  count = np.array([len(pages)], np.int32)
  make: Any = FreeQueue
  return make(
    numbers=numbers,
    ring=ring,
    position=position,
    head=np.zeros_like(count),
    span=count,
    num_free=count,
  )


def in_order(queue: Any) -> list[int]:
  """Returns the pages of the queue of one pool in eviction order."""
  # An entry is stale if its page was removed from the middle of the queue. Then
  # the page's `position` is not the place of the entry.
  capacity = len(queue.ring)
  ring_position = (queue.head[0] + np.arange(queue.span[0])) % capacity
  pages = queue.ring[ring_position]
  return pages[queue.position[pages] == ring_position].tolist()
