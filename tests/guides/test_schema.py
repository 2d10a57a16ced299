"""JSON schemas as grammars: every text is valid, unsupported keywords are not.

jsonschema says what is valid; texts are random walks through the automaton.
"""

import datetime
import json
import math
import re

import jsonschema
import numpy as np
import pytest

from jaxkv import guides
from jaxkv._src.guides.dfa import START
from jaxkv._src.guides.dfa import compile_grammar
from tests.guides.tool_schemas import TOOLS


def _dfa(schema, **options):
  return compile_grammar(guides.json_schema(schema, **options))


class _Walker:
  """Random texts; after some bytes they take a shortest way to an end."""

  def __init__(self, dfa, length=60):
    self._dfa, self._length = dfa, length
    distance = np.where(dfa.accepts, 0, 10**6)
    for _ in dfa.accepts:
      distance = np.minimum(distance, 1 + distance[dfa.next].min(axis=1))
    self._distance = distance[dfa.next]

  def text(self, rng) -> str:
    state, text = START, b""
    while not self._dfa.accepts[state] or (
      len(text) < self._length and rng.random() < 0.9
    ):
      distance = self._distance[state]
      is_late = len(text) >= self._length
      choices = np.flatnonzero(
        distance == distance.min() if is_late else distance < 10**6
      )
      if not len(choices):
        break
      # One byte for each next state: letters would drown the structure.
      edges = self._dfa.next[state]
      choices = {edges[byte]: byte for byte in rng.permutation(choices)}
      byte = rng.choice([*choices.values()])
      text += bytes([byte])
      state = edges[byte]
    return text.decode()


_SCHEMAS = {
  "anything": {},
  "object": {"type": "object"},
  "array": {"type": "array"},
  "anything inside": {
    "properties": {"a": {}, "b": {"type": "array", "items": {}}},
    "required": ["a", "b"],
  },
  "true inside": {"properties": {"a": True}, "required": ["a"]},
  "names that JSON escapes": {
    "properties": {name: {"type": "null"} for name in ('a"b', "a\\", "ü\n")},
    "required": ['a"b'],
  },
  "an array that is not empty": {"type": "array", "minItems": 1},
  "two or three items": {
    "type": "array",
    "items": {"type": "boolean"},
    "minItems": 2,
    "maxItems": 3,
  },
  "no items": {"type": "array", "items": True, "maxItems": 0},
  "a list of types": {"type": ["string", "null", "array"], "maxLength": 3},
  "lengths": {"type": "string", "minLength": 2, "maxLength": 4},
  "integers as floats": {"type": "string", "minLength": 2.0, "maxLength": 3.0},
  "items as floats": {"type": "array", "minItems": 1.0, "maxItems": 2.0},
  "the shortest length": {"type": "string", "minLength": 2},
  "a pattern": {"type": "string", "pattern": "^[a-c]+|x$"},
  "a pattern with anchors in sets": {"type": "string", "pattern": r"[\^$é]\$"},
  "a date": {"type": "string", "format": "date"},
  "a date and a time": {"type": "string", "format": "date-time"},
  "values": {"enum": ['a"b', "ü\n", 1, None, True, 1.5, {"a": [1]}]},
  "one value": {"const": {"a": "x+y"}, "type": "object"},
  "no properties": {"type": "object", "additionalProperties": False},
  "integers by name": {
    "type": "object",
    "additionalProperties": {"type": "integer"},
  },
  "a property in the middle is required": {
    "properties": {name: {"type": "null"} for name in "abc"},
    "required": ["b"],
    "additionalProperties": False,
  },
  "references": {
    "$defs": {"a/b": {"type": "number"}, "c": {"$ref": "#/$defs/a~1b"}},
    "anyOf": [{"$ref": "#/$defs/c"}, {"type": "null"}],
    "description": "a number or null",
  },
  **TOOLS,
}


