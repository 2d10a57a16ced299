"""match, admit: sequences enter with whatever of them is cached."""

import pytest

import jaxkv
from jaxkv import ChunkedLocal
from jaxkv import FullAttention
from jaxkv import SlidingWindow
from jaxkv import Status
from tests.cache.by_hand import NONE
from tests.cache.by_hand import PAGES
from tests.cache.by_hand import after_text
from tests.cache.by_hand import ints
from tests.cache.by_hand import match
from tests.cache.by_hand import pages
from tests.cache.by_hand import prompt
from tests.cache.by_hand import references
from tests.cache.by_hand import rows
from tests.cache.by_hand import table
from tests.cache.by_hand import text
from tests.cache.by_hand import tiny
from tests.cache.by_hand import without
from tests.cache.by_hand import write


def test_a_prompt_gets_pages_for_all_of_its_tokens():
  """Five tokens are three pages of two; none of them is computed yet."""
  state, out = jaxkv.admit(tiny(), ints(0), *prompt(1, 2, 3, 4, 5))
  assert out.code.tolist() == [Status.OK]
  assert out.num_cached_tokens.tolist() == [0]
  assert pages(state, 0) == [1, 2, 3]
  assert state.length.tolist() == [0, 0, 0]


def test_cached_prefix_pages_are_shared():
  """Slot 0 holds 1 2 | 3 4 | 5 in pages 1, 2, 3; the full ones are cached.

  Slot 1 asks for 1 2 | 3 4 | 9: pages 1 and 2 are shared, page 4 is fresh.
  """
  state = write(tiny(), 0, 1, 2, 3, 4, 5)
  hit = jaxkv.match(state, *prompt(1, 2, 3, 4, 9))
  assert hit.pages[0, 0].tolist() == [1, 2, 8, 8]
  state, out = jaxkv.admit(state, ints(1), *prompt(1, 2, 3, 4, 9))
  assert out.num_cached_tokens.tolist() == [4]
  assert pages(state, 1) == [1, 2, 4]
  assert references(state, 1, 2, 3, 4) == [2, 2, 1, 1]


def test_one_token_is_always_left_over():
  """Slot 0 held 1 2 | 3 4. Its query is needed, so 3 4 is computed again."""
  state = write(tiny(), 0, 1, 2, 3, 4)
  state, out = jaxkv.admit(state, ints(1), *prompt(1, 2, 3, 4))
  assert out.num_cached_tokens.tolist() == [2]
  assert pages(state, 1) == [1, 3]


def test_a_prompt_that_does_not_fit_changes_nothing():
  """Seven pages: the first takes 1 to 4, the second needs four more."""
  tokens = rows({0: (1,) * 8, 1: (2,) * 8, 2: (3,) * 5})
  state, out = jaxkv.admit(tiny(), ints(0, 1, 2), tokens, ints(8, 8, 5))
  assert out.code.tolist() == [Status.OK, Status.OUT_OF_PAGES, Status.OK]
  assert pages(state, 0) == [1, 2, 3, 4]
  assert pages(state, 1) == []
  # The third is shorter: rows behind a refused one are served.
  assert pages(state, 2) == [5, 6, 7]


class TestWindows:
  @pytest.mark.slow
  def test_a_hit_has_null_pages(self):
    state = after_text(10, SlidingWindow(4))
    state, out = jaxkv.admit(state, ints(0), text(), ints(11))
    assert out.num_cached_tokens.tolist() == [10]
    # Pages 1 to 3 stay in the queue; the first one in it is taken.
    assert table(state) == [[0, 0, 0, 4, 5, 6]]
    assert jaxkv.free_pages(state) == [*range(7, PAGES), 3, 2, 1]

  @pytest.mark.slow
  def test_an_evicted_part_is_filled_again(self):
    """Two tokens of the text are computed twice; the middle comes back."""
    state = without(after_text(10, SlidingWindow(4)), 2)
    state, out = jaxkv.admit(state, ints(0), text(), ints(7))
    assert out.num_cached_tokens.tolist() == [2]
    assert table(state) == [[1, 6, 7, 8]]
    state, done = jaxkv.commit(state, text(2), ints(5))
    assert done.num_published_pages.tolist() == [2]
    # The older of two equal pages is the hit.
    assert match(state, 7) == (6, [[NONE, 6, 3]])
    assert match(state, 11) == (10, [[NONE, NONE, NONE, 4, 5]])


class TestChunks:
  @pytest.mark.slow
  def test_a_hit_without_pages_of_one_group(self):
    state = without(after_text(10, FullAttention(), ChunkedLocal(4)), 10)
    state, out = jaxkv.admit(state, ints(0), text(), ints(11))
    assert out.num_cached_tokens.tolist() == [8]
    # Page 10 has no key any more, but stays where it is in the queue.
    assert table(state) == [[1, 2, 3, 4, 11, 12], [0, 0, 0, 0, 13, 14]]
    jaxkv.check(state)
