"""Failure is data: a code for every row, and the first one stays."""

import jax.numpy as jnp
import pytest

import jaxkv
from jaxkv import Status
from jaxkv._src.cache import state as status
from tests.cache.by_hand import ints
from tests.cache.by_hand import tiny


def test_an_error_stays_until_it_is_cleared():
  state, _ = jaxkv.free(tiny(), slots=ints(7))
  with pytest.raises(jaxkv.CacheError, match="BAD_SLOT"):
    jaxkv.check(state)
  jaxkv.check(jaxkv.clear_error(state)[0])


def test_running_out_of_pages_is_no_error():
  """Two pages of two tokens for five tokens."""
  state, out = jaxkv.allocate(tiny(num_pages=3), ints(5, 0, 0))
  assert out.code[0] == Status.OUT_OF_PAGES
  jaxkv.check(state)
  assert int(jaxkv.stats(state).failed_rows) == 1


@pytest.mark.parametrize(
  ("before", "codes", "after"),
  [
    (Status.OK, [Status.OK, Status.SKIPPED], Status.OK),
    (Status.OK, [Status.OK, Status.BAD_SLOT, Status.NO_ROOM], Status.BAD_SLOT),
    # The first failure stays.
    (Status.BAD_SLOT, [Status.NO_ROOM], Status.BAD_SLOT),
    (Status.BAD_SLOT, [Status.OUT_OF_PAGES], Status.BAD_SLOT),
    # Running out of pages hides no mistake, before it or behind it.
    (Status.OK, [Status.OUT_OF_PAGES, Status.NO_ROOM], Status.NO_ROOM),
    (Status.OUT_OF_PAGES, [Status.NO_ROOM], Status.NO_ROOM),
    (Status.OUT_OF_PAGES, [Status.OK], Status.OUT_OF_PAGES),
  ],
)
def test_which_failure_sticks(before, codes, after):
  assert status.sticky(jnp.int32(before), ints(*codes)) == after


def test_the_first_case_that_holds_gives_the_code():
  negative, large = ints(-1, 5, 500) < 0, ints(-1, 5, 500) > 99
  code = status.first_code(
    (negative, Status.BAD_LENGTH), (large | negative, Status.SLOT_FULL)
  )
  assert code.tolist() == [Status.BAD_LENGTH, Status.OK, Status.SLOT_FULL]
  assert status.is_failure(code).tolist() == [True, False, True]
