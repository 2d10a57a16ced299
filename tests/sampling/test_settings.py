"""Settings of sequences: as they are written, stored and read."""

import dataclasses
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv._src.guides.stop_strings import stop_strings
from jaxkv._src.guides.token_bytes import token_bytes
from jaxkv._src.sampling import settings
from jaxkv._src.sampling.settings import LogitBias
from jaxkv._src.sampling.settings import Sampling
from jaxkv._src.sampling.settings import as_sampling

_FLOATS = (
  "temperature",
  "top_p",
  "min_p",
  "presence_penalty",
  "frequency_penalty",
  "repetition_penalty",
)
_INTS = ("top_k", "min_tokens", "max_tokens", "seed")
_STRINGS = stop_strings(["ab"], token_bytes([b"a", b"b"]))
_NAN = float("nan")
_INF = float("inf")


def _ints(values):
  return jnp.asarray(values, jnp.int32)


class TestByHand:
  def test_a_number_is_broadcast_to_all_sequences(self):
    sampling = as_sampling(Sampling(temperature=0.5, top_k=3), 2)
    assert sampling.temperature.tolist() == [0.5, 0.5]
    assert sampling.top_k.tolist() == [3, 3]
    assert sampling.top_p is None

  def test_a_list_has_one_value_for_each_sequence(self):
    sampling = as_sampling(Sampling(min_p=[0.0, 0.25], seed=(7, -1)), 2)
    assert sampling.min_p.tolist() == [0, 0.25]
    assert sampling.seed.tolist() == [7, -1]

  @pytest.mark.parametrize(
    ("value", "stored"),
    [
      ([5, 6], [[5, 6], [5, 6]]),
      ([[5, 6], [7]], [[5, 6], [7, -1]]),
      ([[], [7]], [[-1], [7]]),
      ([], [[-1], [-1]]),
      ([[], []], [[-1], [-1]]),
      (np.array([5, 6]), [[5, 6], [5, 6]]),
      (np.array([[5, 6], [7, -1]]), [[5, 6], [7, -1]]),
    ],
  )
  def test_stop_tokens(self, value, stored):
    assert as_sampling(Sampling(stop_tokens=value), 2).stop_tokens.tolist() == (
      stored
    )

  @pytest.mark.parametrize(
    ("value", "tokens", "values"),
    [
      ({5: 1.5}, [[5], [5]], [[1.5], [1.5]]),
      ([{5: 1.5, 6: -2}, {}], [[5, 6], [-1, -1]], [[1.5, -2], [0, 0]]),
      ({}, [[-1], [-1]], [[0], [0]]),
      ({3: -_INF}, [[3], [3]], [[-_INF], [-_INF]]),
      (
        LogitBias(tokens=[[3], [4]], values=np.array([[1.0], [2.0]])),
        [[3], [4]],
        [[1], [2]],
      ),
      (
        LogitBias(tokens=np.array([3, 4]), values=np.array([1.0, 2.0])),
        [[3, 4], [3, 4]],
        [[1, 2], [1, 2]],
      ),
    ],
  )
  def test_logit_bias(self, value, tokens, values):
    bias = as_sampling(Sampling(logit_bias=value), 2).logit_bias
    assert bias.tokens.tolist() == tokens and bias.values.tolist() == values

  @pytest.mark.parametrize(
    ("value", "stored"),
    [
      ([[1, 2], [3]], [[[1, 2], [-1, 3]]] * 2),
      ([[[1, 2], [3]], []], [[[1, 2], [-1, 3]], [[-1, -1], [-1, -1]]]),
      ([[[7]], [[8], [9]]], [[[7], [-1]], [[8], [9]]]),
      ([], [[[-1]], [[-1]]]),
      ([[], []], [[[-1]], [[-1]]]),
      (np.array([[1, 2], [-1, 3]]), [[[1, 2], [-1, 3]]] * 2),
    ],
  )
  def test_bad_words(self, value, stored):
    """Unused places are in front of a word, and at the end of the words."""
    assert as_sampling(Sampling(bad_words=value), 2).bad_words.tolist() == (
      stored
    )

  def test_no_settings_are_default_settings(self):
    assert as_sampling(None, 3) == Sampling() == as_sampling(Sampling(), 3)

  def test_stop_strings_are_kept(self):
    sampling = as_sampling(Sampling(stop_strings=_STRINGS), 3)
    assert sampling.stop_strings is _STRINGS


_WIDE = {
  "temperature": 0.5,
  "top_k": [1, 2, 3],
  "top_p": 0.25,
  "min_p": [0.0, 0.5, 1.0],
  "presence_penalty": -1,
  "frequency_penalty": [0.5, 0.0, -0.5],
  "repetition_penalty": 1.25,
  "min_tokens": 1,
  "max_tokens": [4, 5, 6],
  "stop_tokens": [[1], [], [2, 3]],
  "logit_bias": [{}, {1: 2.0}, {2: 1.0, 3: -_INF}],
  "bad_words": [[[1, 2]], [], [[3], [4, 5, 6]]],
  "seed": [1, 2, 3],
}


