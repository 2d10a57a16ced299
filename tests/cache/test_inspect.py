"""stats, usage, free_pages, cached_pages, num_common_prefix_pages: a look."""

import jax
import pytest

import jaxkv
from tests.cache.by_hand import ints
from tests.cache.by_hand import tiny
from tests.cache.by_hand import write


@pytest.mark.slow
def test_pages_of_a_cache_in_use():
  """Slot 0 holds 1 2 | 3 in pages 1 and 2 of seven."""
  state = write(tiny(), 0, 1, 2, 3)
  assert jaxkv.free_pages(state) == [3, 4, 5, 6, 7]
  assert jaxkv.cached_pages(state) == [1]
  assert float(jaxkv.usage(state)) == pytest.approx(2 / 7)


@pytest.mark.slow
def test_common_pages_are_those_of_all_sequences():
  """Slot 1 is a fork of 1 2 | 3 4 | 5 in slot 0: pages 1 and 2 are common."""
  state = write(tiny(), 0, 1, 2, 3, 4, 5)
  assert jaxkv.num_common_prefix_pages(state).tolist() == [3]
  state, _ = jaxkv.fork(state, ints(0), ints(1))
  assert jaxkv.num_common_prefix_pages(state).tolist() == [2]
  assert jaxkv.num_common_prefix_pages(write(state, 2, 9)).tolist() == [0]


def test_statistics_count_from_the_start():
  """Three pages were popped, two of them published."""
  stats = jaxkv.stats(write(tiny(), 0, 1, 2, 3, 4, 5))
  assert (int(stats.popped_pages), int(stats.published_pages)) == (3, 2)
  assert (int(stats.evicted_pages), int(stats.failed_rows)) == (0, 0)


def test_a_reading_outlives_a_donated_state():
  state = write(tiny(), 1, 8, 9)
  old_stats = jaxkv.stats(state)
  donating = jax.jit(jaxkv.allocate, donate_argnums=0)
  state, _ = donating(state, ints(3, 0, 0))
  interval = jaxkv.stats(state) - old_stats
  assert int(interval.popped_pages) == 2
