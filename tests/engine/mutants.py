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


def _one_sample_more(g):
  return replace(g.requests, num_samples=g.requests.num_samples + 1)


def _reversed_stop_tokens(g):
  return replace(g.sampling, stop_tokens=g.sampling.stop_tokens[::-1])


_QUEUE = {
  "a token less": (
    "sampling.stop_rules:endings",
    given(rows=lambda g: g.rows._replace(lengths=g.rows.lengths + 1)),
    _BY_HAND + "test_tokens_equal_plain_python",
  ),
  "nothing stops": (
    "sampling.stop_rules:endings",
    given(config=lambda g: replace(g.config, stop_token=-1)),
    _BY_HAND + "test_tokens_equal_plain_python",
  ),
  "samples of a prompt are equal": (
    "queue.enqueue:new_queue",
    returned(_keys_of_prompts),
    _BY_HAND + "test_tokens_equal_plain_python",
  ),
  "the last that waits is first": (
    "queue.queue:first_of",
    given(condition=lambda g: g.condition & ~jnp.roll(g.condition, -1)),
    _BY_HAND + "test_younger_of_equal_sequences_is_preempted",
  ),
  "a failure has no code": (
    "queue.queue:fail",
    given(code=lambda g: g.code * 0),
    "test_hopeless.py::test_sequences_that_never_fit_fail",
  ),
  "tokens have the first version": (
    "sampling.sample_and_verify:_append",
    given(version=lambda g: g.version * 0),
    "test_weights.py::TestUpdateWeights::test_recompute",
  ),
  "priorities are the other way round": (
    "queue.queue:order_of",
    given(priority=lambda g: -g.priority),
    _BY_HAND + "test_priority_orders_admission_and_preemption",
  ),
  "all samples of every prompt": (
    "queue.enqueue:new_queue",
    given(requests=_one_sample_more),
    "test_until.py::test_empty_groups_are_not_complete",
  ),
}

_LOOP = {
  "pages with NaN stay in the index": (
    "step:_bad_rows",
    returned(lambda out, g: jnp.full_like(out, g.queue.no_row)),
    "test_bad_logits.py::test_bad_weights_leave_nothing_in_the_index",
  ),
  "steps of earlier calls count": (
    "generate:goes_on",
    given(first_step=lambda g: g.first_step * 0),
    _BY_HAND + "test_younger_of_equal_sequences_is_preempted",
  ),
  "failed sequences never ended": (
    "queue.queue:has_ended",
    returned(lambda out, g: g.status == 2),
    _PARTS + "test_limits_of_a_call",
  ),
  "rows without a sequence have ended": (
    "queue.queue:has_ended",
    returned(lambda out, g: g.status >= 2),
    _PARTS + "test_limits_of_a_call",
  ),
  "stop strings count at once": (
    "sampling.stop_rules:endings",
    given(sampling=lambda g: replace(g.sampling, min_tokens=None)),
    _PARTS + "test_stop_tokens_and_stop_strings",
  ),
  "stop tokens of other sequences": (
    "sampling.stop_rules:endings",
    given(sampling=_reversed_stop_tokens),
    _PARTS + "test_stop_tokens_and_stop_strings",
  ),
  "guesses take the last pages": (
    "sampling.speculate:_fits",
    returned(lambda out, g: out | ~out),
    _PARTS + "test_drafts_leave_the_last_pages",
  ),
}

_OF_DEVICES = {
  "a rollout is not brought to its memory": (
    "state:_beside",
    returned(lambda out, g: g.tree),
    "test_devices.py::TestPlacement::test_rollout_has_the_device_of_its_memory",
  ),
}

_OF_VERBS = {
  "groups are harvested in parts": (
    "results.generated:harvest",
    given(whole_prompts=lambda g: False),
    _VERBS + "test_harvest_of_groups_and_sequences",
  ),
  "what is dropped stays": (
    "verbs.update_weights:_restart",
    returned(lambda out, g: g.queue),
    _VERBS + "test_policies_of_update_weights",
  ),
  "what is dropped ends where it would have": (
    "verbs.update_weights:_restart",
    returned(lambda out, g: replace(out, limit=g.queue.limit)),
    _VERBS + "test_policies_of_update_weights",
  ),
}

MUTANTS = {
  **table("jaxkv._src.engine", "tests/engine", _QUEUE | _LOOP | _OF_VERBS),
  **table("jaxkv._src.engine", "tests/sharding", _OF_DEVICES),
}
