"""Conversations: what a tool says, and another turn."""

import functools

import jax
import numpy as np
import pytest

import jaxkv
from jaxkv import rollout
from tests.rollout import by_hand

pytestmark = pytest.mark.slow

_TURNS, _PAGE = 4, 4


def _model(params, batch, kv):
  """Random tokens of the last one, without K/V."""
  del kv
  last = batch.tokens[0].at[batch.columns].get(mode="clip")
  return params[last], None


@functools.cache
def _program():
  return jax.jit(functools.partial(rollout.generate, model=_model))


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
def test_what_turns_compute(count):
  """The new tokens, and at most a page of each sequence in each turn."""
  state, params = _conversations(count)
  rng, ids = np.random.default_rng(1), np.arange(count)
  said = np.zeros((count, 120), bool)
  begins = np.asarray(state.queue.prompt_length)
  said |= np.arange(120) < begins[:, None]
  needed = int(begins.sum())
  for turn in range(_TURNS):
    if turn:
      words = rng.integers(0, 50, (count, 9))
      lengths = rng.integers(1, 10, count)
      before = np.asarray(state.queue.length)
      state, out = rollout.extend(state, ids, words, lengths)
      assert np.all(out.ok)
      column = np.arange(120)
      said |= (column >= before[:, None]) & (
        column < (before + lengths)[:, None]
      )
      needed += int(lengths.sum())
    state = _program()(params, state)
    assert bool(rollout.is_done(state))
  out = jax.device_get(rollout.generated(state))
  inside = np.arange(120) < out.lengths[:, None]
  np.testing.assert_array_equal(out.mask, inside & ~said)
  drawn = int(out.mask.sum())
  counters = state.counters
  assert int(counters.generated) == drawn
  computed = drawn + int(counters.prefilled) + int(counters.recomputed)
  assert computed <= needed + drawn + _PAGE * (_TURNS - 1) * count
  # Not much less than that, or the bound would say nothing.
  assert computed > 0.8 * (needed + drawn)
  assert _program()._cache_size() == 1


def test_a_turn_by_hand():
  """The tokens of a turn are those of a prompt with all that was said."""
  config = rollout.RolloutConfig(
    max_new_tokens=3, max_length=14, prefill_chunk=4
  )
  program = by_hand.program()
  state = by_hand.begun(by_hand.sizes(40, 2), config, [[1, 2, 3]] * 2)
  state = program(state, 0.0)
  first = state.queue.tokens[1, :6].tolist()
  state, out = rollout.extend(state, [1], [[9, 4, 0]], [2], max_tokens=[4])
  assert out.ok.tolist() == [True]
  end = program(state, 0.0)
  whole = by_hand.begun(by_hand.sizes(40, 2), config, [[*first, 9, 4]])
  whole = program(whole, 0.0)
  assert end.queue.tokens[1, :11].tolist() == (
    whole.queue.tokens[0, :11].tolist()
  )
  assert end.queue.length.tolist() == [6, 12]
  assert end.queue.start.tolist() == [3, 8]
  mask = rollout.generated(end).mask[1].tolist()
  assert mask == [False] * 3 + [True] * 3 + [False] * 2 + [True] * 4 + (
    [False] * 2
  )
