"""Checks the invariants of a pool after a call."""

from typing import Any


def checked_queue(cache: Any) -> list[int]:
  """Returns a manager's free queue, after a check of all its pages."""
  pool = cache.page_pool
  queue = cache.host.free_queue()
  assert len(queue) == len(set(queue)) == pool.get_num_free_pages()
  assert cache.usage == pool.get_usage() == 1 - len(queue) / pool.num_pages
  counts = cache.host.pages.ref_counts()
  assert counts[0] == 0 and 0 not in queue
  for page in range(1, pool.num_pages):
    assert counts[page] >= 0
    assert (page in queue) == (counts[page] == 0)
  num_cached = len(cache.host.cached_page_ids())
  assert 0 <= len(pool.cached_page_hash_to_page) <= num_cached
  return queue
