"""fork: one sequence becomes two that share their full pages."""

import jax.numpy as jnp

import jaxkv
from jaxkv import Status
from tests.cache.by_hand import ints
from tests.cache.by_hand import pages
from tests.cache.by_hand import references
from tests.cache.by_hand import tiny
from tests.cache.by_hand import write


def test_full_pages_are_shared_and_the_last_one_is_copied():
  """Slot 0 holds tokens 0 1 | 2 in pages 1 and 2.

  Slot 1 shares page 1, which nobody writes any more, and owes the copy 2 -> 3,
  because both will write their own token behind token 2.
  """
  state = write(tiny(), 0, 0, 1, 2)
  state, out = jaxkv.fork(state, ints(0), ints(1))
  assert pages(state, 0) == [1, 2]
  assert pages(state, 1) == [1, 3]
  assert (out.copies.src.tolist(), out.copies.dst.tolist()) == ([2], [3])
  assert references(state, 1, 2, 3) == [2, 1, 1]
  assert state.length.tolist() == [3, 3, 0]


def test_forks_of_full_pages_need_no_copy():
  """Slot 0 holds 0 1 | 2 3: both pages are shared; 8 is NO_PAGE."""
  state = write(tiny(), 0, 0, 1, 2, 3)
  state, out = jaxkv.fork(state, ints(0), ints(2))
  assert pages(state, 2) == [1, 2]
  assert (out.copies.src.tolist(), out.copies.dst.tolist()) == ([8], [8])


def test_room_ahead_is_not_shared():
  """Slot 0 has pages 1, 2, 3 for one token; its fork gets page 4 for it."""
  state, _ = jaxkv.allocate(tiny(), ints(5, 0, 0))
  state, _ = jaxkv.commit(state, ints([7], [0], [0]), ints(1, 0, 0))
  state, _ = jaxkv.fork(state, ints(0), ints(1))
  assert pages(state, 1) == [4]


def test_two_forks_of_one_sequence():
  """Slots 1 and 2 share page 1 and get pages 3 and 4, in that order."""
  state = write(tiny(), 0, 0, 1, 2)
  state, out = jaxkv.fork(state, ints(0, 0), ints(1, 2))
  assert [pages(state, slot) for slot in range(3)] == [[1, 2], [1, 3], [1, 4]]
  assert (out.copies.src.tolist(), out.copies.dst.tolist()) == ([2, 2], [3, 4])
  assert references(state, 1) == [3]


def test_refused_forks_change_nothing():
  state = write(write(tiny(), 0, 0, 1, 2), 1, 5)
  new_state, out = jaxkv.fork(state, ints(0, 2, 3, 0), ints(1, 1, 2, 2))
  assert out.code.tolist() == [
    Status.SLOT_IN_USE,  # Slot 1 holds a sequence.
    Status.SLOT_EMPTY,  # Slot 2 has nothing to share.
    Status.BAD_SLOT,  # There is no slot 3.
    Status.OK,
  ]
  assert pages(new_state, 1) == pages(state, 1) == [3]
  masked, out = jaxkv.fork(state, ints(0), ints(2), mask=jnp.asarray([False]))
  assert out.code.tolist() == [Status.SKIPPED]
  assert pages(masked, 2) == []
