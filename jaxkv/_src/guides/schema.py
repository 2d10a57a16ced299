"""JSON schemas as grammars.

| keyword                                          | supported                 |
|--------------------------------------------------|---------------------------|
| `type`                                           | one type or a list        |
| `enum`, `const`, `anyOf`                         | yes                       |
| `$ref`                                           | into the schema, if it is |
|                                                  | not recursive             |
| `properties`, `required`, `additionalProperties` | yes                       |
| `items`, `minItems`, `maxItems`                  | yes                       |
| `minLength`, `maxLength`, `pattern`              | lengths or a pattern      |
| `format`                                         | date, date-time, uuid     |
| `title`, `description`, `default` and the like   | ignored                   |

Any other keyword is refused, because a text of the grammar could violate it.
"""

import json
from collections.abc import Mapping
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
# Bytes that a JSON string must escape: control characters, `"` and `\`.
_ESCAPED = (1 << 32) - 1 | 1 << ord('"') | 1 << ord("\\")


def json_schema(schema: Schema | str, *, whitespace: str = "[ ]?") -> Grammar:
  r"""Returns the JSON texts that a JSON schema describes, as a grammar.

  Every text of the grammar is valid under the schema, but not every valid text
  is in the grammar: properties come in the order of the schema, an object with
  `properties` has no additional, strings contain no escapes of code points, and
  `{}`, objects and arrays without further keywords are nested a few levels
  deep. The module's table lists the keywords.

  Needs the extra `schema` (`outlines_core`).

  Args:
    schema: a JSON schema as a mapping or as JSON text. A Pydantic model has one
      in `model_json_schema()`.
    whitespace: regular expression of the white space around punctuation, by
      default at most one space; "" for none.

  Raises:
    ImportError: `outlines_core` is not installed.
    ValueError: a keyword is not supported or contradicts another one. The
      message names its path.

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
  plain = _Reader(root).schema(root, "$", ())
  return regex(outlines.build_regex_from_schema(json.dumps(plain), whitespace))


class _Reader:
  """Checks a schema and reduces it to keywords that outlines_core expresses.

  outlines_core ignores keywords that it does not know, and of some pairs of
  keywords it ignores one. So a schema is rebuilt from what is checked here.
  """

  def __init__(self, root: Schema):
    self._root = root

  def schema(self, schema: Any, path: str, refs: tuple[str, ...]) -> Any:
    """Returns the reduced schema.

    Args:
      schema: a schema or a part of one.
      path: of the part, for messages.
      refs: references that are being expanded.
    """
    if schema is True:
      return {}
    if not isinstance(schema, Mapping):
      _refuse(path, "be an object or true", schema, "write a schema")
    keywords = set(schema) - _ANNOTATIONS
    for form in ("$ref", "anyOf", "enum", "const"):
      if form in keywords:
        # A type beside values says nothing new.
        allowed = {form, "type"} if form in ("enum", "const") else {form}
        _check_keywords(keywords - allowed, path, f"beside `{form}`")
        return self._form(form, schema[form], f"{path}.{form}", refs)
    types = schema.get("type", "object" if "properties" in keywords else ())
    types = [types] if isinstance(types, str) else list(types)
    for name in types:
      if name not in _KEYWORDS_OF_TYPE:
        _refuse(
          f"{path}.type", f"be in {[*_KEYWORDS_OF_TYPE]}", name, "correct it"
        )
    allowed = set().union(*(_KEYWORDS_OF_TYPE[name] for name in types))
    place = f"for {' or '.join(types) or 'a value without a type'}"
    _check_keywords(keywords - allowed - {"type"}, path, place)
    # outlines_core writes `{}` as alternatives without a group around them.
    names = types or ("object", "array", "string", "number", "boolean", "null")
    parts = [self._typed(name, schema, path, refs) for name in names]
    return {"anyOf": parts} if len(parts) > 1 else parts[0]

  def _form(self, form: str, value: Any, path: str, refs: Any) -> Any:
    if form == "anyOf":
      parts = enumerate(value)
      return {"anyOf": [self.schema(x, f"{path}[{i}]", refs) for i, x in parts]}
    if form != "$ref":
      return {form: value}
    if value in refs:
      _refuse(path, "not be recursive", value, "write the levels out")
    part: Any = self._root
    root, *names = value.split("/")
    for name in names:
      name = name.replace("~1", "/").replace("~0", "~")
      part = part.get(name) if isinstance(part, Mapping) else None
    if root != "#" or part is None:
      _refuse(
        path, "point into the schema, as '#/$defs/name'", value, "correct it"
      )
    return self.schema(part, f"{path}({value})", (*refs, value))

  def _typed(self, name: str, schema: Schema, path: str, refs: Any) -> Any:
    """Returns the reduced schema of one type."""
    keywords = _KEYWORDS_OF_TYPE[name] & set(schema)
    plain: dict[str, Any] = {"type": name}
    plain |= {keyword: schema[keyword] for keyword in keywords}
    if name == "object":
      self._object(plain, path, refs)
    elif name == "array":
      _check_order(plain, "minItems", "maxItems", path)
      if "items" in plain:
        plain["items"] = self.schema(plain["items"], f"{path}.items", refs)
    elif name == "string":
      _check_order(plain, "minLength", "maxLength", path)
      _string(plain, path)
    return plain

  def _object(self, plain: dict[str, Any], path: str, refs: Any) -> None:
    properties = plain.get("properties", {})
    for name in plain.get("required", ()):
      if name not in properties:
        rule = "name entries of `properties`"
        _refuse(f"{path}.required", rule, name, "describe that property")
    additional = plain.pop("additionalProperties", True)
    if properties or additional is False:
      plain["properties"] = {
        name: self.schema(part, f"{path}.properties.{name}", refs)
        for name, part in properties.items()
      }
    elif additional is not True:
      place = f"{path}.additionalProperties"
      plain["additionalProperties"] = self.schema(additional, place, refs)


def _string(plain: dict[str, Any], path: str) -> None:
  limits = {"minLength", "maxLength", "pattern", "format"} & set(plain)
  if len(limits - {"maxLength"} if "minLength" in limits else limits) > 1:
    rule = "not be combined with other limits of a string"
    keyword = min(limits & {"pattern", "format"})
    _refuse(f"{path}.{keyword}", rule, plain[keyword], "keep one of them")
  if plain.get("format", "uuid") not in _FORMATS:
    rule = f"be in {_FORMATS}"
    _refuse(f"{path}.format", rule, plain["format"], "use `pattern`")
  if "pattern" in plain:
    # A pattern may match anywhere; the grammar has the texts that it matches
    # from begin to end, so anchors at its ends say nothing new.
    pattern = plain["pattern"].removeprefix("^")
    if pattern.endswith("$") and not pattern.endswith("\\$"):
      pattern = pattern[:-1]
    try:
      has_escaped = _has_escaped(regex(pattern))
    except ValueError as error:
      raise ValueError(f"`schema` at {path}.pattern: {error}") from None
    if has_escaped:
      rule = (
        r'match no `"`, no `\` and no control characters, which JSON escapes'
      )
      remedy = r'write [^"\\\x00-\x1f] in place of `.`'
      _refuse(f"{path}.pattern", rule, plain["pattern"], remedy)
    plain["pattern"] = f"(?:{pattern})"


def _has_escaped(grammar: Grammar) -> bool:
  """Returns whether a text of a grammar may have a byte of `_ESCAPED`."""
  match grammar:
    case ByteSet(mask):
      return bool(mask & _ESCAPED)
    case Chain(parts) | Choice(parts):
      return any(map(_has_escaped, parts))
    case Repeat(item):
      return _has_escaped(item)
  raise TypeError(type(grammar).__name__)


def _check_keywords(keywords: set[str], path: str, place: str) -> None:
  """Refuses keywords that a text of the grammar could violate."""
  if keywords:
    raise ValueError(
      f"`schema` must not have `{min(keywords)}` {place} at {path}, which a "
      "grammar cannot express; remove it and check the finished text."
    )


def _check_order(plain: Schema, low: str, high: str, path: str) -> None:
  if plain.get(low, 0) > plain.get(high, plain.get(low, 0)):
    rule = f"be at most `{high}`, {plain[high]}"
    _refuse(f"{path}.{low}", rule, plain[low], "exchange them")


def _refuse(path: str, rule: str, value: Any, remedy: str) -> NoReturn:
  raise ValueError(f"`schema` at {path} must {rule}, got {value!r}; {remedy}.")
