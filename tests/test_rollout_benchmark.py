"""The logic of `benchmarks/rollout.py` that no figure shows."""

import pathlib

import numpy as np
import pytest

from jaxkv import rollout as rollouts

_FOLDER = pathlib.Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def _benchmarks_can_be_imported(monkeypatch):
  monkeypatch.syspath_prepend(str(_FOLDER))


def _work(lengths, answers, slots, page_size=4):
  import rollout_ideal

  rows = [np.arange(100, 100 + length) for length in lengths]
  return rollout_ideal._workload_of(
    rows, answers, page_size=page_size, slots=slots
  )


class TestRows:
  def test_a_bound_has_a_side(self, capsys):
    from rows import Row
    from rows import at_least
    from rows import at_most
    from rows import show
    from rows import summary

    rows = [
      at_most("a", "few", 3, 3),
      at_most("a", "many", 4, 3),
      at_least("b", "more", 3, 3),
      at_least("b", "less", 2, 3),
      Row("c", "free", 1234.5),
    ]
    assert [row.met for row in rows] == [True, False, True, False, None]
    assert summary(show(rows)) == (
      "2 of 4 bounds are kept; missed: a: many; b: less"
    )
    assert capsys.readouterr().out.count("MISSED") == 2
    assert rows[0].as_json() == {
      "workload": "a",
      "metric": "few",
      "value": 3,
      "bound": 3,
      "side": "at most",
      "met": True,
    }


class TestIdeal:
  def test_two_sequences_in_one_slot(self):
    import rollout_ideal as ideal

    # A prompt of 5 in 3 + 2, then a token; a prompt of 2, then two tokens.
    work = _work([5, 2], [2, 3], slots=1)
    found = ideal.schedule(work, lambda decoding: 3 - decoding)
    # draws:     -  1  1    1  1  1
    assert (found.steps, found.busy) == (6, 5 / 6)
    assert found.cost == 6 * ideal.RIDGE

  def test_prompts_ride_with_decoding(self):
    import rollout_ideal as ideal

    work = _work([2, 600], [4, 1], slots=2)
    # 2 + 293, then 1 + 294, then the last 13 prompt tokens.
    assert ideal.schedule(work, ideal.mixed_room).steps == 4
    # 62 columns: 2 + 60, three times 1 + 61, then 62 a step.
    assert ideal.schedule(work, ideal.loop_room(2, 60)).steps == 10

  def test_sequences_without_pages_pause(self):
    import rollout_ideal as ideal

    work = _work([4, 4], [5, 5], slots=2)
    ample = ideal.schedule(work, ideal.mixed_room)
    scarce = ideal.schedule(work, ideal.mixed_room, pages=3)
    # The second draws once beside the first, and pauses when both need two.
    assert (ample.steps, scarce.steps) == (5, 9)

  def test_equal_pages_are_computed_once(self):
    import rollout_ideal as ideal

    counts = ideal.new_tokens(ideal.same_batch())
    assert counts.tolist() == [71] + 15 * [7]

  def test_the_need_has_room_for_the_longest_answer(self):
    import rollout_ideal as ideal

    assert ideal.reserved_pages(_work([4, 8], [1, 8], slots=3)) == 3 * 3.5


def test_the_longest_wait_begins_with_a_decoded_token():
  import rollout_counts

  # p: prefill, d: decode, w: wait, x: preempted, a letter a step.
  steps = {0: "wppdwdwwdx", 1: "wdwwx" + "wpdwd"}
  kinds = np.array([[".pdwx".index(kind) for kind in steps[s]] for s in (0, 1)])
  owners = np.array([10 * [3], 5 * [4] + 5 * [4]])
  timeline = rollouts.Timeline(0, owners.T, kinds.T, 0 * kinds.T)
  assert rollout_counts.longest_wait(timeline) == 2
