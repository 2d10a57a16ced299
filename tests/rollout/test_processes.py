"""Two processes make what one makes."""

import numpy as np
import pytest

from tests.rollout import recipes
from tests.rollout import started


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path):
  """With two devices each: four shards there, and two in one process."""
  address = f"localhost:{started.free_port()}"
  both = [
    started.start("data", str(tmp_path / f"{own}.npz"), address, "2", str(own))
    for own in range(2)
  ]
  alone = started.start("data", str(tmp_path / "alone.npz"))
  started.wait(*both, alone)
  wanted = np.load(tmp_path / "alone.npz")
  names = recipes.attention_alone()
  prompts = names["requests"].tokens
  samples = names["config"].num_samples
  assert wanted["tokens"].shape[0] == prompts.shape[0] * samples
  assert (wanted["lengths"] > prompts.shape[1]).any()
  for own in range(2):
    found = np.load(tmp_path / f"{own}.npz")
    for name in ("tokens", "lengths"):
      np.testing.assert_array_equal(found[name], wanted[name])
