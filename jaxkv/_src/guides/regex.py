r"""Regular expressions as grammars.

| written            | meaning                                              |
|--------------------|------------------------------------------------------|
| `abc`, `é`         | these characters                                     |
| `.`                | any character but a newline                          |
| `[a-z_]`, `[^"\n]` | one character of a set, or one that is not in it     |
| `\d` `\w` `\s`     | digits, letters with digits and `_`, white space, of |
|                    | ASCII; `\D` `\W` `\S` are all other characters       |
| `\n` `\t` `\r`     | a character, also `\f` `\v` `\a`, `\xHH`, and in a   |
|                    | `str` `\uHHHH` and `\UHHHHHHHH`                      |
| `\.` `\"` `\\`     | the punctuation itself                               |
| `(ab)`, `(?:ab)`   | a group                                              |
| `a|b`              | one or the other                                     |
| `a*` `a+` `a?`     | any number, at least one, at most one                |
| `a{2}` `a{2,}`     | two, at least two                                    |
| `a{2,5}` `a{,5}`   | two to five, at most five                            |

The expression describes the whole text, as in `re.fullmatch` with `re.ASCII`.
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
_MOST_TIMES = 100_000


def regex(pattern: str | bytes) -> Grammar:
  r"""The texts that a regular expression matches from begin to end.

  A `str` is about characters, and what it matches is valid UTF-8; `bytes` are
  about bytes, as in Python's `re`. The module's table has all that is known.

  Args:
    pattern: the expression.

  Raises:
    TypeError: `pattern` is neither `str` nor `bytes`.
    ValueError: `pattern` is wrong or has something that is not supported: look
      around, references, names, flags, lazy or possessive quantifiers, anchors.

  Examples:
    >>> from jaxkv._src.guides.dfa import compile_grammar
    >>> dfa = compile_grammar(regex(r"(yes|no), \d{1,3}%"))
    >>> dfa.matches(b"yes, 95%"), dfa.matches(b"yes, %")
    (True, False)
  """
  if not isinstance(pattern, str | bytes):
    raise TypeError(
      f"`pattern` must be a str or bytes, got {type(pattern).__name__}; use "
      "`re.Pattern.pattern` of a compiled one."
    )
  parser = _Parser(pattern)
  grammar = parser.alternatives()
  if parser.next():
    parser.fail("have no `)` without a `(`", "escape it")
  return grammar


class _Parser:
  """Reads an expression from left to right; bytes as characters 0 .. 255."""

  def __init__(self, pattern: str | bytes):
    self._of_bytes = isinstance(pattern, bytes)
    self._text = (
      pattern.decode("latin-1") if isinstance(pattern, bytes) else pattern
    )
    self._at = 0
    self._last = 255 if self._of_bytes else LAST

  def next(self) -> str:
    """The next character, not taken; empty at the end."""
    return self._text[self._at : self._at + 1]

  def fail(self, rule: str, remedy: str) -> NoReturn:
    raise ValueError(
      f"`pattern` must {rule}, got {self._text!r} with "
      f"{self._text[self._at : self._at + 4]!r} at position {self._at}; "
      f"{remedy}."
    )

  def _take(self) -> str:
    taken = self.next()
    self._at += 1
    return taken

  def _takes(self, wanted: str) -> bool:
    """Whether the next characters are those wanted; takes them if so."""
    found = self._text.startswith(wanted, self._at)
    self._at += len(wanted) if found else 0
    return found

  def alternatives(self) -> Grammar:
    parts = [self._sequence()]
    while self._takes("|"):
      parts.append(self._sequence())
    return choice(*parts)

  def _sequence(self) -> Grammar:
    parts = []
    while self.next() not in ("", "|", ")"):
      parts.append(self._repeated(self._item()))
    return chain(*parts) if parts else Chain(())

  def _item(self) -> Grammar:
    start = self.next()
    if start in ("*", "+", "?", "{"):
      self.fail(f"have an item before `{start}`", "escape it if it is text")
    if start in ("^", "$"):
      self.fail("have no anchors", "it matches whole texts, so leave them out")
    self._take()
    if start == "(":
      return self._group()
    if start == "[":
      return self._one_of(self._set())
    if start == ".":
      return self._one_of(others([(10, 10)], self._last))
    if start == "\\":
      return self._one_of(self._escape())
    return self._one_of(_single(ord(start)))

  def _one_of(self, ranges: Ranges) -> Grammar:
    if self._of_bytes:
      return choice(*(byte_range(low, high) for low, high in ranges))
    return characters(ranges)

  def _group(self) -> Grammar:
    if self.next() == "?" and not self._takes("?:"):
      self.fail(
        "have groups `(...)` and `(?:...)` only",
        "look around, names and flags are not supported",
      )
    inside = self.alternatives()
    if not self._takes(")"):
      self.fail("close each `(`", "add a `)`, or escape the `(`")
    return inside

  def _repeated(self, item: Grammar) -> Grammar:
    start = self.next()
    if start in _SUFFIXES:
      self._take()
      least, most = _SUFFIXES[start]
    elif start == "{":
      least, most = self._numbers()
    else:
      return item
    if self.next() in ("?", "+"):
      self.fail(
        "have no lazy or possessive quantifiers",
        "all texts are wanted, not one match, so leave the last character out",
      )
    if self.next() in ("*", "{"):
      self.fail("have one quantifier for an item", "put the item in a group")
    return Repeat(item, least, most)

  def _numbers(self) -> tuple[int, int | None]:
    """The numbers of `{2}`, `{2,}`, `{,5}` or `{2,5}`."""
    begin = self._at
    end = self._text.find("}", begin)
    low, comma, high = self._text[begin + 1 : max(end, begin)].partition(",")
    known = (low + high).isascii() and (low + high).isdecimal()
    if end < 0 or not known:
      self.fail(
        "have numbers in `{...}`, as in `{2}`, `{2,}` or `{2,5}`",
        "escape the `{` if it is text",
      )
    least = int(low or 0)
    most = (int(high) if high else None) if comma else least
    highest = least if most is None else most
    if highest > _MOST_TIMES or highest < least:
      self.fail(
        f"have numbers in order, of at most {_MOST_TIMES}", "correct them"
      )
    self._at = end + 1
    return least, most

  def _set(self) -> Ranges:
    """The ranges of `[...]`, whose bracket is taken."""
    negated = self._takes("^")
    ranges: list[tuple[int, int]] = []
    first = True
    while first or self.next() != "]":
      first = False
      low = self._member()
      follows = self._text[self._at + 1 : self._at + 2]
      if self.next() != "-" or follows in ("]", ""):
        ranges += low
        continue
      self._take()
      ranges.append(self._range(low, self._member()))
    self._take()
    return others(ranges, self._last) if negated else ranges

  def _range(self, low: Ranges, high: Ranges) -> tuple[int, int]:
    (begin, *more), (end, *others) = list(low), list(high)
    single = begin[0] == begin[1] and end[0] == end[1] and not more + others
    if not single or end[0] < begin[0]:
      self.fail(
        "have ranges from one character to a later one", "escape the `-`"
      )
    return begin[0], end[0]

  def _member(self) -> Ranges:
    if not self.next():
      self.fail("close each `[`", "add a `]`, or escape the `[`")
    start = self._take()
    if start == "\\":
      return self._escape()
    return _single(ord(start))

  def _escape(self) -> Ranges:
    """The ranges of an escape, whose backslash is taken."""
    start = self._take()
    if start.lower() in _SETS:
      ranges = _SETS[start.lower()]
      return others(ranges, self._last) if start.isupper() else ranges
    if start in _CONTROLS:
      return _single(_CONTROLS[start])
    if start in _CODES and (start == "x" or not self._of_bytes):
      return _single(self._code(_CODES[start]))
    if not start or (start.isascii() and start.isalnum()):
      self._at -= len(start) + 1
      self.fail(
        "have known escapes only", "references and anchors are not supported"
      )
    return _single(ord(start))

  def _code(self, digits: int) -> int:
    text = self._text[self._at : self._at + digits]
    try:
      number = int(text, 16) if text.isalnum() else LAST + 1
    except ValueError:
      number = LAST + 1
    if len(text) < digits or number > LAST or 0xD800 <= number < 0xE000:
      self._at -= 2
      self.fail(
        f"have {digits} hexadecimal digits of a character here",
        "write the character itself",
      )
    self._at += digits
    return number


def _single(character: int) -> Ranges:
  return [(character, character)]