class TestArrays:
  @pytest.mark.parametrize("field", _FLOATS)
  @pytest.mark.parametrize(
    "value", [1, np.float64(0.5), jnp.bfloat16(0.5), np.array([1, 1]), True]
  )
  def test_real_numbers_of_any_width_are_cast(self, field, value):
    if value is True:
      with pytest.raises(TypeError, match=f"`{field}` must hold real numbers"):
        Sampling(**{field: value})
      return
    sampling = Sampling(**{field: value})
    stored = getattr(as_sampling(sampling, 2), field)
    assert (stored.dtype, stored.shape) == (jnp.float32, (2,))
    np.testing.assert_array_equal(
      stored, np.broadcast_to(np.float32(value), (2,))
    )

  def test_shapes_and_dtypes(self):
    sampling = as_sampling(Sampling(**_WIDE), 3)
    for field in _FLOATS:
      chex.assert_shape(getattr(sampling, field), (3,))
      assert getattr(sampling, field).dtype == jnp.float32
    for field in _INTS:
      chex.assert_shape(getattr(sampling, field), (3,))
      assert getattr(sampling, field).dtype == jnp.int32
    chex.assert_shape(sampling.stop_tokens, (3, 2))
    chex.assert_shape(sampling.bad_words, (3, 2, 3))
    chex.assert_shape(sampling.logit_bias.values, (3, 2))

  def test_stored_settings_can_be_stored_again(self):
    sampling = as_sampling(Sampling(**_WIDE), 3)
    chex.assert_trees_all_equal(as_sampling(sampling, 3), sampling)
    traced = jax.jit(lambda sampling: as_sampling(sampling, 3))(sampling)
    chex.assert_trees_all_equal(traced, sampling)

  def test_traced_numbers(self):
    def store(temperature, top_k):
      sampling = Sampling(temperature=[temperature, 0.5], top_k=top_k)
      return as_sampling(sampling, 2)

    # Their values are not known.
    stored = jax.jit(store)(-1.0, -5)
    assert stored.temperature.tolist() == [-1, 0.5]
    assert stored.top_k.tolist() == [-5, -5]

  def test_the_callers_arrays_are_copied(self):
    """A state that has the settings may be donated."""
    temperature = jnp.full((2,), 0.5)
    stops = _ints([[1], [2]])
    written = Sampling(temperature=temperature, stop_tokens=stops)
    stored = as_sampling(written, 2)
    jax.jit(lambda sampling: sampling, donate_argnums=0)(stored)
    assert stored.temperature.is_deleted()
    assert temperature.tolist() == [0.5, 0.5] and stops.tolist() == [[1], [2]]

  def test_leaves_share_no_buffer(self):
    leaves = jax.tree.leaves(as_sampling(Sampling(**_WIDE), 3))
    addresses = {leaf.unsafe_buffer_pointer() for leaf in leaves}
    assert len(addresses) == len(leaves)


class _Refused(NamedTuple):
  """A field, values, the error and its message."""

  field: str
  values: tuple
  error: type[Exception]
  message: str


_REFUSED = [
  _Refused(
    "temperature", (-1, 1e-46, _NAN, _INF, 1e39), ValueError, "be 0, or"
  ),
  _Refused("top_k", (-2,), ValueError, "be at least 1, or 0 or -1 for all"),
  _Refused("top_p", (0, -1, 1.1, _NAN), ValueError, "be above 0 and at most 1"),
  _Refused("min_p", (-0.1, 1.1, _NAN), ValueError, "be 0 .. 1"),
  _Refused("presence_penalty", (_NAN, _INF), ValueError, "be finite"),
  _Refused("frequency_penalty", (_NAN, -_INF), ValueError, "be finite"),
  _Refused(
    "repetition_penalty",
    (0, -1, _NAN, _INF, np.float16(0), np.float16(_INF)),
    ValueError,
    "be a finite",
  ),
  _Refused("min_tokens", (-1,), ValueError, "be at least 0"),
  _Refused("max_tokens", (0, -1), ValueError, "be at least 1"),
  *(
    _Refused(field, (1.5, True, "3"), TypeError, "hold integers")
    for field in _INTS
  ),
  *(_Refused(field, (2**40,), ValueError, "fit int32") for field in _INTS),
  *(
    _Refused(field, ("hot", 1j, True), TypeError, "hold real numbers")
    for field in _FLOATS
  ),
]


