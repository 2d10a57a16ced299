"""Byte pairs as SmolLM2 merges them, slowly and in plain Python."""

import functools
from collections.abc import Iterator
from typing import Any

import pytest

_WORDS = (
  r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
)


class SlowBytePairs:
  """The tokens of a text, from the facts of a .gguf file."""

  def __init__(self, facts: Any):
    regex = pytest.importorskip("regex", reason="it knows letters and digits")
    tokens = facts["tokenizer.ggml.tokens"]
    kinds = facts["tokenizer.ggml.token_type"]
    merges = facts["tokenizer.ggml.merges"]
    self._numbers = {token: number for number, token in enumerate(tokens)}
    self._ranks = {tuple(pair.split(" ")): i for i, pair in enumerate(merges)}
    special = [t for t, k in zip(tokens, kinds, strict=True) if k == 3]
    self._special = regex.compile("|".join(map(regex.escape, special)))
    self._words = regex.compile(_WORDS)
    self._digits = regex.compile(r"\p{N}|[^\p{N}]+")
    self._letters = _letters()
    self._word = functools.cache(self._merged)

  def encode(self, text: str) -> list[int]:
    """The tokens: special ones first, then digits alone, then words."""
    found, begin = [], 0
    for match in self._special.finditer(text):
      found += self._plain(text[begin : match.start()])
      found.append(self._numbers[match.group()])
      begin = match.end()
    return [*found, *self._plain(text[begin:])]

  def _plain(self, text: str) -> Iterator[int]:
    for part in self._digits.findall(text):
      for word in self._words.findall(part):
        yield from self._word(
          "".join(self._letters[byte] for byte in word.encode())
        )

  def _merged(self, word: str) -> list[int]:
    pieces, none = list(word), len(self._ranks)
    while len(pieces) > 1:
      ranks = [
        self._ranks.get((left, right), none)
        for left, right in zip(pieces, pieces[1:], strict=False)  # noqa: RUF007
      ]
      place = ranks.index(min(ranks))
      if ranks[place] == none:
        break
      pieces[place : place + 2] = ["".join(pieces[place : place + 2])]
    # Some bytes are no token of this vocabulary; nothing stands for them.
    return [self._numbers[piece] for piece in pieces if piece in self._numbers]


def _letters() -> dict[int, str]:
  plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
  others = [byte for byte in range(256) if byte not in plain]
  found = {byte: chr(byte) for byte in plain}
  return found | {byte: chr(256 + i) for i, byte in enumerate(others)}
