"""A byte-level vocabulary of some hundred tokens, trained in a second.

It has what real ones have: all bytes, pieces of words with the space before
them, characters whose bytes are several tokens, and special tokens.
"""

import functools
from collections.abc import Iterator

import numpy as np

from jaxkv._src.commands.characters import reference_text

_NUM_SPECIAL = 2
"""Tokens 0 and 1 have no bytes."""

_LENGTH, _SIZE = 30_000, 256 + 300
_OTHERS = ' {"name": "é", "list": [1, 2.5e-3, true, null]}\n\n→ naïve 東京 🙂 '


@functools.cache
def text() -> bytes:
  """What the vocabulary was trained on."""
  return (reference_text()[:_LENGTH] + _OTHERS * 4).encode()


@functools.cache
def tokens() -> tuple[bytes, ...]:
  """The bytes of each token."""
  return (b"",) * _NUM_SPECIAL + tuple(_pieces())


def _pieces() -> Iterator[bytes]:
  """All bytes, then what the most frequent pair of neighbours makes."""
  pieces = [bytes([byte]) for byte in range(256)]
  numbers = np.frombuffer(text(), np.uint8).astype(np.int64)
  while len(pieces) < _SIZE:
    pairs = numbers[:-1] * _SIZE + numbers[1:]
    first, second = divmod(int(np.bincount(pairs).argmax()), _SIZE)
    numbers = _merged(numbers, first, second, len(pieces))
    pieces.append(pieces[first] + pieces[second])
  # Two ways of merging may make one piece.
  return iter(dict.fromkeys(pieces))


def _merged(numbers: np.ndarray, first: int, second: int, new: int):
  hits = (numbers[:-1] == first) & (numbers[1:] == second)
  places = []
  for place in np.flatnonzero(hits).tolist():
    if not places or place > places[-1] + 1:
      places.append(place)
  numbers = numbers.copy()
  numbers[places] = new
  return np.delete(numbers, np.array(places) + 1)


def cut(data: bytes, table: tuple[bytes, ...], random) -> list[int]:
  """Tokens that spell some bytes, chosen at random at each place."""
  known: dict[bytes, int] = {}
  for number, piece in enumerate(table):
    known.setdefault(piece, number)
  longest = min(12, max(map(len, table)))
  numbers, place = [], 0
  while place < len(data):
    ends = [
      end
      for end in range(place + 1, place + longest + 1)
      if data[place:end] in known and end <= len(data)
    ]
    end = ends[-1] if random.random() < 0.5 else random.choice(ends)
    numbers.append(known[data[place:end]])
    place = end
  return numbers
