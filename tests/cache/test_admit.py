"""match, admit: sequences enter with whatever of them is cached."""

import jaxkv
from jaxkv import Status
from tests.cache.by_hand import ints
from tests.cache.by_hand import pages
from tests.cache.by_hand import prompt
from tests.cache.by_hand import references
from tests.cache.by_hand import rows
from tests.cache.by_hand import tiny
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
