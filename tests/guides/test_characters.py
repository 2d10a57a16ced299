"""Sets of characters as bytes of UTF-8."""

import pytest
from hypothesis import example
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from jaxkv._src.guides.characters import LAST
from jaxkv._src.guides.characters import characters
from jaxkv._src.guides.characters import others
from jaxkv._src.guides.dfa import compile_grammar
from jaxkv._src.guides.grammars import Repeat

_EDGES = [0, 0x7F, 0x80, 0x7FF, 0x800, 0xD7FF, 0xE000, 0xFFFF, 0x10000, LAST]
_NEAR = sorted(
  {max(0, min(LAST, edge + more)) for edge in _EDGES for more in (-1, 0, 1)}
)
_CODES = [code for code in _NEAR if not 0xD800 <= code < 0xE000]


@pytest.mark.parametrize("index", range(0, len(_EDGES), 2))
def test_ranges_between_encoding_lengths(index):
  low, high = _EDGES[index : index + 2]
  dfa = compile_grammar(characters([(low, high)]))
  for code in _CODES:
    assert dfa.matches(chr(code)) == (low <= code <= high)


class TestRanges:
  codes = st.one_of(
    st.sampled_from(_CODES), st.characters(codec="utf-8").map(ord)
  )

  @settings(max_examples=100)
  @given(codes, codes, st.lists(codes, max_size=20))
  def test_random_ranges(self, low, high, points):
    low, high = sorted((low, high))
    dfa = compile_grammar(characters([(low, high)]))
    for code in [low, high, *points, *_CODES]:
      assert dfa.matches(chr(code)) == (low <= code <= high)

  @settings(max_examples=100)
  @given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=4))
  def test_others_is_the_complement_of_ranges(self, pairs):
    ranges = [(min(pair), max(pair)) for pair in pairs]
    inside = {x for low, high in ranges for x in range(low, high + 1)}
    outside = [
      x for low, high in others(ranges, 9) for x in range(low, high + 1)
    ]
    assert outside == [x for x in range(10) if x not in inside]


@settings(max_examples=300)
@given(
  st.one_of(
    st.binary(max_size=6),
    st.text(max_size=3).map(str.encode),
    st.lists(
      st.sampled_from([0x41, 0x80, 0x9F, 0xA0, 0xBF, 0xC1, 0xC2, 0xE0, 0xED])
      | st.sampled_from([0xEF, 0xF0, 0x8F, 0x90, 0xF4, 0xF5]),
      max_size=4,
    ).map(bytes),
  )
)
@example(b"\xed\x9f\xbf\xee\x80\x80")
@example(b"\xed\xa0\x80")
@example(b"\xe0\x9f\xbf")
@example(b"\xf0\x8f\xbf\xbf")
@example(b"\xf4\x90\x80\x80")
def test_valid_utf8(data):
  """All characters, any number of them: what Python decodes."""
  try:
    data.decode()
    valid = True
  except UnicodeDecodeError:
    valid = False
  dfa = compile_grammar(Repeat(characters([(0, LAST)])))
  assert dfa.matches(data) == valid
