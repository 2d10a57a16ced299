"""The character model: its vocabulary, its training, and its file."""

import concurrent.futures
import dataclasses
import functools
import json
import os
import threading
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import models
from jaxkv._src.models import characters
from jaxkv._src.models import checkpoint as store
from jaxkv._src.models import training
from jaxkv._src.models import vocabulary
from tests.models.small_model import TEXT as _TEXT


def _recipe(steps: int) -> training.Recipe:
  return training.Recipe(
    steps=steps,
    phases=characters._PHASES,
    learning_rate=1e-2,
    warmup=1,
    weight_decay=0.1,
    max_norm=1.0,
    seed=0,
  )


class TestVocabulary:
  def test_round_trip(self):
    text = vocabulary.reference_text()
    known = vocabulary.vocabulary_of(text)
    tokens = known.encode(text)
    assert tokens.dtype == np.int32
    assert tokens.max() == known.size - 2
    assert known.decode(tokens) == text
    assert known.stop_token == known.size - 1
    assert known.encode("").shape == (0,)
    assert known.decode([]) == ""

  def test_unknown_characters_and_tokens(self):
    known = models.Vocabulary("abc")
    with pytest.raises(ValueError, match=r"'\?' at position 2"):
      known.encode("ab?c")
    for token in (-1, 4):
      with pytest.raises(ValueError, match=f"{token} at position 1"):
        known.decode([0, token])
    with pytest.raises(ValueError, match="repeats"):
      models.Vocabulary("aa")

  def test_stop_tokens_end_every_second_paragraph(self):
    text = "a\n\nb\n\n\nc\n\nd\n"
    known = vocabulary.vocabulary_of(text)
    tokens = vocabulary.training_tokens(text, known)
    assert known.decode(tokens, stop="/") == "a\n\nb\n\n\n/c\n\nd\n/"


class TestTraining:
  def test_lowers_the_loss(self, small_model):
    tokens = vocabulary.training_tokens(_TEXT, small_model.vocabulary)
    batch = jnp.asarray(tokens[None, :257])
    loss = functools.partial(training.mean_loss, config=small_model.config)
    untrained = models.init_params(jax.random.key(0), small_model.config)
    assert loss(small_model.params, batch) < 0.5 * loss(untrained, batch)

  def test_same_recipe_same_weights(self, small_model, tmp_path):
    again = models.character_model(
      steps=25, text=_TEXT, folder=tmp_path, progress=False
    )
    jax.tree.map(
      np.testing.assert_array_equal, again.params, small_model.params
    )

  def test_too_short_a_text(self, tmp_path):
    with pytest.raises(ValueError, match="tokens holds 6"):
      models.character_model(text="abcde", folder=tmp_path, progress=False)

  @pytest.mark.parametrize(
    ("steps", "num_shapes"), [(1, 1), (25, 1), (61, 2), (600, 3)]
  )
  def test_spans_cover_every_step_once(self, steps, num_shapes):
    spans = training._spans(_recipe(steps))
    assert [step for _, a, b in spans for step in range(a, b)] == list(
      range(steps)
    )
    # Each length costs a compilation: only the last span of all may be short.
    assert {b - a for _, a, b in spans[:-1]} <= {25}
    assert len({phase.context for phase, _, _ in spans}) == num_shapes


