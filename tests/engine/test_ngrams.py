"""Drafts from n-grams, and the acceptance rates of drafts."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import rollout
from jaxkv._src.engine.sampling import ngrams
from tests.engine import by_hand


def _expected(queue, row: int, samples: int, num_matched: int) -> list[int]:
  """Searches for the last tokens of a row, from right to left."""
  lengths = np.asarray(queue.length).tolist()
  tokens = [
    np.asarray(row_tokens)[:length].tolist()
    for row_tokens, length in zip(queue.tokens, lengths, strict=True)
  ]
  first_ids = np.asarray(queue.ids) - np.arange(queue.size)
  ngram = tokens[row][-num_matched:]
  group = [
    sibling
    for sibling in range(queue.size)
    if sibling // samples == row // samples
    and first_ids[sibling] == first_ids[row]
  ]
  for column in range(queue.width - 1, num_matched - 1, -1):
    for sibling in reversed(group):
      earlier_tokens = tokens[sibling][column - num_matched : column]
      if column < lengths[sibling] and earlier_tokens == ngram:
        return tokens[sibling][column:]
  return []


@pytest.mark.parametrize(
  ("samples", "num_matched"), [(4, 2), (3, 1), (1, 3), (2, 20)]
)
def test_drafts_follow_the_rightmost_match(samples, num_matched):
  """Of equal columns, that of the last sample; other prompts do not count."""
  config = rollout.RolloutConfig(
    num_samples=samples,
    max_new_tokens=9,
    draft_tokens=3,
    draft_match=num_matched,
  )
  state = by_hand.begun(by_hand.sizes(40, 4), config, [[1, 2]] * 4)
  rng = np.random.default_rng(samples)
  queue = state.queue
  num_found = 0
  for _ in range(10):
    length = rng.integers(1, queue.width + 1, queue.size)
    inside = np.arange(queue.width) < length[:, None]
    tokens = rng.integers(0, 2, queue.tokens.shape) * inside
    ids = np.arange(queue.size)
    # The row of a removed sequence of another prompt.
    ids[1] += 50 * (samples > 1)
    queue = dataclasses.replace(
      queue,
      tokens=jnp.asarray(tokens, jnp.int32),
      length=jnp.asarray(length, jnp.int32),
      ids=jnp.asarray(ids, jnp.int32),
    )
    rows = [0, queue.no_row, 2, 1, 3]
    drafts, counts = ngrams.propose(queue, jnp.asarray(rows, jnp.int32), config)
    for row, drafted, count in zip(rows, drafts, counts.tolist(), strict=True):
      expected = []
      if row < queue.no_row:
        expected = _expected(queue, row, samples, num_matched)
      assert count == len(expected)
      num_found += count > 0
      assert drafted.tolist()[:count] == expected[:3]
  assert (num_found > 5) == (num_matched < queue.width)


def test_rates_follow_the_accepted_drafts():
  """And rise slowly if a match is not tried; sibling rows keep theirs."""
  rates = jnp.asarray([0.8, 0.8, 0.25, 0.6, 0.3, 0.795], jnp.float32)
  learned = ngrams.learn(
    rates,
    # Row 6 is none.
    jnp.asarray([0, 1, 2, 3, 6], jnp.int32),
    jnp.asarray([True, True, True, True, True]),
    drafted=jnp.asarray([4, 4, 0, 0, 4], jnp.int32),
    accepted=jnp.asarray([1, 4, 0, 0, 4], jnp.int32),
  )
  expected = [0.8 * 0.8 + 0.2 / 4, 0.8 * 0.8 + 0.2, 0.26, 0.6, 0.3, 0.795]
  np.testing.assert_allclose(learned, expected, rtol=1e-6)
  same = ngrams.learn(
    rates, jnp.arange(5), jnp.zeros((5,), bool), *(jnp.zeros((5,), int),) * 2
  )
  assert same.tolist() == rates.tolist()
