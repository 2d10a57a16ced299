"""Trains a byte-level BPE vocabulary of about 550 tokens in a second.

Like real vocabularies, it has all bytes, words with a leading space, characters
whose bytes are split over tokens, and special tokens.
"""

import functools
from collections.abc import Iterator

import numpy as np

from jaxkv._src.commands.characters import reference_text

_NUM_SPECIAL = 2
"""Tokens 0 and 1 have no bytes."""

_LENGTH, _SIZE = 30_000, 256 + 300
_RARE = ' {"name": "é", "list": [1, 2.5e-3, true, null]}\n\n→ naïve 東京 🙂 '


@functools.cache
def text() -> bytes:
  """Returns the training text."""
  return (reference_text()[:_LENGTH] + _RARE * 4).encode()


@functools.cache
def tokens() -> tuple[bytes, ...]:
  """Returns the bytes of each token."""
  return (b"",) * _NUM_SPECIAL + tuple(_pieces())


def _pieces() -> Iterator[bytes]:
  """Yields all bytes, then merges of the most frequent adjacent pairs."""
  pieces = [bytes([byte]) for byte in range(256)]
  numbers = np.frombuffer(text(), np.uint8).astype(np.int64)
  while len(pieces) < _SIZE:
    pairs = numbers[:-1] * _SIZE + numbers[1:]
    first, second = divmod(int(np.bincount(pairs).argmax()), _SIZE)
    numbers = _merge_pair(numbers, first, second, len(pieces))
    pieces.append(pieces[first] + pieces[second])
  # Different merges may result in equal pieces.
  return iter(dict.fromkeys(pieces))


def _merge_pair(numbers: np.ndarray, first: int, second: int, new: int):
  hits = (numbers[:-1] == first) & (numbers[1:] == second)
  places = []
  for place in np.flatnonzero(hits).tolist():
    if not places or place > places[-1] + 1:
      places.append(place)
  numbers = numbers.copy()
  numbers[places] = new
  return np.delete(numbers, np.array(places) + 1)


def cut(data: bytes, table: tuple[bytes, ...], random) -> list[int]:
  """Tokenizes bytes, with a random token at each position."""
  token_of_piece: dict[bytes, int] = {}
  for token, piece in enumerate(table):
    token_of_piece.setdefault(piece, token)
  longest = min(12, max(map(len, table)))
  numbers, place = [], 0
  while place < len(data):
    ends = [
      end
      for end in range(place + 1, place + longest + 1)
      if data[place:end] in token_of_piece and end <= len(data)
    ]
    end = ends[-1] if random.random() < 0.5 else random.choice(ends)
    numbers.append(token_of_piece[data[place:end]])
    place = end
  return numbers
