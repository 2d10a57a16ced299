"""Pools of rollouts: equal tokens, whichever worker computes them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import models
from jaxkv import rollout
from jaxkv import workers
from tests.rollout import by_hand
from tests.workers.exact_decoder import DECODER
from tests.workers.stub import results_of

_CONFIG = rollout.RolloutConfig(
  num_samples=2, max_new_tokens=6, stop_token=4, prefill_chunk=8, max_length=16
)
_BY_HAND = by_hand.all_logits(by_hand.model)
_FORWARD = functools.partial(models.forward, config=DECODER)
_PROMPTS = [by_hand.PROMPTS[number % 4] for number in range(24)]


def _worker(model, params, config, kv_of, slots=4, rows=6, steps=3):
  cache_config = by_hand.sizes(60, slots)
  no_prompts = rollout.Requests(
    np.zeros((rows, 9), np.int32),
    np.ones(rows, np.int32),
    num_samples=np.zeros(rows, np.int32),
  )
  state = rollout.init(
    jaxkv.init(cache_config, jax.random.key(4)),
    kv_of(cache_config),
    no_prompts,
    by_hand.key(),
    config,
  )
  return workers.LocalWorker(params, state, model=model, steps=steps)


def _by_hand(_, **options):
  return _worker(_BY_HAND, None, _CONFIG, by_hand.pages, **options)


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
  """A worker whose third call of `advance` fails, the first four times."""

  num_failures = 0

  def __init__(self, worker):
    self._worker, self._calls = worker, 0

  def __getattr__(self, name):
    return getattr(self._worker, name)

  def advance(self):
    self._calls += 1
    if self._calls == 3 and _Fails.num_failures < 4:
      _Fails.num_failures += 1
      raise OSError("the machine was taken away")
    return self._worker.advance()


@pytest.mark.slow
def test_tokens_do_not_depend_on_failures_or_removed_workers():
  _Fails.num_failures = 0
  with workers.Pool(
    lambda place: _Fails(_by_hand(place)), 3, config=_CONFIG
  ) as pool:
    pool.submit(by_hand.requests_of(_PROMPTS))
    results = results_of(pool, {5: lambda: pool.remove(2), 9: pool.add})
  assert _Fails.num_failures > 1
  _assert_by_hand(results)


@pytest.mark.slow
def test_moved_sequences_are_not_computed_again():
  source, target = _by_hand(0, slots=8), _by_hand(1, slots=8)
  prompts = by_hand.requests_of(_PROMPTS[:3])
  assert source.submit(prompts, [0, 2, 4]) == [True] * 3
  ended = source.advance()
  exported = source.export()
  # The pool has 59 pages.
  assert exported.contents[0].shape[0] == 16
  moved = sorted({0, 2, 4} - {samples.id for samples in ended})
  # In two calls, as if there were no room at first.
  assert target.import_sequences(exported, moved[:1]) == moved[:1]
  assert target.import_sequences(exported, moved[1:]) == moved[1:]
  while len(ended) < 3:
    ended += target.advance()
  assert int(target._state.counters.recomputed) == 0


@pytest.mark.slow
def test_samples_do_not_keep_the_results_of_other_prompts():
  worker, ended = _by_hand(0), []
  prompts = by_hand.requests_of(_PROMPTS[:3])
  worker.submit(prompts, [0, 2, 4])
  while len(ended) < 3:
    ended += worker.advance()
  for array in jax.tree.leaves(ended[0].results):
    assert array.base is None or array.base.size == array.size
  worker.close()
  worker.close()


def test_a_rollout_of_other_weights_or_with_sequences_is_refused():
  state = _by_hand(0)._state
  cache = dataclasses.replace(state.memory.cache, epoch=jnp.uint32(3))
  queue = dataclasses.replace(state.queue, status=state.queue.status * 0)
  for changed_state, text in (
    (by_hand.with_cache(state, cache), "version 3 and 0 sequences"),
    (dataclasses.replace(state, queue=queue), "version 0 and 12 sequences"),
  ):
    with pytest.raises(ValueError, match=f"no sequences, got {text}"):
      workers.LocalWorker(None, changed_state, model=_BY_HAND)


@pytest.mark.slow
def test_prompts_that_are_refused_are_named():
  requests = rollout.Requests([by_hand.PROMPTS[0]] * 3, [8, 0, 12])
  with pytest.raises(
    ValueError, match="got BAD_LENGTH for id 2, BAD_LENGTH for id 4;"
  ):
    _by_hand(0).submit(requests, [0, 2, 4])


def test_new_weights_keep_the_dtypes():
  state = _by_hand(0)._state
  params = {"weight": jnp.ones((2,), jnp.bfloat16)}
  worker = workers.LocalWorker(params, state, model=_BY_HAND)
  for prompt_id in (np.float32(3), jnp.float32(4)):
    worker.update_weights({"weight": prompt_id * np.ones((2,))}, 0, None)
    weight = worker._params["weight"]
    assert weight.dtype == jnp.bfloat16 and weight.tolist() == [prompt_id] * 2


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

  def kv_of(cache_config):
    return models.init_kv(DECODER, cache_config)

  versions = [
    models.init_params(jax.random.key(seed), DECODER) for seed in range(5)
  ]
  with workers.Pool(
    lambda _: _worker(_FORWARD, versions[0], config, kv_of, steps=2),
    2,
    config=config,
    max_age=max_age,
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
      cache=jaxkv.init(cache_config), kv=kv_of(cache_config)
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
