"""Publication of full pages: of drafts, and where several slots merge."""

import pytest

import jaxkv
from jaxkv import FullAttention
from jaxkv import SlidingWindow
from tests.cache.by_hand import ints
from tests.cache.by_hand import pages
from tests.cache.by_hand import references
from tests.cache.by_hand import rows
from tests.cache.by_hand import table
from tests.cache.by_hand import tiny
from tests.cache.by_hand import with_text
from tests.cache.by_hand import write


def test_the_page_behind_is_published():
  """Pages of 2 tokens beside one of 8: 1-2 and 3-7 for ten tokens."""
  kinds = (FullAttention(page_size=8), SlidingWindow(2))
  state = with_text(10, *kinds, use_eagle=True)
  assert table(state) == [[1, 2], [3, 4, 5, 6, 7]]
  # Of the window the last page before eight tokens and the one behind.
  assert jaxkv.cached_pages(state) == [1, 6, 7]


@pytest.mark.slow
def test_a_page_that_several_slots_merge_is_free():
  """Slot 0 has 1 2 | 3 in pages of 2, and slots 1 and 2 fork the same tokens.

  All groups end a page after four tokens, so the forks share a page without a
  key until both have four. Then both merge it into slot 0's page.
  """
  kinds = (FullAttention(), FullAttention(page_size=4))
  state = tiny(*kinds, num_pages=20, merge_duplicates=True)
  state = write(state, 1, 1, 2, 3)
  state, _ = jaxkv.fork(state, ints(1), ints(2))
  shared = pages(state, 1)[0]
  assert pages(state, 2)[0] == shared and references(state, shared) == [2]
  state = write(state, 0, 1, 2, 3, 4)
  first_page = pages(state, 0)[0]
  free = len(jaxkv.free_pages(state))
  state, _ = jaxkv.allocate(state, ints(0, 1, 1))
  state, _ = jaxkv.commit(state, rows({1: (4,), 2: (4,)}), ints(0, 1, 1))
  assert pages(state, 1)[0] == pages(state, 2)[0] == first_page
  assert references(state, first_page, shared) == [3, 0]
  # All three slots hold the same three pages.
  assert table(state, 0) == table(state, 1) == table(state, 2)
  assert len(jaxkv.free_pages(state)) == 19 - 3 > free
  jaxkv.check(state)
