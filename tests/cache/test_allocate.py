"""allocate: pages for the tokens to come."""

import jaxkv
from jaxkv import Status
from tests.cache import by_hand


def test_pages_are_handed_out_slot_by_slot():
  """Three tokens need two pages, one token needs one."""
  state, out = jaxkv.allocate(by_hand.tiny(), by_hand.ints(3, 0, 1))
  assert out.num_new_pages.tolist() == [2, 0, 1]
  assert by_hand.pages(state, 0) == [1, 2]
  assert by_hand.pages(state, 1) == []
  assert by_hand.pages(state, 2) == [3]


def test_only_missing_pages_are_taken():
  """Slot 0 holds three tokens in pages 1 and 2, which have room for one."""
  state = by_hand.write(by_hand.tiny(), 0, 1, 2, 3)
  state, out = jaxkv.allocate(state, by_hand.ints(1, 0, 0))
  assert out.num_new_pages.tolist() == [0, 0, 0]
  assert by_hand.pages(state, 0) == [1, 2]
  # Room that was made and not used counts.
  state, out = jaxkv.allocate(state, by_hand.ints(2, 0, 0))
  assert out.num_new_pages.tolist() == [1, 0, 0]
  assert by_hand.pages(state, 0) == [1, 2, 3]


def test_a_row_gets_all_its_pages_or_none():
  """Seven pages: four, then four of three, then three."""
  state, out = jaxkv.allocate(by_hand.tiny(), by_hand.ints(8, 7, 6))
  assert out.code.tolist() == [Status.OK, Status.OUT_OF_PAGES, Status.OK]
  assert out.num_new_pages.tolist() == [4, 0, 3]
  assert by_hand.pages(state, 1) == []
  assert jaxkv.free_pages(state) == []


def test_slots_are_served_in_the_order_named():
  """Slot 2 comes first and gets page 1."""
  state, out = jaxkv.allocate(by_hand.tiny(), [1, 1], slots=[2, 0])
  assert out.ok.all()
  assert (by_hand.pages(state, 2), by_hand.pages(state, 0)) == ([1], [2])


def test_a_slot_holds_four_pages():
  state, out = jaxkv.allocate(by_hand.tiny(), by_hand.ints(9, -1, 8))
  assert out.code.tolist() == [Status.SLOT_FULL, Status.BAD_LENGTH, Status.OK]
  assert by_hand.pages(state, 2) == [1, 2, 3, 4]
