"""Logits of each sequence, changed by its settings."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv._src.sampling import penalties
from jaxkv._src.sampling import settings
from jaxkv._src.sampling.penalties import History
from jaxkv._src.sampling.penalties import adjust
from jaxkv._src.sampling.settings import Sampling
from tests.sampling import by_definition
from tests.sampling.by_definition import Row

_INF = float("inf")
_VOCABULARY = 6
_LOGITS = [2.0, -1.0, 0.0, 1.0, 4.0, -2.0]


def _adjusted(row: Row, stop_token=-1, logits=_LOGITS) -> list[float]:
  """The logits of one row with settings."""
  sampling = by_definition.sampling_of([row])
  history = by_definition.history_of([row], sampling, len(logits), stop_token)
  return adjust(jnp.asarray([logits]), sampling, history)[0].tolist()


class TestByHand:
  def test_default_settings_change_no_logit(self):
    assert _adjusted(Row()) == _LOGITS

  def test_logit_bias(self):
    logits = _adjusted(Row(logit_bias={0: 1.5, 4: -_INF, 99: 7.0}))
    assert logits == [3.5, -1, 0, 1, -_INF, -2]

  def test_min_tokens(self):
    """Stop tokens, their own and that of all, until two were drawn."""
    row = functools.partial(Row, min_tokens=2, stop_tokens=[0, 3])
    assert _adjusted(row(drawn=[1]), 5) == [-_INF, -1, 0, -_INF, 4, -_INF]
    assert _adjusted(row(drawn=[1, 1]), 5) == _LOGITS
    assert _adjusted(row(drawn=[]), -1) == [-_INF, -1, 0, -_INF, 4, -2]

  def test_bad_words(self):
    words = [[4], [1, 2], [3, 1, 5], [2, 0]]
    logits = _adjusted(Row(prompt=[3], drawn=[1], bad_words=words))
    assert logits == [2, -1, -_INF, 1, -_INF, -_INF]

  def test_a_word_longer_than_the_sequence(self):
    assert _adjusted(Row(prompt=[2], bad_words=[[1, 2, 3]])) == _LOGITS

  @pytest.mark.parametrize(
    ("penalty", "logits"),
    [
      # Tokens of the prompt and drawn ones, once each.
      ({"repetition_penalty": 2.0}, [1, -2, 0, 1, 2, -4]),
      ({"frequency_penalty": 0.5}, [2, -1, 0, 1, 3, -2.5]),
      ({"presence_penalty": 0.5}, [2, -1, 0, 1, 3.5, -2.5]),
    ],
  )
  def test_penalties(self, penalty, logits):
    row = Row(prompt=[0, 1], drawn=[4, 4, 5], **penalty)
    assert _adjusted(row) == logits

  def test_the_bias_is_applied_before_the_penalties(self):
    """The bias first: it makes a negative logit positive."""
    row = Row(
      drawn=[1],
      logit_bias={1: 5.0},
      repetition_penalty=2.0,
      frequency_penalty=0.5,
      presence_penalty=0.25,
    )
    assert _adjusted(row)[1] == (-1 + 5) / 2 - 0.5 - 0.25

  def test_a_banned_token_stays_banned(self):
    row = Row(
      drawn=[4], bad_words=[[4]], logit_bias={4: 9.0}, presence_penalty=-2.0
    )
    assert _adjusted(row)[4] == -_INF


class TestSeen:
  def _seen(self, tokens, lengths, is_drawn, vocab_size=_VOCABULARY):
    counts = penalties.seen_in(
      jnp.asarray(tokens, jnp.int32),
      jnp.asarray(lengths, jnp.int32),
      jnp.asarray(is_drawn, bool),
      vocab_size=vocab_size,
    )
    assert counts.dtype == jnp.uint16
    return np.asarray(counts)

  def test_by_hand(self):
    """Prompt tokens, drawn ones, those of an environment, and padding."""
    counts = self._seen(
      [[3, 1, 1, 5, 5, 2, 0, 0]], [6], [[0, 0, 1, 1, 1, 0, 1, 1]]
    )
    assert (counts & 0x7FFF).tolist() == [[0, 1, 0, 0, 0, 2]]
    assert (counts >> 15).tolist() == [[0, 1, 1, 1, 0, 0]]

  def test_tokens_beyond_the_vocabulary_are_dropped(self):
    counts = self._seen([[6, -1, 2**30, 1]], [4], [[1, 1, 0, 0]])
    assert counts.tolist() == [[0, 1 << 15, 0, 0, 0, 0]]

  def test_counts_end_at_the_largest(self):
    """The bit of the prompt is not touched, in either way of counting."""
    width = 150_000
    is_drawn = np.ones((2, width), bool)
    is_drawn[1, :70_000] = False
    counts = self._seen(np.full((2, width), 2), [width, width], is_drawn)
    assert counts[:, 2].tolist() == [0x7FFF, 0xFFFF]
    counts = jnp.asarray([[0x7FFE, 0x7FFF, 0xFFFE, 0xFFFF]], jnp.uint16)
    for _ in range(2):
      for token in range(4):
        token = jnp.full((1,), token, jnp.int32)
        counts = penalties.see(counts, token, jnp.ones((1,), bool))
    assert counts.tolist() == [[0x7FFF, 0x7FFF, 0xFFFF, 0xFFFF]]

  def test_a_new_token_is_counted(self):
    tokens = [[3, 1, 1, 5], [2, 2, 4, 4]]
    is_drawn = [[0, 0, 1, 1], [0, 1, 1, 1]]
    counts = jnp.asarray(self._seen(tokens, [3, 3], is_drawn))
    new_tokens = jnp.asarray([5, 4], jnp.int32)
    both_rows = penalties.see(counts, new_tokens, jnp.ones((2,), bool))
    assert both_rows.tolist() == self._seen(tokens, [4, 4], is_drawn).tolist()
    second_row = penalties.see(counts, new_tokens, jnp.asarray([False, True]))
    assert second_row.tolist() == self._seen(tokens, [3, 4], is_drawn).tolist()

  @pytest.mark.parametrize("token", [-1, 6, 2**30])
  def test_tokens_out_of_range_are_not_counted(self, token):
    counts = jnp.ones((1, _VOCABULARY), jnp.uint16)
    token = jnp.full((1,), token, jnp.int32)
    mask = jnp.ones((1,), bool)
    assert penalties.see(counts, token, mask).tolist() == counts.tolist()


class TestLastTokens:
  def test_by_hand(self):
    tokens = jnp.asarray([[1, 2, 3, 4, 9], [5, 6, 9, 9, 9]], jnp.int32)
    sequences = jnp.asarray([1, 0, 2, -1], jnp.int32)
    lengths = jnp.asarray([2, 4, 3, 3], jnp.int32)
    last_tokens = penalties.last_tokens_of(tokens, sequences, lengths, 3)
    assert last_tokens.tolist() == [[-1, 5, 6], [2, 3, 4], [-1] * 3, [-1] * 3]

  def test_a_length_of_zero_gives_no_columns(self):
    tokens = jnp.ones((1, 2), jnp.int32)
    zeros = jnp.zeros((1,), jnp.int32)
    assert penalties.last_tokens_of(tokens, zeros, zeros, 0).shape == (1, 0)


_tokens = st.integers(0, _VOCABULARY - 1)
_halves = st.integers(-8, 8).map(lambda number: number / 2)
_rows = st.builds(
  Row,
  prompt=st.lists(_tokens, min_size=1, max_size=4),
  drawn=st.lists(_tokens, max_size=5),
  presence_penalty=_halves,
  frequency_penalty=_halves,
  repetition_penalty=st.sampled_from([0.5, 1.0, 1.25, 2.0]),
  min_tokens=st.integers(0, 5),
  stop_tokens=st.lists(_tokens, max_size=2),
  logit_bias=st.dictionaries(_tokens, _halves | st.just(-_INF), max_size=3),
  bad_words=st.lists(st.lists(_tokens, min_size=1, max_size=3), max_size=3),
)


class TestAgainstTheDefinition:
  @pytest.mark.deep
  @given(
    st.lists(_rows, min_size=1, max_size=4),
    st.integers(-1, _VOCABULARY - 1),
    st.integers(0, 2**32 - 1),
  )
  def test_rows_of_a_batch_are_adjusted_independently(
    self, rows, stop_token, seed
  ):
    logits = np.random.default_rng(seed).normal(size=(len(rows), _VOCABULARY))
    logits = (4 * logits).astype(np.float32)
    sampling = by_definition.sampling_of(rows)
    history = by_definition.history_of(rows, sampling, _VOCABULARY, stop_token)
    outputs = adjust(jnp.asarray(logits), sampling, history)
    for i, row in enumerate(rows):
      expected = by_definition.adjusted(logits[i], row, stop_token)
      np.testing.assert_allclose(outputs[i], expected, rtol=1e-6, atol=1e-6)
      row_logits = _adjusted(row, stop_token, logits[i].tolist())
      np.testing.assert_array_equal(outputs[i], np.float32(row_logits))


class TestCalls:
  def test_unused_settings_add_no_operation(self):
    logits = jnp.asarray([_LOGITS])
    history = History(counts=jnp.zeros((1,), jnp.int32))
    sampling = settings.as_sampling(Sampling(temperature=0.5, top_k=3), 1)

    def run(logits):
      return adjust(logits, sampling, history)

    assert not jax.make_jaxpr(run)(logits).jaxpr.eqns

  def test_half_precision_logits_become_float32(self):
    logits = jnp.asarray([_LOGITS], jnp.bfloat16)
    history = History(counts=jnp.zeros((1,), jnp.int32))
    sampling = settings.as_sampling(Sampling(logit_bias={0: 0.001}), 1)
    outputs = adjust(logits, sampling, history)
    assert outputs.dtype == jnp.float32
    assert float(outputs[0, 0]) == np.float32(2.001)

  def test_words_of_one_token_need_no_last_tokens(self):
    sampling = settings.as_sampling(Sampling(bad_words=[[1], [99]]), 1)
    history = History(counts=jnp.zeros((1,), jnp.int32))
    outputs = adjust(jnp.asarray([_LOGITS]), sampling, history)
    assert outputs.tolist() == [[2, -_INF, 0, 1, 4, -2]]

  def test_a_row_without_a_sequence_is_not_changed(self):
    row = Row(drawn=[4], bad_words=[[4]], presence_penalty=1.0, min_tokens=9)
    sampling = settings.rows(
      by_definition.sampling_of([row]), jnp.asarray([1], jnp.int32)
    )
    history = by_definition.history_of([row], sampling, _VOCABULARY, 3)
    outputs = adjust(jnp.asarray([_LOGITS]), sampling, history)
    assert outputs.tolist() == [_LOGITS]
