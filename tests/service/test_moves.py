"""Sequences that move between engines."""

import functools

import jax
import numpy as np
import pytest

from jaxkv import models
from jaxkv import rollout
from tests.models import tiny_decoders

_DECODER = tiny_decoders.llama(vocab_size=32)
_GREEDY = rollout.Sampling(temperature=0.0)


def _engine() -> rollout.Engine:
  return rollout.Engine(
    models.init_params(jax.random.key(0), _DECODER),
    functools.partial(models.forward, config=_DECODER),
    models.cache_config(_DECODER, num_slots=3, max_length=32, page_size=2),
    rollout.RolloutConfig(num_samples=2, max_new_tokens=5, prefill_chunk=8),
    num_prompts=8,
    secret=np.arange(4, dtype=np.uint32),
  )


def _run(engine: rollout.Engine) -> list[rollout.PromptSamples]:
  while engine.step():
    pass
  return engine.harvest()


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [0, 4])
def test_a_queue_with_salts_and_priorities_takes_prompts_without(num_steps):
  """Pages of sequences without a salt are those of sequences with salt 0.

  The queue also records log-probs of prompts.
  """
  prompt = [4, 2, 4, 2, 9]
  requests = rollout.Requests(
    [[1, 2]],
    [2],
    sampling=_GREEDY,
    priority=[3, 4],
    log_probs_from=[1],
    salts=np.full((2, 4), 7, np.uint32),
  )
  with _engine() as source, _engine() as target:
    expected = source.generate([prompt], sampling=_GREEDY).results
    (first_id,) = source.submit([prompt], sampling=_GREEDY)
    if num_steps:
      source.step(num_steps)
    target.submit(requests)
    _run(target)
    num_prefilled = int(target.counters.prefilled)
    assert target.import_sequences(source.export()) == [first_id]
    (out,) = _run(target)
    num_prefilled = int(target.counters.prefilled) - num_prefilled
  width = expected.tokens.shape[1]
  np.testing.assert_array_equal(out.results.tokens[:, :width], expected.tokens)
  assert (num_prefilled == 0) == (num_steps > 0)
