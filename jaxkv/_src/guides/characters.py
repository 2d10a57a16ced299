"""Converts sets of characters to grammars over UTF-8 bytes."""

from collections.abc import Iterable

from jaxkv._src.guides.grammars import Grammar
from jaxkv._src.guides.grammars import byte_range
from jaxkv._src.guides.grammars import chain
from jaxkv._src.guides.grammars import choice

LAST = 0x10FFFF
"""The last code point of Unicode."""

Ranges = Iterable[tuple[int, int]]
"""Ranges of code points: pairs (first, last), both inclusive."""

# Within each range, all UTF-8 encodings have the same length. The gap from
# 0xD800 to 0xDFFF excludes surrogates, which have no UTF-8 encoding.
_LENGTHS = ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF))
_LENGTHS += ((0x10000, LAST),)
_TAIL_LOW = 0x80
_TAIL_HIGH = 0xBF


def characters(ranges: Ranges) -> Grammar:
  """Returns a grammar of the UTF-8 encodings of characters in `ranges`."""
  parts = []
  for low, high in ranges:
    for first, last in _LENGTHS:
      begin = max(low, first)
      end = min(high, last)
      if begin <= end:
        parts += _byte_strings(chr(begin).encode(), chr(end).encode())
  return choice(*parts)


def others(ranges: Ranges, last: int = LAST) -> list[tuple[int, int]]:
  """Returns the ranges of code points in 0 .. `last` outside of `ranges`."""
  gaps = []
  begin = 0
  for low, high in sorted(ranges):
    if begin < low:
      gaps.append((begin, low - 1))
    begin = max(begin, high + 1)
  return [*gaps, (begin, last)] if begin <= last else gaps


def _byte_strings(low: bytes, high: bytes) -> list[Grammar]:
  """Returns grammars of the UTF-8 strings `low` .. `high`, of equal lengths."""
  if len(low) == 1:
    return [byte_range(low[0], high[0])]
  size = len(low) - 1
  tail_low = bytes([_TAIL_LOW]) * size
  tail_high = bytes([_TAIL_HIGH]) * size
  if low[0] == high[0]:
    return _with_first_byte(low[0], low[1:], high[1:])
  # If the first byte is between those of `low` and `high`, any tail is valid.
  parts = []
  begin = low[0]
  end = high[0]
  if low[1:] != tail_low:
    parts += _with_first_byte(begin, low[1:], tail_high)
    begin += 1
  if high[1:] != tail_high:
    parts += _with_first_byte(end, tail_low, high[1:])
    end -= 1
  if begin <= end:
    tail = byte_range(_TAIL_LOW, _TAIL_HIGH)
    parts.append(chain(byte_range(begin, end), *[tail] * size))
  return parts


def _with_first_byte(byte: int, low: bytes, high: bytes) -> list[Grammar]:
  """Returns `_byte_strings(low, high)`, with `byte` before each grammar."""
  first = byte_range(byte, byte)
  return [chain(first, part) for part in _byte_strings(low, high)]
