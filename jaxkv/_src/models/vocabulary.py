"""Characters as tokens, and the text that the character model learns."""

import dataclasses
import pydoc_data.topics
import re
from collections.abc import Sequence

import numpy as np

_BLANK_LINE = re.compile(r"\n\n+")


@dataclasses.dataclass(frozen=True)
class Vocabulary:
  """One token for each character, and a stop token.

  Attributes:
    characters: the known characters, each once; token i is character i.

  The last token is the stop token. It ends a text and is not a character.

  Examples:
    >>> vocabulary = Vocabulary("abc")
    >>> vocabulary.encode("cab")
    array([2, 0, 1], dtype=int32)
    >>> vocabulary.decode([2, 0, 1, vocabulary.stop_token])
    'cab'
  """

  characters: str

  def __post_init__(self) -> None:
    if len(set(self.characters)) != len(self.characters):
      raise ValueError(f"characters has repeats: {self.characters!r}.")

  @property
  def stop_token(self) -> int:
    """The token that ends a text."""
    return len(self.characters)

  @property
  def size(self) -> int:
    """Number of tokens, the stop token included."""
    return len(self.characters) + 1

  def encode(self, text: str) -> np.ndarray:
    """The tokens of a text, int32[T]; no stop token is added.

    Raises:
      ValueError: a character is not in the vocabulary.
    """
    tokens = {character: i for i, character in enumerate(self.characters)}
    for i, character in enumerate(text):
      if character not in tokens:
        raise ValueError(
          f"text holds {character!r} at position {i}, which is not one of "
          f"the {len(self.characters)} characters of this vocabulary."
        )
    return np.array([tokens[character] for character in text], np.int32)

  def decode(
    self, tokens: Sequence[int] | np.ndarray, *, stop: str = ""
  ) -> str:
    """The text of int[T] tokens; each stop token becomes the string `stop`.

    Raises:
      ValueError: a number is not a token.
    """
    pieces = [*self.characters, stop]
    flat = np.asarray(tokens)
    if flat.ndim != 1:
      raise ValueError(f"`tokens` must be [T], got shape {flat.shape}.")
    for i, token in enumerate(flat.tolist()):
      if not 0 <= token < self.size:
        raise ValueError(
          f"tokens holds {token} at position {i}; tokens go from 0 to "
          f"{self.size - 1}."
        )
    return "".join(pieces[token] for token in flat.tolist())


def reference_text() -> str:
  """Python's own reference, which ships with Python: about 465 KB.

  The topics of `pydoc_data`, sorted by name. The text differs a little between
  versions of Python.
  """
  topics = pydoc_data.topics.topics
  return "\n".join(topics[name] for name in sorted(topics))


def vocabulary_of(text: str) -> Vocabulary:
  """The vocabulary of a text: its characters, in order of code point.

  Examples:
    >>> vocabulary_of("banana").characters
    'abn'
  """
  return Vocabulary("".join(sorted(set(text))))


def training_tokens(text: str, vocabulary: Vocabulary) -> np.ndarray:
  r"""The text, with a stop token after every second blank line and at the end.

  A model trained on it sometimes stops at the end of a paragraph, so lengths
  vary, and a prompt may hold several paragraphs.

  Args:
    text: the text to learn.
    vocabulary: one that has all its characters.

  Returns:
    int32[T] tokens.

  Examples:
    >>> text = "a\n\nb\n\nc"
    >>> vocabulary = vocabulary_of(text)
    >>> vocabulary.decode(training_tokens(text, vocabulary), stop="/")
    'a\n\nb\n\n/c/'
  """
  ends = [match.end() for match in _BLANK_LINE.finditer(text)][1::2]
  stops = np.array([*ends, len(text)], np.int64)
  tokens = vocabulary.encode(text)
  return np.insert(tokens, stops, np.int32(vocabulary.stop_token))
