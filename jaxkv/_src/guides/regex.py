r"""Parses regular expressions to grammars.

| pattern            | meaning                                              |
|--------------------|------------------------------------------------------|
| `abc`, `é`         | these characters                                     |
| `.`                | any character but a newline                          |
| `[a-z_]`, `[^"\n]` | one character in a set, or outside of a set          |
| `\d` `\w` `\s`     | ASCII digits, word characters, white space;          |
|                    | `\D` `\W` `\S` match all other characters            |
| `\n` `\t` `\r`     | a control character, also `\f` `\v` `\a`             |
| `\xHH`             | the character with this code; in a `str`, also       |
|                    | `\uHHHH` and `\UHHHHHHHH`                            |
| `\.` `\"` `\\`     | a literal punctuation character                      |
| `(ab)`, `(?:ab)`   | a group                                              |
| `a|b`              | alternatives                                         |
| `a*` `a+` `a?`     | any number, at least one, at most one                |
| `a{2}` `a{2,}`     | two, at least two                                    |
| `a{2,5}` `a{,5}`   | two to five, at most five                            |

The pattern matches the whole text, as in `re.fullmatch` with `re.ASCII`.
"""

from typing import NoReturn

from jaxkv._src.guides.characters import LAST
from jaxkv._src.guides.characters import Ranges
from jaxkv._src.guides.characters import characters
from jaxkv._src.guides.characters import others
from jaxkv._src.guides.grammars import Chain
from jaxkv._src.guides.grammars import Grammar
from jaxkv._src.guides.grammars import Repeat
from jaxkv._src.guides.grammars import byte_range
from jaxkv._src.guides.grammars import chain
from jaxkv._src.guides.grammars import choice

_DIGITS = [(48, 57)]
_WORD = [(48, 57), (65, 90), (95, 95), (97, 122)]
_SPACE = [(9, 13), (32, 32)]
_SETS = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_CONTROLS = {"n": 10, "t": 9, "r": 13, "f": 12, "v": 11, "a": 7}
_CODES = {"x": 2, "u": 4, "U": 8}
_SUFFIXES = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_MAX_REPEATS = 100_000


def regex(pattern: str | bytes) -> Grammar:
  r"""Parses a regular expression to the grammar of the texts that it matches.

  The pattern must match the whole text. A `str` pattern matches characters,
  which the grammar encodes as UTF-8. A `bytes` pattern matches bytes. The
  docstring of this module lists the syntax.

  Raises:
    TypeError: `pattern` is neither `str` nor `bytes`.
    ValueError: `pattern` is malformed, has a repeat above 100,000, or uses
      unsupported syntax: look-around, references, group names, flags, lazy or
      possessive quantifiers, anchors.

  Examples:
    >>> from jaxkv._src.guides.dfa import compile_grammar
    >>> dfa = compile_grammar(regex(r"(yes|no), \d{1,3}%"))
    >>> dfa.matches(b"yes, 95%"), dfa.matches(b"yes, %")
    (True, False)
  """
  if not isinstance(pattern, str | bytes):
    raise TypeError(
      f"`pattern` must be a str or bytes, got {type(pattern).__name__}; pass "
      "the attribute `pattern` of a compiled expression."
    )
  parser = _Parser(pattern)
  grammar = parser.alternatives()
  if parser.peek():
    parser.fail("have a `(` for each `)`", "escape the `)` to match it")
  return grammar


