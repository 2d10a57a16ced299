"""JSON as a grammar: what Python's `json` reads, up to a depth."""

import itertools
import json
import re

import pytest
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from jaxkv import rollout
from jaxkv._src.guides.dfa import compile_grammar


def _dfa(depth, **options):
  return compile_grammar(rollout.json_grammar(depth, **options))


_PLAIN, _SPACED = _dfa(2), _dfa(2, max_spaces=None)


_TEXTS = [
  *["0", "-0", "12", "-1.50", "1e5", "2.5E-03", "0e+0", "true", "false"],
  *["null", '""', '"é東🙂"', r'"\"\\\/\b\f\n\r\t"', r'"\u00e9\uD7ff\uFFFF"'],
  *['"\x7f"', "[]", "{}", "[1]", "[1,2]", '{"":{}}'],
  '{"a":[1,"b"],"a":{"c":null}}',
]
_OTHERS = [
  *["", "-", "01", "1.", ".5", "1e", "+1", "0x1", "1 2", "nul", "True", "NaN"],
  *['"', '"\n"', '"\x1f"', r'"\a"', r'"\u12"', r'"\u12g4"', "'a'", '"a"b'],
  *["[", "[1,]", "[,1]", "[1", "]", "[1}", "{1:2}", '{"a"}', '{"a":}'],
  *['{"a":1,}', '{"a":1', '{"a" :1}', "[ ]", " 1", r'"\ud83d"', r'"\uDC00"'],
  *["[[[]]]", '{"a":[{}]}', "[1 ]"],
]


@pytest.mark.parametrize("text", _TEXTS)
def test_accepts(text):
  json.loads(text)
  assert _PLAIN.matches(text) and _SPACED.matches(text)


@pytest.mark.parametrize("text", _OTHERS)
def test_refuses(text):
  assert not _PLAIN.matches(text)


def test_invalid_utf8_is_refused():
  for data in [b'"\xff"', b'"\xc3"', b'"\xed\xa0\x80"', b'"\xc0\x80"']:
    assert not _PLAIN.matches(data)


class TestOptions:
  def test_kind(self):
    objects, arrays = _dfa(1, kind="object"), _dfa(1, kind="array")
    texts = ['{"a":1}', "[1]", "1"]
    assert [*map(objects.matches, texts)] == [True, False, False]
    assert [*map(arrays.matches, texts)] == [False, True, False]

  def test_depth(self):
    for depth in range(4):
      dfa = _dfa(depth)
      for more in range(5):
        assert dfa.matches("[" * more + "]" * more) == (0 < more <= depth)
        nested = '{"":' * more + "0" + "}" * more
        assert dfa.matches(nested) == (more <= depth)

  def test_spaces(self):
    one = _dfa(1, max_spaces=1)
    for text in ['{ "a" : 1 , "b" : 2 }', "[ 1\n,\t2\r]", "[]", "[ ]"]:
      assert one.matches(text) and _SPACED.matches(text)
    for text in ["[  1]", "[1] ", " [1]", "1 "]:
      assert not one.matches(text)

  def test_items(self):
    dfa = _dfa(1, max_items=2)
    for text in ["[]", "[1,2]", '{"a":1,"b":2}', "{}"]:
      assert dfa.matches(text)
    for text in ["[1,]", "[1,2,3]", '{"a":1,"b":2,"c":3}']:
      assert not dfa.matches(text)
    assert not _dfa(1, max_items=0).matches("[1]")

  def test_characters(self):
    dfa = _dfa(0, max_characters=2)
    for text in ['""', '"ab"', '"🙂🙂"', r'"\u0041\n"']:
      assert dfa.matches(text)
    for text in ['"abc"', '"\n"', '"\\"']:
      assert not dfa.matches(text)

  def test_digits(self):
    dfa = _dfa(0, max_digits=2)
    for text in ["0", "12", "-12.34e-56"]:
      assert dfa.matches(text)
    for text in ["123", "01", "1.234", "1e567"]:
      assert not dfa.matches(text)
    assert _dfa(0, max_digits=1).matches("7")

  def test_ascii(self):
    dfa = _dfa(0, ascii_only=True)
    assert dfa.matches(r'"a~ \u00e9"')
    assert not dfa.matches('"é"') and not dfa.matches('"\x7f"')

  def test_the_longest_text(self):
    assert _PLAIN.max_bytes is None
    dfa = _dfa(1, max_items=2, max_characters=1, max_digits=2)
    number = "-12.34e+56"
    text = f'{{"\\u0041":{number},"\\u0041":{number}}}'
    assert dfa.matches(text) and dfa.max_bytes == len(text)

  @pytest.mark.parametrize(
    ("options", "message"),
    [
      ({"depth": -1}, "`depth` must be at least 0 for kind='value', got -1"),
      ({"depth": 0, "kind": "array"}, "`depth` must be at least 1"),
      ({"kind": "list"}, "`kind` must be one of .*, got 'list'"),
      ({"max_spaces": -1}, "`max_spaces` must not be negative, got -1"),
      ({"max_items": -1}, "`max_items` must not be negative"),
      ({"max_characters": -1}, "`max_characters` must not be negative"),
      ({"max_digits": 0}, "`max_digits` must be at least 1, got 0"),
    ],
  )
  def test_wrong_options(self, options, message):
    with pytest.raises(ValueError, match=message):
      rollout.json_grammar(**({"depth": 1} | options))


def test_the_automaton_doubles_with_the_depth():
  sizes = [_dfa(depth).num_states for depth in range(5)]
  assert sizes[0] < 40 and sizes[3] < 700
  for smaller, larger in itertools.pairwise(sizes[1:]):
    assert larger < 2.5 * smaller


def _depth(value) -> int:
  if isinstance(value, dict):
    value = [*value.values()]
  if not isinstance(value, list):
    return 0
  return 1 + max(map(_depth, value), default=0)


def _reads(text: str) -> object:
  """The value of a text that RFC 8259 allows; raises ValueError."""

  def refuse(word):
    raise ValueError(word)

  return json.loads(text, parse_constant=refuse)


_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_VALUES = st.recursive(
  st.none()
  | st.booleans()
  | st.integers()
  | st.text(max_size=5)
  | st.floats(allow_nan=False, allow_infinity=False),
  lambda inner: (
    st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=3), inner, max_size=3)
  ),
  max_leaves=6,
)


class TestAgainstJson:
  @settings(max_examples=200)
  @given(_VALUES, st.booleans())
  def test_accepts_what_is_written(self, value, ascii_only):
    text = json.dumps(value, ensure_ascii=ascii_only, separators=(",", ":"))
    good = _depth(value) <= 2 and not _SURROGATE.search(text)
    assert _PLAIN.matches(text) == good
    assert _SPACED.matches(json.dumps(value, ensure_ascii=ascii_only)) == good

  @settings(max_examples=300)
  @given(_VALUES, st.integers(0, 60), st.text('0-e."\\u}],:{[ tn', max_size=2))
  def test_after_an_edit(self, value, place, more):
    """Texts that are almost JSON: one is accepted if it can be read."""
    text = json.dumps(value, ensure_ascii=False)
    text = text[:place] + more + text[place + 1 :]
    try:
      good = _depth(_reads(text)) <= 2 and text == text.strip()
    except ValueError:
      good = False
    if not _SURROGATE.search(text):
      assert _SPACED.matches(text) == good, text
