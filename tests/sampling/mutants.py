"""Mutants of sampling, with the test that notices each."""

import jax
import jax.numpy as jnp

from tests.tools.mistakes import given
from tests.tools.mistakes import returned
from tests.tools.mistakes import table

_CUTOFFS = "sampling/test_filters.py::TestByHand"
_MIXED = "sampling/test_sample.py::TestMixed"
_PENALTIES = "sampling/test_penalties.py::"
_SEQUENCES = "engine/test_by_hand.py::test_tokens_equal_plain_python"


def _least_likely(g):
  """Reverses the order of the distributions."""
  logits = -g.weights.logits
  return g.weights._replace(
    logits=logits, best=jnp.max(logits, axis=1, keepdims=True)
  )


def _at_temperature_1(out, g):
  """Returns log-probs of the model's distribution."""
  scores = jax.nn.log_softmax(g.logits, axis=1)
  log_probs = jnp.take_along_axis(scores, out.tokens[:, None], axis=1)
  return out._replace(log_probs=log_probs[:, 0])


_FILTERS = {
  "top-k keeps a token more": (
    "filters:_keep_count",
    given(top_k=lambda g: g.top_k + 1),
    _CUTOFFS,
  ),
  "min-p is forgotten": (
    "filters:cutoff",
    given(min_p=lambda g: None),
    _CUTOFFS,
  ),
}

_SETTINGS = {
  "the stop token of all is allowed": (
    "penalties:_banned_tokens",
    given(history=lambda g: g.history._replace(stop_token=-1)),
    _PENALTIES + "TestByHand",
  ),
  "every bad word is begun": (
    "penalties:_completes_word",
    returned(lambda out, g: out | True),
    _PENALTIES + "TestByHand",
  ),
  "rows that draw nothing count a token": (
    "penalties:see",
    given(mask=lambda g: g.mask | True),
    _PENALTIES + "TestSeen",
  ),
  "padding is seen": (
    "penalties:seen_in",
    given(lengths=lambda g: jnp.full_like(g.lengths, g.tokens.shape[1])),
    _PENALTIES + "TestSeen",
  ),
  "the last tokens are a place early": (
    "penalties:last_tokens_of",
    given(lengths=lambda g: g.lengths - 1),
    _PENALTIES + "TestLastTokens",
  ),
  "rows without a sequence have that of the last": (
    "settings:rows",
    given(sequences=lambda g: jnp.clip(g.sequences, 0, 2)),
    "sampling/test_settings.py::TestRows",
  ),
}

_DRAWS = {
  "temperature multiplies": (
    "sample:_weights",
    returned(lambda out, g: out._replace(divisor=1 / out.divisor)),
    _MIXED,
  ),
  "greedy takes the least likely": (
    "sample:_most_likely",
    given(weights=_least_likely),
    _MIXED,
  ),
  "both choices have one number": (
    "sample:_uniforms",
    returned(lambda out, g: (out[0], out[0])),
    _MIXED,
  ),
  "all draws of a sequence are one": (
    "sample:sample_tokens",
    given(counts=lambda g: g.counts * 0),
    _SEQUENCES,
  ),
  "a draw depends on the place in the batch": (
    "sample:sample_tokens",
    given(keys=lambda g: g.keys[::-1]),
    _SEQUENCES,
  ),
  "log-probabilities of another temperature": (
    "sample:sample_tokens",
    returned(_at_temperature_1),
    _MIXED,
  ),
  "all tokens are drawn from": (
    "sample:_weights",
    returned(lambda out, g: out._replace(cutoff=out.cutoff * 0)),
    _MIXED,
  ),
  "the model's own distribution is the changed one": (
    "sample:sample_tokens",
    given(raw_logits=lambda g: None),
    "sampling/test_sample.py::TestTheModelsOwn",
  ),
}

MUTANTS = table("jaxkv._src.sampling", "tests", _FILTERS | _SETTINGS | _DRAWS)
