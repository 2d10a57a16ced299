"""Stop strings: found at the very token in which they end."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from jaxkv import rollout
from tests.guides import small_vocabulary
from tests.tools.transforms import TRANSFORMS
from tests.tools.transforms import check_under

_TOKENS = [b"", b"a", b"b", b"ab", b"ba", b"aab", b"bb a", b" ", b"aaaaa"]
_END, _A, _B, _AB, _BA, _AAB, _BBA, _SPACE, _A5 = range(len(_TOKENS))


def _found(strings, numbers, tokens=None):
  """The strings that each token of one sequence completes."""
  tokens = rollout.token_bytes(_TOKENS if tokens is None else tokens)
  stop = rollout.stop_strings(strings, tokens)
  return _scan(stop, np.asarray(numbers, np.int32)[:, None])[:, 0].tolist()


@jax.jit
def _scan(stop, numbers):
  """int32[T, Q]: what each of int32[T, Q] tokens completes."""
  states = stop.init(numbers.shape[1])
  return jax.lax.scan(stop.advance, states, jnp.asarray(numbers))[1]


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

  def test_the_string_that_ends_first(self):
    assert _found(["bb a", "bb"], [_BBA]) == [1]
    assert _found(["bb", "bb a"], [_BBA]) == [0]

  def test_of_strings_that_end_together_the_first_in_the_list(self):
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
  def test_each_has_its_own_list(self):
    lists = [["ab"], None, ["b", "ab"], ["x", "bb a"], ["ab"]]
    stop = rollout.stop_strings(lists, rollout.token_bytes(_TOKENS))
    numbers = np.array([_A, _BBA])[:, None].repeat(5, axis=1).astype(np.int32)
    assert _scan(stop, numbers).tolist() == [[-1] * 5, [0, -1, 0, 1, 0]]
    assert stop.start[0] == stop.start[4]

  def test_rows_in_any_order(self):
    lists = [["ab"], ["b"], ["a"]]
    stop = rollout.stop_strings(lists, rollout.token_bytes(_TOKENS))
    states = stop.init(3)[jnp.asarray([2, 0])]
    states, found = stop.advance(states, jnp.asarray([_B, _A]))
    assert found.tolist() == [-1, -1]
    states, found = stop.advance(states, jnp.asarray([_A, _B]))
    assert found.tolist() == [0, 0]

  def test_select(self):
    lists = [["ab"], ["b"], []]
    stop = rollout.stop_strings(lists, rollout.token_bytes(_TOKENS))
    chosen = stop.select([1, 1, 2, 0])
    assert chosen.start.tolist() == stop.start[jnp.array([1, 1, 2, 0])].tolist()
    found = chosen.advance(chosen.init(4), jnp.full((4,), _B))[1]
    assert found.tolist() == [0, 0, -1, -1]
    for number in (-1, 3):
      with pytest.raises(ValueError, match=r"`lists\[1\]` must be 0 .. 2, got"):
        stop.select([0, number])

  def test_one_list_serves_any_number(self):
    stop = rollout.stop_strings(["ab"], rollout.token_bytes(_TOKENS))
    assert stop.init(3).shape == (3,)

  def test_a_state_may_be_donated(self):
    tokens = rollout.token_bytes(_TOKENS)
    stop = rollout.stop_strings(["ab"], tokens)
    held = (stop, stop.init(2))
    addresses = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(held)]
    own = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(tokens)]
    assert len({*addresses, *own}) == len(addresses) + len(own)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transformed(transform):
  def check(advance):
    lists = [["ab"], ["bb", "b a"]]
    stop = rollout.stop_strings(lists, rollout.token_bytes(_TOKENS))
    states, found = advance(
      stop, stop.init(2), jnp.asarray([_A, _B], jnp.int32)
    )
    assert found.tolist() == [-1, -1]
    states, found = advance(stop, states, jnp.asarray([_B, _BBA], jnp.int32))
    assert found.tolist() == [0, 0]
    assert states.dtype == found.dtype == jnp.int32

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
      rollout.stop_strings(strings, rollout.token_bytes(_TOKENS))

  def test_numbers_of_sequences(self):
    stop = rollout.stop_strings([["a"], ["b"]], rollout.token_bytes(_TOKENS))
    with pytest.raises(ValueError, match=r"the shape \[3\], a list of stop"):
      stop.init(3)
    with pytest.raises(TypeError, match="`lists` must hold integers"):
      stop.select([0.5])
    shared = rollout.stop_strings(["a"], rollout.token_bytes(_TOKENS))
    with pytest.raises(ValueError, match="one for each list"):
      shared.select([0])


def _expected(strings, pieces):
  """A search of the whole text for what each of its tokens completes."""
  text, found = b"", []
  for piece in pieces:
    before, text = len(text), text + piece
    ends = []
    for number, string in enumerate(strings):
      # The first that ends after what was there before.
      place = text.find(string, max(0, before - len(string) + 1))
      if place >= 0:
        ends.append((place + len(string), number))
    found.append(min(ends)[1] if ends else -1)
  return found


class TestSearch:
  @settings(max_examples=60)
  @given(
    st.lists(st.text("ab ", min_size=1, max_size=4), max_size=4),
    st.lists(st.integers(0, len(_TOKENS) - 1), min_size=12, max_size=12),
  )
  def test_as_a_search_of_the_text(self, strings, numbers):
    pieces = [_TOKENS[number] for number in numbers]
    encoded = [string.encode() for string in strings]
    # One shape for all examples, so that one program serves them.
    filler = "\0" * (20 - sum(map(len, strings)))
    found = _found([*strings, filler], numbers)
    assert found == _expected(encoded, pieces)


def _some(text: bytes, chance: random.Random) -> bytes:
  """A piece of the text, or bytes of which some may not be in it."""
  begin, size = chance.randrange(len(text)), chance.randint(1, 12)
  if chance.random() < 0.85:
    return text[begin : begin + size]
  return bytes(chance.choice(text) for _ in range(min(size, 3)))


def test_a_thousand_random_strings_over_a_byte_level_vocabulary():
  """Each is found where a search finds it."""
  tokens, count = small_vocabulary.tokens(), 1000
  chance = random.Random(0)
  text = small_vocabulary.text()
  lists, sequences = [], []
  for _ in range(count):
    begin = chance.randrange(len(text) - 60)
    numbers = small_vocabulary.cut(text[begin : begin + 60], tokens, chance)
    numbers += [chance.randrange(len(tokens)) for _ in range(8)]
    whole = b"".join(tokens[number] for number in numbers)
    lists.append([_some(whole, chance) for _ in range(chance.randint(1, 3))])
    sequences.append(numbers)
  table = np.full((max(map(len, sequences)), count), len(tokens), np.int32)
  for column, numbers in enumerate(sequences):
    table[: len(numbers), column] = numbers
  stop = rollout.stop_strings(lists, rollout.token_bytes(tokens))
  found = np.asarray(_scan(stop, table))
  ended = inside = 0
  for column, numbers in enumerate(sequences):
    pieces = [tokens[number] for number in numbers]
    expected = _expected(lists[column], pieces)
    assert found[: len(numbers), column].tolist() == expected
    first = next((i for i, one in enumerate(expected) if one >= 0), None)
    if first is not None:
      ended += 1
      string = lists[column][expected[first]]
      inside += not b"".join(pieces[: first + 1]).endswith(string)
  # Most are found, and many of them end inside of a token.
  assert ended > count * 0.8 and inside > count * 0.1