class _Parser:
  """A recursive descent parser of one pattern."""

  def __init__(self, pattern: str | bytes):
    self._is_bytes = isinstance(pattern, bytes)
    # Latin-1 maps byte b to character b, so one parser reads both types.
    self._text = (
      pattern.decode("latin-1") if isinstance(pattern, bytes) else pattern
    )
    self._position = 0
    self._max_character = 255 if self._is_bytes else LAST

  def peek(self) -> str:
    """Returns the next character without taking it, or "" at the end."""
    return self._text[self._position : self._position + 1]

  def fail(self, rule: str, remedy: str) -> NoReturn:
    raise ValueError(
      f"`pattern` must {rule}, got {self._text!r} with "
      f"{self._text[self._position :][:4]!r} at position {self._position}; "
      f"{remedy}."
    )

  def _take(self) -> str:
    character = self.peek()
    self._position += 1
    return character

  def _take_if(self, prefix: str) -> bool:
    """Takes `prefix` and returns True if it comes next, else returns False."""
    is_next = self._text.startswith(prefix, self._position)
    self._position += len(prefix) if is_next else 0
    return is_next

  def alternatives(self) -> Grammar:
    parts = [self._sequence()]
    while self._take_if("|"):
      parts.append(self._sequence())
    return choice(*parts)

  def _sequence(self) -> Grammar:
    parts = []
    while self.peek() not in ("", "|", ")"):
      parts.append(self._repeated(self._item()))
    return chain(*parts) if parts else Chain(())

  def _item(self) -> Grammar:
    start = self.peek()
    if start in ("*", "+", "?", "{"):
      self.fail(
        f"have an item before `{start}`", f"escape the `{start}` to match it"
      )
    if start in ("^", "$"):
      self.fail(
        "have no anchors", "leave them out, since patterns match whole texts"
      )
    self._take()
    if start == "(":
      return self._group()
    if start == "[":
      return self._one_of(self._set())
    if start == ".":
      return self._one_of(others([(10, 10)], self._max_character))
    if start == "\\":
      return self._one_of(self._escape())
    return self._one_of(_single(ord(start)))

  def _one_of(self, ranges: Ranges) -> Grammar:
    if self._is_bytes:
      return choice(*(byte_range(low, high) for low, high in ranges))
    return characters(ranges)

  def _group(self) -> Grammar:
    if self.peek() == "?" and not self._take_if("?:"):
      self.fail(
        "have only groups of the forms `(...)` and `(?:...)`",
        "leave out look-around, names and flags",
      )
    inside = self.alternatives()
    if not self._take_if(")"):
      self.fail("close each `(`", "add a `)`, or escape the `(` to match it")
    return inside

  def _repeated(self, item: Grammar) -> Grammar:
    start = self.peek()
    if start in _SUFFIXES:
      self._take()
      minimum, maximum = _SUFFIXES[start]
    elif start == "{":
      minimum, maximum = self._numbers()
    else:
      return item
    if self.peek() in ("?", "+"):
      self.fail(
        "have no lazy or possessive quantifiers",
        f"leave out this `{self.peek()}`",
      )
    if self.peek() in ("*", "{"):
      self.fail(
        "have at most one quantifier for an item",
        "put the item and its first quantifier in a group",
      )
    return Repeat(item, minimum, maximum)

  def _numbers(self) -> tuple[int, int | None]:
    """Parses the counts of `{2}`, `{2,}`, `{,5}` or `{2,5}`."""
    begin = self._position
    end = self._text.find("}", begin)
    low, comma, high = self._text[begin + 1 : max(end, begin)].partition(",")
    is_decimal = (low + high).isascii() and (low + high).isdecimal()
    if end < 0 or not is_decimal:
      self.fail(
        "have numbers in `{...}`, as in `{2}`, `{2,}` or `{2,5}`",
        "escape the `{` to match it",
      )
    minimum = int(low or 0)
    maximum = (int(high) if high else None) if comma else minimum
    largest = minimum if maximum is None else maximum
    if largest > _MAX_REPEATS or largest < minimum:
      self.fail(
        f"have numbers of at most {_MAX_REPEATS} in `{{...}}`, the lower first",
        "correct the numbers",
      )
    self._position = end + 1
    return minimum, maximum

  def _set(self) -> Ranges:
    """Parses `[...]` after its opening bracket."""
    negated = self._take_if("^")
    ranges: list[tuple[int, int]] = []
    # As in Python's `re`, a `]` as the first character is a member of the set.
    first = True
    while first or self.peek() != "]":
      first = False
      low = self._member()
      # A `-` before the closing bracket is a member, not a range.
      follows = self._text[self._position + 1 : self._position + 2]
      if self.peek() != "-" or follows in ("]", ""):
        ranges += low
        continue
      self._take()
      ranges.append(self._range(low, self._member()))
    self._take()
    return others(ranges, self._max_character) if negated else ranges

  def _range(self, low: Ranges, high: Ranges) -> tuple[int, int]:
    ends = [*low, *high]
    are_single = len(ends) == 2 and all(begin == end for begin, end in ends)
    if not are_single or ends[1] < ends[0]:
      self.fail(
        "have ranges from one character to a later one",
        "escape the `-` to match it",
      )
    return ends[0][0], ends[1][0]

  def _member(self) -> Ranges:
    if not self.peek():
      self.fail("close each `[`", "add a `]`, or escape the `[` to match it")
    start = self._take()
    if start == "\\":
      return self._escape()
    return _single(ord(start))

  def _escape(self) -> Ranges:
    """Parses an escape after its backslash."""
    start = self._take()
    if start.lower() in _SETS:
      ranges = _SETS[start.lower()]
      return others(ranges, self._max_character) if start.isupper() else ranges
    if start in _CONTROLS:
      return _single(_CONTROLS[start])
    if start in _CODES and (start == "x" or not self._is_bytes):
      return _single(self._code(_CODES[start]))
    # Refuses other letters and digits. In `re`, most of these escapes are
    # references, anchors or errors, not literals.
    if not start or (start.isascii() and start.isalnum()):
      # The message points at the backslash.
      self._position -= 2
      self.fail(
        "have only supported escapes",
        "remove references and anchors, and write letters without a backslash",
      )
    return _single(ord(start))

  def _code(self, digits: int) -> int:
    """Parses the hexadecimal digits of an escape."""
    text = self._text[self._position : self._position + digits]
    try:
      is_plain = text.isascii() and text.isalnum()
      number = int(text, 16) if is_plain else LAST + 1
    except ValueError:
      number = LAST + 1
    if len(text) < digits or number > LAST or 0xD800 <= number < 0xE000:
      # The message points at the backslash, two characters back.
      self._position -= 2
      self.fail(
        f"have the code of a character in {digits} hexadecimal digits here",
        "write the character itself",
      )
    self._position += digits
    return number


def _single(character: int) -> Ranges:
  return [(character, character)]
