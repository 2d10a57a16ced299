"""A character model that is trained in seconds, for tests."""

import pathlib

from jaxkv import models
from jaxkv._src.commands import characters

TEXT = "".join(f"{i} is {i % 7} modulo seven.\n\n" for i in range(200))


def trained_in(folder: pathlib.Path) -> models.Pretrained:
  """Trains a character model for 25 steps: bad, but sure of its best token."""
  return characters.character_model(sizes=((64, 32),), text=TEXT, folder=folder)
