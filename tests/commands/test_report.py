"""What `python -m jaxkv rollout` reports."""

import jax
import numpy as np
import pytest

import jaxkv
from jaxkv import rollout
from jaxkv._src.commands import report
from tests.rollout import by_hand

_COMMON = [1, 2, 3, 4]


class TestLeastPrefilled:
  @pytest.mark.parametrize(
    ("prompts", "least"),
    [
      ([], 0),
      # The last token is none of a prompt's work.
      ([[1]], 0),
      ([[1, 2, 3]], 2),
      # A prompt that ends with its page computes it.
      ([[1, 2]], 1),
      ([[1, 2], [1, 2]], 2),
      # In the right order, the other one finds it.
      ([[1, 2], [1, 2, 3]], 1),
      ([[1, 2, 3], [1, 2]], 1),
      # Two common pages, and the first token of each third page.
      ([[*_COMMON, 5, 6], [*_COMMON, 8, 9]], 4 + 1 + 1),
      ([[*_COMMON, 5, 6, 7], [*_COMMON, 8, 9, 7]], 4 + 2 + 2),
      # Equal tokens after different ones are another page.
      ([[5, 6, 3, 4, 0], [7, 8, 3, 4, 0]], 8),
    ],
  )
  def test_prompts(self, prompts, least):
    rows = [([*prompt, 0], len(prompt)) for prompt in prompts]
    assert report.least_prefilled(rows, 1, 2) == least

  def test_samples_fork(self):
    rows = [([1, 2, 3, 4, answer], 4) for answer in range(3)]
    assert report.least_prefilled(rows, 3, 2) == 3
    assert report.least_prefilled(rows, 1, 2) == 2 + 3

  def test_answers_are_hit(self):
    """The second prompt has a page more, and the first one's answer too."""
    long = [1, 2, 3, 4, 5, 6]
    for answer, least in (([3, 4], 2 + 1), ([3, 4, 5], 1), ([3, 9, 5], 2 + 1)):
      rows = [([1, 2, *answer], 2), (long, 5)]
      assert report.least_prefilled(rows, 1, 2) == least
      assert report.least_prefilled(rows[::-1], 1, 2) == least

  def test_a_rollout_with_one_slot(self):
    """Each prompt finds what all before it have cached."""
    prompts = [[*_COMMON], [*_COMMON, 5], [*_COMMON, 6, 7, 8], [9], [1]]
    config = rollout.RolloutConfig(max_new_tokens=6)
    sizes = jaxkv.CacheConfig(
      num_pages=60, page_size=2, num_slots=1, pages_per_slot=8
    )
    state = by_hand.begun(jax.random.key(0), sizes, config, prompts)
    end = by_hand.program()(state, 1.0)
    rows = zip(end.sequences.tokens, end.sequences.length, strict=True)
    tokens = [np.asarray(row)[:length].tolist() for row, length in rows]
    begun = zip(tokens, map(len, prompts), strict=True)
    assert report.least_prefilled(begun, 1, 2) == int(end.counters.prefilled)
