"""Several calls of the model for one round of scheduling change no token."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import rollout
from jaxkv._src.engine import decode_round
from jaxkv._src.engine import schedule
from tests.engine import by_hand
from tests.tools.platforms import programs_for

_CONFIG = rollout.RolloutConfig(
  num_samples=2, max_new_tokens=6, stop_token=8, prefill_chunk=4, timeline=64
)


def _config(decode_steps: int, **options) -> rollout.RolloutConfig:
  return dataclasses.replace(_CONFIG, decode_steps=decode_steps, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
  "decode_steps",
  [
    3,
    pytest.param(2, marks=pytest.mark.deep),
    pytest.param(16, marks=pytest.mark.deep),
  ],
)
def test_decode_steps_change_no_token(decode_steps):
  """60 pages are enough; 12 shorten rounds."""
  config = _config(decode_steps)
  program = by_hand.program()
  for pages in (60, 12):
    state = by_hand.begun(by_hand.sizes(pages, 3), config)
    state = program(state, 0.7)
    by_hand.check_sequences(state, config, 0.7)
    assert not np.any(np.asarray(state.queue.code))


@pytest.mark.deep
@pytest.mark.parametrize("decode_steps", [1, 4])
def test_gpu_programs_change_no_token(decode_steps):
  """GPU programs have other loops, and idle calls at the end of a round."""
  config = _config(decode_steps)
  with programs_for("cuda"):
    # No other test has 61 pages, so none has traced these programs.
    state = by_hand.begun(by_hand.sizes(61, 3), config)
    state = by_hand.program()(state, 0.7)
  by_hand.check_sequences(state, config, 0.7)


@pytest.mark.slow
def test_each_token_takes_one_call():
  """Five tokens take a call each, in rounds of three."""
  program = by_hand.program()
  config = _config(3, num_samples=1)
  config = dataclasses.replace(config, stop_token=-1, max_new_tokens=5)
  state = by_hand.begun(by_hand.sizes(20, 2), config, [[1, 2]])
  # The limit is between the ends of rounds.
  part = program(state, 0.0, 2)
  assert (int(part.counters.steps), int(part.queue.length[0])) == (2, 4)
  assert int(part.memory.cache.length[0]) == 3
  end_state = program(part, 0.0)
  whole = program(state, 0.0)
  for state in (end_state, whole):
    assert int(state.counters.steps) == 5
    assert int(state.counters.generated) == 5
    assert int(state.counters.prefilled) == 1
    assert np.asarray(state.counters.calls).sum() == 5
  assert end_state.queue.tokens.tolist() == whole.queue.tokens.tolist()
  spans = list(rollout.timeline(whole).spans())
  assert [(span.kind, span.start, span.stop) for span in spans] == [
    ("prefill", 0, 1),
    ("decode", 1, 5),
  ]
  assert sum(span.tokens for span in spans) == 6


@pytest.mark.slow
def test_ended_sequence_keeps_its_slot_for_the_round():
  program = by_hand.program()
  config = _config(4, num_samples=1, stop_token=-1, max_new_tokens=8)
  state = by_hand.begun(
    by_hand.sizes(40, 2),
    config,
    [[1], [2], [3]],
    sampling=rollout.Sampling(max_tokens=[2, 8, 8]),
  )
  state = program(state, 0.0)
  spans = rollout.timeline(state).spans()
  assert [(s.slot, s.sequence, s.kind, s.start, s.stop) for s in spans] == [
    (0, 0, "decode", 0, 2),
    (0, 0, "wait", 2, 4),
    (0, 2, "decode", 4, 12),
    (1, 1, "decode", 0, 8),
  ]
  assert int(state.counters.steps) == 12
  # Two columns in each call, of which fewer are needed at the ends.
  assert int(state.counters.rows) == 24


@pytest.mark.deep
def test_scarce_pages_shorten_a_round():
  """Three free pages: the round is shorter, and none is preempted."""
  config = _config(8, num_samples=1, stop_token=-1, max_new_tokens=6)
  state = by_hand.begun(by_hand.sizes(8, 2), config, [[1], [2]])
  one_step = by_hand.program()(state, 0.0, 1)
  state = by_hand.program()(state, 0.0)
  assert int(one_step.counters.steps) == 1
  assert int(state.counters.preempted) == 0
  assert int(state.counters.peak_pages) <= 7


def test_bad_decode_steps_are_refused():
  with pytest.raises(ValueError, match="decode_steps` must be at least 1"):
    _config(0)
  with pytest.raises(ValueError, match="decode_steps` must be 1 with `draft"):
    _config(2, draft_tokens=3)
  config = _config(17, num_samples=1)
  with pytest.raises(ValueError, match="at most the tokens of a slot, 16, got"):
    by_hand.begun(by_hand.sizes(60, 3), config)


def test_a_round_ends_with_the_page_of_a_state():
  """Slots have 1 to 4 tokens in pages of 4, and compute another one first."""
  config = rollout.RolloutConfig(max_new_tokens=9, decode_steps=8)
  prompts = [[1] * length for length in (2, 3, 4, 5)]
  state = by_hand.begun(by_hand.sizes(20, 4), config, prompts)
  slots = dataclasses.replace(state.slots, row=jnp.arange(4, dtype=jnp.int32))
  further = {}
  for kind in (jaxkv.FullAttention(), jaxkv.Recurrent()):
    sizes = jaxkv.CacheConfig(
      num_pages=30, page_size=4, num_slots=4, pages_per_slot=4, groups=(kind,)
    )
    lengths = np.asarray([1, 2, 3, 4])
    cache, _ = jaxkv.allocate(jaxkv.init(sizes), lengths)
    cache, _ = jaxkv.commit(cache, np.ones((4, 4), np.int32), lengths)
    memory = dataclasses.replace(state.memory, cache=cache)
    work = schedule.decode_work(
      jnp.ones((4,), bool), jnp.zeros((4,), jnp.int32)
    )
    _, tokens = jax.jit(
      functools.partial(decode_round.reserve, max_calls=None)
    )(dataclasses.replace(state, slots=slots, memory=memory), work)
    further[kind] = tokens.tolist()
  assert further == {
    jaxkv.FullAttention(): [7] * 4,
    jaxkv.Recurrent(): [2, 1, 0, 3],
  }
