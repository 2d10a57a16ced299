"""Log-probs of given tokens, and rollouts that sample nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import models
from jaxkv import rollout
from tests.models import tiny_decoders

pytestmark = pytest.mark.slow

_DECODER = tiny_decoders.llama(vocab_size=32)
_SIZES = models.cache_config(_DECODER, num_slots=3, max_length=16, page_size=2)
_PROMPTS = np.asarray([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 0, 0]], np.int32)


def _begun(params=None, **options) -> rollout.RolloutState:
  requests = rollout.Requests(_PROMPTS, [6, 4], log_probs_from=[1, 3])
  return rollout.init(
    jaxkv.init(_SIZES),
    models.init_kv(_DECODER, _SIZES),
    requests,
    jax.random.key(0),
    rollout.RolloutConfig(prefill_chunk=4, **options),
  )


@functools.cache
def _program():
  model = functools.partial(models.forward, config=_DECODER)
  return jax.jit(functools.partial(rollout.generate, model=model))


@functools.cache
def _params():
  return models.init_params(jax.random.key(0), _DECODER)


def _check_given(out: rollout.Generated) -> None:
  """Compares log-probs of prompts with those of a pass without a cache."""
  positions = np.broadcast_to(np.arange(6), _PROMPTS.shape)
  logits = models.forward_uncached(
    _params(), _PROMPTS, positions, config=_DECODER
  )
  log_probs = np.asarray(jax.nn.log_softmax(logits))
  for row, (first_column, end_column) in enumerate([(1, 6), (3, 4)]):
    columns = np.arange(first_column, end_column)
    expected = log_probs[row, columns - 1, _PROMPTS[row, columns]]
    np.testing.assert_allclose(out.log_probs[row, columns], expected, atol=1e-5)
    assert not np.any(out.log_probs[row, :first_column])


def test_rollouts_that_sample_nothing_end_with_their_log_probs():
  """Prompts may fill the rows of the queue, and cannot be extended."""
  state = _program()(_params(), _begun(max_new_tokens=0))
  out = rollout.generated(state)
  _check_given(out)
  assert out.lengths.tolist() == [6, 4]
  assert out.finish.tolist() == [rollout.Finish.LENGTH] * 2
  # All but the last token of each.
  assert int(state.counters.prefilled) == 5 + 3
  with pytest.raises(ValueError, match="to extend sequences, got 0"):
    rollout.extend(state, [0], [[5]], [1], max_tokens=[2])
  state, _ = rollout.harvest(state)
  requests = rollout.Requests(_PROMPTS, [6, 4], log_probs_from=[1, 3])
  state, submitted = rollout.submit(state, requests)
  assert submitted.ok.all()
  _check_given(rollout.generated(_program()(_params(), state)))


def test_sequences_move_only_to_rollouts_that_sample():
  state, exported = rollout.export(_begun(max_new_tokens=1), [0], max_pages=0)
  target = _begun(max_new_tokens=0, max_length=state.queue.width)
  with pytest.raises(ValueError, match="max_new_tokens > 0, False, got True"):
    rollout.import_sequences(target, exported)


def test_sequences_with_a_log_prob_of_nan_fail():
  """They would sample further tokens otherwise."""

  def model(params, batch, kv):
    logits, kv = models.forward(params, batch, kv, config=_DECODER)
    is_bad = (batch.tokens[0] == 4).at[batch.columns].get(mode="clip")
    return jnp.where(is_bad[:, None], jnp.nan, logits), kv

  run = jax.jit(functools.partial(rollout.generate, model=model))
  out = rollout.generated(run(_params(), _begun(max_new_tokens=2)))
  codes = [jaxkv.Status.BAD_LOGITS, jaxkv.Status.OK]
  assert out.code.tolist() == codes
  assert out.lengths.tolist()[0] == 6
