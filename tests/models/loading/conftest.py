"""Fixtures of tests that read checkpoints."""

import pytest

from tests.models.loading import llama_folder


@pytest.fixture
def folder(tmp_path):
  """A folder with a tiny Llama."""
  llama_folder.write_folder(tmp_path)
  return tmp_path


@pytest.fixture(scope="module")
def transformers():
  """The library, with its logits on a CPU."""
  pytest.importorskip("torch")
  pytest.importorskip("safetensors")
  return pytest.importorskip("transformers")
