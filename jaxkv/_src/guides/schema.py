"""JSON schemas as grammars.

| keyword                                          | supported                 |
|--------------------------------------------------|---------------------------|
| `type`                                           | one type or a list        |
| `enum`, `const`, `anyOf`                         | yes                       |
| `$ref`                                           | into the same schema, but |
|                                                  | not recursively           |
| `properties`, `required`, `additionalProperties` | yes                       |
| `items`, `minItems`, `maxItems`                  | yes                       |
| `minLength`, `maxLength`, `pattern`              | lengths, or a pattern     |
| `format`                                         | date, date-time, uuid;    |
|                                                  | only days that exist      |
| `title`, `description`, `default` and the like   | ignored                   |

Other keywords raise ValueError, because generated texts could violate them.
"""

import json
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import NoReturn

from jaxkv._src.extras import extra_package
from jaxkv._src.guides.grammars import ByteSet
from jaxkv._src.guides.grammars import Chain
from jaxkv._src.guides.grammars import Choice
from jaxkv._src.guides.grammars import Grammar
from jaxkv._src.guides.grammars import Repeat
from jaxkv._src.guides.regex import regex

Schema = Mapping[str, Any]

_TYPE_NAMES = {
  type(None): "null",
  bool: "boolean",
  int: "integer",
  float: "number",
  str: "string",
  list: "array",
  dict: "object",
}
_ANNOTATIONS = frozenset(
  """$comment $defs $id $schema default definitions deprecated description
  examples readOnly title writeOnly""".split()
)
_KEYWORDS_OF_TYPE = {
  "object": {"properties", "required", "additionalProperties"},
  "array": {"items", "minItems", "maxItems"},
  "string": {"minLength", "maxLength", "pattern", "format"},
  "integer": set(),
  "number": set(),
  "boolean": set(),
  "null": set(),
}
_FORMATS = ("date", "date-time", "uuid")
# The year 0000 is left out, because Python's `datetime` has none.
_YEAR = r"(?:\d{3}[1-9]|\d{2}[1-9]0|\d[1-9]00|[1-9]000)"
_LEAP_YEAR = (
  r"(?:\d{2}(?:0[48]|[2468][048]|[13579][26])"
  r"|(?:[02468][48]|[2468]0|[13579][26])00)"
)
_DATE = (
  rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])"
  r"|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))"
  rf"|{_LEAP_YEAR}-02-29)"
)
_HOURS_AND_MINUTES = r"(?:[01]\d|2[0-3]):[0-5]\d"
_PATTERNS = {
  "date": _DATE,
  "date-time": (
    rf"{_DATE}T{_HOURS_AND_MINUTES}:[0-5]\d(?:\.\d{{3}})?"
    rf"(?:Z|[+-]{_HOURS_AND_MINUTES})"
  ),
}
"""Expressions of formats; those of outlines_core have a February 31."""
# The bytes that a JSON string must escape: control characters, `"` and `\`.
_ESCAPED = (1 << 32) - 1 | 1 << ord('"') | 1 << ord("\\")


def json_schema(schema: Schema | str, *, whitespace: str = "[ ]?") -> Grammar:
  r"""Returns a grammar of JSON texts that are valid under a JSON schema.

  The grammar omits some valid texts. Properties appear in the order of the
  schema. If a schema lists `properties`, objects have no other properties, even
  if `additionalProperties` allows them. Strings have no `\uXXXX` escapes. If a
  schema does not describe the contents of an object or array, the contents nest
  only a few levels. The docstring of this module lists the keywords.

  Needs `outlines_core`, which `jaxkv[schema]` installs.

  Args:
    schema: a JSON schema as a mapping or as JSON text. For a Pydantic model,
      pass `model_json_schema()`.
    whitespace: regular expression of the white space around punctuation, by
      default at most one space; "" for none.

  Raises:
    ImportError: `outlines_core` is not installed.
    ValueError: the schema is not valid JSON, `whitespace` is not a regular
      expression, or a keyword is not supported, has a value that JSON Schema
      does not allow, or contradicts another one; the message then has the path
      of the keyword.

  Examples:
    >>> from jaxkv._src.guides.dfa import compile_grammar
    >>> properties = {"city": {"type": "string"}, "days": {"type": "integer"}}
    >>> dfa = compile_grammar(json_schema(
    ...   {"type": "object", "properties": properties, "required": ["city"]}
    ... ))
    >>> dfa.matches('{"city": "Rome"}'), dfa.matches('{"days": 3}')
    (True, False)
  """
  outlines = extra_package(
    "outlines_core.json_schema",
    install="jaxkv[schema]",
    task="To read a JSON schema",
  )
  root = json.loads(schema) if isinstance(schema, str) else schema
  reduced = _Reducer(root).reduce(root, "$", ())
  try:
    regex(whitespace)
  except ValueError as error:
    raise ValueError(f"`whitespace`: {error}") from None
  # outlines_core adds no parentheses, without which a `|` would split a larger
  # expression.
  space = f"(?:{whitespace})"
  return regex(outlines.build_regex_from_schema(json.dumps(reduced), space))