class TestRefused:
  @pytest.mark.parametrize("case", _REFUSED, ids=lambda case: case.field)
  def test_values_out_of_range_are_refused(self, case):
    """When the settings are made."""
    for value in case.values:
      pattern = f"`{case.field}` must {case.message}.*got"
      with pytest.raises(case.error, match=pattern):
        Sampling(**{case.field: value})

  @pytest.mark.parametrize("case", _REFUSED[:9], ids=lambda case: case.field)
  def test_the_sequence_is_named(self, case):
    pattern = rf"`{case.field}\[1\]` must {case.message}"
    with pytest.raises(case.error, match=pattern):
      as_sampling(Sampling(**{case.field: [1, case.values[0]]}), 2)

  @pytest.mark.parametrize("field", (*_FLOATS, *_INTS))
  @pytest.mark.parametrize("value", [[1, 1, 1], [1], [[1, 1]], [[1], [1]]])
  def test_wrong_shapes_are_refused(self, field, value):
    message = rf"`{field}` must have the shape \[\] or \[[2Q]\], one for each"
    with pytest.raises(ValueError, match=message):
      as_sampling(Sampling(**{field: value}), 2)

  @pytest.mark.parametrize(
    ("field", "value", "error", "message"),
    [
      ("stop_tokens", 5, TypeError, "must be a list of ints for all"),
      ("stop_tokens", [[[5]]], TypeError, "must be a list of ints for all"),
      ("stop_tokens", [5.0], TypeError, "hold integers"),
      ("stop_tokens", [[5], [True]], TypeError, r"\[1\]` must hold integers"),
      (
        "stop_tokens",
        [[5], [-1]],
        ValueError,
        r"\[1\]` must hold tokens of at",
      ),
      ("stop_tokens", [[5]], ValueError, "must have 2 lists, one for each"),
      ("stop_tokens", np.array([[5]]), ValueError, r"the shape \[2, X\], one"),
      ("stop_tokens", [5, [6]], TypeError, "must be a list of ints"),
      ("logit_bias", [5], TypeError, "must be a dictionary from to"),
      ("logit_bias", [{5: 1.0}], ValueError, "must have 2 dictionaries"),
      ("logit_bias", {-1: 1.0}, ValueError, "must hold tokens of at least 0"),
      ("logit_bias", {1.5: 1.0}, TypeError, "must hold integers"),
      ("logit_bias", {5: "much"}, TypeError, "must hold real numbers"),
      ("logit_bias", {5: _NAN}, ValueError, "must hold finite .* got nan"),
      ("logit_bias", {5: _INF}, ValueError, "must hold finite .* got inf"),
      ("logit_bias", {5: 1e39}, ValueError, r"must hold finite .* got 1e\+39"),
      (
        "logit_bias",
        LogitBias(tokens=np.array([5]), values=np.zeros(3)),
        ValueError,
        r"values` must have the shape of `logit_bias.tokens`, \[2, 1\], got",
      ),
      ("bad_words", [1, 2], TypeError, "must be a list of lists of ints"),
      (
        "bad_words",
        [[1], []],
        ValueError,
        r"\[0\]\[1\]` must have at least one tok",
      ),
      ("bad_words", [[[1]]], ValueError, "must have 2 lists, one for each"),
      ("bad_words", [[-1, 2]], ValueError, "must hold tokens of at least 0"),
      (
        "bad_words",
        np.array([[1, -1]]),
        ValueError,
        "before the tokens of each word",
      ),
      ("bad_words", np.ones((2, 2, 2)), TypeError, "must hold integers"),
      ("stop_strings", ["ab"], TypeError, "make it with rollout.stop_strings"),
    ],
  )
  def test_wrong_lists_are_refused(self, field, value, error, message):
    with pytest.raises(error, match=f"`{field}.*{message}"):
      as_sampling(Sampling(**{field: value}), 2)

  def test_min_tokens_above_max_tokens_are_refused(self):
    message = r"`min_tokens\[1\]` must be at most .* got 5 and 4"
    with pytest.raises(ValueError, match=message):
      as_sampling(Sampling(min_tokens=5, max_tokens=[5, 4]), 2)

  def test_other_types_are_refused(self):
    with pytest.raises(TypeError, match=r"be a rollout\.Sampling, got dict"):
      as_sampling({"top_k": 5}, 2)


