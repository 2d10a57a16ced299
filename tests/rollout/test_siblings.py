"""Samples of one prompt: one computes it, the others follow and share it."""

import numpy as np
import pytest

from jaxkv import rollout
from tests.rollout import by_hand

_PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.slow
def test_samples_with_different_salts_share_no_page():
  """Two samples share the prompt's pages only if their salts are equal."""
  config = rollout.RolloutConfig(
    num_samples=2, max_new_tokens=4, max_length=14, prefill_chunk=3
  )
  program = by_hand.program()
  for words, is_shared in (
    ([5, 6, 7, 8], True),
    ([9, 6, 7, 8], False),
    ([5, 6, 7, 9], False),
    ([5, 9, 9, 9], False),
  ):
    state = by_hand.begun(
      by_hand.sizes(40, 2),
      config,
      [_PROMPT],
      salts=np.asarray([[5, 6, 7, 8], words], np.uint32),
    )
    state = program(state, 1.0)
    assert bool(rollout.is_done(state))
    assert (int(state.counters.peak_shared) > 0) == is_shared, words
    assert is_shared or int(state.memory.cache.stats.hit_tokens) == 0, words
