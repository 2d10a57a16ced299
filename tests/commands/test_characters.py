"""The character model: its vocabulary, its training, and its file."""

import concurrent.futures

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import models
from jaxkv._src.commands import characters
from tests.models.small_model import TEXT
from tests.models.small_model import trained_in


class TestVocabulary:
  def test_round_trip(self):
    text = characters.reference_text()
    vocabulary = characters.Vocabulary("".join(sorted(set(text))))
    tokens = vocabulary.encode(text)
    assert tokens.dtype == np.int32
    assert tokens.max() == vocabulary.vocab_size - 2
    assert vocabulary.decode(tokens) == text
    assert vocabulary.stop_token == vocabulary.vocab_size - 1
    assert vocabulary.encode("").shape == (0,)
    assert vocabulary.decode([]) == ""

  def test_unknown_characters(self):
    with pytest.raises(ValueError, match=r"'\?' at position 2"):
      characters.Vocabulary("abc").encode("ab?c")

  def test_stop_tokens_end_every_second_paragraph(self):
    vocabulary = characters.Vocabulary("\nabcd")
    tokens = characters.training_tokens("a\n\nb\n\n\nc\n\nd\n", vocabulary)
    ends = np.flatnonzero(tokens == vocabulary.stop_token)
    assert vocabulary.decode(tokens[: ends[0]]) == "a\n\nb\n\n\n"
    assert vocabulary.decode(tokens[ends[0] : ends[1]]) == "c\n\nd\n"
    assert ends[1] == len(tokens) - 1


class TestTraining:
  @pytest.mark.slow
  def test_lowers_the_loss(self, small_model):
    tokens = characters.training_tokens(TEXT, small_model.tokenizer)[:257]
    positions = jnp.arange(256, dtype=jnp.int32)[None]

    def loss(params):
      logits = models.forward_uncached(
        params, jnp.asarray(tokens[None, :-1]), positions,
        config=small_model.config,
      )  # fmt: skip
      scores = np.asarray(jax.nn.log_softmax(logits[0]))
      return -scores[np.arange(256), tokens[1:]].mean()

    untrained = models.init_params(jax.random.key(0), small_model.config)
    assert loss(small_model.params) < 0.5 * loss(untrained)

  @pytest.mark.slow
  def test_equal_recipes_give_equal_weights(self, small_model, tmp_path):
    model = trained_in(tmp_path)
    chex.assert_trees_all_equal(model.params, small_model.params)


class TestKeptWeights:
  """The file is used, or replaced with a warning."""

  @pytest.fixture
  def trainings(self, monkeypatch):
    """Replaces training by a list of calls, and weights that differ by call."""
    calls = []

    def train(tokens, config, sizes):
      del tokens, sizes
      calls.append(None)
      return models.init_params(jax.random.key(len(calls)), config)

    monkeypatch.setattr(characters, "train", train)
    return calls

  def _model(self, folder, **keywords):
    keywords = {"text": TEXT, "folder": folder} | keywords
    return characters.character_model(**keywords)

  def test_is_trained_once(self, trainings, tmp_path):
    model, other_model = self._model(tmp_path), self._model(tmp_path)
    assert len(trainings) == 1
    chex.assert_trees_all_equal(model.params, other_model.params)
    self._model(tmp_path, text=TEXT + "more")
    self._model(tmp_path, sizes=((7, 2),))
    assert len(trainings) == 3

  def test_environment_names_the_folder(self, trainings, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXKV_CACHE", str(tmp_path / "made" / "here"))
    self._model(None)
    assert len(list((tmp_path / "made" / "here").glob("*.npz"))) == 1

  @pytest.mark.parametrize("damage", ["cut", "empty", "noise", "flipped"])
  def test_a_damaged_file_is_replaced(self, trainings, tmp_path, damage):
    self._model(tmp_path)
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    middle = len(data) // 2
    flipped = bytes([data[middle] ^ 1])
    path.write_bytes(
      {
        "cut": data[:middle],
        "empty": b"",
        "noise": b"not an archive" * 100,
        "flipped": data[:middle] + flipped + data[middle + 1 :],
      }[damage]
    )
    with pytest.warns(UserWarning, match="training the model again"):
      trained_model = self._model(tmp_path)
    assert len(trainings) == 2
    kept_model = self._model(tmp_path)
    assert len(trainings) == 2
    chex.assert_trees_all_equal(trained_model.params, kept_model.params)

  def test_a_folder_that_cannot_be_written(self, trainings, tmp_path):
    """Raised before a minute's training."""
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
      self._model(tmp_path / "file" / "folder")
    assert trainings == []

  def test_concurrent_first_calls_write_one_file(self, trainings, tmp_path):
    """The file is complete, and no other file is left."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
      calls = [pool.submit(self._model, tmp_path) for _ in range(2)]
      params = [call.result().params for call in calls]
    embed = self._model(tmp_path).params["embed"]
    assert any(np.array_equal(embed, tree["embed"]) for tree in params)
    assert len(list(tmp_path.iterdir())) == 1