class _Reducer:
  """Checks a schema and reduces it to keywords that outlines_core supports.

  outlines_core ignores unknown keywords. It also ignores one of two keywords
  that it cannot combine, such as `pattern` and `maxLength`. So this class
  builds a new schema of checked keywords only.
  """

  def __init__(self, root: Schema):
    self._root = root

  def reduce(self, schema: Any, path: str, refs: tuple[str, ...]) -> Any:
    """Returns the reduced schema, or part of one at `path` from the root.

    `refs` are the references that are being expanded, to detect recursion.
    """
    if schema is True:
      schema = {}
    if not isinstance(schema, Mapping):
      _refuse(path, "be an object or true", schema, "write a schema")
    keywords = set(schema) - _ANNOTATIONS
    for form in ("$ref", "anyOf", "enum", "const"):
      if form in keywords:
        # `type` beside `enum` or `const` adds nothing to the grammar, so it is
        # only checked against the values.
        allowed = {form, "type"} if form in ("enum", "const") else {form}
        _check_keywords(keywords - allowed, path, f"beside `{form}`")
        if form in ("enum", "anyOf"):
          _check_list(schema[form], f"{path}.{form}")
        if "type" in keywords and len(allowed) > 1:
          values = schema[form] if form == "enum" else [schema[form]]
          types = _types_of(schema["type"], f"{path}.type")
          _check_types(values, types, f"{path}.{form}")
        return self._reduce_keyword(form, schema[form], f"{path}.{form}", refs)
    types = ["object"] if "properties" in keywords else []
    if "type" in keywords:
      types = _types_of(schema["type"], f"{path}.type")
    allowed = set().union(*(_KEYWORDS_OF_TYPE[name] for name in types))
    place = f"for {' or '.join(types) or 'a value without a type'}"
    _check_keywords(keywords - allowed - {"type"}, path, place)
    # Without `types`, the schema is expanded to all types. For `{}`,
    # outlines_core would return alternatives without parentheses, whose `|`
    # would split a larger expression.
    names = types or ("object", "array", "string", "number", "boolean", "null")
    parts = [self._reduce_type(name, schema, path, refs) for name in names]
    return {"anyOf": parts} if len(parts) > 1 else parts[0]

  def _reduce_keyword(
    self, keyword: str, value: Any, path: str, refs: Any
  ) -> Any:
    if keyword == "anyOf":
      parts = enumerate(value)
      return {"anyOf": [self.reduce(x, f"{path}[{i}]", refs) for i, x in parts]}
    if keyword != "$ref":
      _check_json(value, path)
      return {keyword: value}
    if not isinstance(value, str):
      _refuse(path, "be a string", value, "write '#/$defs/name'")
    if value in refs:
      _refuse(path, "not be recursive", value, "nest copies of it")
    part: Any = self._root
    root, *names = value.split("/")
    for name in names:
      name = name.replace("~1", "/").replace("~0", "~")
      part = part.get(name) if isinstance(part, Mapping) else None
    if root != "#" or part is None:
      _refuse(
        path,
        "point into the schema, such as '#/$defs/name'",
        value,
        "correct it",
      )
    return self.reduce(part, f"{path}({value})", (*refs, value))

  def _reduce_type(
    self, name: str, schema: Schema, path: str, refs: Any
  ) -> Any:
    """Returns the reduced schema of one type."""
    keywords = _KEYWORDS_OF_TYPE[name] & set(schema)
    reduced: dict[str, Any] = {"type": name}
    reduced |= {keyword: schema[keyword] for keyword in keywords}
    if name == "object":
      self._reduce_object(reduced, path, refs)
    elif name == "array":
      _reduce_bounds(reduced, "minItems", "maxItems", path)
      if "items" in reduced:
        reduced["items"] = self.reduce(reduced["items"], f"{path}.items", refs)
    elif name == "string":
      _reduce_bounds(reduced, "minLength", "maxLength", path)
      _reduce_string(reduced, path)
    return reduced

  def _reduce_object(
    self, reduced: dict[str, Any], path: str, refs: Any
  ) -> None:
    properties = reduced.get("properties", {})
    if not isinstance(properties, Mapping):
      remedy = "write a schema for each name"
      _refuse(f"{path}.properties", "be an object", properties, remedy)
    required = reduced.get("required", [])
    if isinstance(required, str) or not isinstance(required, Sequence):
      _refuse(f"{path}.required", "be a list of names", required, "write one")
    for name in required:
      if name not in properties:
        rule = "name entries of `properties`"
        _refuse(f"{path}.required", rule, name, "describe that property")
    additional = reduced.pop("additionalProperties", True)
    if properties or additional is False:
      reduced["properties"] = {
        _escape(name): self.reduce(part, f"{path}.properties.{name}", refs)
        for name, part in properties.items()
      }
      reduced["required"] = [*map(_escape, required)]
    elif additional is not True:
      place = f"{path}.additionalProperties"
      reduced["additionalProperties"] = self.reduce(additional, place, refs)


