"""Sets of byte strings, composed from smaller sets."""

import dataclasses


class Grammar:
  """A set of byte strings; the base class of the classes below.

  Examples:
    >>> from jaxkv.guides import json_schema, regex
    >>> answer = regex("Answer: ") + (regex("none") | json_schema({}))
  """

  def __add__(self, other: "Grammar") -> "Grammar":
    """Returns all concatenations of a string of `self` and one of `other`."""
    return chain(self, other)

  def __or__(self, other: "Grammar") -> "Grammar":
    """Returns the union of both sets."""
    return choice(self, other)


@dataclasses.dataclass(frozen=True)
class ByteSet(Grammar):
  """The strings that consist of one byte of a set.

  Attributes:
    mask: an integer whose bit b is set if byte b is in the set.
  """

  mask: int


@dataclasses.dataclass(frozen=True)
class Chain(Grammar):
  """A concatenation of parts, or the empty string if there are no parts."""

  parts: tuple[Grammar, ...]


@dataclasses.dataclass(frozen=True)
class Choice(Grammar):
  """A union of parts, or the empty set if there are no parts."""

  parts: tuple[Grammar, ...]


@dataclasses.dataclass(frozen=True)
class Repeat(Grammar):
  """A repetition of an item.

  Attributes:
    item: the repeated grammar.
    least: minimum number of repetitions.
    most: maximum number of repetitions; None for no limit.
  """

  item: Grammar
  least: int = 0
  most: int | None = None


def byte_range(low: int, high: int) -> ByteSet:
  """Returns the grammar of one byte from `low` to `high`, inclusive."""
  return ByteSet((1 << (high + 1)) - (1 << low))


def chain(*parts: Grammar) -> Grammar:
  """Returns the concatenation of parts."""
  return parts[0] if len(parts) == 1 else Chain(parts)


def choice(*parts: Grammar) -> Grammar:
  """Returns the union of parts, with all `ByteSet` parts merged."""
  mask = 0
  longer: list[Grammar] = []
  for part in parts:
    if isinstance(part, ByteSet):
      mask |= part.mask
    else:
      longer.append(part)
  if mask or not longer:
    longer.insert(0, ByteSet(mask))
  return longer[0] if len(longer) == 1 else Choice(tuple(longer))
