"""`branch`: copies of sequences continue as their sequence would."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import rollout
from tests.engine import by_hand

_CONFIG = rollout.RolloutConfig(num_samples=2, max_new_tokens=11)
_PAGE_SIZE = 2
_run = by_hand.program()
_branch = jax.jit(rollout.branch, static_argnums=2)


def _begun() -> rollout.RolloutState:
  """Returns two prompts, and room for four others."""
  state = by_hand.begun(
    by_hand.sizes(80, 3),
    _CONFIG,
    [[1, 2, 3, 4, 5], [6, 7, 1], *[[1]] * 4],
    num_samples=[2, 1, 0, 0, 0, 0],
    sampling=rollout.Sampling(temperature=1.0),
  )
  return by_hand.begun_at(state, 1.0)


def _with_keys_of(
  state: rollout.RolloutState, copy_ids: list[int], parent_id: int
) -> rollout.RolloutState:
  """Gives copies the random key of their sequence."""
  ids = state.queue.ids.tolist()
  keys = state.queue.keys
  for copy_id in copy_ids:
    keys = keys.at[ids.index(copy_id)].set(keys[ids.index(parent_id)])
  return by_hand.with_queue(state, keys=keys)


@pytest.mark.parametrize("num_steps", [0, 2, 5, 9, 30])
def test_copies_with_the_key_of_a_sequence_sample_its_tokens(num_steps):
  """Of waiting, running and ended sequences, and of their copies."""
  state = _run(_begun(), 1.0, num_steps)
  whole = _run(state, 1.0)
  copies = {0: [], 2: []}
  for parent_id in (0, 2, 0):
    source_id = copies[parent_id][-1] if copies[parent_id] else parent_id
    state, out = _branch(state, jnp.asarray([source_id], jnp.int32), 2)
    assert out.ok.all()
    copies[parent_id] += [int(out.ids[0]), int(out.ids[0]) + 1]
  for parent_id, copy_ids in copies.items():
    state = _with_keys_of(state, copy_ids, parent_id)
  rollout.check(state)
  end = _run(state, 1.0)
  rollout.check(end)
  ids = end.queue.ids.tolist()
  for name in ("tokens", "log_probs", "versions", "length", "finish"):
    values = np.asarray(getattr(end.queue, name))
    expected = np.asarray(getattr(whole.queue, name))
    for parent_id, copy_ids in copies.items():
      row = whole.queue.ids.tolist().index(parent_id)
      for copy_id in copy_ids:
        # Log-probs that were computed again may differ by rounding.
        np.testing.assert_allclose(
          values[ids.index(copy_id)], expected[row], rtol=0, atol=1e-5
        )
  # Each copy computes at most its last, incomplete page again, and the token
  # that its sequence computes next.
  computed = [int(s.counters.prefilled) for s in (whole, end)]
  num_copies = sum(map(len, copies.values()))
  if num_steps:
    assert computed[1] - computed[0] <= num_copies * _PAGE_SIZE


def test_copies_differ_without_a_common_key():
  state = _run(_begun(), 1.0, 3)
  state, out = _branch(state, jnp.asarray([0], jnp.int32), 2)
  end = _run(state, 4.0)
  ids = end.queue.ids.tolist()
  rows = [
    ids.index(0),
    ids.index(int(out.ids[0])),
    ids.index(int(out.ids[0])) + 1,
  ]
  drawn = {tuple(end.queue.tokens[row].tolist()) for row in rows}
  assert len(drawn) == 3


def test_rows_that_cannot_be_copied_are_refused():
  """An unknown id, a masked row, and rows without room in the queue."""
  state = _run(_begun(), 1.0, 3)
  ids = jnp.asarray([0, 99, 1, 2], jnp.int32)
  mask = jnp.asarray([True, True, False, True])
  state, out = rollout.branch(state, ids, 1, mask=mask)
  status = jaxkv.Status
  codes = [status.OK, status.BAD_SEQUENCE, status.SKIPPED, status.OK]
  assert out.code.tolist() == codes
  assert (out.ids >= 0).tolist() == [True, False, False, True]
  state, out = rollout.branch(state, jnp.asarray([0, 2, 1], jnp.int32), 2)
  assert out.code.tolist() == [status.OK, status.OK, status.QUEUE_FULL]
  with pytest.raises(ValueError, match="`num_branches` must be at most"):
    rollout.branch(state, ids, 3)
