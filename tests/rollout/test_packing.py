"""Which tokens a step computes."""

import jax.numpy as jnp
import pytest

from jaxkv import rollout
from jaxkv._src.rollout import packing


def _scheduled(missing, turns, sizes) -> packing.Work:
  missing = jnp.asarray(missing, jnp.int32)
  turns = jnp.asarray(turns, jnp.int32)
  return packing.schedule(missing, missing > 1, turns, sizes)


@pytest.mark.parametrize(
  ("chunk", "sizes"),
  [(1, (0, 1)), (64, (0, 64)), (252, (0, 252)), (256, (0, 64, 256))],
)
def test_sizes(chunk, sizes):
  config = rollout.RolloutConfig(prefill_chunk=chunk)
  assert packing.widths(config) == sizes


def check_widths() -> None:
  """Slot 0 decodes, 1 and 2 have prompts, 3 is empty; widths 0, 4 and 16.

  Three prompt tokens fill the places of slots 1, 2 and 3. A width is taken if
  three quarters of it are filled, and the smallest one for any token beyond.
  """
  sizes = (0, 4, 16)
  for prompt, width, counts in (
    (1, 0, [1, 2, 1, 0]),
    (2, 1, [1, 2, 2, 0]),
    (12, 1, [1, 2, 5, 0]),
    (13, 2, [1, 2, 13, 0]),
    (90, 2, [1, 2, 17, 0]),
  ):
    work = _scheduled([1, 2, prompt, 0], [0, 1, 2, 9], sizes)
    assert int(work.width) == width, prompt
    if prompt > 1:
      assert work.counts.tolist() == counts, prompt


def test_widths():
  check_widths()


def test_turns():
  """Whose turn it is computes its prompt first."""
  for turns, counts in (([0, 1], [6, 0]), ([1, 0], [0, 6])):
    work = _scheduled([9, 9], turns, (0, 4))
    assert work.counts.tolist() == counts
