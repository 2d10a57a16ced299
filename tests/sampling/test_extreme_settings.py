"""Settings near the ends of float32: log-probs are finite, or a code says why.

Every sequence of a rollout has its random settings, so one program is
compiled for hundreds of them.
"""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import rollout

_VOCABULARY = 24
_SEQUENCES = 320
_NEW = 3
_MOST = float(np.finfo(np.float32).max)
_TINY = 1.2e-38
_LARGE = [1.0, 1e10, 1e30, 2e37, 1e38, 3e38, _MOST]
_EITHER = [0.0, *_LARGE, *(-x for x in _LARGE)]
_FILTERS = ("top_k", "top_p", "min_p")


def _model(params, batch, kv, config=None):
  """Logits that depend on the last token."""
  del kv, config  # A table needs no keys and values.
  return params[batch.tokens[0].at[batch.columns].get(mode="clip")], None


def _table(scale: float) -> jax.Array:
  normal = np.random.default_rng(0).normal(size=(_VOCABULARY,) * 2)
  return jnp.asarray((normal * scale).clip(-_MOST, _MOST), jnp.float32)


def _random(seed: int, count: int = _SEQUENCES) -> rollout.Sampling:
  """Settings that `Sampling` allows, with many extreme ones."""
  rng = np.random.default_rng(seed)

  def some(values, *shape):
    return rng.choice(values, (_SEQUENCES, *shape)).astype(np.float32)

  # A token may stand in the list twice, and -inf bans it.
  biases = rollout.LogitBias(
    tokens=rng.integers(-1, _VOCABULARY, (_SEQUENCES, 6)).astype(np.int32),
    values=some([*_EITHER, -np.inf], 6),
  )
  return rollout.Sampling(
    temperature=some([0.0, _TINY, 1e-30, 1e-3, 1.0, 1.0, 1e30, 8.5e37]),
    top_k=rng.integers(0, 9, _SEQUENCES),
    top_p=some([1e-38, 0.1, 0.9, 1.0]),
    min_p=some([0.0, 1e-38, 0.5, 1.0]),
    presence_penalty=some(_EITHER),
    frequency_penalty=some(_EITHER),
    repetition_penalty=some([_TINY, 1e-30, 0.5, *_LARGE]),
    min_tokens=rng.integers(0, 4, _SEQUENCES),
    stop_tokens=rng.integers(0, _VOCABULARY, (_SEQUENCES, 2)),
    bad_words=rng.integers(0, _VOCABULARY, (_SEQUENCES, 2, 2)),
    logit_bias=biases,
  )


def _begun(sampling: rollout.Sampling) -> rollout.RolloutState:
  cache_config = jaxkv.CacheConfig(
    num_pages=129, page_size=4, num_slots=64, pages_per_slot=2
  )
  prompts = np.random.default_rng(1).integers(0, _VOCABULARY, (_SEQUENCES, 3))
  config = rollout.RolloutConfig(
    max_new_tokens=_NEW, admissions=64, prefill_chunk=192
  )
  return rollout.init(
    jaxkv.init(cache_config, jax.random.key(0)),
    jaxkv.kv.init(cache_config, num_layers=1, num_kv_heads=1, head_dim=1),
    rollout.Requests(prompts, np.full(_SEQUENCES, 3), sampling=sampling),
    jax.random.key(1),
    config,
  )


@functools.cache
def _generate(numerics):
  config = types.SimpleNamespace(numerics=numerics)
  model = functools.partial(_model, config=config)
  return jax.jit(functools.partial(rollout.generate, model=model))


def _ended(state, params, numerics="fast"):
  """Statuses and codes; every token that was drawn has a finite log-prob."""
  state = _generate(numerics)(params, state)
  assert rollout.is_done(state)
  rollout.check(state)
  out = rollout.generated(state)
  log_probs = np.asarray(out.log_probs)[np.asarray(out.mask)]
  assert np.isfinite(log_probs).all()
  assert (log_probs <= 1e-6).all()
  return np.asarray(state.queue.status), np.asarray(state.queue.code)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("scale", "exact"), [(1.0, False), (1e38, False), (1.0, True)]
)
def test_allowed_settings_give_finite_log_probs(scale, exact):
  sampling = _random(2)
  if exact:  # Log-probs are computed in another way where nothing is left out.
    sampling = dataclasses.replace(sampling, **dict.fromkeys(_FILTERS))
  numerics = "exact" if exact else "fast"
  status, code = _ended(_begun(sampling), _table(scale), numerics)
  assert (status == rollout.SequenceStatus.DONE).all()
  assert (code == jaxkv.Status.OK).all()


@pytest.mark.slow
def test_traced_settings_that_are_not_allowed():
  """They are not checked, so these sequences fail, or get finite numbers."""
  rng = np.random.default_rng(3)
  bad = [0.0, -1.0, np.nan, np.inf, -np.inf, 1e-40, _MOST]
  names = ("temperature", "presence_penalty", "frequency_penalty")
  names += ("repetition_penalty", "top_p", "min_p")
  values = {
    name: jnp.asarray(rng.choice([*bad, *[1.0] * 9], _SEQUENCES), jnp.float32)
    for name in names
  }
  shape = (_SEQUENCES, 3)
  biases = rollout.LogitBias(
    tokens=jnp.asarray(rng.integers(0, _VOCABULARY, shape), jnp.int32),
    values=jnp.asarray(rng.choice([*bad, *[1.0] * 19], shape), jnp.float32),
  )

  @jax.jit
  def begun(values, biases):
    sampling = rollout.Sampling(**values, logit_bias=biases)
    return _begun(sampling)

  status, code = _ended(begun(values, biases), _table(1.0))
  failed = status == rollout.SequenceStatus.FAILED
  assert 0 < failed.sum() < _SEQUENCES
  assert (code[failed] == jaxkv.Status.BAD_LOGITS).all()
  assert (code[~failed] == jaxkv.Status.OK).all()
  wrong = np.isnan(values["temperature"]) | np.isnan(biases.values).any(axis=1)
  assert failed[wrong].all()


@pytest.mark.slow
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_without_a_distribution(value, temperature):
  """A model that gives them after one token ends sequences that draw it."""
  table = _table(1.0).at[5].set(value)
  sampling = rollout.Sampling(temperature=temperature)
  status, code = _ended(_begun(sampling), table)
  failed = code == jaxkv.Status.BAD_LOGITS
  assert 0 < failed.sum() < _SEQUENCES
  assert (
    status
    == np.where(
      failed, rollout.SequenceStatus.FAILED, rollout.SequenceStatus.DONE
    )
  ).all()
