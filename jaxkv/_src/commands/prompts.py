"""The prompts of `python -m jaxkv rollout`: a file's lines, or real text."""

import dataclasses
import pathlib

import numpy as np

from jaxkv._src.commands.errors import CommandError
from jaxkv.models import Vocabulary

_NUM_DEFAULT = 24
_PREAMBLE = 224
_OPENING = 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompts:
  """Prompts as padded rows.

  Attributes:
    tokens: int32[P, L].
    lengths: int32[P].
  """

  tokens: np.ndarray
  lengths: np.ndarray


def read_lines(path: str) -> list[str]:
  """The lines of a text file in UTF-8, one prompt each.

  Raises:
    CommandError: no such file, one that is not UTF-8, or an empty one.
  """
  try:
    text = pathlib.Path(path).read_text(encoding="utf-8")
  except OSError as error:
    raise CommandError(f"cannot read {path}: {error.strerror}") from error
  except UnicodeDecodeError as error:
    raise CommandError(
      f"{path} is not UTF-8 text: {error.reason} at byte {error.start}; save "
      "it as UTF-8"
    ) from error
  if not text:
    raise CommandError(f"{path} is empty: it needs one prompt a line")
  # Not `splitlines`, which also ends a line at a form feed.
  return text.removesuffix("\n").split("\n")


def read(path: str, vocabulary: Vocabulary) -> list[np.ndarray]:
  """Reads one prompt a line.

  Args:
    path: a text file in UTF-8.
    vocabulary: encodes the lines.

  Returns:
    int32[...] tokens of each prompt.

  Raises:
    CommandError: no such file, an empty line, or a character that the model
      does not know; the message names the line.
  """
  encoded = []
  for number, line in enumerate(read_lines(path), start=1):
    if not line:
      raise CommandError(
        f"{path} line {number}: an empty prompt; write one prompt a line"
      )
    try:
      encoded.append(vocabulary.encode(line))
    except ValueError as error:
      reason = str(error).rstrip(".")
      raise CommandError(
        f"{path} line {number}: {reason}; remove it"
      ) from error
  return encoded


def default(text: str, vocabulary: Vocabulary) -> list[np.ndarray]:
  """Openings of a text's paragraphs, each after the text's first lines.

  Args:
    text: the text that the model was trained on.
    vocabulary: encodes it.

  Returns:
    int32[...] tokens of each prompt; all begin with the same preamble.
  """
  preamble = text[:_PREAMBLE].rstrip() + "\n\n"
  paragraphs = [part.strip() for part in text.split("\n\n")]
  paragraphs = [part for part in paragraphs if len(part) > 2 * _OPENING]
  stride = max(1, len(paragraphs) // _NUM_DEFAULT)
  chosen = paragraphs[::stride][:_NUM_DEFAULT]
  # Openings of different lengths, so that pages and prompts do not line up.
  return [
    vocabulary.encode(preamble + part[: _OPENING - number % 7])
    for number, part in enumerate(chosen)
  ]


def padded(encoded: list[np.ndarray], width: int, path: str | None) -> Prompts:
  """The prompts as rows of `width` tokens.

  Args:
    encoded: tokens of each prompt.
    width: L, the longest prompt that fits.
    path: the file of the prompts, for the message.

  Raises:
    CommandError: a prompt is longer than `width`; the message names its line.
  """
  lengths = np.asarray([len(tokens) for tokens in encoded], np.int32)
  for number, length in enumerate(lengths.tolist(), start=1):
    if length > width:
      place = f"{path} line {number}" if path else f"default prompt {number}"
      raise CommandError(
        f"{place}: a prompt of {length} tokens is longer than {width}, which "
        "--max-tokens leaves in a slot; shorten it or lower --max-tokens"
      )
  tokens = np.zeros((len(encoded), width), np.int32)
  for row, prompt in zip(tokens, encoded, strict=True):
    row[: len(prompt)] = prompt
  return Prompts(tokens=tokens, lengths=lengths)
