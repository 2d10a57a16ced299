"""The verbs by hand: their effects on the queue, and their codes.

Most tests use states that never ran, which compiles no model.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import guides
from jaxkv import rollout
from jaxkv._src.engine.queue.page_keys import page_keys
from tests.engine import by_hand
from tests.engine.by_hand import DONE
from tests.engine.by_hand import EMPTY
from tests.engine.by_hand import RUNS
from tests.engine.by_hand import WAITS

_OK, _SKIPPED = jaxkv.Status.OK, jaxkv.Status.SKIPPED
_UNKNOWN, _ENDED = jaxkv.Status.BAD_SEQUENCE, jaxkv.Status.ENDED
_CONFIG = rollout.RolloutConfig(
  num_samples=2, max_new_tokens=4, max_length=14, prefill_chunk=3
)
_PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8], [9, 9, 9], [4]]


@functools.cache
def _program() -> by_hand.Runner:
  """Returns a rollout that is compiled once for all tests."""
  return by_hand.program()


def _begun(counts=(2, 2, 0), prompts=_PROMPTS, **options):
  """Returns a rollout of three prompts; the last one has no sample."""
  return by_hand.begun(
    by_hand.sizes(40, 3), _CONFIG, prompts, num_samples=list(counts), **options
  )


def _codes(out) -> list[int]:
  return out.code.tolist()


@pytest.mark.slow
def test_extend_sets_limits_and_page_keys():
  state, _ = rollout.abort(_begun(), [2])
  state = by_hand.with_queue(state, overtaken=state.queue.overtaken + 3)
  state, out = rollout.extend(
    state, [2, 0, 1], [[7, 6, 5]] * 3, [2, 3, 3], max_tokens=[3, 9, 4]
  )
  # Eight tokens, three of a tool, and four to draw are more than fourteen.
  assert _codes(out) == [_OK, *[jaxkv.Status.BAD_LENGTH] * 2]
  queue = state.queue
  assert queue.tokens[2, :6].tolist() == [9, 9, 9, 7, 6, 0]
  assert queue.length.tolist() == [8, 8, 5, 3, 1, 1]
  assert queue.start.tolist() == [8, 8, 5, 3, 1, 1]
  assert queue.limit.tolist() == [12, 12, 8, 7, 5, 5]
  assert int(queue.finish[2]) == rollout.Finish.UNFINISHED
  assert int(queue.status[2]) == WAITS
  assert state.queue.overtaken.tolist() == [3, 3, 0, 3, 3, 3]
  keys = page_keys(state.memory.cache, queue.tokens[2:3], None)[0, :2]
  np.testing.assert_array_equal(state.queue.page_keys[2, :2], keys)
  out = rollout.generated(state)
  assert not np.any(out.mask) and out.versions[2].tolist() == [-1] * 14
  rollout.check(state)


def test_extend_changes_priorities():
  """The order follows; other sequences keep theirs."""
  state = _begun(priority=[5] * 6)
  state, out = rollout.extend(
    state, [2, 99, 3], [[7]] * 3, [1, 1, 0], priority=[1, 2, 9]
  )
  assert _codes(out) == [_OK, jaxkv.Status.BAD_SEQUENCE, _OK]
  assert state.queue.priority.tolist() == [5, 5, 1, 9, 5, 5]
  order = [row for row in state.queue.order.tolist() if row < 4]
  assert order == [2, 0, 1, 3]
  rollout.check(state)
  with pytest.raises(ValueError, match="`priority` must be None"):
    rollout.extend(_begun(), [2], [[7]], [1], priority=[1])


def _reused_rows() -> rollout.RolloutState:
  """Returns a rollout whose first group was harvested and holds old data."""
  state, _ = rollout.abort(_begun(), [0, 1])
  state, out = rollout.harvest(state, [0, 1])
  assert _codes(out) == [_OK, _OK]
  return by_hand.with_queue(
    state,
    computed=state.queue.computed + 7,
    overtaken=state.queue.overtaken + 7,
    page_keys=state.queue.page_keys + jnp.uint32(1),
    epochs=state.queue.epochs + jnp.uint32(9),
  )


def test_submit_reuses_rows():
  """New sequences in a harvested group keep nothing of the old ones."""
  state = _reused_rows()
  full = jaxkv.Status.QUEUE_FULL
  new_state, out = rollout.submit(
    state, rollout.Requests([[7, 6, 5, 4, 3, 2]] * 3, [5, 6, 2])
  )
  assert _codes(out) == [_OK, _OK, full]
  assert out.ids.tolist() == [4, 6, -1]
  queue = new_state.queue
  assert queue.ids.tolist() == [4, 5, 2, 3, 6, 7]
  assert queue.status.tolist() == [WAITS] * 6
  assert queue.length.tolist() == [5, 5, 3, 3, 6, 6]
  assert queue.finish.tolist() == [0] * 6
  assert int(queue.next_id) == 8
  assert queue.computed.tolist() == [0, 0, 7, 7, 0, 0]
  assert queue.overtaken.tolist() == [0, 0, 7, 7, 0, 0]
  assert queue.order.tolist() == [2, 3, 0, 1, 4, 5]
  assert queue.epochs.tolist() == [0, 0, 9, 9, 0, 0]
  keys = page_keys(new_state.memory.cache, queue.tokens[:2], None)[:, :2]
  np.testing.assert_array_equal(queue.page_keys[:2, :2], keys)
  # A row that is EMPTY is no group.
  _, out = rollout.submit(_begun((1, 2, 1)), rollout.Requests([[7]], [1]))
  assert _codes(out) == [full]


def _with_strings(strings, lists):
  """Returns settings in which each sample has one of the lists of strings."""
  texts = guides.token_bytes([bytes([65 + n]) for n in range(11)])
  strings = rollout.stop_strings(strings, texts).select(lists)
  return rollout.Sampling(stop_strings=strings)


def test_other_stop_strings_are_refused():
  state = _begun(sampling=_with_strings([["AB"], ["C"]], [0, 1] * 3))
  for other_strings in ([["AB"], ["CD"]], [["AB"], ["D"]], [["C"], ["AB"]]):
    sampling = _with_strings(other_strings, [0, 1])
    with pytest.raises(ValueError, match=r"must have the automata .* `init`"):
      rollout.submit(state, rollout.Requests([[7]], [1], sampling=sampling))


@pytest.mark.slow
def test_selected_stop_strings():
  strings = [["AB"], ["C"]]
  state = _begun(sampling=_with_strings(strings, [0, 1] * 3))
  new = _with_strings(strings, [1, 1])
  state, out = rollout.submit(state, rollout.Requests([[7]], [1], sampling=new))
  assert _codes(out) == [_OK]
  # The first list has three states.
  starts = state.queue.sampling.stop_strings.start
  assert starts.tolist() == [0, 3, 0, 3, 3, 3]
  assert state.queue.stop_states.tolist() == [0, 3, 0, 3, 3, 3]


@pytest.mark.slow
def test_ids_in_use_are_refused():
  _, out = rollout.submit(
    _reused_rows(), rollout.Requests([[7]] * 4, [1] * 4), ids=[1, 20, 21, -2]
  )
  assert _codes(out) == [_UNKNOWN, _OK, _UNKNOWN, _UNKNOWN]
  # Those of a prompt that is refused are free for a later one.
  _, out = rollout.submit(
    _reused_rows(), rollout.Requests([[7]] * 4, [1] * 4), ids=[3, 4, -1, 0]
  )
  assert _codes(out) == [_UNKNOWN, _OK, _UNKNOWN, _OK]
  new_state, out = rollout.submit(
    _reused_rows(), rollout.Requests([[7]] * 2, [1] * 2), ids=[0, 30]
  )
  assert _codes(out) == [_OK, _OK]
  assert new_state.queue.ids.tolist() == [0, 1, 2, 3, 30, 31]
  assert int(new_state.queue.next_id) == 32
  # Draws depend on the number alone.
  keys = jax.random.key_data(new_state.queue.keys)
  old_keys = jax.random.key_data(_begun().queue.keys)
  np.testing.assert_array_equal(keys[:4], old_keys[:4])
  rollout.check(by_hand.with_queue(new_state, page_keys=None))


def test_ids_beyond_int32_are_refused():
  state, out = rollout.submit(
    _reused_rows(), rollout.Requests([[7]], [1]), ids=[2**31 - 5]
  )
  assert _codes(out) == [_OK]
  state, out = rollout.submit(state, rollout.Requests([[7]] * 2, [1] * 2))
  assert _codes(out) == [_OK, _UNKNOWN]
  assert out.ids.tolist() == [2**31 - 3, -1]


def test_harvest_of_groups_and_sequences():
  """One sample of the first group has ended, and both of the second."""
  state, _ = rollout.abort(_begun(), [0, 2, 3])
  skipped = [_SKIPPED] * 2
  new_state, out = rollout.harvest(state, whole_prompts=True)
  assert _codes(out) == [*skipped, _OK, _OK, *skipped]
  status = [DONE, WAITS, EMPTY, EMPTY, EMPTY, EMPTY]
  assert new_state.queue.status.tolist() == status
  assert out.results.valid.tolist() == [False, False, True, True, False, False]
  assert out.results.tokens[2, :4].tolist() == [9, 9, 9, 0]
  assert not np.any(out.results.tokens[:2])
  unfinished = jaxkv.Status.UNFINISHED
  _, out = rollout.harvest(state, [0, 2, 1], whole_prompts=True)
  assert _codes(out) == [unfinished, _OK, unfinished]
  new_state, out = rollout.harvest(state, [0, 2, 1])
  assert _codes(out) == [_OK, _OK, unfinished]
  status = [EMPTY, WAITS, EMPTY, DONE, EMPTY, EMPTY]
  assert new_state.queue.status.tolist() == status
  _, out = rollout.harvest(new_state)
  assert _codes(out) == [*[_SKIPPED] * 3, _OK, *skipped]


@pytest.mark.slow
def test_policies_of_update_weights():
  """Two sequences run, one has ended, and one waits after `extend`."""
  state = _program()(_begun(), 1.0, 5)
  state, _ = rollout.abort(state, [2])
  state, out = rollout.extend(state, [3], [[5, 5]], [2], max_tokens=[1])
  assert _codes(out) == [_OK]
  old_queue = state.queue
  assert old_queue.status[:4].tolist() == [RUNS, RUNS, DONE, WAITS]
  assert np.all(old_queue.length[:3] > old_queue.prompt_length[:3])
  for how in ("recompute", "keep", "drop"):
    new_state = rollout.update_weights(state, how)
    assert int(new_state.memory.cache.epoch) == 1
    keeps = how == "keep"
    runs = RUNS if keeps else WAITS
    assert new_state.queue.status[:4].tolist() == [runs, runs, DONE, WAITS]
    assert bool(jnp.any(new_state.memory.cache.length > 0)) == keeps
    # Keys of the new weights are for those that begin with them.
    epoch = 0 if keeps else 1
    assert new_state.queue.epochs[:4].tolist() == [epoch, epoch, 0, 1]
    queue = new_state.queue
    rows = slice(None)
    if how == "drop":
      assert queue.length[:4].tolist() == [8, 8, int(old_queue.length[2]), 3]
      assert queue.start[:4].tolist() == [8, 8, 3, 3]
      assert queue.limit[:4].tolist() == [12, 12, 7, 7]
      assert not np.any(queue.tokens[:2, 8:])
      assert not np.any(queue.tokens[3, 3:])
      assert not np.any(np.asarray(queue.versions[:2]) >= 0)
      assert not np.any(np.asarray(queue.log_probs[:2]))
      rows = slice(2, 3)
    for name in ("tokens", "length", "versions"):
      np.testing.assert_array_equal(
        getattr(queue, name)[rows], getattr(old_queue, name)[rows]
      )
    rollout.check(new_state)


@pytest.mark.slow
def test_requeued_sequence_hits_no_old_page():
  """A kept sequence that leaves its slot finds no page of old weights.

  Its eight tokens are computed in chunks. When it has computed some of them
  again, it leaves once more, and finds the pages of those and no others.
  """
  program = by_hand.program()
  config = dataclasses.replace(_CONFIG, num_samples=1, prefill_chunk=2)
  state = by_hand.begun(by_hand.sizes(40, 1), config, _PROMPTS[:1])
  state = program(state, 1.0, 4)
  assert int(state.memory.cache.length[0]) >= 8
  state, _ = rollout.requeue(rollout.update_weights(state, "keep"), [0])
  state = program(state, 1.0, 1)
  length = int(state.memory.cache.length[0])
  assert 2 <= length < 8 and int(state.memory.cache.stats.hit_tokens) == 0
  assert not np.any(np.asarray(state.queue.page_keys[0, length // 2 :]))
  state, _ = rollout.requeue(state, [0])
  state = program(state, 1.0, 1)
  assert int(state.memory.cache.stats.hit_tokens) == length // 2 * 2
