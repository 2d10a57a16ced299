"""Engines that record log-probs of given tokens for some of their prompts."""

import functools

import jax
import numpy as np
import pytest

from jaxkv import models
from jaxkv import rollout
from tests.models import tiny_decoders

_DECODER = tiny_decoders.llama(vocab_size=32)


@pytest.mark.slow
def test_plain_prompts_follow_prompts_with_log_probs():
  """The number of widths of a call changes with the first such prompt."""
  params = models.init_params(jax.random.key(0), _DECODER)
  cache = models.cache_config(_DECODER, num_slots=3, max_length=32, page_size=2)
  config = rollout.RolloutConfig(prefill_chunk=128, max_new_tokens=3)
  prompt = np.asarray([3, 1, 4, 1, 5], np.int32)
  greedy = rollout.Sampling(temperature=0.0)
  requests = rollout.Requests(
    prompt[None], [5], log_probs_from=[1], sampling=greedy
  )
  model = functools.partial(models.forward, config=_DECODER)
  with rollout.Engine(params, model, cache, config) as engine:
    expected = engine.generate([prompt], sampling=greedy).results
    num_calls = int(np.asarray(engine.counters.steps))
    recorded = engine.generate(requests).results
    plain = engine.generate([prompt], sampling=greedy).results
    calls = np.asarray(engine.counters.calls)
    assert calls.sum() == int(np.asarray(engine.counters.steps)) - num_calls
  for results in (recorded, plain):
    width = expected.tokens.shape[1]
    np.testing.assert_array_equal(results.tokens[:, :width], expected.tokens)
  positions = np.arange(5)[None]
  logits = models.forward_uncached(
    params, prompt[None], positions, config=_DECODER
  )
  log_probs = np.asarray(jax.nn.log_softmax(logits))[
    0, np.arange(4), prompt[1:]
  ]
  np.testing.assert_allclose(recorded.log_probs[0, 1:5], log_probs, atol=1e-5)
  assert not np.any(plain.log_probs[0, :5])
