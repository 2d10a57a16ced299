"""A small character model, trained on this machine and kept in a file.

Random weights hide cache bugs: the logits of the best two tokens are almost
equal everywhere. This model is trained once, in about a minute, on a text
that ships with Python, so examples and tests need no download.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import warnings
from collections.abc import Callable
from typing import Any

import platformdirs

from jaxkv._src.models import checkpoint as store
from jaxkv._src.models import training
from jaxkv._src.models import vocabulary
from jaxkv._src.models.decoder.description import Decoder
from jaxkv._src.models.decoder.llama import llama
from jaxkv._src.models.decoder.params import Params
from jaxkv._src.models.decoder.params import shapes_of

_FORMAT_VERSION = 2
_STEPS = 600
# Most steps use short sequences, which are cheap. Without the longer ones, the
# loss beyond position 128 is 1 nat a character worse.
_PHASES = (
  training.Phase(share=4, context=64, batch_size=32),
  training.Phase(share=1, context=192, batch_size=10),
  training.Phase(share=1, context=512, batch_size=4),
)


class NotKeptWarning(UserWarning):
  """The trained model cannot be kept in the cache folder."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CharacterModel:
  """A decoder of single characters.

  Attributes:
    config: the decoder's sizes.
    params: its weights, as `jaxkv.models.forward` takes them.
    vocabulary: converts text to tokens and back; it has the stop token.
  """

  config: Decoder
  params: Params
  vocabulary: vocabulary.Vocabulary


def character_model(
  *,
  steps: int = _STEPS,
  text: str | None = None,
  folder: str | os.PathLike[str] | None = None,
  progress: bool = True,
) -> CharacterModel:
  """Loads the character model, or trains it and keeps it in a cache folder.

  About 0.1 M parameters, trained on Python's own reference. The first call
  takes about a minute on two CPU cores, later ones milliseconds. For a
  given text, `steps` and machine the weights are always the same.

  The file records the sha256 of the text, the model's sizes, the training
  recipe and a digest of the weights. If any of them differs from the request,
  or the file cannot be read, the model is trained again and a warning says
  why. Training uses sequences of up to 512 tokens; beyond that the loss grows
  slowly.

  If the folder cannot be written, a `NotKeptWarning` says so before the
  training begins, and the model is returned all the same. Several processes
  may make their first call at once: each trains the model, and none reads a
  file that another one has half written.

  Args:
    steps: optimiser steps; a few give a bad model quickly.
    text: the text to learn, longer than 512 characters; None: the reference.
    folder: folder of the file; by default the environment variable JAXKV_CACHE,
      or without it the platform's cache folder for jaxkv.
    progress: whether to show a progress bar on stderr.

  Returns:
    The model, float32.

  Examples:
    >>> model = character_model()  # doctest: +SKIP
    >>> model.vocabulary.encode("def").shape  # doctest: +SKIP
    (3,)
  """
  text = vocabulary.reference_text() if text is None else text
  characters = vocabulary.vocabulary_of(text)
  config = _config(characters.size)
  recipe = training.Recipe(
    steps=steps,
    phases=_PHASES,
    learning_rate=9e-3,
    warmup=50,
    weight_decay=0.1,
    max_norm=1.0,
    seed=0,
  )
  facts = _facts(text, config, recipe)
  path = cache_folder(folder) / f"characters-{_digest(facts)[:16]}.npz"
  params = _load(path, facts, config)
  if params is None:
    kept = _kept(path, lambda: store.check_writable(path))
    tokens = vocabulary.training_tokens(text, characters)
    params, _ = training.train(tokens, config, recipe, progress=progress)
    if kept:
      _kept(path, lambda: store.save(path, facts, params))
  return CharacterModel(config=config, params=params, vocabulary=characters)


def cache_folder(
  folder: str | os.PathLike[str] | None = None,
) -> pathlib.Path:
  """The argument, else JAXKV_CACHE, else the platform's cache folder."""
  chosen = folder or os.environ.get("JAXKV_CACHE")
  return pathlib.Path(chosen or platformdirs.user_cache_dir("jaxkv"))


def _config(vocab_size: int) -> Decoder:
  return llama(
    vocab_size=vocab_size,
    num_layers=2,
    embed_dim=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    mlp_dim=176,
  )


def _facts(
  text: str, config: Decoder, recipe: training.Recipe
) -> dict[str, Any]:
  """Everything that determines the weights, as JSON values."""
  sizes = dataclasses.asdict(config)
  sizes["dtype"] = config.dtype.name
  facts = {
    "format": _FORMAT_VERSION,
    "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
    "config": sizes,
    "recipe": dataclasses.asdict(recipe),
  }
  return json.loads(json.dumps(facts))


def _digest(facts: dict[str, Any]) -> str:
  return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _load(
  path: pathlib.Path, facts: dict[str, Any], config: Decoder
) -> Params | None:
  """The weights in the file, or None if they must be trained."""
  # Not `Path.exists`, which raises for a folder that may not be searched.
  if not os.path.exists(path):
    return None
  try:
    return store.load(path, facts, shapes_of(config))
  except store.UnusableFileError as error:
    warnings.warn(
      f"{path} cannot be used ({error}); training the model again.",
      stacklevel=3,
    )
    return None


def _kept(path: pathlib.Path, write: Callable[[], None]) -> bool:
  """Whether `write` could write the file; a warning says why not."""
  try:
    write()
  except OSError as error:
    warnings.warn(
      f"the trained model cannot be kept in {path} ({error.strerror}); set "
      "JAXKV_CACHE to a writable folder.",
      NotKeptWarning,
      stacklevel=3,
    )
    return False
  return True
