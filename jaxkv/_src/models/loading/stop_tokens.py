"""Reads the stop tokens of a checkpoint."""

import pathlib
from typing import Any

from jaxkv._src.models.loading.safetensors_files import json_object


def stop_tokens(
  folder: pathlib.Path, config: dict[str, Any]
) -> tuple[int, ...]:
  """Returns the ids of the tokens that end a text or a chat message.

  Args:
    folder: the folder of the checkpoint.
    config: the values of its config.json.
  """
  # generation_config.json takes precedence, because chat models can end a
  # message with a token that config.json lacks.
  value = config.get("eos_token_id")
  path = folder / "generation_config.json"
  if path.exists():
    generation = json_object(path).get("eos_token_id")
    value = value if generation is None else generation
  if value is None:
    return ()
  tokens = value if isinstance(value, list) else [value]
  if not all(type(token) is int and 0 <= token < 2**31 for token in tokens):
    raise ValueError(
      f"`eos_token_id` in {folder} must be a token id or a list of ids, got "
      f"{value!r}."
    )
  return tuple(tokens)
