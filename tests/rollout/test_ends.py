"""Where sequences end: by a stop string, and at their limits.

The model is told what every sequence says, so it takes no time to compile.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import rollout
from tests.rollout import by_hand

_TOLD = np.asarray([0, 1, 2, 1, 2, 1, 2, 1, 2, 1], np.int32)
"""The token at each position; the first one is the prompt."""


def _model(params, batch, kv):
  """The likeliest token behind each column is the one that is told."""
  del params, kv
  following = jnp.asarray(_TOLD)[batch.positions[0] + 1]
  logits = jax.nn.one_hot(following, by_hand.VOCABULARY)
  return logits[batch.columns], None


def _begun(config, sampling, count):
  """So many prompts of one token."""
  state = by_hand.begun(
    by_hand.sizes(60, count), config, [[0]] * count, sampling=sampling
  )
  return by_hand.begun_at(state, 0.0)


def _ended(state, run):
  """The rollout at its end."""
  end = run(state)
  assert bool(rollout.is_done(end))
  rollout.check(end)
  return end


def _program(draft=None):
  """A compiled `rollout.generate`."""
  return jax.jit(
    lambda state: rollout.generate(
      None, state, rollout.Until(steps=40), model=_model, draft=draft
    )
  )


@pytest.mark.slow
def test_stop_strings_after_enough_tokens():
  """`ab` is drawn as tokens 1 and 2, 3 and 4, and so on.

  A sequence may end with it as soon as `min_tokens` are before its last token.
  """
  texts = rollout.token_bytes([b"!", b"a", b"b"])
  sampling = rollout.Sampling(
    stop_strings=rollout.stop_strings(["ab"], texts),
    min_tokens=[0, 1, 2, 3, 4],
  )
  config = rollout.RolloutConfig(max_new_tokens=8, max_length=9)
  end = _ended(_begun(config, sampling, 5), _program())
  assert end.queue.length.tolist() == [1 + n for n in (2, 2, 4, 4, 6)]
  assert set(end.queue.finish.tolist()) == {rollout.Finish.STOP_STRING}


@pytest.mark.slow
def test_no_token_is_guessed_behind_the_last():
  """All guesses are right, so those not accepted are behind the last token."""

  def draft(params, rows, tokens):
    del params
    length = jnp.sum(tokens[:, 1:] > 0, axis=1, dtype=jnp.int32) + 1
    ahead = length[:, None] + jnp.arange(3, dtype=jnp.int32)[None]
    guesses = jnp.asarray(_TOLD)[jnp.minimum(ahead, len(_TOLD) - 1)]
    return guesses, jnp.full((rows.ids.shape[0],), 3, jnp.int32)

  config = rollout.RolloutConfig(
    max_new_tokens=8,
    max_length=9,
    draft_tokens=3,
    draft_columns=16,
    timeline=16,
  )
  most = [1, 2, 3, 4, 5]
  state = _begun(config, rollout.Sampling(max_tokens=most), 5)
  end = _ended(state, _program(draft))
  assert end.queue.length.tolist() == [1 + n for n in most]
  assert set(end.queue.finish.tolist()) == {rollout.Finish.LENGTH}
  assert int(end.counters.drafted) == int(end.counters.accepted) > 0
  # Steps with drafts are no prefill.
  kinds = {span.kind for span in rollout.timeline(end).spans()}
  assert kinds == {"decode"}


@pytest.mark.slow
def test_a_sequence_that_begins_again_has_its_first_limit():
  """Of three tokens, not the one that its second turn might draw."""
  config = rollout.RolloutConfig(max_new_tokens=3, max_length=9)
  run = _program()
  end = _ended(_begun(config, rollout.Sampling(), 2), run)
  assert end.queue.length.tolist() == [4, 4]
  state, out = rollout.extend(end, [0], [[2, 1]], [2], max_tokens=[1])
  assert out.ok.tolist() == [True]
  assert _ended(state, run).queue.length.tolist() == [7, 4]
  state = rollout.update_weights(state, "drop")
  end = _ended(state, run)
  assert end.queue.length.tolist() == [4, 4]
  assert end.queue.versions[0, 1:4].tolist() == [1, 1, 1]
