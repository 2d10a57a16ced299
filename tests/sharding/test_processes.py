"""Two processes have the results of one."""

import numpy as np
import pytest

from tests.sharding import recipes
from tests.sharding import started


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path):
  """Two processes have four shards, and one process has two."""
  address = f"localhost:{started.free_port()}"
  pair = [
    started.start("data", str(tmp_path / f"{i}.npz"), address, "2", str(i))
    for i in range(2)
  ]
  single = started.start("data", str(tmp_path / "alone.npz"))
  started.wait(*pair, single)
  expected = np.load(tmp_path / "alone.npz")
  names = recipes.attention_alone()
  prompts = names["requests"].tokens
  samples = names["config"].num_samples
  assert expected["tokens"].shape[0] == prompts.shape[0] * samples
  assert (expected["lengths"] > prompts.shape[1]).any()
  for i in range(2):
    results = np.load(tmp_path / f"{i}.npz")
    for name in ("tokens", "lengths"):
      np.testing.assert_array_equal(results[name], expected[name])
