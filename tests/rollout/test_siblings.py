"""Samples of one prompt: one computes it, the others follow and share it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import models
from jaxkv import rollout
from tests.rollout import by_hand

_PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]


def test_salts_that_differ_in_some_words():
  """Two samples share the prompt's pages only if their salts are equal."""
  config = rollout.RolloutConfig(
    num_samples=2, max_new_tokens=4, max_length=14, prefill_chunk=3
  )
  program, salt = by_hand.program(), [5, 6, 7, 8]
  for other, is_shared in (
    ([5, 6, 7, 8], True),
    ([9, 6, 7, 8], False),
    ([5, 6, 7, 9], False),
    ([5, 9, 9, 9], False),
  ):
    state = by_hand.begun(
      jax.random.key(5),
      by_hand.sizes(40, 2),
      config,
      [_PROMPT],
      salts=np.asarray([salt, other], np.uint32),
    )
    end = program(state, 1.0)
    assert bool(rollout.is_done(end))
    assert (int(end.counters.peak_shared) > 0) == is_shared, other
    assert is_shared or int(end.cache.stats.hit_tokens) == 0, other


_MODEL = models.llama(
  vocab_size=23,
  num_layers=2,
  embed_dim=16,
  num_heads=2,
  num_kv_heads=1,
  head_dim=8,
  mlp_dim=32,
)


def test_a_leader_of_older_weights_is_not_followed():
  """It keeps its half of the prompt; the other sample computes all anew."""
  sizes = by_hand.sizes(40, 2)
  config = rollout.RolloutConfig(
    num_samples=2, max_new_tokens=4, max_length=14, prefill_chunk=4
  )
  old, new = (
    models.init_params(jax.random.key(number), _MODEL) for number in (0, 1)
  )
  state = by_hand.begun(
    jax.random.key(5),
    sizes,
    config,
    [_PROMPT],
    kv=models.init_kv(_MODEL, sizes),
  )
  run = jax.jit(
    functools.partial(
      rollout.generate, model=functools.partial(models.forward, config=_MODEL)
    )
  )
  state = run(old, state, rollout.Until(steps=1))
  assert 0 < int(state.cache.length[0]) < len(_PROMPT)
  state, out = rollout.requeue(state, [1])
  assert out.ok.tolist() == [True]
  state = rollout.update_weights(state, "keep")
  end = run(new, state, rollout.Until(steps=60))
  out = rollout.generated(end)
  logits = models.forward_uncached(
    new, out.tokens, out.positions, config=_MODEL
  )
  scores = jax.nn.log_softmax(logits[:, :-1])
  wanted = jnp.take_along_axis(scores, out.tokens[:, 1:, None], axis=2)[..., 0]
  gaps = jnp.where(out.mask[:, 1:], jnp.abs(out.log_probs[:, 1:] - wanted), 0)
  # The first one goes on with K/V of both weights.
  assert float(gaps[0].max()) > 1e-4
  assert float(gaps[1].max()) <= 1e-5
