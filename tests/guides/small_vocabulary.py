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
  tokens = np.frombuffer(text(), np.uint8).astype(np.int64)
  while len(pieces) < _SIZE:
    pairs = tokens[:-1] * _SIZE + tokens[1:]
    left, right = divmod(int(np.bincount(pairs).argmax()), _SIZE)
    tokens = _merge_pair(tokens, left, right, len(pieces))
    pieces.append(pieces[left] + pieces[right])
  # Different merges may result in equal pieces.
  return iter(dict.fromkeys(pieces))


def _merge_pair(tokens: np.ndarray, left: int, right: int, new: int):
  hits = (tokens[:-1] == left) & (tokens[1:] == right)
  positions = []
  for position in np.flatnonzero(hits).tolist():
    if not positions or position > positions[-1] + 1:
      positions.append(position)
  tokens = tokens.copy()
  tokens[positions] = new
  return np.delete(tokens, np.array(positions) + 1)


def cut(data: bytes, table: tuple[bytes, ...], random) -> list[int]:
  """Tokenizes bytes, with a random token at each position."""
  token_of_piece: dict[bytes, int] = {}
  for token, piece in enumerate(table):
    token_of_piece.setdefault(piece, token)
  longest = min(12, max(map(len, table)))
  tokens, start = [], 0
  while start < len(data):
    ends = [
      end
      for end in range(start + 1, start + longest + 1)
      if data[start:end] in token_of_piece and end <= len(data)
    ]
    end = ends[-1] if random.random() < 0.5 else random.choice(ends)
    tokens.append(token_of_piece[data[start:end]])
    start = end
  return tokens
