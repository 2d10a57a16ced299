"""Fixtures of tests that load checkpoints."""

import pytest

from tests.models.loading import llama_folder


@pytest.fixture
def folder(tmp_path):
  """Returns a folder with a tiny Llama."""
  llama_folder.write_folder(tmp_path)
  return tmp_path


@pytest.fixture(scope="module")
def transformers():
  """Imports transformers, or skips."""
  pytest.importorskip("torch")
  pytest.importorskip("safetensors")
  return pytest.importorskip("transformers")
