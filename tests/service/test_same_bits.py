"""Exact numerics of engines, which have compiler options of their own."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxkv import models
from jaxkv import rollout
from tests.models import tiny_decoders
from tests.tools.tiers import slow_except

_DECODERS = ["llama", "windows and caps", "states"]


@slow_except("name", _DECODERS, "llama")
@pytest.mark.parametrize("name", _DECODERS)
def test_engine_score_and_trainer_have_the_same_bits(name):
  """The trainer is compiled with the default options."""
  decoder = tiny_decoders.decoder(tiny_decoders.LAYERS[name])
  decoder = dataclasses.replace(decoder, numerics="exact")
  params = models.init_params(jax.random.key(0), decoder)
  cache = models.cache_config(decoder, num_slots=3, max_length=32, page_size=4)
  rng = np.random.default_rng(0)
  lengths = rng.integers(2, 12, 6)
  prompts = [rng.integers(0, decoder.vocab_size, n).tolist() for n in lengths]
  model = functools.partial(models.forward, config=decoder)
  config = rollout.RolloutConfig(max_new_tokens=16, prefill_chunk=8)
  with rollout.Engine(params, model, cache, config) as engine:
    results = engine.generate(prompts).results
    spans = list(zip(results.prompt_lengths, results.lengths, strict=True))
    completions = [
      [row[prompt_length:length].tolist()]
      for row, (prompt_length, length) in zip(
        results.tokens, spans, strict=True
      )
    ]
    scored = engine.score(prompts, completions).log_probs[:, 0]
  trainer = jax.jit(functools.partial(models.grouped_log_probs, config=decoder))
  for row, (prompt_length, length) in enumerate(spans):
    sampled_log_probs = results.log_probs[row, prompt_length:length]
    trained = trainer(
      params,
      np.asarray([prompts[row]], np.int32),
      np.asarray([prompt_length]),
      np.asarray([completions[row]], np.int32),
      np.asarray([[length - prompt_length]]),
    )
    np.testing.assert_array_equal(
      scored[row, : length - prompt_length], sampled_log_probs
    )
    np.testing.assert_array_equal(trained[0, 0], sampled_log_probs)
