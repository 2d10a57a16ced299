"""Pools of Ray actors: deaths, weights, damaged weights."""

import functools
import importlib.util
import os
import time

import jax
import numpy as np
import pytest

import jaxkv
from jaxkv import models
from jaxkv import rollout
from jaxkv import workers
from tests.workers.exact_decoder import DECODER

pytestmark = [
  pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="ray is not installed; pip install jaxkv[ray]",
  ),
  pytest.mark.deep,
]

_CONFIG = rollout.RolloutConfig(
  num_samples=2,
  max_new_tokens=20,
  prefill_chunk=16,
  max_length=32,
)
_FORWARD = functools.partial(models.forward, config=DECODER)
_NUM_PROMPTS = 200


def _params(version=0):
  return models.init_params(jax.random.key(version), DECODER)


def _make(_, pause=0.0):
  """Makes a worker; Ray calls it inside of the actor."""
  engine = rollout.Engine(
    _params(),
    _FORWARD,
    jaxkv.CacheConfig(
      num_pages=200, page_size=4, num_slots=4, pages_per_slot=8
    ),
    _CONFIG,
    num_prompts=8,
    key=jax.random.key(5),
    secret=jax.random.key(4),
  )
  step = engine.step

  def slowly(steps):
    # So that a job of a tiny model lasts longer than the time between deaths.
    time.sleep(pause)
    return step(steps)

  engine.step = slowly
  return engine


def _requests():
  rng = np.random.default_rng(1)
  tokens = rng.integers(0, 11, (_NUM_PROMPTS, 11)).astype(np.int32)
  return rollout.Requests(
    tokens, rng.integers(1, 12, _NUM_PROMPTS).astype(np.int32)
  )


@pytest.fixture(scope="module")
def ray():
  ray = pytest.importorskip("ray")
  # The actors import the tests, with the options of this process.
  ray.init(
    num_cpus=2,
    include_dashboard=False,
    object_store_memory=200 * 2**20,
    runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(_paths())}},
  )
  yield ray
  ray.shutdown()


def _paths():
  import sys

  return [path for path in sys.path if path]


@pytest.fixture(scope="module")
def undisturbed():
  with workers.Pool(_make, 1, config=_CONFIG, steps=4) as pool:
    pool.submit(_requests())
    return {samples.id: samples.results for samples in pool.results()}


def _assert_equal(actual, expected):
  assert actual.keys() == expected.keys()
  for prompt_id, results in expected.items():
    for name in ("tokens", "lengths", "log_probs", "finish"):
      np.testing.assert_array_equal(
        getattr(actual[prompt_id], name), getattr(results, name)
      )


def test_killed_actors_change_no_bit(ray, undisturbed):
  """Four deaths, 20 seconds apart: each prompt ends once, with equal bits."""
  from jaxkv.integrations.ray import RayWorkers

  actors = {}

  class Recorded(RayWorkers):
    def __call__(self, place):
      actors[place] = super().__call__(place)
      return actors[place]

  make = Recorded(functools.partial(_make, pause=0.5), num_cpus=0.5)
  results, kills, start = {}, 0, time.monotonic()
  with workers.Pool(make, 4, config=_CONFIG, max_failures=8, steps=4) as pool:
    pool.submit(_requests())
    for samples in pool.results():
      assert samples.id not in results
      results[samples.id] = samples.results
      if kills < 4 and time.monotonic() - start > 20 * (kills + 1):
        ray.kill(actors[kills]._actor)
        kills += 1
  assert kills == 4
  _assert_equal(results, undisturbed)


def test_tokens_span_at_most_one_update(ray):
  """Ten updates: tokens of a sequence are at most one version apart."""
  from jaxkv.integrations.ray import RayWorkers

  make = RayWorkers(_make, num_cpus=0.5)
  parts = []
  with workers.Pool(make, 4, config=_CONFIG, max_age=1, steps=4) as pool:
    pool.submit(_requests())
    for samples in pool.results():
      parts.append(samples.results)
      if len(parts) % 18 == 0 and len(parts) <= 180:
        assert pool.update_weights(_params(len(parts) // 18)) <= 10
  results = jax.tree.map(lambda *rows: np.concatenate(rows), *parts)
  versions = np.where(results.mask, results.versions, 99)
  assert len(parts) == _NUM_PROMPTS
  assert (results.versions.max(axis=1) - versions.min(axis=1)).max() <= 1
  assert results.versions.max() == 10
  _assert_scores(results)


def _assert_scores(results):
  """The weights of each token's version give its log-prob, bit for bit."""
  score = jax.jit(functools.partial(rollout.score, model=_FORWARD))
  cache_config = jaxkv.CacheConfig(
    num_pages=900, page_size=4, num_slots=16, pages_per_slot=8
  )
  start = results.prompt_lengths[:, None]
  column = np.arange(20)[None]
  columns = np.minimum(start + column, 31)
  lengths = results.lengths[:, None] - start
  answers = np.take_along_axis(results.tokens, columns, axis=1)
  for version in range(11):
    memory = rollout.Memory(
      cache=jaxkv.init(cache_config), kv=models.init_kv(DECODER, cache_config)
    )
    _, scored = score(
      _params(version),
      memory,
      results.tokens[::2, :11],
      results.prompt_lengths[::2],
      answers.reshape(-1, 2, 20),
      lengths.reshape(-1, 2),
    )
    scores = np.asarray(scored.log_probs).reshape(-1, 20)
    is_own = np.take_along_axis(results.versions, columns, axis=1) == version
    is_own &= column < lengths
    recorded = np.take_along_axis(results.log_probs, columns, axis=1)
    np.testing.assert_array_equal(scores[is_own], recorded[is_own])


def test_damaged_weights_are_sent_again(ray):
  from jaxkv._src.integrations import ray_workers

  make = ray_workers.RayWorkers(_make, num_cpus=0.5)
  worker = make(0)
  params = jax.device_get(_params(1))
  damaged = ray.put((params, b"another checksum"))
  make._stored = params, damaged
  assert worker.update_weights(params, version=1, max_age=None) == []
  assert make._stored[0] is params and make._stored[1] is not damaged
  worker.close()


@pytest.mark.parametrize("name", ["max_restarts", "max_task_retries"])
def test_only_the_pool_replaces_actors(name):
  from jaxkv.integrations.ray import RayWorkers

  with pytest.raises(ValueError, match=f"`{name}` must be 0, got -1"):
    RayWorkers(_make, **{name: -1})


def test_ray_must_be_started():
  ray = pytest.importorskip("ray")
  from jaxkv.integrations.ray import RayWorkers

  if ray.is_initialized():
    pytest.skip("another test has started Ray")
  with pytest.raises(RuntimeError, match=r"call ray\.init"):
    RayWorkers(_make)
