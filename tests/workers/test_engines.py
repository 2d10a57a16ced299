"""Pools of engines: equal tokens, whichever engine computes them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import guides
from jaxkv import models
from jaxkv import rollout
from jaxkv import workers
from tests.engine import by_hand
from tests.workers.exact_decoder import DECODER
from tests.workers.stub import results_of

_CONFIG = rollout.RolloutConfig(
  num_samples=2, max_new_tokens=6, stop_token=4, prefill_chunk=8, max_length=16
)
_BY_HAND = by_hand.all_logits(by_hand.model)
_FORWARD = functools.partial(models.forward, config=DECODER)
_PROMPTS = [by_hand.PROMPTS[number % 4] for number in range(24)]


def _engine(params, model, config, kv_of=None, slots=4):
  return rollout.Engine(
    params,
    model,
    by_hand.sizes(60, slots),
    config,
    init_kv=kv_of,
    num_prompts=6,
    key=by_hand.key(),
    secret=jax.random.key(4),
  )


def _by_hand(_, params=None, **options):
  return _engine(params, _BY_HAND, _CONFIG, by_hand.pages, **options)


def _assert_by_hand(results_by_id: dict) -> None:
  assert sorted(results_by_id) == list(range(0, 48, 2))
  for prompt_id, results in results_by_id.items():
    for sample in range(2):
      expected = by_hand.expected(
        prompt_id + sample, _PROMPTS[prompt_id // 2], 1.0, _CONFIG
      )
      length = int(results.lengths[sample])
      assert results.tokens[sample, :length].tolist() == expected.tokens


class _Fails:
  """A worker whose third call of `step` fails, the first four times."""

  num_failures = 0

  def __init__(self, worker):
    self._worker, self._calls = worker, 0

  def __getattr__(self, name):
    return getattr(self._worker, name)

  def step(self, steps):
    self._calls += 1
    if self._calls == 3 and _Fails.num_failures < 4:
      _Fails.num_failures += 1
      raise OSError("the machine was taken away")
    return self._worker.step(steps)


@pytest.mark.slow
def test_tokens_do_not_depend_on_failures_or_removed_workers():
  _Fails.num_failures = 0
  with workers.Pool(
    lambda place: _Fails(_by_hand(place)), 3, config=_CONFIG, steps=3
  ) as pool:
    pool.submit(by_hand.requests_of(_PROMPTS))
    results = results_of(pool, {5: lambda: pool.remove(2), 9: pool.add})
  assert _Fails.num_failures > 1
  _assert_by_hand(results)


@pytest.mark.slow
def test_moved_sequences_are_not_computed_again():
  source, target = _by_hand(0, slots=8), _by_hand(1, slots=8)
  prompts = by_hand.requests_of(_PROMPTS[:3])
  assert source.submit(prompts, ids=[0, 2, 4]).tolist() == [0, 2, 4]
  source.step(3)
  ended = source.harvest()
  exported = source.export()
  # The pool has 59 pages.
  assert exported.contents[0].shape[0] == 16
  moved = sorted({0, 2, 4} - {samples.id for samples in ended})
  # In two calls, as if there were no room at first.
  assert target.import_sequences(exported, moved[:1]) == moved[:1]
  assert target.import_sequences(exported, moved[1:]) == moved[1:]
  while target.step():
    pass
  ended += target.harvest()
  assert len(ended) == 3 and int(target.counters.recomputed) == 0


@pytest.mark.slow
def test_samples_do_not_keep_the_results_of_other_prompts():
  engine = _by_hand(0)
  engine.submit(by_hand.requests_of(_PROMPTS[:3]))
  while engine.step():
    pass
  for array in jax.tree.leaves(engine.harvest()[0].results):
    assert array.base is None or array.base.size == array.size
  engine.close()
  engine.close()


def test_engines_with_other_weights_stop_a_pool():
  def make(seed):
    return _by_hand(seed, {"weight": jnp.full((2,), seed, jnp.bfloat16)})

  with workers.Pool(make, 2, config=_CONFIG, steps=1) as pool:
    pool.submit(by_hand.requests_of(_PROMPTS))
    with pytest.raises(RuntimeError, match=r"got others in place [01]"):
      results_of(pool)
  # After an update, the pool's weights are the same everywhere.
  with workers.Pool(make, 2, config=_CONFIG) as pool:
    pool.update_weights({"weight": jnp.ones((2,))})
    pool.submit(by_hand.requests_of(_PROMPTS))
    _assert_by_hand(results_of(pool))


def test_new_weights_keep_the_dtypes_and_have_later_versions():
  engine = _by_hand(0, {"weight": jnp.ones((2,), jnp.bfloat16)})
  for version, value in ((3, np.float32(3)), (4, jnp.float32(4))):
    weights = {"weight": value * np.ones((2,))}
    assert engine.update_weights(weights, version=version) == []
    weight = engine._weights.read()["weight"]
    assert weight.dtype == jnp.bfloat16 and weight.tolist() == [value] * 2
  assert int(engine.state.memory.cache.epoch) == 4
  with pytest.raises(ValueError, match="`version` must be at least 5 and"):
    engine.update_weights(weights, version=4)


def test_prompts_with_old_tokens_are_dropped():
  """The third prompt waits, so it has no token yet."""
  engine = _by_hand(0)
  prompts = by_hand.requests_of([by_hand.PROMPTS[1]] * 3)
  engine.submit(prompts, ids=[6, 2, 4])
  engine.step(3)
  assert engine.update_weights(None, max_age=1) == []
  assert engine.update_weights(None, max_age=1) == [2, 4]
  assert engine.room().prompts == 5
  while engine.step():
    pass
  (out,) = engine.harvest()
  assert out.id == 6 and out.results.versions.max() == 2


@pytest.mark.slow
def test_sequences_with_stop_strings_move():
  """To an engine with the same strings; another one refuses, unchanged."""
  tokens = guides.token_bytes([bytes([65 + token]) for token in range(11)])
  sampling = rollout.Sampling(
    stop_strings=rollout.stop_strings(["CAB"], tokens)
  )
  source, target, new = map(_by_hand, range(3))
  target.generate([[1]], sampling=sampling, max_new_tokens=1)
  prompts = by_hand.requests_of(_PROMPTS[:3], sampling=sampling)
  source.submit(prompts, ids=[10, 20, 30])
  source.step(2)
  exported = source.export()
  with pytest.raises(ValueError, match="must have no stop strings for"):
    new.import_sequences(exported)
  assert target.import_sequences(exported) == [10, 20, 30]
  assert target.import_sequences(exported) == []


@pytest.mark.slow
def test_lists_of_later_prompts_may_be_shorter():
  def prompts(count, stops):
    sampling = rollout.Sampling(stop_tokens=[stops] * 2 * count)
    return by_hand.requests_of(_PROMPTS[:count], sampling=sampling)

  with workers.Pool(_by_hand, 1, config=_CONFIG, steps=1) as pool:
    ids = pool.submit(prompts(1, [4, 7, 8]))
    ids += pool.submit(prompts(6, [4]))
    with pytest.raises(ValueError, match="stop_tokens` must have at most 3"):
      pool.submit(prompts(1, [4, 7, 8, 9]))
    assert sorted(results_of(pool)) == ids


@pytest.mark.slow
@pytest.mark.parametrize(
  "max_age", [0, pytest.param(1, marks=pytest.mark.deep)]
)
def test_versions_reproduce_the_log_probs(max_age):
  """Of each token, by `score` with the weights that sampled it."""
  config = rollout.RolloutConfig(
    num_samples=2,
    max_new_tokens=6,
    prefill_chunk=8,
    max_length=16,
  )

  versions = [
    models.init_params(jax.random.key(seed), DECODER) for seed in range(5)
  ]
  with workers.Pool(
    lambda _: _engine(versions[0], _FORWARD, config),
    2,
    config=config,
    max_age=max_age,
    steps=2,
  ) as pool:
    pool.submit(by_hand.requests_of(_PROMPTS))
    parts = []
    for samples in pool.results():
      parts.append(samples.results)
      if len(parts) in (3, 6, 9, 12):
        pool.update_weights(versions[len(parts) // 3])
  assert len(parts) == 24
  cache_config = by_hand.sizes(60, 4)
  score = jax.jit(functools.partial(rollout.score, model=_FORWARD))
  results = jax.tree.map(lambda *rows: np.concatenate(rows), *parts)
  is_drawn = results.mask
  oldest = np.where(is_drawn, results.versions, 99).min(axis=1)
  newest = results.versions.max(axis=1)
  assert (newest - oldest).max() <= max_age and newest.max() == 4
  for version, params in enumerate(versions):
    memory = rollout.Memory(
      cache=jaxkv.init(cache_config),
      kv=models.init_kv(DECODER, cache_config),
    )
    for row in range(0, 48, 2):
      start = int(results.prompt_lengths[row])
      columns = results.tokens[row : row + 2, start:]
      columns = np.pad(columns, ((0, 0), (0, start)))[:, :6]
      lengths = results.lengths[row : row + 2] - start
      memory, scored = score(
        params,
        memory,
        results.tokens[row : row + 1, :9],
        np.asarray([start], np.int32),
        columns[None],
        lengths[None],
      )
      for sample in range(2):
        index = start + np.arange(lengths[sample])
        is_own = results.versions[row + sample, index] == version
        np.testing.assert_array_equal(
          np.asarray(scored.log_probs)[0, sample, : lengths[sample]][is_own],
          results.log_probs[row + sample, index][is_own],
        )
