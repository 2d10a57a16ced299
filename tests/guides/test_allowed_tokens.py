"""Masks of the tokens that lead to an end, and the tokens that it takes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from jaxkv._src.guides.allowed_tokens import UNREACHABLE
from jaxkv._src.guides.allowed_tokens import token_masks
from jaxkv._src.guides.dfa import START
from jaxkv._src.guides.dfa import compile_grammar
from jaxkv._src.guides.regex import regex
from tests.guides.patterns import PATTERNS

_STOP = 0


def _allowed(masks, state, left) -> list[int]:
  """Returns the tokens of a mask with `left` tokens left."""
  step = min(
    max(left - masks.distance[state], 0),
    masks.last[state] - masks.first[state],
  )
  words = masks.masks[masks.rows[masks.first[state] + step]]
  bits = np.unpackbits(words.view(np.uint8), bitorder="little")
  return np.flatnonzero(bits).tolist()


class TestByHand:
  def test_tokens_that_can_still_match_are_allowed(self):
    tokens = [b"", b"a", b"ab", b"b", b"c", b""]
    masks = token_masks(compile_grammar(regex("a?b")), tokens, [_STOP])
    assert _allowed(masks, START, 9) == [1, 2, 3]
    assert masks.distance[START] == 2

  def test_the_stop_token_is_allowed_where_a_text_may_end(self):
    tokens = [b"", b"a"]
    dfa = compile_grammar(regex("aa?"))
    masks = token_masks(dfa, tokens, [_STOP])
    state_1 = dfa.next[START, ord("a")]
    state_2 = dfa.next[state_1, ord("a")]
    assert _allowed(masks, START, 9) == [1]
    assert _allowed(masks, state_1, 9) == [0, 1]
    assert _allowed(masks, state_2, 9) == [0]
    assert masks.distance[[START, state_1, state_2]].tolist() == [2, 1, 1]

  def test_tokens_must_end_the_text_within_the_limit(self):
    """From "(" on an end takes a token more."""
    tokens = [b"", b"a", b"(", b")", b"()"]
    masks = token_masks(compile_grammar(regex(r"(a|\(a?\))*")), tokens, [_STOP])
    assert _allowed(masks, START, 1) == [0]
    assert _allowed(masks, START, 2) == [0, 1, 4]
    assert _allowed(masks, START, 3) == [0, 1, 2, 4]
    assert _allowed(masks, START, 99) == [0, 1, 2, 4]
    # Too few: what leads to the nearest end.
    assert _allowed(masks, START, 0) == _allowed(masks, START, -5) == [0]

  def test_texts_that_tokens_cannot_spell_are_not_begun(self):
    """An "x" needs a "y" after it, which no token has."""
    tokens = [b"", b"a", b"x"]
    masks = token_masks(compile_grammar(regex("(a|xy)*")), tokens, [_STOP])
    assert _allowed(masks, START, 9) == [0, 1]

  def test_dead_states_allow_the_stop_token_alone(self):
    dfa = compile_grammar(regex("(a|xy)*"))
    masks = token_masks(dfa, [b"", b"a", b"x"], [_STOP])
    dead_state = dfa.next[START, ord("x")]
    assert masks.distance[dead_state] == UNREACHABLE
    for state in (0, dead_state):
      assert _allowed(masks, state, 9) == _allowed(masks, state, 1) == [_STOP]

  def test_stop_tokens_have_no_bytes(self):
    masks = token_masks(compile_grammar(regex("a*")), [b"a", b"a"], [1])
    assert _allowed(masks, START, 9) == [0, 1]
    masks = token_masks(compile_grammar(regex("a+")), [b"a", b"a"], [1])
    assert _allowed(masks, START, 9) == [0]
    # Nothing but the stop token would spell what follows a "b".
    masks = token_masks(compile_grammar(regex("(ba)*")), [b"b", b"a"], [1])
    assert _allowed(masks, START, 9) == [1]

  def test_several_stop_tokens_are_allowed_together(self):
    masks = token_masks(compile_grammar(regex("a*")), [b"a", b"", b""], [1, 2])
    assert _allowed(masks, START, 1) == [1, 2]

  @pytest.mark.parametrize("vocab_size", [3, 31, 32, 33, 100])
  def test_masks_of_any_vocabulary_size(self, vocab_size):
    tokens = [b"", b"b", *[b"a"] * (vocab_size - 2)]
    masks = token_masks(compile_grammar(regex("a*")), tokens, [_STOP])
    assert masks.masks.shape[1] == -(-vocab_size // 32)
    assert _allowed(masks, START, 9) == [0, *range(2, vocab_size)]


def _expected(dfa, tokens):
  """The fewest tokens to an end of each state, and of each token in it."""
  num_states = dfa.num_states
  next_states = np.zeros((num_states, len(tokens)), int)
  for state in range(num_states):
    for token_id, token in enumerate(tokens):
      next_state = state
      for byte in token:
        next_state = dfa.next[next_state, byte]
      next_states[state, token_id] = next_state if token else 0
  distance = np.where(dfa.accepts, 1, UNREACHABLE)
  for _ in range(num_states):
    distance = np.minimum(distance, 1 + distance[next_states].min(axis=1))
  distance = np.minimum(distance, UNREACHABLE)
  return distance, np.minimum(1 + distance[next_states], UNREACHABLE)


@settings(max_examples=100)
@given(
  PATTERNS,
  st.lists(
    st.lists(st.sampled_from([*b"ab.\n", *"é".encode()]), max_size=3),
    min_size=1,
    max_size=8,
  ),
)
def test_masks_equal_an_exhaustive_search(pattern, tokens):
  tokens = [b"", *map(bytes, tokens)]
  dfa = compile_grammar(regex(pattern))
  masks = token_masks(dfa, tokens, [_STOP])
  distance, needed = _expected(dfa, tokens)
  assert masks.distance.tolist() == distance.tolist()
  for state in range(dfa.num_states):
    for left in range(1, 8):
      if left < distance[state] < UNREACHABLE:
        continue
      expected = np.flatnonzero(needed[state] <= left).tolist()
      if dfa.accepts[state] or distance[state] == UNREACHABLE:
        expected = [_STOP, *expected]
      assert _allowed(masks, state, left) == expected
