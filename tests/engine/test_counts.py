"""Counters of a rollout that has run for a very long time."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxkv import rollout
from tests.engine import by_hand


def _begun(timeline=0):
  config = rollout.RolloutConfig(max_new_tokens=5, timeline=timeline)
  sizes = by_hand.sizes(5, 2)
  return by_hand.begun(sizes, config, [[1], [2], [3]])


def _with_counts(state, start_count):
  """Adds `start_count` to each count of the rollout."""

  def words(count):
    """Returns the count plus `start_count`; peaks have one word and stay."""
    leaves = jax.tree.leaves(count)
    if len(leaves) < 2:
      return count
    low = np.uint32(start_count % 2**32)
    high = np.uint32(start_count >> 32)
    return jax.tree.map(
      lambda leaf, word: leaf + word, count, type(count)(low=low, high=high)
    )

  counters = {name: words(x) for name, x in vars(state.counters).items()}
  counters = dataclasses.replace(state.counters, **counters)
  return dataclasses.replace(state, counters=counters)


@pytest.mark.parametrize(
  "start_count",
  [
    2**32 - 3,
    pytest.param(2**31 - 3, marks=pytest.mark.deep),
    pytest.param(2**40 + 2**32 - 3, marks=pytest.mark.deep),
  ],
)
def test_counters_do_not_wrap_around(start_count):
  """Counters, limits and timelines are right beyond 2**32."""
  program = by_hand.program()
  state = _begun(timeline=6)
  for steps in (7, by_hand.NO_LIMIT):
    late_state = program(_with_counts(state, start_count), 1.0, steps)
    fresh = program(state, 1.0, steps)
    for name, count in vars(fresh.counters).items():
      offset = 0 if name.startswith("peak") else start_count
      expected = np.asarray(count).astype(np.int64) + offset
      counted = np.asarray(getattr(late_state.counters, name))
      np.testing.assert_array_equal(counted, expected.astype(counted.dtype))
    assert int(late_state.counters.steps) > start_count
    spans = rollout.timeline(late_state)
    expected = rollout.timeline(fresh)
    assert spans.start == expected.start + start_count
    np.testing.assert_array_equal(spans.kinds, expected.kinds)
    np.testing.assert_array_equal(spans.tokens, expected.tokens)
