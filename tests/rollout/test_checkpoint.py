"""A rollout that a new process goes on with, from a checkpoint of orbax."""

import importlib.util

import numpy as np
import pytest

from tests.rollout import started

_RECIPES = ("one device", "Data parallel", "Tensor parallel")


@pytest.mark.parametrize(
  "recipe",
  [
    pytest.param(name, marks=pytest.mark.deep)
    if name == "Tensor parallel"
    else name
    for name in _RECIPES
  ],
)
def test_restored_equals_undisturbed(recipe, tmp_path):
  """Every bit of the state at the end, and where each array lies."""
  if importlib.util.find_spec("orbax") is None:
    pytest.skip("orbax is not installed; pip install jaxkv[checkpoints]")
  # One after the other: the second one knows nothing of the first.
  started.wait(started.start("save", recipe, str(tmp_path)))
  started.wait(started.start("restore", recipe, str(tmp_path)))
  wanted = np.load(tmp_path / "saved.npz")
  restored = np.load(tmp_path / "restored.npz")
  assert wanted.files == restored.files
  assert len(wanted.files) > 30
  for name in wanted.files:
    np.testing.assert_array_equal(restored[name], wanted[name], err_msg=name)
