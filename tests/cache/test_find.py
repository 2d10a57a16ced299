"""Lengths of hits of full attention beside windows."""

import pytest

from jaxkv import FullAttention
from jaxkv import SlidingWindow
from tests.cache.by_hand import NONE
from tests.cache.by_hand import after_text
from tests.cache.by_hand import match
from tests.cache.by_hand import without


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
def test_hits_end_where_all_groups_have_pages(evicted, tokens, pages):
  kinds = (FullAttention(), SlidingWindow(4), SlidingWindow(4))
  state = without(after_text(8, *kinds), *evicted)
  assert match(state, 9) == (tokens, pages)
