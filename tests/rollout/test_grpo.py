"""A training program of a page, and what it must not do."""

import pathlib

import jax
import pytest

import jaxkv
from jaxkv import models
from tests.rollout import grpo

_ROUNDS = 50


def test_it_is_short():
  """Imports, blank lines and the sizes of the model included."""
  lines = pathlib.Path(grpo.__file__).read_text("utf-8").splitlines()
  code = [line for line in lines if line.strip()]
  body = code[next(n for n, line in enumerate(code) if "MODEL" in line) :]
  assert len(body) <= 45, len(body)


@pytest.mark.slow
def test_it_learns_and_compiles_once():
  params = models.init_params(jax.random.key(0), grpo.MODEL)
  moments = grpo.OPTIMIZER.init(params)
  cache = jaxkv.init(grpo.SIZES, jax.random.key(1))
  kv = models.init_kv(grpo.MODEL, grpo.SIZES)
  rewards = []
  for number in range(_ROUNDS):
    key = jax.random.fold_in(jax.random.key(2), number)
    # optax mixes dtypes.
    with jax.numpy_dtype_promotion("standard"):
      params, moments, cache, kv, reward = grpo.grpo_round(
        params, moments, cache, kv, key
      )
    rewards.append(float(reward))
  assert grpo.grpo_round._cache_size() == 1
  assert sum(rewards[-5:]) > 2 * sum(rewards[:5]), rewards
  assert int(cache.epoch) == _ROUNDS
  jaxkv.check(cache)
