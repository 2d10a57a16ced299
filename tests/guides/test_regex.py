"""Regular expressions: what Python's `re` matches, to the last byte."""

import re

import pytest
from hypothesis import example
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from jaxkv._src.guides.dfa import compile_grammar
from jaxkv._src.guides.regex import regex
from tests.guides.patterns import PATTERNS


def check(pattern, text):
  """An automaton matches a text if `re` does."""
  matches = compile_grammar(regex(pattern)).matches(text)
  expected = re.fullmatch(pattern, text, re.ASCII) is not None
  assert matches == expected, (pattern, text, matches)


_BY_HAND = {
  "abc": ["abc", "ab", "abcd", ""],
  "": ["", "a"],
  "a|bc|": ["a", "bc", "", "b", "abc"],
  "(a|b)c": ["ac", "bc", "c", "abc"],
  "(?:ab)+": ["ab", "abab", "", "aba"],
  "a*b?c+": ["c", "aabcc", "ab", "bbc"],
  "a{3}": ["aaa", "aa", "aaaa"],
  "a{2,}": ["a", "aa", "aaaaa"],
  "a{1,3}": ["", "a", "aaa", "aaaa"],
  "a{,2}": ["", "aa", "aaa"],
  "a{0}b": ["b", "ab"],
  "(a*)*b": ["b", "aab", "a"],
  "(|a)+": ["", "aaa", "b"],
  ".": ["a", "é", "東", "🙂", "\n", "", "ab"],
  "é+": ["é", "éé", "e", ""],
  "[a-cx]": ["a", "c", "x", "d", "-"],
  "[^a-c]": ["a", "d", "é", "\n", ""],
  "[]a]": ["]", "a", "b"],
  "[^]a]": ["]", "a", "b"],
  "[a-]": ["a", "-", "b"],
  "[-a]": ["a", "-", "b"],
  r"[\]\\]": ["]", "\\", "a"],
  r"[\w.]+": ["a.b_9", "a b", "é"],
  r"[^\s\d]": ["a", " ", "1", "é"],
  "[à-ü京-東]": ["à", "é", "ü", "東", "京", "a", "ý"],
  r"\d\D\w\W\s\S": ["1a_- x", "11_- x", "1a_-xx"],
  r"\n\t\r\f\v\a": ["\n\t\r\f\v\a", "ntrfva"],
  r"\x41\u00e9\U0001F642": ["Aé🙂", "Ae🙂"],
  r"\.\"\\\[\]\{\}\(\)\*\+\?\|\^\$\-\/": ['."\\[]{}()*+?|^$-/', "a"],
  r"-}]": ["-}]", "-"],
  r"\é": ["é", "e"],
  "(yes|no), [0-9]{1,3}%": ["yes, 5%", "no, 100%", "no, 1000%"],
}


@pytest.mark.parametrize("pattern", _BY_HAND)
def test_by_hand(pattern):
  for text in _BY_HAND[pattern]:
    check(pattern, text)


_BYTES_BY_HAND = {
  b".": [b"a", b"\xff", b"\n", b"\xc3\xa9"],
  rb"\xff[^\x00-\x7f]": [b"\xff\x80", b"\xff\x7f"],
  rb"\W": [b"\xe9", b"a"],
  "é+".encode(): ["é".encode(), "éé".encode(), b"\xc3\xa9\xa9"],
}


@pytest.mark.parametrize("pattern", _BYTES_BY_HAND)
def test_bytes_by_hand(pattern):
  for text in _BYTES_BY_HAND[pattern]:
    check(pattern, text)


# Random expressions, and texts that often match them.


@settings(max_examples=300)
@given(PATTERNS, st.lists(st.text("ab.é\n", max_size=5), min_size=8))
@example("(?:(a|()))*", ["", "aa"])
def test_random_characters(pattern, texts):
  dfa = compile_grammar(regex(pattern))
  compiled = re.compile(pattern, re.ASCII)
  for text in texts:
    assert dfa.matches(text) == (compiled.fullmatch(text) is not None), text


@settings(max_examples=300)
@given(
  PATTERNS,
  st.lists(
    st.lists(st.sampled_from([*b"ab.\n", *"é".encode(), 255]), max_size=6),
    min_size=8,
  ),
)
def test_random_bytes(pattern, texts):
  pattern = pattern.encode("latin-1")
  dfa = compile_grammar(regex(pattern))
  compiled = re.compile(pattern)
  for text in map(bytes, texts):
    assert dfa.matches(text) == (compiled.fullmatch(text) is not None), text


@pytest.mark.parametrize(
  ("pattern", "message"),
  [
    ("(a", r"close each `\(`, got '\(a' with '' at position 2; add a `\)`"),
    ("a)", r"have a `\(` for each `\)`, got 'a\)' with '\)' at position 1"),
    ("[a", r"close each `\["),
    ("[]", r"close each `\["),
    ("*a", r"have an item before `\*`"),
    ("a|+", r"have an item before `\+`"),
    ("{2}", "have an item before `{`"),
    ("a**", "have at most one quantifier"),
    ("a{2}{3}", "have at most one quantifier"),
    ("a*?", "have no lazy or possessive quantifiers"),
    ("a++", "have no lazy or possessive quantifiers"),
    ("a{2}?", "have no lazy or possessive quantifiers"),
    ("a{x}", r"have numbers in `\{...\}`"),
    ("a{", r"have numbers in `\{...\}`"),
    ("a{,}", r"have numbers in `\{...\}`"),
    ("a{3,2}", "have numbers of at most .*, the lower first"),
    ("a{2,0}", "have numbers of at most .*, the lower first"),
    ("a{200000}", "of at most 100000"),
    ("^a", "have no anchors"),
    ("a$", "have no anchors"),
    (r"\ba", "have only supported escapes"),
    (r"(a)\1", "have only supported escapes"),
    (r"\Z", "have only supported escapes"),
    ("a\\", "have only supported escapes"),
    (r"\xg1", "have the code of a character in 2 hexadecimal digits"),
    (r"\x1", "have the code of a character in 2 hexadecimal digits"),
    (r"\ud800", "have the code of a character in 4 hexadecimal digits"),
    (r"\U00110000", "have the code of a character in 8 hexadecimal digits"),
    (rb"\u0041", "have only supported escapes"),
    ("[z-a]", "have ranges from one character to a later one"),
    (r"[a-\d]", "have ranges from one character"),
    (r"[\d-z]", "have ranges from one character"),
    ("(?=a)", r"have only groups of the forms `\(...\)` and `\(\?:...\)`"),
    ("(?<!a)", "leave out look-around, names and flags"),
    ("(?P<x>a)", "leave out look-around, names and flags"),
    ("(?i)a", "leave out look-around, names and flags"),
  ],
)
def test_unsupported_syntax_is_refused(pattern, message):
  with pytest.raises(ValueError, match=f"^`pattern` must .*{message}"):
    regex(pattern)


def test_not_a_pattern():
  with pytest.raises(TypeError, match="must be a str or bytes, got Pattern"):
    regex(re.compile("a"))
