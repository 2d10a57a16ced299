"""Lengths of hits: full attention, windows, chunks, drafts."""

import pytest

from jaxkv import FullAttention
from jaxkv import SlidingWindow
from tests.cache.by_hand import NONE
from tests.cache.by_hand import after_text
from tests.cache.by_hand import match
from tests.cache.by_hand import without

pytestmark = pytest.mark.slow


class TestFullAttention:
  @pytest.mark.parametrize(
    ("evicted", "tokens"),
    # Ten tokens in pages 1 to 5: a prefix ends before the first page missing.
    [((), 10), ((5,), 8), ((3,), 4), ((3, 5), 4), ((1,), 0)],
  )
  def test_every_page_of_a_prefix_is_needed(self, evicted, tokens):
    state = without(after_text(10, FullAttention()), *evicted)
    assert match(state, 11) == (tokens, [list(range(1, tokens // 2 + 1))])

  def test_one_token_is_left_over(self):
    state = after_text(10, FullAttention())
    lengths = (1, 2, 3, 4, 5, 10, 11, 16)
    num_cached = [match(state, length)[0] for length in lengths]
    assert num_cached == [0, 0, 2, 2, 4, 8, 10, 10]


class TestHybrid:
  @pytest.mark.fast
  @pytest.mark.parametrize(
    ("evicted", "tokens", "pages"),
    # Eight tokens: full attention has pages 1 to 4, the windows of 4 tokens
    # have 5 to 8 and 9 to 12.
    [
      ((), 8, [[1, 2, 3, 4], [NONE, NONE, 7, 8], [NONE, NONE, 11, 12]]),
      # What no window looks at is not missed.
      (
        (5, 6, 9, 10),
        8,
        [[1, 2, 3, 4], [NONE, NONE, 7, 8], [NONE, NONE, 11, 12]],
      ),
      ((1,), 0, [[], [], []]),
      ((4, 8, 12), 6, [[1, 2, 3], [NONE, 6, 7], [NONE, 10, 11]]),
      ((4,), 6, [[1, 2, 3], [NONE, 6, 7], [NONE, 10, 11]]),
      ((8,), 6, [[1, 2, 3], [NONE, 6, 7], [NONE, 10, 11]]),
      ((7,), 4, [[1, 2], [5, 6], [9, 10]]),
      # Each group alone would have six tokens, or four.
      ((8, 11), 4, [[1, 2], [5, 6], [9, 10]]),
      ((7, 9), 0, [[], [], []]),
      ((7, 10), 2, [[1], [5], [9]]),
    ],
  )
  def test_hits_end_where_all_groups_have_pages(self, evicted, tokens, pages):
    kinds = (FullAttention(), SlidingWindow(4), SlidingWindow(4))
    state = without(after_text(8, *kinds), *evicted)
    assert match(state, 9) == (tokens, pages)


class TestDraftModel:
  def test_the_last_page_is_computed_again(self):
    state = after_text(8, FullAttention(), use_eagle=True)
    assert match(state, 9) == (6, [[1, 2, 3]])
    assert match(state, 8) == (4, [[1, 2]])
    assert match(state, 3) == (0, [[]])

  def test_a_window_needs_the_page_behind(self):
    state = after_text(8, SlidingWindow(4), use_eagle=True)
    assert match(state, 9) == (6, [[NONE, 2, 3]])
    assert match(without(state, 4), 9) == (4, [[1, 2]])
    assert match(without(state, 1), 9) == (6, [[NONE, 2, 3]])

  def test_one_page_less_for_all_groups_together(self):
    """A page is left out once, not once by each kind."""
    kinds = (FullAttention(), SlidingWindow(4), SlidingWindow(6))
    state = after_text(12, *kinds, use_eagle=True)
    tokens, pages = match(state, 13)
    assert tokens == 10
    assert pages[0] == [1, 2, 3, 4, 5]
    assert pages[1] == [NONE, NONE, NONE, 10, 11]
    assert pages[2] == [NONE, NONE, 15, 16, 17]
