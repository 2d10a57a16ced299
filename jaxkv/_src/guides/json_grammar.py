r"""JSON as a grammar, nested up to a fixed depth."""

from jaxkv._src.guides.characters import LAST
from jaxkv._src.guides.characters import characters
from jaxkv._src.guides.characters import others
from jaxkv._src.guides.grammars import Chain
from jaxkv._src.guides.grammars import Grammar
from jaxkv._src.guides.grammars import Repeat
from jaxkv._src.guides.grammars import bytes_of
from jaxkv._src.guides.grammars import chain
from jaxkv._src.guides.grammars import choice
from jaxkv._src.guides.grammars import literal
from jaxkv._src.guides.grammars import optional

_DIGIT = bytes_of(b"0123456789")
_HEX = bytes_of(b"0123456789abcdefABCDEF")
_KINDS = ("value", "object", "array")


def json_grammar(
  depth: int,
  *,
  kind: str = "value",
  max_spaces: int | None = 0,
  max_items: int | None = None,
  max_characters: int | None = None,
  max_digits: int | None = None,
  ascii_only: bool = False,
) -> Grammar:
  r"""The texts of JSON in which arrays and objects are nested `depth` deep.

  All texts are valid UTF-8 and follow RFC 8259. Escapes of surrogates, such as
  `\ud83d`, are left out; the characters themselves are not. An object may have
  a key twice.

  A `Guide` ends its texts in time whatever the limits here. With limits for
  spaces, items, characters and digits there is a longest text, see
  `Guide.max_bytes`.

  The automaton has 622 states for a depth of 3, and about twice as many for
  each further level. Limits multiply them: one of n characters by about n, and
  one of n items by n at each level.

  Args:
    depth: the most arrays and objects around a value, not negative; 0 for
      strings, numbers, true, false and null alone.
    kind: "value" for any value, "object" or "array" for that alone.
    max_spaces: the most blanks, tabs and newlines wherever they may stand;
      None for any number. There are none before and after the text.
    max_items: the most items of an array or an object; None for any number.
    max_characters: the most characters of a string, an escape counted as one;
      None for any number.
    max_digits: the most digits before the point of a number, after it, and in
      the exponent; None for any number. Python reads integers of up to 4,300.
    ascii_only: strings have only ASCII characters, others as escapes.

  Raises:
    ValueError: `kind` is unknown, or a number is negative, or `depth` is 0 for
      an object or an array.

  Examples:
    >>> from jaxkv._src.guides.dfa import compile_grammar
    >>> dfa = compile_grammar(json_grammar(1, max_spaces=1))
    >>> dfa.matches('{"a": -1.5e3, "b": "c"}'), dfa.matches('{"a": {}}')
    (True, False)
  """
  _check(depth, kind, max_spaces, max_items, max_characters, max_digits)
  space = Repeat(bytes_of(b" \t\n\r"), 0, max_spaces)
  if max_spaces == 0:
    space = Chain(())
  string = _string(max_characters, ascii_only)
  scalar = choice(
    string,
    _number(max_digits),
    *(literal(word) for word in ("true", "false", "null")),
  )
  value = scalar
  array = nested = value
  for _ in range(depth):
    pair = chain(string, space, literal(":"), space, value, space)
    array = _items("[", chain(value, space), "]", space, max_items)
    nested = _items("{", pair, "}", space, max_items)
    value = choice(scalar, array, nested)
  return {"value": value, "object": nested, "array": array}[kind]


def _items(
  begin: str, item: Grammar, end: str, space: Grammar, most: int | None
) -> Grammar:
  comma = chain(literal(","), space)
  items = Repeat(item, 0, most, separator=comma)
  return chain(literal(begin), space, items, literal(end))


def _string(most: int | None, ascii_only: bool) -> Grammar:
  known = [(ord(" "), 0x7E if ascii_only else LAST)]
  quoted = [(ord('"'), ord('"')), (ord("\\"), ord("\\"))]
  plain = characters(others([*others(known), *quoted]))
  # D8 to DF would begin an escape of a surrogate.
  code = choice(
    chain(bytes_of(b"0123456789abcefABCEF"), _HEX),
    chain(bytes_of(b"dD"), bytes_of(b"01234567")),
  )
  escape = choice(bytes_of(rb'"\/bfnrt'), chain(literal("u"), code, _HEX, _HEX))
  character = choice(plain, chain(literal("\\"), escape))
  return chain(literal('"'), Repeat(character, 0, most), literal('"'))


def _number(most: int | None) -> Grammar:
  digits = Repeat(_DIGIT, 1, most)
  first = chain(
    bytes_of(b"123456789"),
    Repeat(_DIGIT, 0, None if most is None else most - 1),
  )
  exponent = chain(bytes_of(b"eE"), optional(bytes_of(b"+-")), digits)
  return chain(
    optional(literal("-")),
    choice(literal("0"), first),
    optional(chain(literal("."), digits)),
    optional(exponent),
  )


def _check(depth: int, kind: str, *limits: int | None) -> None:
  if kind not in _KINDS:
    raise ValueError(f"`kind` must be one of {_KINDS}, got {kind!r}.")
  least = 0 if kind == "value" else 1
  if depth < least:
    raise ValueError(
      f"`depth` must be at least {least} for kind={kind!r}, got {depth}."
    )
  *others, digits = limits
  names = ("max_spaces", "max_items", "max_characters")
  for name, limit in zip(names, others, strict=True):
    if limit is not None and limit < 0:
      raise ValueError(f"`{name}` must not be negative, got {limit}.")
  if digits is not None and digits < 1:
    raise ValueError(f"`max_digits` must be at least 1, got {digits}.")
