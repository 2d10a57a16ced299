"""Columns of padding, with more slots than chunks in a call."""

import functools

import jax
import numpy as np
import pytest

import jaxkv
from jaxkv import rollout
from tests.engine import by_hand

_MODEL = by_hand.all_logits(by_hand.model)
_SLOTS = 16


def _log_prob(tokens: list[int]) -> float:
  """Returns the log-prob of the last token after the others."""
  logits = by_hand.logits_of(tokens[:-1])
  return float(jax.nn.log_softmax(logits)[tokens[-1]])


@pytest.mark.slow
def test_scores_after_prompts_of_one_token():
  sizes = by_hand.sizes(200, _SLOTS)
  memory = rollout.Memory(cache=jaxkv.init(sizes), kv=by_hand.pages(sizes))
  random = np.random.default_rng(0)
  prompts = random.integers(0, by_hand.VOCABULARY, (60, 9)).astype(np.int32)
  lengths = random.integers(1, 10, 60).astype(np.int32)
  answers = random.integers(0, by_hand.VOCABULARY, (60, 3, 6)).astype(np.int32)
  counts = random.integers(1, 7, (60, 3)).astype(np.int32)
  score = jax.jit(functools.partial(rollout.score, model=_MODEL))
  _, scored = score(None, memory, prompts, lengths, answers, counts)
  assert bool(scored.ok.all())
  for row in np.flatnonzero(lengths == 1).tolist():
    for sample, count in enumerate(counts[row].tolist()):
      text = [prompts[row, 0], *answers[row, sample]]
      expected = [_log_prob(text[: 2 + column]) for column in range(count)]
      np.testing.assert_allclose(
        scored.log_probs[row, sample, :count], expected, rtol=0, atol=1e-5
      )


@pytest.mark.slow
def test_log_probs_of_prompts():
  config = rollout.RolloutConfig(
    max_new_tokens=5,
    num_samples=2,
    prefill_chunk=64,
    raw_log_probs=True,
  )
  random = np.random.default_rng(1)
  prompts = [
    random.integers(0, by_hand.VOCABULARY, length).tolist()
    for length in random.integers(2, 10, 60)
  ]
  state = by_hand.begun(
    by_hand.sizes(200, _SLOTS), config, prompts, log_probs_from=[1] * 60
  )
  queue = by_hand.program()(state, 0.0).queue
  log_probs = np.asarray(queue.records.raw_log_probs)
  for row, prompt in enumerate(prompts):
    expected = [_log_prob(prompt[:n]) for n in range(2, len(prompt) + 1)]
    # Of the first sample; the others share its prompt.
    np.testing.assert_allclose(
      log_probs[2 * row, 1 : len(prompt)], expected, rtol=0, atol=1e-5
    )
