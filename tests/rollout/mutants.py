"""Mistakes in rollouts: one each, and the test that notices it."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from tests.tools.mistakes import given
from tests.tools.mistakes import returned
from tests.tools.mistakes import table

_BY_HAND = "test_by_hand.py::"
_SAMPLING = "test_sampling.py::TestMixed"
_CUTOFFS = "test_filters.py::TestByHand"
_PROCESSORS = "test_processors.py::"
_PARTS = "test_parts.py::"
_VERBS = "test_verbs.py::"


def _keys_of_prompts(out, g):
  """All samples of a prompt have one key."""
  samples = g.config.num_samples
  return replace(out, keys=jnp.repeat(out.keys[::samples], samples, axis=0))


def _least_likely(g):
  """The distributions turned round."""
  logits = -g.weights.logits
  return g.weights._replace(
    logits=logits, best=jnp.max(logits, axis=1, keepdims=True)
  )


def _at_temperature_1(out, g):
  """Log-probabilities of the model's own distribution."""
  scores = jax.nn.log_softmax(g.logits, axis=1)
  own = jnp.take_along_axis(scores, out.tokens[:, None], axis=1)
  return out._replace(log_probs=own[:, 0])


_FILTERS = {
  "top-k keeps a token more": (
    "sampling.filters:_keep_count",
    given(top_k=lambda g: g.top_k + 1),
    _CUTOFFS,
  ),
  "min-p is forgotten": (
    "sampling.filters:cutoff",
    given(min_p=lambda g: None),
    _CUTOFFS,
  ),
}

_SETTINGS = {
  "the stop token of all is allowed": (
    "sampling.penalties:_additions",
    given(history=lambda g: g.history._replace(stop_token=-1)),
    _PROCESSORS + "TestByHand",
  ),
  "every bad word is begun": (
    "sampling.penalties:_begun",
    returned(lambda out, g: out | True),
    _PROCESSORS + "TestByHand",
  ),
  "rows that draw nothing count a token": (
    "sampling.penalties:see",
    given(mask=lambda g: g.mask | True),
    _PROCESSORS + "TestSeen",
  ),
  "padding is seen": (
    "sampling.penalties:seen_in",
    given(lengths=lambda g: jnp.full_like(g.lengths, g.tokens.shape[1])),
    _PROCESSORS + "TestSeen",
  ),
  "the last tokens are a place early": (
    "sampling.penalties:last_tokens_of",
    given(lengths=lambda g: g.lengths - 1),
    _PROCESSORS + "TestLastTokens",
  ),
  "rows without a sequence have that of the last": (
    "sampling.settings:rows",
    given(numbers=lambda g: jnp.clip(g.numbers, 0, 2)),
    "test_settings.py::TestRows",
  ),
}

_DRAWS = {
  "temperature multiplies": (
    "sampling.sample:_weights",
    returned(lambda out, g: out._replace(divisor=1 / out.divisor)),
    _SAMPLING,
  ),
  "greedy takes the least likely": (
    "sampling.sample:_most_likely",
    given(weights=_least_likely),
    _SAMPLING,
  ),
  "both choices have one number": (
    "sampling.sample:_uniforms",
    returned(lambda out, g: (out[0], out[0])),
    _SAMPLING,
  ),
  "all draws of a sequence are one": (
    "sampling.sample:draw",
    given(counts=lambda g: g.counts * 0),
    _BY_HAND + "test_sequences",
  ),
  "a draw depends on the place in the batch": (
    "sampling.sample:draw",
    given(keys=lambda g: g.keys[::-1]),
    _BY_HAND + "test_sequences",
  ),
  "log-probabilities of another temperature": (
    "sampling.sample:draw",
    returned(_at_temperature_1),
    _SAMPLING,
  ),
  "all tokens are drawn from": (
    "sampling.sample:_weights",
    returned(lambda out, g: out._replace(cutoff=out.cutoff * 0)),
    _SAMPLING,
  ),
  "the model's own distribution is the changed one": (
    "sampling.sample:draw",
    given(raw_logits=lambda g: None),
    "test_sampling.py::TestTheModelsOwn",
  ),
}

