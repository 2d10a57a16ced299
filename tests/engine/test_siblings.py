"""Samples of one prompt: one computes it, the others follow and share it."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import rollout
from jaxkv._src.cache.steps.longest_hit import Prefix
from jaxkv._src.engine.admission import admission_order
from tests.engine import by_hand

_PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.slow
def test_samples_with_different_salts_share_no_page():
  """Two samples share the prompt's pages only if their salts are equal."""
  config = rollout.RolloutConfig(
    num_samples=2, max_new_tokens=4, max_length=14, prefill_chunk=3
  )
  program = by_hand.program()
  for words, is_shared in (
    ([5, 6, 7, 8], True),
    ([9, 6, 7, 8], False),
    ([5, 6, 7, 9], False),
    ([5, 9, 9, 9], False),
  ):
    state = by_hand.begun(
      by_hand.sizes(40, 2),
      config,
      [_PROMPT],
      salts=np.asarray([[5, 6, 7, 8], words], np.uint32),
    )
    state = program(state, 1.0)
    assert bool(rollout.is_done(state))
    assert (int(state.counters.peak_shared) > 0) == is_shared, words
    assert is_shared or int(state.memory.cache.stats.hit_tokens) == 0, words


def test_a_sample_follows_a_running_one_or_one_of_its_step():
  """Row 0 runs in slot 1; rows 1, 2 and 3 wait, of which 2 and 3 are samples.

  A sample that can follow enters first, though it finds no cached page.
  """
  config = rollout.RolloutConfig(
    num_samples=2, max_new_tokens=4, admissions=4, prefill_chunk=3
  )
  state = by_hand.begun(by_hand.sizes(40, 4), config, [_PROMPT] * 2)
  no_slot = 4
  empty = jnp.asarray([0, 2, 3, no_slot], jnp.int32)
  waiting = admission_order.Candidates(
    rows=jnp.asarray([2, 1, 3], jnp.int32),
    # A choice needs the lengths alone.
    found=Prefix(jnp.asarray([4, 0, 4], jnp.int32), *[None] * 6),
    is_blocked=jnp.asarray([False, True, True]),
    needs_page_of=jnp.zeros((3, 3), bool),
    siblings=jnp.asarray([[1, 0, 1], [0, 1, 0], [1, 0, 1]], bool),
    leaders=jnp.asarray([no_slot, 1, no_slot], jnp.int32),
    shared_tokens=jnp.zeros((3, 2), jnp.int32),
  )
  chosen, leaders = admission_order.choose(
    state.queue, waiting, empty, no_slot, config
  )
  assert chosen.tolist() == [1, 0, 2, 3]
  # The second one computes its prompt itself, and the third one follows it.
  assert leaders.tolist() == [1, 2, 2, no_slot]


def test_samples_leave_their_slots_with_their_leader():
  """A sample waits for the leader's prompt, and then for another slot."""
  config = rollout.RolloutConfig(
    num_samples=2, max_new_tokens=4, max_length=14, prefill_chunk=3
  )
  state = by_hand.begun(by_hand.sizes(40, 3), config, [_PROMPT] * 2)
  # Slot 2 computes the prompt of slot 0; slot 1 has another prompt.
  cache, _ = jaxkv.allocate(state.memory.cache, [0, 3, 3])
  cache, _ = jaxkv.commit(cache, [_PROMPT[:3]] * 3, [0, 3, 3])
  slots = dataclasses.replace(
    state.slots,
    row=jnp.asarray([1, 2, 0], jnp.int32),
    leader=jnp.asarray([2, 3, 3], jnp.int32),
  )
  runs, waits = by_hand.RUNS, by_hand.WAITS
  state = by_hand.with_queue(
    state, status=jnp.asarray([runs, runs, runs, waits], jnp.int32)
  )
  state = by_hand.with_cache(dataclasses.replace(state, slots=slots), cache)
  rollout.check(state)
  state, out = rollout.requeue(state, [0])
  assert out.ok.all()
  rollout.check(state)
  assert state.queue.status.tolist() == [waits, waits, runs, waits]
  assert state.slots.row.tolist() == [4, 2, 4]
  assert state.slots.leader.tolist() == [3, 3, 3]
