"""Publication of full pages: of hits, by commits, of forks and drafts."""

import pytest

import jaxkv
from jaxkv import FullAttention
from jaxkv import SlidingWindow
from tests.cache.by_hand import ints
from tests.cache.by_hand import pages
from tests.cache.by_hand import references
from tests.cache.by_hand import rows
from tests.cache.by_hand import table
from tests.cache.by_hand import text
from tests.cache.by_hand import tiny
from tests.cache.by_hand import with_text
from tests.cache.by_hand import write


@pytest.mark.slow
def test_pages_without_a_possible_hit_are_not_published():
  """A window of 2 beside full attention with pages of 4, seven tokens.

  Full attention has 0 1 2 3 | 4 5 6 in pages 1 and 2; the window has 0 1 | 2 3
  | 4 5 | 6 in pages 3 to 6. A hit ends at four tokens, where the window looks
  at token 3 alone: of its pages only page 4 is published.
  """
  groups = (FullAttention(page_size=4), SlidingWindow(2))
  state = write(tiny(*groups), 0, *range(7))
  assert table(state) == [[1, 2], [3, 4, 5, 6]]
  assert jaxkv.cached_pages(state) == [1, 4]


@pytest.mark.slow
def test_waiting_pages_are_published_by_the_next_commit():
  """Of six tokens the last two fill a page, but not one of each group."""
  kinds = (FullAttention(page_size=4), FullAttention())
  state = with_text(6, *kinds)
  assert table(state) == [[1, 2], [3, 4, 5]]
  assert jaxkv.cached_pages(state) == [1, 3, 4]
  state, _ = jaxkv.allocate(state, ints(2))
  state, done = jaxkv.commit(state, text(6), ints(2))
  assert table(state) == [[1, 2], [3, 4, 5, 6]]
  assert done.num_published_pages.tolist() == [3]


@pytest.mark.slow
def test_forks_that_share_a_page_without_a_key():
  kinds = (FullAttention(), FullAttention(page_size=4))
  state = with_text(3, *kinds, num_slots=2)
  assert jaxkv.cached_pages(state) == []
  state, _ = jaxkv.fork(state, ints(0), ints(1))
  assert table(state, 1) == [[1, 4], [5]]
  state, _ = jaxkv.allocate(state, ints(1, 1))
  state, done = jaxkv.commit(state, ints([7], [8]), ints(1, 1))
  # Page 1 is published once, by the first.
  assert done.num_published_pages.tolist() == [3, 2]
  assert jaxkv.cached_pages(state) == [1, 2, 3, 4, 5]
  jaxkv.check(state)


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