_SEQUENCES = {
  "a token less": (
    "rollout.endings:ending",
    given(rows=lambda g: g.rows._replace(lengths=g.rows.lengths + 1)),
    _BY_HAND + "test_sequences",
  ),
  "nothing stops": (
    "rollout.endings:ending",
    given(config=lambda g: replace(g.config, stop_token=-1)),
    _BY_HAND + "test_sequences",
  ),
  "samples of a prompt are equal": (
    "rollout.sequences:samples_of",
    returned(_keys_of_prompts),
    _BY_HAND + "test_sequences",
  ),
  "the last that waits is first": (
    "rollout.sequences:first_of",
    given(condition=lambda g: g.condition & ~jnp.roll(g.condition, -1)),
    _BY_HAND + "test_preemption",
  ),
  "a failure has no code": (
    "rollout.sequences:fail",
    given(code=lambda g: g.code * 0),
    "test_hopeless.py::test_hopeless",
  ),
  "tokens have the first version": (
    "rollout.sequences:append",
    given(version=lambda g: g.version * 0),
    _VERBS + "test_versions",
  ),
  "priorities are the other way round": (
    "rollout.sequences:order_of",
    given(
      sequences=lambda g: replace(g.sequences, priority=-g.sequences.priority)
    ),
    _BY_HAND + "test_priority",
  ),
  "all samples of every prompt": (
    "rollout.sequences:samples_of",
    given(num_samples=lambda g: g.num_samples + 1),
    _BY_HAND + "test_num_samples",
  ),
}

_LOOP = {
  "steps of earlier calls count": (
    "rollout.until:goes_on",
    given(begin=lambda g: g.begin * 0),
    _BY_HAND + "test_preemption",
  ),
  "failed sequences never ended": (
    "rollout.until:has_ended",
    returned(lambda out, g: g.status == 2),
    _PARTS + "test_until",
  ),
  "rows without a sequence have ended": (
    "rollout.until:has_ended",
    returned(lambda out, g: g.status >= 2),
    _PARTS + "test_until",
  ),
  "stop strings count at once": (
    "rollout.endings:ending",
    given(own=lambda g: replace(g.own, min_tokens=None)),
    _PARTS + "test_endings",
  ),
  "stop tokens of other sequences": (
    "rollout.endings:ending",
    given(own=lambda g: replace(g.own, stop_tokens=g.own.stop_tokens[::-1])),
    _PARTS + "test_endings",
  ),
  "guesses take the last pages": (
    "rollout.guessing:_fit",
    returned(lambda out, g: out | ~out),
    _PARTS + "test_pages_of_guesses",
  ),
  "a rollout is not brought to its memory": (
    "rollout.placement:beside",
    returned(lambda out, g: g.tree),
    "test_devices.py::TestPlaces::test_on_one_device",
  ),
}

_OF_VERBS = {
  "groups are harvested in parts": (
    "rollout.verbs.harvest:harvest",
    given(groups=lambda g: False),
    _VERBS + "test_harvest",
  ),
  "what is dropped stays": (
    "rollout.verbs.update_weights:_begun_again",
    returned(lambda out, g: g.sequences),
    _VERBS + "test_update_weights",
  ),
  "what is dropped ends where it would have": (
    "rollout.verbs.update_weights:_begun_again",
    returned(lambda out, g: replace(out, limit=g.sequences.limit)),
    _VERBS + "test_update_weights",
  ),
}

MUTANTS = table(
  "jaxkv._src",
  "tests/rollout",
  _FILTERS | _SETTINGS | _DRAWS | _SEQUENCES | _LOOP | _OF_VERBS,
)
