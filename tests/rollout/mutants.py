"""Mistakes in rollouts: one each, and the test that notices it."""

from dataclasses import replace

import jax.numpy as jnp

from tests.tools.mistakes import given
from tests.tools.mistakes import returned
from tests.tools.mistakes import table

_BY_HAND = "test_by_hand.py::"
_PARTS = "test_parts.py::"
_VERBS = "test_verbs.py::"


def _keys_of_prompts(out, g):
  """All samples of a prompt have one key."""
  samples = g.config.num_samples
  return replace(out, keys=jnp.repeat(out.keys[::samples], samples, axis=0))


_SEQUENCES = {
  "a token less": (
    "endings:ending",
    given(rows=lambda g: g.rows._replace(lengths=g.rows.lengths + 1)),
    _BY_HAND + "test_sequences",
  ),
  "nothing stops": (
    "endings:ending",
    given(config=lambda g: replace(g.config, stop_token=-1)),
    _BY_HAND + "test_sequences",
  ),
  "samples of a prompt are equal": (
    "sequences:samples_of",
    returned(_keys_of_prompts),
    _BY_HAND + "test_sequences",
  ),
  "the last that waits is first": (
    "sequences:first_of",
    given(condition=lambda g: g.condition & ~jnp.roll(g.condition, -1)),
    _BY_HAND + "test_preemption",
  ),
  "a failure has no code": (
    "sequences:fail",
    given(code=lambda g: g.code * 0),
    "test_hopeless.py::test_hopeless",
  ),
  "tokens have the first version": (
    "sequences:append",
    given(version=lambda g: g.version * 0),
    _VERBS + "test_versions",
  ),
  "priorities are the other way round": (
    "sequences:order_of",
    given(
      sequences=lambda g: replace(g.sequences, priority=-g.sequences.priority)
    ),
    _BY_HAND + "test_priority",
  ),
  "all samples of every prompt": (
    "sequences:samples_of",
    given(num_samples=lambda g: g.num_samples + 1),
    _BY_HAND + "test_num_samples",
  ),
}

_LOOP = {
  "steps of earlier calls count": (
    "until:goes_on",
    given(begin=lambda g: g.begin * 0),
    _BY_HAND + "test_preemption",
  ),
  "failed sequences never ended": (
    "until:has_ended",
    returned(lambda out, g: g.status == 2),
    _PARTS + "test_until",
  ),
  "rows without a sequence have ended": (
    "until:has_ended",
    returned(lambda out, g: g.status >= 2),
    _PARTS + "test_until",
  ),
  "stop strings count at once": (
    "endings:ending",
    given(own=lambda g: replace(g.own, min_tokens=None)),
    _PARTS + "test_endings",
  ),
  "stop tokens of other sequences": (
    "endings:ending",
    given(own=lambda g: replace(g.own, stop_tokens=g.own.stop_tokens[::-1])),
    _PARTS + "test_endings",
  ),
  "guesses take the last pages": (
    "guessing:_fit",
    returned(lambda out, g: out | ~out),
    _PARTS + "test_pages_of_guesses",
  ),
  "a rollout is not brought to its memory": (
    "placement:beside",
    returned(lambda out, g: g.tree),
    "test_devices.py::TestPlaces::test_on_one_device",
  ),
}

_OF_VERBS = {
  "groups are harvested in parts": (
    "verbs.harvest:harvest",
    given(groups=lambda g: False),
    _VERBS + "test_harvest",
  ),
  "what is dropped stays": (
    "verbs.update_weights:_begun_again",
    returned(lambda out, g: g.sequences),
    _VERBS + "test_update_weights",
  ),
  "what is dropped ends where it would have": (
    "verbs.update_weights:_begun_again",
    returned(lambda out, g: replace(out, limit=g.sequences.limit)),
    _VERBS + "test_update_weights",
  ),
}

MUTANTS = table(
  "jaxkv._src.rollout",
  "tests/rollout",
  _SEQUENCES | _LOOP | _OF_VERBS,
)
