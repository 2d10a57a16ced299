"""The automaton of a grammar: right, and the smallest one."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings

from jaxkv._src.guides import dfa
from jaxkv._src.guides import nfa
from jaxkv._src.guides.dfa import START
from jaxkv._src.guides.dfa import compile_grammar
from jaxkv._src.guides.grammars import Chain
from jaxkv._src.guides.grammars import Choice
from jaxkv._src.guides.grammars import Repeat
from jaxkv._src.guides.grammars import literal
from jaxkv._src.guides.regex import regex
from tests.guides.patterns import PATTERNS


class TestByHand:
  def test_two_states_in_a_circle(self):
    dfa = compile_grammar(regex("(ab)*"))
    a, b = b"ab"
    assert dfa.next[START, a] == 2 and dfa.next[2, b] == START
    assert np.count_nonzero(dfa.next) == 2
    assert dfa.accepts.tolist() == [False, True, False]

  def test_equal_ends_are_one(self):
    dfa = compile_grammar(regex("xab|yab|zab"))
    assert dfa.num_states == 5

  def test_states_that_differ_late_are_two(self):
    dfa = compile_grammar(regex("(ab|ba)*"))
    assert dfa.num_states == 4
    assert dfa.matches("abba") and not dfa.matches("aa")

  def test_states_without_an_end_are_dead(self):
    nothing = Choice(())
    dfa = compile_grammar(literal("a") | (literal("b") + nothing))
    assert dfa.num_states == 3 and not dfa.matches("b")

  def test_loops_do_not_leak_into_what_is_around_them(self):
    dfa = compile_grammar(Repeat(Repeat(literal("a")), 0, 1) + literal("b"))
    assert dfa.matches("aab") and not dfa.matches("ba")
    dfa = compile_grammar(Repeat(literal("a")) | Repeat(literal("b")))
    assert dfa.matches("bb") and not dfa.matches("ab")


class TestLongest:
  @pytest.mark.parametrize(
    ("pattern", "most"),
    [
      ("", 0),
      ("a|bcd", 3),
      ("(a|b{3}){2}", 6),
      ("é?", 2),
      ("a*", None),
      ("(a|b*c)d", None),
      ("a{1000}", 1000),
      (".{3}", 12),
    ],
  )
  def test_bytes(self, pattern, most):
    assert compile_grammar(regex(pattern)).max_bytes == most


def _alike(dfa):
  """Pairs of states that no string of any length tells apart."""
  states = range(dfa.num_states)
  different = {
    (one, other)
    for one, other in itertools.combinations(states, 2)
    if dfa.accepts[one] != dfa.accepts[other]
  }
  table = dfa.next
  classes = np.unique(table, axis=1, return_index=True)[1].tolist()
  while True:
    more = {
      (one, other)
      for one, other in itertools.combinations(states, 2)
      if (one, other) not in different
      and any(
        tuple(sorted((int(table[one, c]), int(table[other, c])))) in different
        for c in classes
      )
    }
    if not more:
      return set(itertools.combinations(states, 2)) - different
    different |= more


@settings(max_examples=100)
@given(PATTERNS)
def test_any_two_states_differ(pattern):
  dfa = compile_grammar(regex(pattern))
  assert not _alike(dfa)
  reached = {0, START, *dfa.next.reshape(-1).tolist()}
  assert reached == set(range(dfa.num_states))
  assert not dfa.next[0].any() and not dfa.accepts[0]


def test_any_two_states_differ_where_something_is_counted():
  dfa = compile_grammar(regex("(x|[^y]{0,30})y{3}|a{7}b"))
  assert not _alike(dfa)


class TestRefused:
  def test_what_matches_nothing(self):
    with pytest.raises(ValueError, match="`grammar` must match some text"):
      compile_grammar(Chain((literal("a"), Choice(()))))

  def test_too_many_states(self, monkeypatch):
    monkeypatch.setattr(dfa, "MOST_STATES", 1000)
    monkeypatch.setattr(nfa, "MOST_STATES", 10_000)
    with pytest.raises(ValueError, match="at most 1000 states, got more"):
      compile_grammar(regex("[ab]*a[ab]{12}"))
    with pytest.raises(ValueError, match="at most 10000 parts, got more"):
      compile_grammar(regex("(a{100}){200}"))

  def test_no_grammar(self):
    with pytest.raises(TypeError, match="must be a Grammar, got 'a'"):
      compile_grammar(Chain(("a",)))
