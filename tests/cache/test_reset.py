"""reset_prefix_cache, new_epoch, clear_error: what was is forgotten."""

import pytest

import jaxkv
from jaxkv import Status
from tests.cache.by_hand import ints
from tests.cache.by_hand import prompt
from tests.cache.by_hand import tiny
from tests.cache.by_hand import write


@pytest.mark.slow
def test_a_reset_waits_until_nothing_is_held():
  """Slot 0 holds 1 2 in page 1."""
  state = write(tiny(), 0, 1, 2)
  state, out = jaxkv.reset_prefix_cache(state)
  assert out.code == Status.STILL_HELD
  assert jaxkv.cached_pages(state) == [1]
  state, _ = jaxkv.free(state, slots=ints(0))
  state, out = jaxkv.reset_prefix_cache(state)
  assert out.code == Status.OK
  assert jaxkv.cached_pages(state) == []
  # The queue keeps its order: page 1 is not moved to the front.
  assert jaxkv.free_pages(state) == [2, 3, 4, 5, 6, 7, 1]


def test_a_new_epoch_has_no_hits_of_the_old_epoch():
  """Page 1 stays cached, but under a key that nobody asks for any more."""
  state, _ = jaxkv.new_epoch(write(tiny(), 0, 1, 2))
  assert jaxkv.cached_pages(state) == [1]
  assert jaxkv.match(state, *prompt(1, 2, 3)).num_cached_tokens.tolist() == [0]
  # Slot 1 is new and publishes page 2 under a key of the new epoch.
  state = write(state, 1, 1, 2)
  assert jaxkv.match(state, *prompt(1, 2, 3)).pages[0, 0, 0] == 2


def test_a_sequence_keeps_the_epoch_of_its_start():
  """Slot 0 computed 1 2 with old weights: 3 4 get keys of the old epoch."""
  state, _ = jaxkv.new_epoch(write(tiny(), 0, 1, 2))
  state = write(state, 0, 3, 4)
  hit = jaxkv.match(state, *prompt(1, 2, 3, 4, 5))
  assert hit.num_cached_tokens.tolist() == [0]