@pytest.mark.parametrize("schema", _SCHEMAS.values(), ids=_SCHEMAS)
def test_random_texts_are_valid(schema):
  walker, rng = _Walker(_dfa(schema)), np.random.default_rng(0)
  validator = jsonschema.Draft202012Validator(schema)
  texts = {walker.text(rng) for _ in range(200)}
  for text in texts:
    validator.validate(json.loads(text))
  assert len(texts) > 1 or schema in (
    _SCHEMAS["one value"],
    _SCHEMAS["no properties"],
    _SCHEMAS["no items"],
  )


def test_schemas_are_dicts_or_json():
  schema = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
    "required": ["a"],
  }
  for dfa in (_dfa(schema), _dfa(json.dumps(schema))):
    for text in ['{"a":1}', '{ "a" : -20, "b": "é\\n"}']:
      assert dfa.matches(text)
    for text in ["{}", '{"a":1.5}', '{"b":"","a":1}', '{"a":1,"c":2}', "1"]:
      assert not dfa.matches(text)


def test_dates_are_those_of_the_calendar():
  dfa = _dfa({"type": "string", "format": "date"})
  years = [1, 4, 99, 100, 400, 1000, 1582, 1900, 2000, 2023, 2024, 2100, 9999]
  for year in years:
    for month in range(14):
      for day in range(33):
        text = f"{year:04}-{month:02}-{day:02}"
        assert dfa.matches(f'"{text}"') == _is_date(text), text
  for text in ("0000-01-01", "2024-1-01", "+2024-01-01", "20240101", ""):
    assert not dfa.matches(f'"{text}"')


def _is_date(text):
  try:
    return datetime.date.fromisoformat(text) is not None
  except ValueError:
    return False


def test_random_times_are_of_the_calendar():
  dfa = _dfa({"type": "string", "format": "date-time"})
  walker, rng = _Walker(dfa), np.random.default_rng(0)
  for _ in range(300):
    time = datetime.datetime.fromisoformat(json.loads(walker.text(rng)))
    assert time.tzinfo is not None
  for text in (
    *["2024-02-29T23:59:59Z", "2024-02-29T00:00:00.125+05:30"],
    "2023-12-31T10:00:00-23:59",
  ):
    assert dfa.matches(f'"{text}"')
  for text in (
    *["2023-02-29T23:59:59Z", "2024-02-29T24:00:00Z", "2024-02-29T10:00:00"],
    *["2024-04-31T10:00:00Z", "12024-02-29T10:00:00Z", "2024-02-29 10:00:00Z"],
  ):
    assert not dfa.matches(f'"{text}"')


def test_white_space():
  dfa = _dfa({"properties": {"a": {}}, "required": ["a"]}, whitespace="")
  assert dfa.matches('{"a":1}') and not dfa.matches('{"a": 1}')


def test_white_space_with_alternatives():
  schema = {"properties": {"a": {"type": "null"}}, "required": ["a"]}
  dfa = _dfa(schema, whitespace=" |\n")
  assert dfa.matches('{ "a"\n: null\n}')
  for text in ("{ ", '\n"a" ', "\n}", '{"a":null}'):
    assert not dfa.matches(text)
  with pytest.raises(ValueError, match=r"`whitespace`: `pattern` must have a"):
    guides.json_schema(schema, whitespace=" )|(")


@pytest.mark.parametrize("value", ["2", 1.5, -1, -1.0, True, None, math.inf])
@pytest.mark.parametrize(
  ("kind", "keyword"),
  [
    ("string", "minLength"),
    ("string", "maxLength"),
    ("array", "minItems"),
    ("array", "maxItems"),
  ],
)
def test_bounds_that_are_no_counts_are_refused(kind, keyword, value):
  part = {"type": kind, keyword: value}
  with pytest.raises(
    ValueError,
    match=rf"at \$\.properties\.a\.{keyword} must be an integer of at least 0,"
    rf" got {re.escape(repr(value))};",
  ):
    guides.json_schema({"properties": {"a": part}})


