"""Sets of byte strings, put together from smaller ones."""

import dataclasses
from collections.abc import Iterable


class Grammar:
  """A set of byte strings: one of the classes below.

  Examples:
    >>> from jaxkv.rollout import json_schema, regex
    >>> answer = regex("Answer: ") + (regex("none") | json_schema({}))
  """

  def __add__(self, other: "Grammar") -> "Grammar":
    """The strings of one with those of the other after them."""
    return chain(self, other)

  def __or__(self, other: "Grammar") -> "Grammar":
    """The strings of both."""
    return choice(self, other)


@dataclasses.dataclass(frozen=True)
class ByteSet(Grammar):
  """One byte out of a set.

  Attributes:
    mask: bit b is set if byte b is in the set.
  """

  mask: int


@dataclasses.dataclass(frozen=True)
class Chain(Grammar):
  """Parts one after the other; the empty string if there are none."""

  parts: tuple[Grammar, ...]


@dataclasses.dataclass(frozen=True)
class Choice(Grammar):
  """One of several parts; not even the empty string if there are none."""

  parts: tuple[Grammar, ...]


@dataclasses.dataclass(frozen=True)
class Repeat(Grammar):
  """An item several times.

  Attributes:
    item: what is repeated.
    least: the fewest times.
    most: the most times; None for any number.
    separator: what stands between two items.
  """

  item: Grammar
  least: int = 0
  most: int | None = None
  separator: Grammar = Chain(())


def byte_range(low: int, high: int) -> ByteSet:
  """The bytes low .. high, both included."""
  return ByteSet((1 << (high + 1)) - (1 << low))


def bytes_of(members: Iterable[int]) -> ByteSet:
  """The bytes given."""
  mask = 0
  for byte in members:
    mask |= 1 << byte
  return ByteSet(mask)


def literal(text: str | bytes) -> Grammar:
  """The one string given; a `str` stands for its UTF-8."""
  data = text.encode() if isinstance(text, str) else text
  return Chain(tuple(ByteSet(1 << byte) for byte in data))


def chain(*parts: Grammar) -> Grammar:
  """Parts one after the other."""
  return parts[0] if len(parts) == 1 else Chain(parts)


def choice(*parts: Grammar) -> Grammar:
  """One of several parts; those of one byte become one part."""
  mask = 0
  others: list[Grammar] = []
  for part in parts:
    if isinstance(part, ByteSet):
      mask |= part.mask
    else:
      others.append(part)
  if mask or not others:
    others.insert(0, ByteSet(mask))
  return others[0] if len(others) == 1 else Choice(tuple(others))


def optional(item: Grammar) -> Grammar:
  """The item or nothing."""
  return Repeat(item, 0, 1)