class TestRows:
  def test_rows_of_some_sequences(self):
    sampling = as_sampling(Sampling(**_WIDE), 3)
    chosen_rows = jax.jit(settings.rows)(sampling, _ints([2, 0]))
    assert chosen_rows.top_k.tolist() == [3, 1]
    assert chosen_rows.bad_words.tolist() == [
      [[-1, -1, 3], [4, 5, 6]],
      [[-1, 1, 2], [-1, -1, -1]],
    ]
    assert chosen_rows.logit_bias.values.tolist() == [[1, -_INF], [0, 0]]

  @pytest.mark.parametrize("sequence", [3, -1, 2**30])
  def test_a_row_without_a_sequence(self, sequence):
    """It is greedy, and nothing else is done to it."""
    sampling = as_sampling(Sampling(**_WIDE), 3)
    row = settings.rows(sampling, _ints([sequence]))
    fields = jax.tree.map(lambda leaf: leaf.reshape(-1).tolist(), row)
    assert vars(fields) == dict(
      stop_strings=None,
      temperature=[0],
      top_k=[0],
      top_p=[1],
      min_p=[0],
      presence_penalty=[0],
      frequency_penalty=[0],
      repetition_penalty=[1],
      min_tokens=[0],
      max_tokens=[2**30],
      stop_tokens=[-1, -1],
      logit_bias=LogitBias(tokens=[-1, -1], values=[0, 0]),
      bad_words=[-1] * 6,
      seed=[-1],
    )

  def test_fields_of_none_stay_none(self):
    chosen_rows = settings.rows(as_sampling(Sampling(top_k=2), 3), _ints([1]))
    assert dataclasses.replace(chosen_rows, top_k=None) == Sampling()

  def test_stop_strings_stay(self):
    sampling = as_sampling(Sampling(stop_strings=_STRINGS), 3)
    assert settings.rows(sampling, _ints([1])).stop_strings is _STRINGS


class TestPut:
  def test_all_fields_are_replaced(self):
    sampling = as_sampling(Sampling(**_WIDE), 3)
    new_rows = settings.rows(sampling, _ints([2, 0]))
    changed = jax.jit(settings.put)(sampling, _ints([0, 1]), new_rows)
    expected = settings.rows(sampling, _ints([2, 0, 2]))
    chex.assert_trees_all_equal(changed, expected)

  def test_fields_left_out_get_neutral_values(self):
    sampling = as_sampling(Sampling(**_WIDE), 3)
    changed = settings.put(sampling, _ints([1]), Sampling())
    row = settings.rows(changed, _ints([1]))
    neutral = settings.rows(sampling, _ints([99]))
    neutral = dataclasses.replace(neutral, temperature=jnp.ones((1,)))
    chex.assert_trees_all_equal(row, neutral)
    unchanged_sequences = _ints([0, 2])
    chex.assert_trees_all_equal(
      settings.rows(changed, unchanged_sequences),
      settings.rows(sampling, unchanged_sequences),
    )

  def test_rows_out_of_range_change_nothing(self):
    sampling = as_sampling(Sampling(**_WIDE), 3)
    new_rows = settings.rows(sampling, _ints([2, 2]))
    changed = settings.put(sampling, _ints([3, -1]), new_rows)
    chex.assert_trees_all_equal(changed, sampling)

  def test_shorter_lists_are_padded(self):
    sampling = as_sampling(Sampling(**_WIDE), 3)
    new = as_sampling(
      Sampling(stop_tokens=[9], bad_words=[[9]], logit_bias={9: 1.0}), 1
    )
    row = settings.rows(settings.put(sampling, _ints([0]), new), _ints([0]))
    assert row.stop_tokens.tolist() == [[9, -1]]
    assert row.bad_words.tolist() == [[[-1, -1, 9], [-1, -1, -1]]]
    assert row.logit_bias.tokens.tolist() == [[9, -1]]
    assert row.logit_bias.values.tolist() == [[1, 0]]

  @pytest.mark.parametrize(
    "new",
    [
      {"stop_tokens": [1, 2, 3]},
      {"logit_bias": {1: 1.0, 2: 1.0, 3: 1.0}},
      {"bad_words": [[1], [2], [3]]},
      {"bad_words": [[1, 2, 3, 4]]},
    ],
  )
  def test_longer_lists_are_refused(self, new):
    sampling = as_sampling(Sampling(**_WIDE), 3)
    message = (
      rf"`sampling.{next(iter(new))}` must have at most \[2.*; pass longer"
    )
    with pytest.raises(ValueError, match=message):
      settings.put(sampling, _ints([0]), as_sampling(Sampling(**new), 1))

  @pytest.mark.parametrize("field", [*_WIDE, "stop_strings"])
  def test_fields_that_are_not_compiled_are_refused(self, field):
    value = _WIDE.get(field, _STRINGS)
    new = as_sampling(Sampling(**{field: value}), 3)
    sequences = _ints([0, 1, 2])
    sampling = as_sampling(Sampling(), 3)
    if field in ("seed", "max_tokens"):
      assert settings.put(sampling, sequences, new) == Sampling()
      return
    message = f"`sampling.{field}` must be None, because it was None in"
    with pytest.raises(ValueError, match=message):
      settings.put(sampling, sequences, new)
