"""The timeline of a rollout, against spans written by hand."""

from xml.etree import ElementTree

import pytest

from jaxkv import rollout
from tests.engine import by_hand


@pytest.mark.slow
def test_spans_of_a_preemption():
  """One of three sequences is preempted and resumes."""
  config = rollout.RolloutConfig(max_new_tokens=5, timeline=8)
  state = by_hand.begun(by_hand.sizes(5, 2), config, [[1], [2], [3]])
  program = by_hand.program()
  timeline = rollout.timeline(program(state, 1.0, 7))
  assert list(timeline.spans()) == [
    rollout.Span(0, 0, "decode", 0, 4, 4),
    # For the pages of the other one.
    rollout.Span(0, 0, "wait", 4, 5, 0),
    rollout.Span(0, 0, "decode", 5, 6, 1),
    rollout.Span(0, 1, "prefill", 6, 7, 3),
    rollout.Span(1, 1, "decode", 0, 4, 4),
    rollout.Span(1, 1, "preempt", 4, 5, 0),
  ]
  assert timeline.svg().count("<title>") == 6
  # A number for each stay in a slot, not for each span.
  texts = [node.text for node in ElementTree.fromstring(timeline.svg()).iter()]
  assert [text for text in texts if text in ("0", "1")] == ["0", "1", "1"]
  # The last eight steps of all.
  state = program(state, 1.0)
  timeline = rollout.timeline(state)
  steps = int(state.counters.steps)
  assert (timeline.start, timeline.kinds.shape) == (steps - 8, (8, 2))
  assert list(timeline.spans())[3] == rollout.Span(0, 2, "decode", 7, 12, 5)


def test_rollout_without_a_timeline_is_refused():
  without = by_hand.begun(
    by_hand.sizes(60, 2), rollout.RolloutConfig(max_new_tokens=5)
  )
  with pytest.raises(ValueError, match=r"got RolloutConfig.timeline=0; set "):
    rollout.timeline(without)
