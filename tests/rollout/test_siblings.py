"""Samples of one prompt: one computes it, the others follow and share it."""

import numpy as np
import pytest

from jaxkv import rollout
from tests.rollout import by_hand

_PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.slow
def test_salts_that_differ_in_some_words():
  """Two samples share the prompt's pages only if their salts are equal."""
  config = rollout.RolloutConfig(
    num_samples=2, max_new_tokens=4, max_length=14, prefill_chunk=3
  )
  program, salt = by_hand.program(), [5, 6, 7, 8]
  for other, is_shared in (
    ([5, 6, 7, 8], True),
    ([9, 6, 7, 8], False),
    ([5, 6, 7, 9], False),
    ([5, 9, 9, 9], False),
  ):
    state = by_hand.begun(
      by_hand.sizes(40, 2),
      config,
      [_PROMPT],
      salts=np.asarray([salt, other], np.uint32),
    )
    end = program(state, 1.0)
    assert bool(rollout.is_done(end))
    assert (int(end.counters.peak_shared) > 0) == is_shared, other
    assert is_shared or int(end.memory.cache.stats.hit_tokens) == 0, other
