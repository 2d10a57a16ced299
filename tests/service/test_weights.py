"""Weights that an engine releases, and requests with values for a model."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import models
from jaxkv import rollout
from tests.models import tiny_decoders

_DECODER = tiny_decoders.llama(vocab_size=32)


def _params(seed: int):
  return models.init_params(jax.random.key(seed), _DECODER)


def _ban(logits, rows, extra):
  del rows
  is_banned = jnp.arange(32)[None] == extra["banned"][:, None]
  return jnp.where(is_banned, -jnp.inf, logits), extra


def _engine() -> rollout.Engine:
  return rollout.Engine(
    _params(0),
    functools.partial(models.forward, config=_DECODER),
    models.cache_config(_DECODER, num_slots=3, max_length=32, page_size=2),
    rollout.RolloutConfig(num_samples=2, max_new_tokens=5, prefill_chunk=8),
    process=_ban,
  )


def _requests(banned):
  return rollout.Requests(
    [[5, 3, 5, 3, 1], [2, 7, 1, 0, 0]],
    [5, 3],
    num_samples=[2, 1],
    sampling=rollout.Sampling(temperature=0.0),
    extra={"banned": np.full((4,), banned, np.int32)},
  )


def test_released_weights_come_back():
  """Equal weights keep the pages, new ones do not."""
  with _engine() as engine:
    results = engine.generate(_requests(31)).results
    assert results.lengths.tolist() == [10, 10, 8]
    first_token = int(results.tokens[0, 5])
    params = _params(0)
    engine.release_weights()
    with pytest.raises(RuntimeError, match="has released its weights"):
      engine.generate(_requests(31))
    engine.update_weights(params, version=0)
    assert engine.match(_requests(31)).tolist() == [4, 2]
    results = engine.generate(_requests(first_token)).results
    assert first_token not in results.tokens[:2, 5]
    with pytest.raises(ValueError, match="`version` must be at least 1"):
      engine.update_weights(params, version=0)
    engine.release_weights()
    engine.update_weights(_params(1))
    assert engine.match(_requests(31)).tolist() == [0, 0]
    assert engine.generate(_requests(31)).results.versions.max() == 1
