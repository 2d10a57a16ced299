"""commit: tokens become final, and full pages can be found."""

import pytest

import jaxkv
from jaxkv import Status
from tests.cache.by_hand import ints
from tests.cache.by_hand import pages
from tests.cache.by_hand import prompt
from tests.cache.by_hand import references
from tests.cache.by_hand import rows
from tests.cache.by_hand import tiny
from tests.cache.by_hand import write


def test_a_page_is_published_when_it_is_full():
  """1 2 | 3 in pages 1 and 2; the next token fills page 2."""
  state, _ = jaxkv.allocate(tiny(), ints(4, 0, 0))
  state, out = jaxkv.commit(state, rows({0: (1, 2, 3)}), ints(3, 0, 0))
  assert out.num_published_pages.tolist() == [1, 0, 0]
  assert jaxkv.cached_pages(state) == [1]
  state, out = jaxkv.commit(state, rows({0: (4,)}), ints(1, 0, 0))
  assert out.num_published_pages.tolist() == [1, 0, 0]
  assert jaxkv.cached_pages(state) == [1, 2]
  assert state.length.tolist() == [4, 0, 0]


def test_the_older_of_equal_pages_is_found():
  """Slots 0 and 1 compute 1 2 in pages 1 and 2: both are cached."""
  state = write(write(tiny(), 0, 1, 2), 1, 1, 2)
  assert jaxkv.cached_pages(state) == [1, 2]
  assert jaxkv.match(state, *prompt(1, 2, 3)).pages[0, 0, 0] == 1


@pytest.mark.slow
def test_equal_pages_are_merged_with_merge_duplicates():
  """Slot 1 fills page 2 like page 1, and goes on with page 1 instead."""
  state = write(tiny(merge_duplicates=True), 0, 1, 2)
  state = write(state, 1, 1, 2)
  assert pages(state, 1) == [1]
  assert references(state, 1, 2) == [2, 0]
  # It has no key, so it is the first one to be used again.
  assert jaxkv.free_pages(state) == [2, 3, 4, 5, 6, 7]


def test_tokens_without_a_page_are_refused():
  """One page has room for two tokens."""
  state, _ = jaxkv.allocate(tiny(), ints(2, 0, 0))
  state, out = jaxkv.commit(state, rows({0: (1, 2, 3)}), ints(3, 1, 0))
  assert out.code.tolist() == [Status.NO_ROOM, Status.SLOT_EMPTY, Status.OK]
  assert state.length.tolist() == [0, 0, 0]
