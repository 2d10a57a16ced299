"""Prompts as text, from arguments, a text file or a file of JSON lines."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxkv._src.commands.errors import CommandError
from jaxkv._src.commands.prompts import read_lines
from jaxkv.models import Pretrained

_DEFAULT = "The capital of France is"
_DEFAULT_CHAT = "What is the capital of France?"


@dataclasses.dataclass(frozen=True)
class TextPrompt:
  """A prompt, and where it comes from.

  Attributes:
    place: for messages.
    text: what was written; of a conversation, its last message.
    messages: a conversation; None for plain text.
  """

  place: str
  text: str
  messages: tuple[dict[str, Any], ...] | None = None


def chosen(
  texts: Sequence[str] | None, path: str | None, *, chat: bool
) -> list[TextPrompt]:
  """All prompts: those of arguments, then those of a file.

  Args:
    texts: of arguments.
    path: a file: a prompt a line, or in a .jsonl file a string, or an object
      with "prompt" or "messages".
    chat: whether texts are messages of a user.

  Raises:
    CommandError: a file cannot be read, or a line is no prompt.
  """
  prompts = [
    _of_text(f"--prompt {number}", text, chat)
    for number, text in enumerate(texts or (), start=1)
  ]
  if path is not None:
    read = _of_json if path.endswith(".jsonl") else _of_text
    prompts += [
      read(f"{path} line {number}", line, chat)
      for number, line in enumerate(read_lines(path), start=1)
    ]
  if not prompts:
    default = _DEFAULT_CHAT if chat else _DEFAULT
    return [_of_text("the default prompt", default, chat)]
  return prompts


def _of_text(place: str, text: str, chat: bool) -> TextPrompt:
  if not text:
    raise CommandError(f"{place}: an empty prompt; write some text")
  messages = ({"role": "user", "content": text},) if chat else None
  return TextPrompt(place, text, messages)


def _of_json(place: str, line: str, chat: bool) -> TextPrompt:
  try:
    value = json.loads(line)
  except ValueError as error:
    raise CommandError(f"{place}: no JSON: {error}") from error
  if isinstance(value, dict) and "messages" in value:
    return _of_messages(place, value["messages"])
  if isinstance(value, dict):
    value = value.get("prompt")
  if not isinstance(value, str):
    raise CommandError(
      f'{place}: must be a string, or an object with "prompt" or "messages"'
    )
  return _of_text(place, value, chat)


def _of_messages(place: str, messages: Any) -> TextPrompt:
  known = isinstance(messages, list) and all(
    isinstance(one, dict)
    and isinstance(one.get("role"), str)
    and isinstance(one.get("content"), str)
    for one in messages
  )
  if not known or not messages:
    raise CommandError(
      f'{place}: "messages" must be a list of objects with "role" and "content"'
    )
  return TextPrompt(place, messages[-1]["content"], tuple(messages))


def encoded(prompts: list[TextPrompt], model: Pretrained) -> list[np.ndarray]:
  """int32[...] tokens of each prompt.

  Raises:
    CommandError: the model has no chat template, or its template refuses a
      conversation.
  """
  found = []
  for prompt in prompts:
    try:
      tokens = (
        model.tokenizer.encode(prompt.text)
        if prompt.messages is None
        else model.tokenizer.encode_chat(prompt.messages)
      )
    except (ImportError, ValueError) as error:
      reason = str(error).rstrip(".")
      raise CommandError(f"{prompt.place}: {reason}") from error
    if not len(tokens):
      raise CommandError(f"{prompt.place}: no token; write other text")
    found.append(tokens)
  return found
