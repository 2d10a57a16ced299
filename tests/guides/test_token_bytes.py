"""The bytes of every token, and automata that read them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import guides
from jaxkv._src.guides.token_bytes import advance_states
from tests.tools.transforms import TRANSFORMS
from tests.tools.transforms import check_under

_TOKENS = [b"a", b"", b"bc", b"x" * 300, b"\xff\x00"]


class TestTokenBytes:
  def test_bytes_of_tokens_are_concatenated(self):
    tokens = guides.token_bytes([b"ab", b"", b"c"], vocab_size=5)
    assert bytes(tokens.data.tolist()) == b"abc"
    assert tokens.starts.tolist() == [0, 2, 2, 3, 3, 3]
    assert tokens.vocab_size == 5
    assert tokens.texts() == [b"ab", b"", b"c", b"", b""]

  def test_a_vocabulary_of_special_tokens_alone(self):
    tokens = guides.token_bytes([b"", b""])
    assert tokens.texts() == [b"", b""]

  @pytest.mark.parametrize(
    ("tokens", "vocab_size", "error", "message"),
    [
      (["a"], None, TypeError, r"`tokens\[0\]` must be bytes, got 'a'"),
      ([], None, ValueError, "at least one entry, got 0"),
      ([b"a", b"b"], 1, ValueError, "at most `vocab_size`, 1, got 2"),
    ],
  )
  def test_wrong_arguments(self, tokens, vocab_size, error, message):
    with pytest.raises(error, match=message):
      guides.token_bytes(tokens, vocab_size=vocab_size)


def _counter(states: int) -> jax.Array:
  """State s goes to s + byte, modulo the number of states."""
  state = np.arange(states)[:, None]
  return jnp.asarray((state + np.arange(256)) % states, jnp.int32)


class TestAdvanceStates:
  @pytest.mark.parametrize("transform", TRANSFORMS)
  def test_every_row_reads_all_bytes_of_its_token(self, transform):
    def check(advance):
      table, tokens = _counter(7), guides.token_bytes(_TOKENS)
      states = jnp.asarray([0, 1, 2, 3, 4, 5], jnp.int32)
      token_ids = jnp.asarray([0, 1, 2, 3, 4, 0], jnp.int32)
      expected = [
        (state + sum(_TOKENS[token])) % 7
        for state, token in enumerate(token_ids.tolist())
      ]
      new_states = advance(table, tokens, states, token_ids)
      assert new_states.tolist() == expected and new_states.dtype == jnp.int32

    check_under(transform, check, advance_states, shared=2)

  @pytest.mark.parametrize("token", [-1, -5, 5, 6, 2**31 - 1, -(2**31)])
  def test_a_token_out_of_range_has_no_bytes(self, token):
    new_states = advance_states(
      _counter(7),
      guides.token_bytes(_TOKENS),
      jnp.asarray([3, 3], jnp.int32),
      jnp.asarray([token, 0], jnp.int32),
    )
    assert new_states.tolist() == [3, (3 + ord("a")) % 7]

  @pytest.mark.parametrize("state", [-1, 7, 2**31 - 1])
  def test_a_state_out_of_range_is_unchanged(self, state):
    new_states = advance_states(
      _counter(7),
      guides.token_bytes(_TOKENS),
      jnp.asarray([state, 0], jnp.int32),
      jnp.asarray([2, 2], jnp.int32),
    )
    assert new_states.tolist() == [state, sum(b"bc") % 7]

  def test_no_rows(self):
    rows = jnp.zeros((0,), jnp.int32)
    tokens = guides.token_bytes(_TOKENS)
    assert advance_states(_counter(7), tokens, rows, rows).shape == (0,)
