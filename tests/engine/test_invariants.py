"""A state that was edited by hand breaks the invariant of its field."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import rollout
from tests.engine import by_hand

_RUNS = by_hand.RUNS
_DONE = by_hand.DONE


def _state() -> rollout.RolloutState:
  """Returns two samples of two prompts; one runs, its sibling follows it.

  The sequence in slot 0 has computed three of eight tokens.
  """
  config = rollout.RolloutConfig(
    num_samples=2, max_new_tokens=4, max_length=14, prefill_chunk=3
  )
  prompts = [[1, 2, 3, 4, 5, 6, 7, 8], [9, 8, 7]]
  state = by_hand.begun(by_hand.sizes(40, 3), config, prompts)
  counts = jnp.asarray([3, 0, 0], jnp.int32)
  tokens = jnp.asarray([[1, 2, 3]] * 3, jnp.int32)
  cache, _ = jaxkv.allocate(state.memory.cache, counts)
  cache, _ = jaxkv.commit(cache, tokens, counts)
  status = state.queue.status.at[:2].set(_RUNS)
  slots = dataclasses.replace(
    state.slots,
    row=jnp.asarray([0, 1, 4], jnp.int32),
    leader=jnp.asarray([3, 0, 3], jnp.int32),
  )
  state = dataclasses.replace(state, slots=slots)
  return by_hand.with_queue(by_hand.with_cache(state, cache), status=status)


def _broken(state: rollout.RolloutState) -> list[str]:
  laws = rollout.check_invariants(state)
  return [name for name, holds in laws.items() if not bool(holds)]


def test_no_invariant_is_broken():
  state = _state()
  assert _broken(state) == []
  rollout.check(state)


# The field of the queue, an index, the new value, and the broken invariants.
_EDITS = [
  ("ids", 3, 2, {"numbers"}),
  ("ids", 3, 9, {"numbers"}),
  ("order", [0, 1], [1, 0], {"order"}),
  ("place", [2, 3], [3, 2], {"order"}),
  ("prompt_length", 2, 0, {"lengths"}),
  ("start", 2, 2, {"lengths"}),
  ("length", 2, 2, {"lengths"}),
  ("limit", 2, 2, {"lengths"}),
  ("limit", 2, 15, {"lengths"}),
  ("tokens", (2, 5), 7, {"lengths"}),
  ("versions", (2, 1), 0, {"drawn"}),
  ("log_probs", (2, 1), -0.5, {"drawn"}),
  ("finish", 2, rollout.Finish.LENGTH, {"ends"}),
  ("finish", 2, rollout.Finish.FAILED, {"ends"}),
  ("status", 2, _DONE, {"ends"}),
  ("status", 2, _RUNS, {"slots"}),
]


@pytest.mark.parametrize(("name", "index", "value", "expected"), _EDITS)
def test_an_edit_of_the_queue_breaks_its_invariant(
  name, index, value, expected
):
  state = _state()
  array = np.array(getattr(state.queue, name))
  array[index] = value
  state = by_hand.with_queue(state, **{name: jnp.asarray(array)})
  assert set(_broken(state)) == expected
  with pytest.raises(jaxkv.CacheError, match=min(expected)):
    rollout.check(state)


@pytest.mark.parametrize(
  ("name", "edited", "expected"),
  [
    # The row of a waiting sequence, of two slots, and of no queue.
    ("row", [0, 1, 2], {"slots"}),
    ("row", [0, 0, 1], {"slots"}),
    ("row", [0, 1, 5], {"slots"}),
    # A leader that is empty, and one that follows itself.
    ("leader", [3, 2, 3], {"leaders"}),
    ("leader", [3, 1, 3], {"leaders"}),
    # Slot 0 has pages and follows slot 1.
    ("leader", [1, 3, 3], {"slots"}),
  ],
)
def test_an_edit_of_the_slots_breaks_its_invariant(name, edited, expected):
  state = _state()
  slots = dataclasses.replace(
    state.slots, **{name: jnp.asarray(edited, jnp.int32)}
  )
  assert set(_broken(dataclasses.replace(state, slots=slots))) == expected
