"""Conversations: tokens of a tool, and another turn."""

import functools

import jax
import numpy as np
import pytest

import jaxkv
from jaxkv import rollout
from tests.engine import by_hand

pytestmark = pytest.mark.slow

_TURNS, _PAGE = 4, 4


@functools.cache
def _program():
  return jax.jit(
    functools.partial(rollout.generate, model=by_hand.last_token_model)
  )


def _conversations(count: int) -> tuple[rollout.RolloutState, jax.Array]:
  rng = np.random.default_rng(0)
  sizes = jaxkv.CacheConfig(
    num_pages=40 * count, page_size=_PAGE, num_slots=8, pages_per_slot=32
  )
  state = rollout.init(
    jaxkv.init(sizes, jax.random.key(0)),
    jaxkv.kv.init(sizes, num_layers=1, num_kv_heads=1, head_dim=1),
    rollout.Requests(
      rng.integers(0, 50, (count, 20)), rng.integers(9, 21, count)
    ),
    jax.random.key(1),
    rollout.RolloutConfig(
      max_new_tokens=12, max_length=120, stop_token=7, prefill_chunk=16
    ),
  )
  return state, jax.random.normal(jax.random.key(2), (50, 50))


@pytest.mark.parametrize("count", [64])
def test_turns_recompute_at_most_a_page(count):
  """A turn computes its new tokens, and at most a page of older ones."""
  state, params = _conversations(count)
  rng = np.random.default_rng(1)
  is_given = np.zeros((count, 120), bool)
  prompt_lengths = np.asarray(state.queue.prompt_length)
  is_given |= np.arange(120) < prompt_lengths[:, None]
  needed = int(prompt_lengths.sum())
  for turn in range(_TURNS):
    if turn:
      words = rng.integers(0, 50, (count, 9))
      lengths = rng.integers(1, 10, count)
      old_lengths = np.asarray(state.queue.length)
      state, out = rollout.extend(state, np.arange(count), words, lengths)
      assert np.all(out.ok)
      column = np.arange(120)
      is_given |= (column >= old_lengths[:, None]) & (
        column < (old_lengths + lengths)[:, None]
      )
      needed += int(lengths.sum())
    state = _program()(params, state)
    assert bool(rollout.is_done(state))
  out = jax.device_get(rollout.generated(state))
  inside = np.arange(120) < out.lengths[:, None]
  np.testing.assert_array_equal(out.mask, inside & ~is_given)
  num_sampled = int(out.mask.sum())
  counters = state.counters
  assert int(counters.generated) == num_sampled
  computed = num_sampled + int(counters.prefilled) + int(counters.recomputed)
  assert computed <= needed + num_sampled + _PAGE * (_TURNS - 1) * count
  # Not much less than that, or the bound would say nothing.
  assert computed > 0.8 * (needed + num_sampled)
  assert _program()._cache_size() == 1