_RECURSIVE = {
  "$defs": {"node": {"properties": {"next": {"$ref": "#/$defs/node"}}}},
  "$ref": "#/$defs/node",
}


@pytest.mark.parametrize(
  ("schema", "message"),
  [
    (
      {"properties": {"days": {"type": "integer", "minimum": 3}}},
      r"at \$\.properties\.days must not have `minimum` for integer",
    ),
    (
      {"oneOf": [{}]},
      r"at \$ must not have `oneOf` for a value without a type",
    ),
    (
      {"type": ["string", "null"], "minItems": 2},
      "must not have `minItems` for string or null",
    ),
    ({"anyOf": [{}], "minimum": 1}, "must not have `minimum` beside `anyOf`"),
    ({"enum": ["a"], "minLength": 2}, "`minLength` beside `enum`"),
    (
      {"type": "string", "enum": ["a", 1]},
      r"\$\.enum must have values of type .*string.*, got 1",
    ),
    ({"type": ["null"], "const": True}, r"\$\.const must have values of type"),
    ({"enum": []}, r"\$\.enum must be a list that is not empty, got \[\]"),
    ({"anyOf": []}, r"\$\.anyOf must be a list that is not empty, got \[\]"),
    ({"anyOf": {}}, r"\$\.anyOf must be a list that is not empty, got \{\}"),
    (
      {"type": "string", "enum": "ab"},
      r"\$\.enum must be a list that is not empty, got 'ab'",
    ),
    ({"type": []}, r"\$\.type must be a list that is not empty, got \[\]"),
    ({"type": 3}, r"\$\.type must be a list that is not empty, got 3"),
    ({"type": [["null"]]}, r"\$\.type must be in .*, got \['null'\]"),
    ({"enum": ["a"], "type": "strin"}, r"\$\.type must be in .*, got 'strin'"),
    ({"enum": [math.nan]}, r"\$\.enum must hold JSON values, got \[nan\]"),
    ({"const": {1}}, r"\$\.const must hold JSON values, got \{1\}"),
    ({"$ref": 3}, r"\$\.\$ref must be a string, got 3"),
    ({"properties": ["a"]}, r"\$\.properties must be an object, got \['a'"),
    (
      {"properties": {"a": {}}, "required": "a"},
      r"\$\.required must be a list of names, got 'a'",
    ),
    ({"type": "string", "pattern": 3}, r"\$\.pattern must be a string, got 3"),
    ({"type": "strin"}, r"at \$\.type must be in \['object', .* got 'strin'"),
    ({"type": "array", "items": 3}, r"\$\.items must be an object or true"),
    (
      {"type": "array", "minItems": 3, "maxItems": 2},
      r"\$\.minItems must be at most `maxItems` \(2\), got 3",
    ),
    (
      {"type": "object", "properties": {}, "required": ["a"]},
      r"\$\.required must name entries of `properties`, got 'a'",
    ),
    (
      {"type": "string", "pattern": "a", "maxLength": 3},
      r"\$\.pattern must not be combined with `maxLength`",
    ),
    ({"type": "string", "pattern": ".*"}, r"\$\.pattern must match no `\"`"),
    ({"type": "string", "pattern": "(?=a)"}, r"\$\.pattern: `pattern` must"),
    ({"type": "string", "format": "email"}, r"\$\.format must be in .*'date'"),
    (
      {"$ref": "https://example.com/a"},
      r"\$\.\$ref must point into the schema",
    ),
    ({"$ref": "#/$defs/a"}, r"must point into the schema, .*got '#/\$defs/a'"),
    (_RECURSIVE, r"\$ref must not be recursive, got '#/\$defs/node'"),
  ],
)
def test_refuses_by_name(schema, message):
  with pytest.raises(ValueError, match=message):
    guides.json_schema(schema)
