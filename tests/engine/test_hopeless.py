"""Sequences that can never run fail, and no other ones."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import jaxkv
from jaxkv import rollout
from tests.engine import by_hand


def test_sequences_that_never_fit_fail():
  """Of 7 pages 5 are pinned; the 2 free ones have room for 4 tokens.

  Seven tokens are never admitted. Two tokens are, and draw three more from
  the four that fit; then no page is left, though the sequence is alone. One
  token and another one fit.
  """
  config = rollout.RolloutConfig(max_new_tokens=5)
  state = by_hand.begun(
    by_hand.sizes(8, 1),
    config,
    [[1, 2, 3, 1, 2, 3, 1], [1, 2], [4]],
    sampling=rollout.Sampling(max_tokens=[5, 5, 1]),
  )
  cache, _ = jaxkv.allocate(state.memory.cache, [10])
  cache, _ = jaxkv.touch(cache, cache.page_table[:, 0])
  cache, _ = jaxkv.free(cache, mask=[True])
  state = by_hand.program()(by_hand.with_cache(state, cache), 0.0, 50)
  assert bool(rollout.is_done(state)), "not done after 50 steps"
  failed = by_hand.FAILED
  assert state.queue.status.tolist() == [failed, failed, by_hand.DONE]
  codes = [jaxkv.Status.OUT_OF_PAGES] * 2
  results = rollout.generated(state)
  assert results.code.tolist() == [*codes, jaxkv.Status.OK]
  lengths = state.queue.length - state.queue.prompt_length
  assert lengths.tolist() == [0, 3, 1]
  # One to refuse the first, three tokens, one to find no page, and a token.
  assert int(state.counters.steps) == 6
  assert int(state.counters.preempted) == 0
  assert int(state.memory.cache.pool.queue.num_free[0]) == 2


@pytest.mark.slow
def test_traced_lengths_out_of_range_fail():
  """Sequences with bad lengths fail in `init`, and the others run."""
  sizes = dataclasses.replace(by_hand.sizes(40, 2), pages_per_slot=4)
  config = rollout.RolloutConfig(max_new_tokens=4)
  whole = by_hand.begun(sizes, config, [[1, 2, 3, 4]] * 4)

  def begun(lengths):
    requests = rollout.Requests([[1, 2, 3, 4]] * 4, lengths)
    memory = whole.memory
    return rollout.init(
      memory.cache, memory.kv, requests, by_hand.key(), config
    )

  state = jax.jit(begun)(jnp.asarray([6, 2, 0, 4], jnp.int32))
  state = by_hand.program()(state, 0.0, 50)
  assert state.queue.status.tolist() == [by_hand.FAILED, by_hand.DONE] * 2
  codes = [jaxkv.Status.BAD_LENGTH, jaxkv.Status.OK]
  results = rollout.generated(state)
  assert results.code.tolist() == codes * 2
  assert int(state.memory.cache.error) == jaxkv.Status.OK
