"""truncate: a sequence goes back to an earlier length."""

import jax.numpy as jnp
import pytest

import jaxkv
from jaxkv import SlidingWindow
from jaxkv import Status
from tests.cache.by_hand import ints
from tests.cache.by_hand import pages
from tests.cache.by_hand import references
from tests.cache.by_hand import table
from tests.cache.by_hand import tiny
from tests.cache.by_hand import with_text
from tests.cache.by_hand import write

FIRST = jnp.asarray([True, False, False])


@pytest.mark.slow
def test_pages_behind_the_new_end_are_given_back():
  """Slot 0 held 1 2 | 3 4 | 5 in pages 1, 2, 3 and goes back to two tokens."""
  state = write(tiny(), 0, 1, 2, 3, 4, 5)
  state, out = jaxkv.truncate(state, ints(2, 0, 0), mask=FIRST)
  assert out.code.tolist() == [Status.OK, Status.SKIPPED, Status.SKIPPED]
  assert pages(state, 0) == [1]
  # Page 3 was not full and comes first, page 2 can still be found.
  assert jaxkv.free_pages(state) == [3, 4, 5, 6, 7, 2]


def test_a_page_that_is_written_again_loses_its_key():
  """Page 1 was full; from one token on it is filled anew."""
  state = write(tiny(), 0, 1, 2)
  assert jaxkv.cached_pages(state) == [1]
  state, _ = jaxkv.truncate(state, ints(1, 0, 0), mask=FIRST)
  assert pages(state, 0) == [1]
  assert jaxkv.cached_pages(state) == []


def test_a_shared_page_is_copied_before_it_is_written_again():
  """Slots 0 and 1 share page 1. Slot 0 goes back into it: copy 1 -> 2."""
  state = write(tiny(), 0, 1, 2)
  state, _ = jaxkv.fork(state, ints(0), ints(1))
  state, out = jaxkv.truncate(state, ints(1, 0, 0), mask=FIRST)
  assert (out.copies.src.tolist(), out.copies.dst.tolist()) == (
    [1, 8, 8],
    [2, 8, 8],
  )
  assert (pages(state, 0), pages(state, 1)) == ([2], [1])
  assert references(state, 1, 2) == [1, 1]
  assert jaxkv.cached_pages(state) == [1]


def test_lengths_that_a_slot_never_had_are_refused():
  state = write(tiny(), 0, 1, 2)
  state, out = jaxkv.truncate(state, ints(3, 0, 0))
  assert out.code.tolist() == [
    Status.BAD_LENGTH,
    Status.SLOT_EMPTY,
    Status.SLOT_EMPTY,
  ]
  assert state.length.tolist() == [2, 0, 0]


@pytest.mark.slow
def test_lengths_of_recycled_pages_are_refused():
  state, _ = jaxkv.recycle(with_text(10, SlidingWindow(4)))
  refused, out = jaxkv.truncate(state, ints(7))
  assert out.code.tolist() == [jaxkv.Status.RECYCLED]
  assert table(refused) == [[0, 0, 0, 4, 5]]
  state, out = jaxkv.truncate(state, ints(9))
  assert out.code.tolist() == [jaxkv.Status.OK]
  assert table(state) == [[0, 0, 0, 4, 5]]
  assert jaxkv.cached_pages(state) == [1, 2, 3, 4]


def test_emptied_slots_have_no_skipped_pages():
  """A window had given two pages back; the next sequence holds all of its."""
  state, _ = jaxkv.recycle(with_text(8, SlidingWindow(4)))
  assert table(state) == [[0, 0, 3, 4]]
  state, out = jaxkv.truncate(state, ints(0))
  assert out.code.tolist() == [Status.OK]
  jaxkv.check(state)
  state, _ = jaxkv.allocate(state, ints(4))
  assert len(table(state)[0]) == 2 and 0 not in table(state)[0]
  jaxkv.check(state)
