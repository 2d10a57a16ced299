"""The tokens that a step computes."""

import jax.numpy as jnp
import pytest

from jaxkv import rollout
from jaxkv._src.engine import schedule


def _scheduled(missing, turns, prefill_columns) -> schedule.Work:
  missing = jnp.asarray(missing, jnp.int32)
  turns = jnp.asarray(turns, jnp.int32)
  widths = tuple(schedule.Width(0, columns) for columns in prefill_columns)
  return schedule.schedule(missing, missing > 1, turns, widths)


@pytest.mark.parametrize(
  ("chunk", "prefill_columns"),
  [(1, (0, 1)), (64, (0, 64)), (252, (0, 252)), (256, (0, 64, 256))],
)
def test_widths_of_prefill(chunk, prefill_columns):
  config = rollout.RolloutConfig(prefill_chunk=chunk)
  expected = tuple((0, n, False) for n in prefill_columns)
  assert schedule.widths(config, records=False) == expected


def test_widths_with_drafts():
  config = rollout.RolloutConfig(
    prefill_chunk=4, draft_tokens=3, draft_columns=32
  )
  widths = [(0, 0), (0, 4), (8, 0), (8, 4), (32, 0), (32, 4)]
  widths = tuple((*columns, False) for columns in widths)
  assert schedule.widths(config, records=False) == widths


def test_widths_that_record_log_probs():
  """Chunks exist with the logits of all columns, and with the last ones."""
  config = rollout.RolloutConfig(prefill_chunk=256)
  expected = (0, 0, True), (0, 256, False), (0, 256, True)
  assert schedule.widths(config, records=True) == expected
  config = rollout.RolloutConfig(prefill_chunk=256, max_new_tokens=0)
  assert schedule.widths(config, records=True) == expected[1:]


def test_drafts_are_granted_by_slot():
  """Slots 0, 2 and 3 decode, 1 has a prompt; 8 columns for drafts.

  Six drafts fill three quarters of them, five do not. What finds no column is
  left out, from the last slot on.
  """
  widths = schedule.Width(0, 0), schedule.Width(0, 4)
  widths += schedule.Width(8, 0), schedule.Width(8, 4)
  missing = jnp.asarray([1, 3, 1, 1], jnp.int32)
  for drafts, width, granted in (
    ([2, 0, 2, 1], 1, [0, 0, 0, 0]),
    ([2, 0, 2, 2], 3, [2, 0, 2, 2]),
    ([4, 3, 3, 4], 3, [4, 0, 3, 1]),
  ):
    work = schedule.schedule(
      missing,
      missing > 1,
      jnp.arange(4, dtype=jnp.int32),
      widths,
      jnp.asarray(drafts, jnp.int32),
    )
    assert int(work.width) == width
    assert work.drafts is not None and work.begins is not None
    assert work.drafts.tolist() == granted
    prompt_column = 12 if width > 1 else 4
    owners = [slot for slot in range(4) for _ in range(granted[slot])]
    assert work.slots[4:].tolist() == owners + [4] * (8 - sum(granted))
    # The prompt's columns come after those of the drafts.
    assert work.counts.tolist() == [1, 3, 1, 1]
    assert work.last.tolist() == [0, prompt_column + 2, 2, 3]


def test_width_fits_the_prompt_tokens():
  """Slot 0 decodes, 1 and 2 have prompts, 3 is empty; widths 0, 4 and 16.

  Three prompt tokens fill the places of slots 1, 2 and 3. A width is taken if
  three quarters of it are filled, and the smallest one for any token beyond.
  """
  prefill_columns = (0, 4, 16)
  for prompt, width, counts in (
    (1, 0, [1, 2, 1, 0]),
    (2, 1, [1, 2, 2, 0]),
    (12, 1, [1, 2, 5, 0]),
    (13, 2, [1, 2, 13, 0]),
    (90, 2, [1, 2, 17, 0]),
  ):
    work = _scheduled([1, 2, prompt, 0], [0, 1, 2, 9], prefill_columns)
    assert int(work.width) == width, prompt
    if prompt > 1:
      assert work.counts.tolist() == counts, prompt


def test_prompts_are_computed_in_turn():
  """Sequences compute their prompts in the order of their turns."""
  for turns, counts in (([0, 1], [6, 0]), ([1, 0], [0, 6])):
    work = _scheduled([9, 9], turns, (0, 4))
    assert work.counts.tolist() == counts
