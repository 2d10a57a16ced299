"""Which full pages are published, and when."""

import jaxkv
from jaxkv import FullAttention
from jaxkv import SlidingWindow
from tests.cache.by_hand import held
from tests.cache.by_hand import ints
from tests.cache.by_hand import table
from tests.cache.by_hand import text
from tests.cache.by_hand import tiny
from tests.cache.by_hand import write


def test_pages_that_no_hit_can_use_are_not_published():
  """A window of 2 beside full attention with pages of 4, seven tokens.

  Full attention has 0 1 2 3 | 4 5 6 in pages 1 and 2; the window has 0 1 | 2 3
  | 4 5 | 6 in pages 3 to 6. A hit ends at four tokens, where the window looks
  at token 3 alone: of its pages only page 4 is published.
  """
  groups = (FullAttention(page_size=4), SlidingWindow(2))
  state = write(tiny(*groups), 0, *range(7))
  assert table(state) == [[1, 2], [3, 4, 5, 6]]
  assert jaxkv.cached_pages(state) == [1, 4]


def test_what_waits_is_published_by_the_next_commit():
  """Of six tokens the last two fill a page, but not one of each group."""
  kinds = (FullAttention(page_size=4), FullAttention())
  state = held(6, *kinds)
  assert table(state) == [[1, 2], [3, 4, 5]]
  assert jaxkv.cached_pages(state) == [1, 3, 4]
  state, _ = jaxkv.allocate(state, ints(2))
  state, done = jaxkv.commit(state, text(6), ints(2))
  assert table(state) == [[1, 2], [3, 4, 5, 6]]
  assert done.num_published_pages.tolist() == [3]


def test_forks_that_share_a_page_without_a_key():
  kinds = (FullAttention(), FullAttention(page_size=4))
  state = held(3, *kinds, num_slots=2)
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
  state = held(10, *kinds, use_eagle=True)
  assert table(state) == [[1, 2], [3, 4, 5, 6, 7]]
  # Of the window the last page before eight tokens and the one behind.
  assert jaxkv.cached_pages(state) == [1, 6, 7]