def _escape(name: str) -> str:
  """Escapes a property name as in JSON, which outlines_core does not do."""
  return json.dumps(name, ensure_ascii=False)[1:-1]


def _reduce_string(reduced: dict[str, Any], path: str) -> None:
  limits = {"minLength", "maxLength", "pattern", "format"} & set(reduced)
  if len(limits - {"maxLength"} if "minLength" in limits else limits) > 1:
    keyword = min(limits & {"pattern", "format"})
    conflicts = " or ".join(f"`{name}`" for name in sorted(limits - {keyword}))
    rule = f"not be combined with {conflicts}"
    _refuse(
      f"{path}.{keyword}", rule, reduced[keyword], "keep only one of these"
    )
  if reduced.get("format", "uuid") not in _FORMATS:
    rule = f"be in {_FORMATS}"
    _refuse(f"{path}.format", rule, reduced["format"], "use `pattern`")
  if reduced.get("format") in _PATTERNS:
    reduced["pattern"] = _PATTERNS[reduced.pop("format")]
  if "pattern" in reduced:
    reduced["pattern"] = _whole_pattern(reduced["pattern"], f"{path}.pattern")


def _whole_pattern(value: Any, path: str) -> str:
  """Returns the expression of the strings that match a pattern as a whole."""
  if not isinstance(value, str):
    _refuse(path, "be a string", value, "write a regular expression")
  # In JSON Schema, a pattern can match any part of a string. The grammar has
  # only strings that match as a whole, so the anchors are removed.
  pattern = value.removeprefix("^")
  if pattern.endswith("$") and not pattern.endswith("\\$"):
    pattern = pattern[:-1]
  try:
    has_escaped = _has_escaped(regex(pattern))
  except ValueError as error:
    raise ValueError(f"`schema` at {path}: {error}") from None
  if has_escaped:
    rule = r'match no `"`, no `\` and no control characters, which JSON escapes'
    _refuse(path, rule, value, r'write [^"\\\x00-\x1f] in place of `.`')
  return f"(?:{pattern})"


def _has_escaped(grammar: Grammar) -> bool:
  """Returns True if a text of the grammar can contain a byte in `_ESCAPED`."""
  match grammar:
    case ByteSet(mask):
      return bool(mask & _ESCAPED)
    case Chain(parts) | Choice(parts):
      return any(map(_has_escaped, parts))
    case Repeat(item):
      return _has_escaped(item)
  raise TypeError(type(grammar).__name__)


def _types_of(types: Any, path: str) -> list[str]:
  """Returns the names of one type or of a list of types."""
  if isinstance(types, str):
    types = [types]
  _check_list(types, path)
  for name in types:
    if name not in list(_KEYWORDS_OF_TYPE):
      _refuse(path, f"be in {[*_KEYWORDS_OF_TYPE]}", name, "correct it")
  return list(types)


def _check_list(values: Any, path: str) -> None:
  if isinstance(values, str) or not isinstance(values, Sequence) or not values:
    remedy = "write at least one, or leave the keyword out"
    _refuse(path, "be a list that is not empty", values, remedy)


def _check_json(value: Any, path: str) -> None:
  try:
    json.dumps(value, allow_nan=False)
  except (TypeError, ValueError):
    _refuse(path, "hold JSON values", value, "leave others out")


def _check_types(values: list[Any], types: list[str], path: str) -> None:
  """Raises ValueError unless each value has one of the types."""
  for value in values:
    names = {_TYPE_NAMES.get(type(value), "")}
    if isinstance(value, float) and value.is_integer():
      names.add("integer")
    if "integer" in names:
      names.add("number")
    if not names & set(types):
      _refuse(path, f"have values of type {types}", value, "leave it out")


def _check_keywords(keywords: set[str], path: str, place: str) -> None:
  """Raises ValueError if a set of unsupported keywords is not empty."""
  if keywords:
    raise ValueError(
      f"`schema` at {path} must not have `{min(keywords)}` {place}, because "
      "the grammar would not enforce it; remove it and check the generated "
      "text."
    )


def _reduce_bounds(
  reduced: dict[str, Any], low: str, high: str, path: str
) -> None:
  """Replaces the bounds of a length by ints, after checks."""
  for keyword in {low, high} & set(reduced):
    value = reduced[keyword]
    # In JSON Schema, 3.0 is an integer. In Python, True is one.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or value < 0 or value != value // 1:
      rule = "be an integer of at least 0"
      _refuse(f"{path}.{keyword}", rule, value, "correct it")
    reduced[keyword] = int(value)
  if reduced.get(low, 0) > reduced.get(high, reduced.get(low, 0)):
    rule = f"be at most `{high}` ({reduced[high]})"
    _refuse(f"{path}.{low}", rule, reduced[low], "swap the two")


def _refuse(path: str, rule: str, value: Any, remedy: str) -> NoReturn:
  raise ValueError(f"`schema` at {path} must {rule}, got {value!r}; {remedy}.")
