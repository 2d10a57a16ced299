"""Checks what must be true of a pool after every call."""

from typing import Any


def checked(pool: Any) -> list[int]:
  """Returns the queue of a pool, after a check of all its pages."""
  queue = [page.page_id for page in pool.free_page_queue.get_all_free_pages()]
  assert len(queue) == len(set(queue)) == pool.get_num_free_pages()
  loose = pool.free_page_queue.loose
  counts = dict(enumerate(pool.references(pool.pages)))
  assert pool.get_usage() == 1 - len(queue) / pool.num_pages
  assert counts[0] == 0 and 0 not in queue and 0 not in loose
  for page in range(1, pool.num_pages):
    # In exactly one place, but a lookup may find a loose page.
    assert counts[page] >= 0
    assert (page in queue) == (not counts[page] and page not in loose)
  hashes = pool.hashes_in_order()
  hashed = dict(enumerate(pool.are_hashed(pool.pages)))
  assert {page for page, is_hashed in hashed.items() if is_hashed} == {*hashes}
  view = pool.cached_page_hash_to_page
  assert len(view) == len(list(view)) == len({*hashes.values()})
  for name in view:
    assert list(view[name]) == [page for page in hashes if hashes[page] == name]
  return queue
