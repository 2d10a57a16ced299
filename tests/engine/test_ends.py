"""Ends of sequences: stop strings and limits.

The model has a table of tokens instead of attention, so it compiles fast.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import guides
from jaxkv import rollout
from tests.engine import by_hand

_TOKENS = np.asarray([0, 1, 2, 1, 2, 1, 2, 1, 2, 1], np.int32)
"""The token at each position; the first one is the prompt."""


def _model(params, batch, kv):
  """Returns logits that select the next token of `_TOKENS`."""
  del params, kv
  following = jnp.asarray(_TOKENS)[batch.positions[0] + 1]
  logits = jax.nn.one_hot(following, by_hand.VOCABULARY)
  return logits[batch.columns], None


def _begun(config, sampling, count):
  """Returns a rollout of `count` prompts of one token."""
  state = by_hand.begun(
    by_hand.sizes(60, count), config, [[0]] * count, sampling=sampling
  )
  return by_hand.begun_at(state, 0.0)


def _run_to_end(state, run):
  """Runs the rollout to its end and checks it."""
  end_state = run(state)
  assert bool(rollout.is_done(end_state))
  rollout.check(end_state)
  return end_state


def _program(draft=None):
  """Returns a compiled `rollout.generate`."""
  return jax.jit(
    lambda state: rollout.generate(
      None, state, rollout.Until(steps=40), model=_model, draft=draft
    )
  )


@pytest.mark.slow
def test_stop_strings_end_after_min_tokens():
  """`ab` is drawn as tokens 1 and 2, 3 and 4, and so on.

  A sequence may end with it as soon as `min_tokens` are before its last token.
  """
  texts = guides.token_bytes([b"!", b"a", b"b"])
  sampling = rollout.Sampling(
    stop_strings=rollout.stop_strings(["ab"], texts),
    min_tokens=[0, 1, 2, 3, 4],
  )
  config = rollout.RolloutConfig(max_new_tokens=8, max_length=9)
  state = _run_to_end(_begun(config, sampling, 5), _program())
  assert state.queue.length.tolist() == [1 + n for n in (2, 2, 4, 4, 6)]
  assert set(state.queue.finish.tolist()) == {rollout.Finish.STOP_STRING}


@pytest.mark.slow
def test_no_draft_exceeds_the_limit():
  """All drafts are right, so one that is not accepted is beyond the limit."""

  def draft(params, rows, tokens):
    del params
    length = jnp.sum(tokens[:, 1:] > 0, axis=1, dtype=jnp.int32) + 1
    ahead = length[:, None] + jnp.arange(3, dtype=jnp.int32)[None]
    guesses = jnp.asarray(_TOKENS)[jnp.minimum(ahead, len(_TOKENS) - 1)]
    return guesses, jnp.full((rows.ids.shape[0],), 3, jnp.int32)

  config = rollout.RolloutConfig(
    max_new_tokens=8,
    max_length=9,
    draft_tokens=3,
    draft_columns=16,
    timeline=16,
  )
  max_tokens = [1, 2, 3, 4, 5]
  state = _begun(config, rollout.Sampling(max_tokens=max_tokens), 5)
  state = _run_to_end(state, _program(draft))
  assert state.queue.length.tolist() == [1 + n for n in max_tokens]
  assert set(state.queue.finish.tolist()) == {rollout.Finish.LENGTH}
  assert int(state.counters.drafted) == int(state.counters.accepted) > 0
  # Steps with drafts are no prefill.
  kinds = {span.kind for span in rollout.timeline(state).spans()}
  assert kinds == {"decode"}
