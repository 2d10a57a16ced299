"""How much of a prompt is found: full attention, windows, chunks, drafts."""

import pytest

import jaxkv
from jaxkv import ChunkedLocal
from jaxkv import FullAttention
from jaxkv import SlidingWindow
from tests.cache.by_hand import NONE
from tests.cache.by_hand import PAGES
from tests.cache.by_hand import freed
from tests.cache.by_hand import held
from tests.cache.by_hand import ints
from tests.cache.by_hand import match
from tests.cache.by_hand import table
from tests.cache.by_hand import without

pytestmark = pytest.mark.slow


class TestFullAttention:
  @pytest.mark.parametrize(
    ("gone", "tokens"),
    # Ten tokens in pages 1 to 5: a prefix ends before the first page missing.
    [((), 10), ((5,), 8), ((3,), 4), ((3, 5), 4), ((1,), 0)],
  )
  def test_every_page_of_a_prefix_is_needed(self, gone, tokens):
    state = without(freed(10, FullAttention()), *gone)
    assert match(state, 11) == (tokens, [list(range(1, tokens // 2 + 1))])

  def test_one_token_is_left_over(self):
    state = freed(10, FullAttention())
    found = [match(state, length)[0] for length in (1, 2, 3, 4, 5, 10, 11, 16)]
    assert found == [0, 0, 2, 2, 4, 8, 10, 10]


class TestWindow:
  def test_after_the_window_moved_on(self):
    state, _ = jaxkv.recycle(held(10, SlidingWindow(4)))
    assert table(state) == [[0, 0, 0, 4, 5]]
    assert match(state, 11) == (10, [[NONE, NONE, NONE, 4, 5]])
    # Pages left behind are cached until they are taken.
    assert match(state, 7) == (6, [[NONE, 2, 3]])

  @pytest.mark.parametrize(
    ("gone", "tokens"),
    [
      # A window of 4 needs two pages, fewer only at the start.
      ((), 10),
      ((1, 2, 3), 10),
      ((5,), 8),
      ((4,), 6),
      ((3, 5), 4),
      ((2, 4), 2),
      ((2, 3, 5), 2),
      ((1, 3, 5), 0),
      ((1, 2, 4), 0),
    ],
  )
  def test_two_pages_in_a_row(self, gone, tokens):
    state = without(freed(10, SlidingWindow(4)), *gone)
    assert match(state, 11)[0] == tokens


class TestHybrid:
  @pytest.mark.parametrize(
    ("gone", "tokens", "pages"),
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
  def test_all_groups_must_go_on(self, gone, tokens, pages):
    kinds = (FullAttention(), SlidingWindow(4), SlidingWindow(4))
    state = without(freed(8, *kinds), *gone)
    assert match(state, 9) == (tokens, pages)

  def test_hits_end_where_all_groups_end_a_page(self):
    """Pages of 4 and of 2 tokens, ten tokens: pages 1-3 and 4-8."""
    state = held(10, FullAttention(page_size=4), SlidingWindow(3))
    # Before the last token of four the window needs one page.
    assert jaxkv.cached_pages(state) == [1, 2, 5, 7]
    assert match(state, 10) == (8, [[1, 2], [NONE, NONE, NONE, 7]])
    assert match(state, 8) == (4, [[1], [NONE, 5]])
    assert match(state, 4) == (0, [[], []])
    state, _ = jaxkv.free(state, slots=ints(0))
    wanted = [8, 6, 4, 3, *range(9, PAGES), 2, 1, 7, 5]
    assert jaxkv.free_pages(state) == wanted


class TestChunks:
  @pytest.mark.parametrize(
    ("gone", "tokens", "pages"),
    # Ten tokens: full attention has pages 1 to 5, chunks of 4 have 6 to 10.
    [
      ((), 10, [NONE, NONE, NONE, NONE, 10]),
      # At eight tokens a chunk has just ended: no page is needed.
      ((10,), 8, [NONE] * 4),
      ((6, 7, 8, 9, 10), 8, [NONE] * 4),
      ((5, 6, 7, 9), 8, [NONE] * 4),
      ((4, 8), 4, [NONE] * 2),
      ((4, 9), 6, [NONE, NONE, 8]),
    ],
  )
  def test_earlier_chunks_are_not_missed(self, gone, tokens, pages):
    state = without(freed(10, FullAttention(), ChunkedLocal(4)), *gone)
    found, (full, chunk) = match(state, 11)
    assert (found, chunk) == (tokens, pages)
    assert full == list(range(1, tokens // 2 + 1))

  def test_a_hit_on_nothing_is_none(self):
    state = freed(10, ChunkedLocal(4))
    assert match(state, 9) == (0, [[]])
    assert match(state, 11) == (10, [[NONE] * 4 + [5]])


class TestDraftModel:
  def test_the_last_page_is_computed_again(self):
    state = freed(8, FullAttention(), use_eagle=True)
    assert match(state, 9) == (6, [[1, 2, 3]])
    assert match(state, 8) == (4, [[1, 2]])
    assert match(state, 3) == (0, [[]])

  def test_a_window_needs_the_page_behind(self):
    state = freed(8, SlidingWindow(4), use_eagle=True)
    assert match(state, 9) == (6, [[NONE, 2, 3]])
    assert match(without(state, 4), 9) == (4, [[1, 2]])
    assert match(without(state, 1), 9) == (6, [[NONE, 2, 3]])

  def test_one_page_for_all_groups_together(self):
    """A page is left out once, not once by each kind."""
    kinds = (FullAttention(), SlidingWindow(4), SlidingWindow(6))
    state = freed(12, *kinds, use_eagle=True)
    tokens, pages = match(state, 13)
    assert tokens == 10
    assert pages[0] == [1, 2, 3, 4, 5]
    assert pages[1] == [NONE, NONE, NONE, 10, 11]
    assert pages[2] == [NONE, NONE, 15, 16, 17]
