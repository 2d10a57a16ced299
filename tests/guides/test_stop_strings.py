"""Stop strings: found at the very token in which they end."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from jaxkv import guides
from jaxkv import rollout
from tests.guides import small_vocabulary
from tests.tools.transforms import TRANSFORMS
from tests.tools.transforms import check_under

_TOKENS = [b"", b"a", b"b", b"ab", b"ba", b"aab", b"bb a", b" ", b"aaaaa"]
_END, _A, _B, _AB, _BA, _AAB, _BBA, _SPACE, _A5 = range(len(_TOKENS))


def _found(strings, token_ids, tokens=None):
  """The strings that each token of one sequence completes."""
  tokens = guides.token_bytes(_TOKENS if tokens is None else tokens)
  matcher = rollout.stop_strings(strings, tokens)
  return _scan(matcher, np.asarray(token_ids, np.int32)[:, None])[:, 0].tolist()


@jax.jit
def _scan(matcher, tokens):
  """Returns int32[T, Q], the strings that int32[T, Q] tokens complete."""
  states = matcher.init(tokens.shape[1])
  return jax.lax.scan(matcher.advance, states, jnp.asarray(tokens))[1]


class TestByHand:
  def test_a_string_of_one_token(self):
    assert _found(["ab"], [_A, _SPACE, _AB, _A]) == [-1, -1, 0, -1]

  def test_a_string_over_several_tokens(self):
    assert _found(["ab b"], [_A, _AB, _SPACE, _B]) == [-1, -1, -1, 0]

  def test_a_string_that_ends_inside_a_token(self):
    assert _found(["ab"], [_A, _BBA]) == [-1, 0]
    assert _found(["bb"], [_A, _BBA]) == [-1, 0]
    assert _found(["b a", "bb a"], [_B, _BBA]) == [-1, 0]

  def test_a_string_that_begins_again_inside_itself(self):
    assert _found(["aab"], [_A, _A, _A, _B]) == [-1, -1, -1, 0]
    assert _found(["abab b"], [_AB, _AB, _AB, _SPACE, _B]) == [-1] * 4 + [0]

  def test_the_string_that_ends_first_is_reported(self):
    assert _found(["bb a", "bb"], [_BBA]) == [1]
    assert _found(["bb", "bb a"], [_BBA]) == [0]

  def test_ties_take_the_first_string_of_the_list(self):
    assert _found(["b", "ab"], [_AB]) == [0]
    assert _found(["ab", "b"], [_AB]) == [0]
    assert _found(["ab", "b"], [_BA, _B]) == [1, 0]
    assert _found(["ab", "ab"], [_AB]) == [0]

  def test_tokens_without_bytes_complete_nothing(self):
    assert _found(["ab"], [_A, _END, _B, _END, 99, -1]) == [-1, -1, 0] + 3 * [
      -1
    ]

  def test_text_is_utf8(self):
    tokens = [b"\xc3", b"\xa9", b"e"]
    assert _found(["é"], [0, 1, 2], tokens) == [-1, 0, -1]
    assert _found([b"\xa9e"], [0, 1, 2], tokens) == [-1, -1, 0]

  @pytest.mark.parametrize("strings", [[], [[]], [None]])
  def test_no_strings(self, strings):
    assert _found(strings, [_A, _AB, _BBA]) == [-1, -1, -1]


class TestSequences:
  def test_sequences_have_different_lists(self):
    lists = [["ab"], None, ["b", "ab"], ["x", "bb a"], ["ab"]]
    matcher = rollout.stop_strings(lists, guides.token_bytes(_TOKENS))
    tokens = np.array([_A, _BBA])[:, None].repeat(5, axis=1).astype(np.int32)
    assert _scan(matcher, tokens).tolist() == [[-1] * 5, [0, -1, 0, 1, 0]]
    assert matcher.start[0] == matcher.start[4]

  def test_rows_in_any_order(self):
    lists = [["ab"], ["b"], ["a"]]
    matcher = rollout.stop_strings(lists, guides.token_bytes(_TOKENS))
    states = matcher.init(3)[jnp.asarray([2, 0])]
    states, string_ids = matcher.advance(states, jnp.asarray([_B, _A]))
    assert string_ids.tolist() == [-1, -1]
    states, string_ids = matcher.advance(states, jnp.asarray([_A, _B]))
    assert string_ids.tolist() == [0, 0]

  def test_lists_are_selected_by_index(self):
    lists = [["ab"], ["b"], []]
    matcher = rollout.stop_strings(lists, guides.token_bytes(_TOKENS))
    index = [1, 1, 2, 0]
    chosen = matcher.select(index)
    assert chosen.start.tolist() == matcher.start[jnp.array(index)].tolist()
    string_ids = chosen.advance(chosen.init(4), jnp.full((4,), _B))[1]
    assert string_ids.tolist() == [0, 0, -1, -1]
    for index in (-1, 3):
      with pytest.raises(ValueError, match=r"`lists\[1\]` must be 0 .. 2, got"):
        matcher.select([0, index])

  def test_one_list_serves_any_number_of_sequences(self):
    matcher = rollout.stop_strings(["ab"], guides.token_bytes(_TOKENS))
    assert matcher.init(3).shape == (3,)

  def test_a_state_may_be_donated(self):
    tokens = guides.token_bytes(_TOKENS)
    matcher = rollout.stop_strings(["ab"], tokens)
    leaves = jax.tree.leaves((matcher, matcher.init(2), tokens))
    assert len({x.unsafe_buffer_pointer() for x in leaves}) == len(leaves)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transformed(transform):
  def check(advance):
    lists = [["ab"], ["bb", "b a"]]
    matcher = rollout.stop_strings(lists, guides.token_bytes(_TOKENS))
    tokens = jnp.asarray([_A, _B], jnp.int32)
    states, string_ids = advance(matcher, matcher.init(2), tokens)
    assert string_ids.tolist() == [-1, -1]
    tokens = jnp.asarray([_B, _BBA], jnp.int32)
    states, string_ids = advance(matcher, states, tokens)
    assert string_ids.tolist() == [0, 0]
    assert states.dtype == string_ids.dtype == jnp.int32

  check_under(transform, check, rollout.StopStrings.advance, shared=1)


class TestWrongArguments:
  @pytest.mark.parametrize(
    ("strings", "error", "message"),
    [
      ("ab", TypeError, r"`strings` must be a list, got 'ab'; write \['ab'\]"),
      (["a", ["b"]], TypeError, r"`strings\[0\]` must be a list like"),
      ([["a"], 3], TypeError, r"`strings\[1\]` must be a list of strings or N"),
      ([["a", 3]], TypeError, r"`strings\[0\]\[1\]` must be a str or bytes"),
      ([3], TypeError, r"`strings\[0\]` must be a list of strings"),
      (["a", ""], ValueError, r"`strings\[1\]` must not be empty"),
      ([["a"], [b""]], ValueError, r"`strings\[1\]\[0\]` must not be empty"),
    ],
  )
  def test_strings(self, strings, error, message):
    with pytest.raises(error, match=message):
      rollout.stop_strings(strings, guides.token_bytes(_TOKENS))

  def test_numbers_of_sequences(self):
    matcher = rollout.stop_strings([["a"], ["b"]], guides.token_bytes(_TOKENS))
    with pytest.raises(ValueError, match=r"the shape \[3\], a list of stop"):
      matcher.init(3)
    with pytest.raises(TypeError, match="`lists` must hold integers"):
      matcher.select([0.5])
    shared = rollout.stop_strings(["a"], guides.token_bytes(_TOKENS))
    with pytest.raises(ValueError, match="one for each list"):
      shared.select([0])


def _expected(strings, pieces):
  """Searches the whole text for the string that each token completes."""
  text, string_ids = b"", []
  for piece in pieces:
    start = len(text)
    text += piece
    ends = []
    for string_id, string in enumerate(strings):
      # The first that ends after what was there before.
      offset = text.find(string, max(0, start - len(string) + 1))
      if offset >= 0:
        ends.append((offset + len(string), string_id))
    string_ids.append(min(ends)[1] if ends else -1)
  return string_ids


class TestSearch:
  @settings(max_examples=60)
  @given(
    st.lists(st.text("ab ", min_size=1, max_size=4), max_size=4),
    st.lists(st.integers(0, len(_TOKENS) - 1), min_size=12, max_size=12),
  )
  def test_strings_are_those_of_a_search_of_the_text(self, strings, token_ids):
    pieces = [_TOKENS[token] for token in token_ids]
    encoded = [string.encode() for string in strings]
    # One shape for all examples, so that one program serves them.
    filler = "\0" * (20 - sum(map(len, strings)))
    string_ids = _found([*strings, filler], token_ids)
    assert string_ids == _expected(encoded, pieces)


def _some(text: bytes, chance: random.Random) -> bytes:
  """A piece of the text, or bytes of which some may not be in it."""
  start = chance.randrange(len(text))
  num_bytes = chance.randint(1, 12)
  if chance.random() < 0.85:
    return text[start : start + num_bytes]
  return bytes(chance.choice(text) for _ in range(min(num_bytes, 3)))


def test_a_thousand_random_strings_over_a_byte_level_vocabulary():
  """A search finds the same strings at the same tokens."""
  tokens = small_vocabulary.tokens()
  count = 1000
  chance = random.Random(0)
  text = small_vocabulary.text()
  lists, sequences = [], []
  for _ in range(count):
    start = chance.randrange(len(text) - 60)
    sequence = small_vocabulary.cut(text[start : start + 60], tokens, chance)
    sequence += [chance.randrange(len(tokens)) for _ in range(8)]
    whole = b"".join(tokens[token] for token in sequence)
    lists.append([_some(whole, chance) for _ in range(chance.randint(1, 3))])
    sequences.append(sequence)
  table = np.full((max(map(len, sequences)), count), len(tokens), np.int32)
  for column, sequence in enumerate(sequences):
    table[: len(sequence), column] = sequence
  matcher = rollout.stop_strings(lists, guides.token_bytes(tokens))
  string_ids = np.asarray(_scan(matcher, table))
  ended = inside = 0
  for column, sequence in enumerate(sequences):
    pieces = [tokens[token] for token in sequence]
    expected = _expected(lists[column], pieces)
    assert string_ids[: len(sequence), column].tolist() == expected
    end_index = next((i for i, id_ in enumerate(expected) if id_ >= 0), None)
    if end_index is not None:
      ended += 1
      string = lists[column][expected[end_index]]
      inside += not b"".join(pieces[: end_index + 1]).endswith(string)
  # Most are found, and many of them end inside of a token.
  assert ended > count * 0.8 and inside > count * 0.1
