"""Rollouts that a new process continues on other devices."""

import importlib.util

import pytest

from tests.sharding import started


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["data", "model"])
def test_restored_rollout_continues_unchanged(axis, tmp_path, pytestconfig):
  """The results are the same, bit for bit where devices add no partial sums.

  Two snapshots on two devices; with --deep twenty, on one, two and eight.
  """
  if importlib.util.find_spec("orbax") is None:
    pytest.skip("orbax is not installed; pip install jaxkv[checkpoints]")
  count = "20" if pytestconfig.getoption("deep") else "2"
  saved_on = {"data": 8, "model": 2}[axis]
  words = axis, str(tmp_path)
  started.wait(started.start("save", *words, count, devices=saved_on))
  # One after the other: each knows nothing of the others.
  for devices in (1, 2, 8) if count == "20" else (2,):
    started.wait(started.start("restore", *words, devices=devices))
