"""Limits of a call of `generate`, and the state that it leaves."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import rollout
from tests.engine import by_hand

_CONFIG = rollout.RolloutConfig(
  num_samples=2, max_new_tokens=6, stop_token=8, prefill_chunk=4
)


def _begun(**options) -> rollout.RolloutState:
  sizes = by_hand.sizes(60, 3)
  state = by_hand.begun(sizes, _CONFIG, **options)
  return by_hand.begun_at(state, 1.0)


_model = by_hand.all_logits(by_hand.model)
_generate = jax.jit(
  lambda state, until: rollout.generate(None, state, until, model=_model)
)


def _until(**limits: int) -> rollout.Until:
  """Returns limits that are all numbers, so one program serves all tests."""
  names = ("steps", "sequences", "prompts")
  limits = dict.fromkeys(names, by_hand.NO_LIMIT) | limits
  return rollout.Until(**{k: jnp.int32(v) for k, v in limits.items()})


def _is_done(state: rollout.RolloutState) -> np.ndarray:
  return np.asarray(state.queue.status) == by_hand.DONE


@pytest.mark.parametrize("count", [1, 3])
def test_call_ends_after_complete_groups(count):
  until = _until(prompts=count)
  stopped = _generate(_begun(), until)
  groups = _is_done(stopped).reshape(-1, 2).all(axis=1)
  assert groups.sum() == count
  steps = int(stopped.counters.steps)
  earlier_state = _generate(_begun(), _until(steps=steps - 1))
  assert _is_done(earlier_state).reshape(-1, 2).all(axis=1).sum() < count
  assert int(_generate(stopped, until).counters.steps) == steps
  whole = _generate(_begun(), _until())
  state = _generate(stopped, _until())
  np.testing.assert_array_equal(state.queue.tokens, whole.queue.tokens)


def test_equal_calls_outside_of_jit_trace_the_model_once():
  traced_names = []

  def named(params, batch, kv, *, name):
    traced_names.append(name)
    return _model(params, batch, kv)

  def run(name: str) -> int:
    """Returns the number of times that a call traced the model."""
    num_before = len(traced_names)
    model = functools.partial(named, name=name)
    state = rollout.generate(None, _begun(), _until(steps=2), model=model)
    assert int(state.counters.steps) == 2
    return len(traced_names) - num_before

  assert run("first") > 0
  assert run("first") == 0
  assert run("second") > 0


def test_is_new_marks_each_sequence_once():
  """A sequence is new only after the call in which it ended."""
  state = _begun()
  num_new = np.zeros(8, int)
  while not rollout.is_done(state):
    had_ended = _is_done(state)
    state = _generate(state, _until(steps=3))
    is_new = np.asarray(rollout.generated(state).is_new)
    np.testing.assert_array_equal(is_new, _is_done(state) & ~had_ended)
    num_new += is_new
  assert num_new.tolist() == [1] * 8
  assert not np.any(_generate(state, _until()).queue.is_new)


def test_sequences_until_all_are_harvested():
  """A server: a call ends with an answer, which is harvested."""
  state = _begun()
  answers = {}
  while len(answers) < 8:
    state = _generate(state, _until(sequences=1))
    assert _is_done(state).any()
    state, out = rollout.harvest(state)
    for row in np.flatnonzero(out.results.valid):
      answers[int(out.results.ids[row])] = out.results.tokens[row].tolist()
  whole = _generate(_begun(), _until()).queue
  assert [answers[n] for n in range(8)] == whole.tokens.tolist()
  assert set(state.queue.status.tolist()) == {by_hand.EMPTY}


def test_empty_groups_are_not_complete():
  """A group without samples does not count as complete."""
  state = _begun(num_samples=[0, 1, 2, 0])
  state = _generate(state, _until(prompts=2))
  assert _is_done(state).sum() == 3
  assert bool(rollout.is_done(state))