class TestKeptWeights:
  """The file is used, or refused with a warning and trained again."""

  @pytest.fixture
  def trainings(self, monkeypatch):
    """Replaces training by a list of calls, and weights that differ by call."""
    calls = []

    def train(tokens, config, recipe, *, progress):
      del tokens, recipe, progress
      calls.append(None)
      key = jax.random.key(len(calls))
      return models.init_params(key, config), np.zeros(1, np.float32)

    monkeypatch.setattr(characters.training, "train", train)
    return calls

  def _model(self, folder, **keywords):
    keywords = {"text": _TEXT, "folder": folder, "progress": False} | keywords
    return models.character_model(**keywords)

  def _path(self, folder):
    (path,) = folder.iterdir()
    assert path.suffix == ".npz"
    return path

  def test_is_trained_once(self, trainings, tmp_path):
    first, second = self._model(tmp_path), self._model(tmp_path)
    assert len(trainings) == 1
    chex.assert_trees_all_equal(first.params, second.params)
    self._model(tmp_path, text=_TEXT + "more")
    self._model(tmp_path, steps=7)
    assert len(trainings) == 3

  def test_other_layers_are_another_file(self):
    config = characters._config(5)
    (layer, *_) = config.layers
    near = dataclasses.replace(layer.attention, window=3)
    near = dataclasses.replace(layer, attention=near)
    changes = ({}, {"layers": (near,) * 2}, {"layers": (near, layer)})
    digests = {
      characters._digest(
        characters._facts(
          _TEXT, dataclasses.replace(config, **change), _recipe(1)
        )
      )
      for change in changes
    }
    assert len(digests) == 3

  def test_environment_names_the_folder(self, trainings, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXKV_CACHE", str(tmp_path / "made" / "here"))
    self._model(None)
    self._path(tmp_path / "made" / "here")
    assert len(trainings) == 1

  @pytest.mark.parametrize("damage", ["cut", "empty", "noise", "flipped"])
  def test_a_damaged_file(self, trainings, tmp_path, damage):
    self._model(tmp_path)
    path = self._path(tmp_path)
    data = path.read_bytes()
    middle = len(data) // 2
    path.write_bytes(
      {
        "cut": data[:middle],
        "empty": b"",
        "noise": b"not an archive" * 100,
        "flipped": data[:middle]
        + bytes([data[middle] ^ 1])
        + data[middle + 1 :],
      }[damage]
    )
    with pytest.warns(UserWarning, match="training the model again"):
      again = self._model(tmp_path)
    assert len(trainings) == 2
    kept = self._model(tmp_path)
    assert len(trainings) == 2
    chex.assert_trees_all_equal(again.params, kept.params)

  @pytest.mark.parametrize(
    ("change", "reason"),
    [
      ("weights", "checksum"),
      ("text", "another text"),
      ("format", "another text or recipe"),
      ("record", "record"),
      ("shape", "other names, shapes"),
    ],
  )
  def test_an_intact_file_with_other_contents(
    self, trainings, tmp_path, change, reason
  ):
    self._model(tmp_path)
    path = self._path(tmp_path)
    with np.load(path) as file:
      arrays = dict(file)
    record = json.loads(str(arrays.pop("record")))
    if change == "weights":
      arrays["embed"] = arrays["embed"] + np.float32(1e-3)
    elif change == "text":
      record["facts"]["text_sha256"] = "0" * 64
    elif change == "format":
      record["facts"]["format"] += 1
    elif change == "record":
      record = []
    elif change == "shape":
      arrays["embed"] = arrays["embed"][:, :5]
      record["leaves_sha256"] = store._sha256(arrays)
    np.savez(path, record=np.array(json.dumps(record)), **arrays)
    with pytest.warns(UserWarning, match=reason):
      self._model(tmp_path)
    assert len(trainings) == 2

  def test_a_failed_write_leaves_the_old_file(self, tmp_path, monkeypatch):
    path = tmp_path / "weights.npz"
    old = {"a": np.zeros(3, np.float32)}
    store.save(path, {"version": 1}, old)

    def fail(*_):
      raise OSError("no space")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
      store.save(path, {"version": 2}, {"a": np.ones(3, np.float32)})
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    kept = store.load(path, {"version": 1}, old)
    np.testing.assert_array_equal(kept["a"], old["a"])

  @pytest.mark.parametrize("place", ["the folder", "above it", "the file"])
  def test_a_folder_that_cannot_be_written(self, trainings, tmp_path, place):
    """Told before a minute's training, which is not for nothing."""
    folder = tmp_path / "folder"
    if place == "the folder":
      folder.write_text("")
    elif place == "above it":
      (tmp_path / "file").write_text("")
      folder = tmp_path / "file" / "folder"
    else:
      self._model(folder)
      path = self._path(folder)
      path.unlink()
      (path / "inside").mkdir(parents=True)
    before = len(trainings)

    def stop(*_, **__):
      raise AssertionError("trained before it was told")

    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
      warnings.simplefilter("error", models.NotKeptWarning)
      warnings.filterwarnings("ignore", message=".*cannot be used")
      patch.setattr(characters.training, "train", stop)
      with pytest.raises(models.NotKeptWarning, match="JAXKV_CACHE"):
        self._model(folder)
    with pytest.warns(models.NotKeptWarning) as told:
      warnings.filterwarnings("ignore", message=".*cannot be used")
      model = self._model(folder)
    assert len([t for t in told if t.category is models.NotKeptWarning]) == 1
    assert model.vocabulary.size == model.config.vocab_size
    assert len(trainings) == before + 1

  def test_a_folder_that_cannot_be_searched(
    self, trainings, tmp_path, monkeypatch
  ):
    """Not by its mode, which does not bind an administrator."""
    real = os.stat

    def refuse(path, *args, **kwargs):
      if str(path).startswith(str(tmp_path)):
        raise PermissionError(13, "Permission denied", str(path))
      return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", refuse)
    with pytest.warns(models.NotKeptWarning, match="Permission denied"):
      self._model(tmp_path / "folder")
    assert len(trainings) == 1

  def test_two_first_calls_at_once(self, tmp_path, monkeypatch):
    """Both train, both write, and whoever reads then reads a whole file."""
    both = threading.Barrier(2, timeout=60)

    def train(tokens, config, recipe, *, progress):
      del tokens, recipe, progress
      both.wait()
      params = models.init_params(jax.random.key(1), config)
      return params, np.zeros(1, np.float32)

    monkeypatch.setattr(characters.training, "train", train)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
      calls = [pool.submit(self._model, tmp_path) for _ in range(2)]
      first, second = [call.result() for call in calls]
    kept = self._model(tmp_path)
    chex.assert_trees_all_equal(first.params, second.params, kept.params)
    self._path(tmp_path)
