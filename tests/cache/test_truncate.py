"""truncate: a sequence goes back to an earlier length."""

import jax.numpy as jnp
import pytest

import jaxkv
from jaxkv import SlidingWindow
from jaxkv import Status
from tests.cache import by_hand

FIRST = jnp.asarray([True, False, False])


@pytest.mark.slow
def test_pages_behind_the_new_end_are_given_back():
  """Slot 0 held 1 2 | 3 4 | 5 in pages 1, 2, 3 and goes back to two tokens."""
  state = by_hand.write(by_hand.tiny(), 0, 1, 2, 3, 4, 5)
  state, out = jaxkv.truncate(state, by_hand.ints(2, 0, 0), mask=FIRST)
  assert out.code.tolist() == [Status.OK, Status.SKIPPED, Status.SKIPPED]
  assert by_hand.pages(state, 0) == [1]
  # Page 3 was not full and comes first, page 2 can still be found.
  assert jaxkv.free_pages(state) == [3, 4, 5, 6, 7, 2]


def test_a_page_that_is_written_again_loses_its_key():
  """Page 1 was full; from one token on it is filled anew."""
  state = by_hand.write(by_hand.tiny(), 0, 1, 2)
  assert jaxkv.cached_pages(state) == [1]
  state, _ = jaxkv.truncate(state, by_hand.ints(1, 0, 0), mask=FIRST)
  assert by_hand.pages(state, 0) == [1]
  assert jaxkv.cached_pages(state) == []


def test_a_shared_page_is_copied_before_it_is_written_again():
  """Slots 0 and 1 share page 1. Slot 0 goes back into it: copy 1 -> 2."""
  state = by_hand.write(by_hand.tiny(), 0, 1, 2)
  state, _ = jaxkv.fork(state, by_hand.ints(0), by_hand.ints(1))
  state, out = jaxkv.truncate(state, by_hand.ints(1, 0, 0), mask=FIRST)
  assert (out.copies.src.tolist(), out.copies.dst.tolist()) == (
    [1, 8, 8],
    [2, 8, 8],
  )
  assert (by_hand.pages(state, 0), by_hand.pages(state, 1)) == ([2], [1])
  assert by_hand.references(state, 1, 2) == [1, 1]
  assert jaxkv.cached_pages(state) == [1]


def test_lengths_that_a_slot_never_had_are_refused():
  state = by_hand.write(by_hand.tiny(), 0, 1, 2)
  state, out = jaxkv.truncate(state, by_hand.ints(3, 0, 0))
  assert out.code.tolist() == [
    Status.BAD_LENGTH,
    Status.SLOT_EMPTY,
    Status.SLOT_EMPTY,
  ]
  assert state.length.tolist() == [2, 0, 0]


@pytest.mark.slow
def test_lengths_of_recycled_pages_are_refused():
  state, _ = jaxkv.recycle(by_hand.with_text(10, SlidingWindow(4)))
  refused, out = jaxkv.truncate(state, by_hand.ints(7))
  assert out.code.tolist() == [jaxkv.Status.RECYCLED]
  assert by_hand.table(refused) == [[0, 0, 0, 4, 5]]
  state, out = jaxkv.truncate(state, by_hand.ints(9))
  assert out.code.tolist() == [jaxkv.Status.OK]
  assert by_hand.table(state) == [[0, 0, 0, 4, 5]]
  assert jaxkv.cached_pages(state) == [1, 2, 3, 4]


def test_emptied_slots_have_no_skipped_pages():
  """A window had given two pages back; the next sequence holds all of its."""
  state, _ = jaxkv.recycle(by_hand.with_text(8, SlidingWindow(4)))
  assert by_hand.table(state) == [[0, 0, 3, 4]]
  state, out = jaxkv.truncate(state, by_hand.ints(0))
  assert out.code.tolist() == [Status.OK]
  jaxkv.check(state)
  state, _ = jaxkv.allocate(state, by_hand.ints(4))
  assert len(by_hand.table(state)[0]) == 2 and 0 not in by_hand.table(state)[0]
  jaxkv.check(state)
