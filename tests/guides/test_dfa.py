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
from jaxkv._src.guides.regex import regex
from tests.guides.patterns import PATTERNS


class TestByHand:
  def test_a_loop_needs_two_states(self):
    dfa = compile_grammar(regex("(ab)*"))
    a, b = b"ab"
    assert dfa.next[START, a] == 2 and dfa.next[2, b] == START
    assert np.count_nonzero(dfa.next) == 2
    assert dfa.accepts.tolist() == [False, True, False]

  def test_equal_suffixes_share_states(self):
    dfa = compile_grammar(regex("xab|yab|zab"))
    assert dfa.num_states == 5

  def test_states_that_differ_after_two_bytes_are_kept_apart(self):
    dfa = compile_grammar(regex("(ab|ba)*"))
    assert dfa.num_states == 4
    assert dfa.matches("abba") and not dfa.matches("aa")

  def test_states_without_an_end_are_dead(self):
    empty_choice = Choice(())
    dfa = compile_grammar(regex("a") | (regex("b") + empty_choice))
    assert dfa.num_states == 3 and not dfa.matches("b")

  def test_loops_do_not_leak_into_the_parts_around_them(self):
    dfa = compile_grammar(Repeat(Repeat(regex("a")), 0, 1) + regex("b"))
    assert dfa.matches("aab") and not dfa.matches("ba")
    dfa = compile_grammar(Repeat(regex("a")) | Repeat(regex("b")))
    assert dfa.matches("bb") and not dfa.matches("ab")


class TestLongest:
  @pytest.mark.parametrize(
    ("pattern", "max_bytes"),
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
  def test_max_bytes_of_patterns(self, pattern, max_bytes):
    assert compile_grammar(regex(pattern)).max_bytes == max_bytes


def _alike(dfa):
  """Pairs of states that no string of any length tells apart."""
  states = range(dfa.num_states)
  different = {
    (a, b)
    for a, b in itertools.combinations(states, 2)
    if dfa.accepts[a] != dfa.accepts[b]
  }
  table = dfa.next
  classes = np.unique(table, axis=1, return_index=True)[1].tolist()
  while True:
    new_pairs = {
      (a, b)
      for a, b in itertools.combinations(states, 2)
      if (a, b) not in different
      and any(
        tuple(sorted((int(table[a, c]), int(table[b, c])))) in different
        for c in classes
      )
    }
    if not new_pairs:
      return set(itertools.combinations(states, 2)) - different
    different |= new_pairs


@settings(max_examples=100)
@given(PATTERNS)
def test_automata_are_minimal(pattern):
  dfa = compile_grammar(regex(pattern))
  assert not _alike(dfa)
  reached = {0, START, *dfa.next.reshape(-1).tolist()}
  assert reached == set(range(dfa.num_states))
  assert not dfa.next[0].any() and not dfa.accepts[0]


def test_counted_repeats_are_minimal():
  dfa = compile_grammar(regex("(x|[^y]{0,30})y{3}|a{7}b"))
  assert not _alike(dfa)


class TestRefused:
  def test_a_grammar_without_texts_is_refused(self):
    with pytest.raises(ValueError, match="`grammar` must match some text"):
      compile_grammar(Chain((regex("a"), Choice(()))))

  def test_too_many_states_are_refused(self, monkeypatch):
    monkeypatch.setattr(dfa, "MOST_STATES", 1000)
    monkeypatch.setattr(nfa, "MOST_STATES", 10_000)
    with pytest.raises(ValueError, match="at most 1000 states, got more"):
      compile_grammar(regex("[ab]*a[ab]{12}"))
    with pytest.raises(ValueError, match="at most 10000 parts, got more"):
      compile_grammar(regex("(a{100}){200}"))

  def test_other_types_are_refused(self):
    with pytest.raises(TypeError, match="must be a Grammar, got 'a'"):
      compile_grammar(Chain(("a",)))
