"""Sets of characters as bytes of UTF-8."""

from collections.abc import Iterable

from jaxkv._src.guides.grammars import Grammar
from jaxkv._src.guides.grammars import byte_range
from jaxkv._src.guides.grammars import chain
from jaxkv._src.guides.grammars import choice

LAST = 0x10FFFF
"""The last character."""

Ranges = Iterable[tuple[int, int]]
"""Numbers of characters, first and last of each range."""

# Characters of one length in UTF-8. Surrogates are no characters.
_LENGTHS = ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF))
_LENGTHS += ((0x10000, LAST),)
_TAIL_LOW, _TAIL_HIGH = 0x80, 0xBF


def characters(ranges: Ranges) -> Grammar:
  """One character of some ranges, in UTF-8."""
  parts = []
  for low, high in ranges:
    for first, last in _LENGTHS:
      begin, end = max(low, first), min(high, last)
      if begin <= end:
        parts += _strings(chr(begin).encode(), chr(end).encode())
  return choice(*parts)


def others(ranges: Ranges, last: int = LAST) -> list[tuple[int, int]]:
  """The ranges of all numbers up to `last` that are in none of the ranges."""
  gaps, begin = [], 0
  for low, high in sorted(ranges):
    if begin < low:
      gaps.append((begin, low - 1))
    begin = max(begin, high + 1)
  return [*gaps, (begin, last)] if begin <= last else gaps


def _strings(low: bytes, high: bytes) -> list[Grammar]:
  """All strings of one length from one to another, in the order of UTF-8."""
  if len(low) == 1:
    return [byte_range(low[0], high[0])]
  size = len(low) - 1
  least, most = bytes([_TAIL_LOW]) * size, bytes([_TAIL_HIGH]) * size
  if low[0] == high[0]:
    return _after(low[0], low[1:], high[1:])
  parts, begin, end = [], low[0], high[0]
  if low[1:] != least:
    parts += _after(begin, low[1:], most)
    begin += 1
  if high[1:] != most:
    parts += _after(end, least, high[1:])
    end -= 1
  if begin <= end:
    tail = byte_range(_TAIL_LOW, _TAIL_HIGH)
    parts.append(chain(byte_range(begin, end), *[tail] * size))
  return parts


def _after(byte: int, low: bytes, high: bytes) -> list[Grammar]:
  """Strings that begin with one byte and go on from one to another."""
  first = byte_range(byte, byte)
  return [chain(first, part) for part in _strings(low, high)]
