"""free: a sequence ends, and its pages come back in the order of eviction."""

import pytest

import jaxkv
from jaxkv import Status
from tests.cache import by_hand


def test_uncached_pages_are_reused_first():
  """Slot 0 held 1 2 | 3 4 | 5 in pages 1, 2, 3; page 3 was never full.

  It goes to the front. Cached pages go to the back, the last one first: its
  loss shortens the prefix that can be found, but leaves the rest.
  """
  state = by_hand.write(by_hand.tiny(), 0, 1, 2, 3, 4, 5)
  state, out = jaxkv.free(state, slots=by_hand.ints(0))
  assert out.code.tolist() == [Status.OK]
  assert jaxkv.free_pages(state) == [3, 4, 5, 6, 7, 2, 1]
  hit = jaxkv.match(state, *by_hand.prompt(1, 2, 3, 4, 5))
  assert hit.num_cached_tokens.tolist() == [4]


@pytest.mark.slow
def test_lru_appends_all_freed_pages():
  state = by_hand.write(by_hand.tiny(free_policy="lru"), 0, 1, 2, 3, 4, 5)
  state, _ = jaxkv.free(state, slots=by_hand.ints(0))
  assert jaxkv.free_pages(state) == [4, 5, 6, 7, 3, 2, 1]


def test_shared_pages_stay():
  """Slots 0 and 1 share page 1; pages 2 and 3 are their own."""
  state = by_hand.write(by_hand.tiny(), 0, 0, 1, 2)
  state, _ = jaxkv.fork(state, by_hand.ints(0), by_hand.ints(1))
  state, _ = jaxkv.free(state, slots=by_hand.ints(0))
  assert by_hand.references(state, 1, 2, 3) == [1, 0, 1]
  assert jaxkv.free_pages(state) == [2, 4, 5, 6, 7]


def test_a_slot_is_freed_once():
  state = by_hand.write(by_hand.tiny(), 0, 1, 2)
  state, out = jaxkv.free(state, slots=by_hand.ints(0, 0, 9))
  assert out.code.tolist() == [Status.OK, Status.SLOT_EMPTY, Status.BAD_SLOT]
  assert jaxkv.free_pages(state) == [2, 3, 4, 5, 6, 7, 1]
