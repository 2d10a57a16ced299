"""Filters of the tokens that may be drawn: top-k, top-p and min-p."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv._src.sampling import filters
from tests.sampling import by_definition
from tests.sampling.by_definition import Row

_WEIGHTS = [0.125, 1.0, 0.25, 0.5, 0.25]


def _kept(weights=_WEIGHTS, **options) -> list[int]:
  """Returns the tokens of one row that may be drawn."""
  cast = {"top_k": jnp.int32}
  options = {
    name: jnp.asarray([value], cast.get(name, jnp.float32))
    for name, value in options.items()
  }
  cutoff = filters.cutoff(jnp.asarray([weights], jnp.float32), **options)
  return np.flatnonzero(np.asarray(weights) >= np.asarray(cutoff)).tolist()


_ALL = list(range(len(_WEIGHTS)))


class TestByHand:
  @pytest.mark.parametrize(
    ("top_k", "tokens"),
    [
      (1, [1]),
      (2, [1, 3]),
      (3, [1, 2, 3, 4]),  # Two tokens are third.
      (4, [1, 2, 3, 4]),
      (5, _ALL),
      (6, _ALL),
      (2**31 - 1, _ALL),
      (0, _ALL),
      (-1, _ALL),
    ],
  )
  def test_top_k(self, top_k, tokens):
    assert _kept(top_k=top_k) == tokens

  @pytest.mark.parametrize(
    ("top_p", "tokens"),
    [
      # Of 2.125 in all.
      (1e-6, [1]),
      (0.47, [1]),
      (0.471, [1, 3]),
      (0.705, [1, 3]),
      (0.706, [1, 2, 3, 4]),
      (0.94, [1, 2, 3, 4]),
      (0.942, _ALL),
      (0.99, _ALL),
      (1.0, _ALL),
    ],
  )
  def test_top_p(self, top_p, tokens):
    assert _kept(top_p=top_p) == tokens

  @pytest.mark.parametrize(
    ("min_p", "tokens"),
    [
      (0.0, _ALL),
      (0.125, _ALL),
      (0.126, [1, 2, 3, 4]),
      (0.25, [1, 2, 3, 4]),
      (0.4, [1, 3]),
      (1.0, [1]),
    ],
  )
  def test_min_p(self, min_p, tokens):
    assert _kept(min_p=min_p) == tokens

  def test_top_p_is_a_share_of_the_tokens_that_top_k_keeps(self):
    """Of 1.5 and not of 2.125."""
    assert _kept(top_p=0.6) == [1, 3]
    assert _kept(top_p=0.6, top_k=2) == [1]

  def test_top_p_is_a_share_of_the_tokens_that_min_p_keeps(self):
    assert _kept(top_p=0.6, min_p=0.3) == [1]

  def test_the_strictest_filter_decides(self):
    assert _kept(top_k=1, min_p=0.1) == [1]
    assert _kept(top_k=3, min_p=0.3) == [1, 3]
    assert _kept(top_p=0.99, top_k=2) == [1, 3]

  def test_equal_weights_are_all_kept(self):
    for options in ({"top_k": 2}, {"top_p": 0.1}, {"min_p": 1.0}):
      assert _kept([1.0] * 7, **options) == list(range(7))

  def test_no_filter_keeps_all_tokens(self):
    assert filters.cutoff(jnp.ones((1, 3))).tolist() == [0]

  def test_weights_that_differ_in_the_last_bit_are_ordered(self):
    next_float = float(np.nextafter(np.float32(0.5), np.float32(1)))
    assert _kept([0.5, 1.0, next_float], top_k=2) == [1, 2]

  def test_weights_of_zero_are_not_counted(self):
    """Tokens of weight 0 are never drawn and do not count for top-k."""
    assert 1 in _kept([0.0, 1.0, 0.0, 1e-38], top_k=3)
    assert _kept([0.0, 1.0, 0.0, 0.0], top_p=0.999) == [1]

  def test_a_vocabulary_of_one_token(self):
    for options in ({"top_k": 1}, {"top_p": 0.1}, {"min_p": 1.0}):
      assert _kept([1.0], **options) == [0]

  @pytest.mark.parametrize("weight", [np.nan, 0.0])
  def test_a_row_without_a_distribution_does_not_change_others(self, weight):
    weights = jnp.asarray([[weight] * 5, _WEIGHTS], jnp.float32)
    cutoff = jax.jit(filters.cutoff)(
      weights,
      top_k=jnp.asarray([2, 2], jnp.int32),
      top_p=jnp.asarray([0.5, 0.9]),
    )
    assert (weights[1] >= cutoff[1]).tolist() == [
      False,
      True,
      False,
      True,
      False,
    ]


_numbers = st.fixed_dictionaries(
  {
    "top_k": st.integers(-1, 12) | st.just(10**6),
    "top_p": st.integers(1, 1000).map(lambda number: number / 1000),
    "min_p": st.integers(0, 1000).map(lambda number: (number / 1000) ** 3),
  }
)


def _is_near(logits: np.ndarray, row: Row) -> bool:
  """Returns true if rounding may decide whether a token is kept."""
  scaled = np.sort(np.exp(logits - logits.max()))[::-1]
  shares = by_definition.weights(logits, Row(top_k=row.top_k, min_p=row.min_p))
  sums = np.cumsum(np.sort(shares)[::-1]) / shares.sum()
  return bool(
    np.any(np.abs(scaled - row.min_p) < 1e-6)
    or np.any(np.abs(sums - np.float32(row.top_p)) < 1e-6)
  )


class TestAgainstTheDefinition:
  @pytest.mark.slow
  @given(
    st.lists(_numbers, min_size=4, max_size=4),
    st.sampled_from([1, 2, 5, 33, 300]),
    st.sampled_from([0.2, 1.0, 4.0, 12.0]),
    st.booleans(),
    st.integers(0, 2**32 - 1),
  )
  def test_rows_of_a_batch_are_filtered_independently(
    self, settings, size, spread, rounded, seed
  ):
    logits = np.random.default_rng(seed).normal(size=(4, size)) * spread
    logits = np.round(logits) if rounded else logits.astype(np.float32)
    logits = logits.astype(np.float64)
    best = logits.max(axis=1, keepdims=True)
    weights = jnp.asarray(np.exp(logits - best), jnp.float32)
    options = {
      "top_k": jnp.asarray([row["top_k"] for row in settings], jnp.int32),
      "top_p": jnp.asarray([row["top_p"] for row in settings], jnp.float32),
      "min_p": jnp.asarray([row["min_p"] for row in settings], jnp.float32),
    }
    cutoff = _compiled(weights, **options)
    for i, values in enumerate(settings):
      row = Row(**values)
      kept_mask = np.asarray(weights[i] >= cutoff[i])
      row_options = {name: array[i : i + 1] for name, array in options.items()}
      row_cutoff = _compiled(weights[i : i + 1], **row_options)
      assert (np.asarray(weights[i] >= row_cutoff[0]) == kept_mask).all()
      if not _is_near(logits[i], row):
        expected = by_definition.weights(logits[i], row) > 0
        # Weights below float32 are not drawn in any case.
        is_positive = np.asarray(weights[i]) > 0
        np.testing.assert_array_equal(
          kept_mask & is_positive, expected & is_positive
        )


_compiled = jax.jit(filters.cutoff)


@pytest.mark.slow
class TestTrips:
  """The search ends, and soon."""

  def _trips(self, monkeypatch, logits, **options) -> int:
    """The most trips of a search."""
    counts = []

    def counted(condition, body, loop):
      counts.append(0)
      while bool(condition(loop)):
        assert counts[-1] < 100
        counts[-1] += 1
        loop = body(loop)
      return loop

    weights = jnp.exp(logits - logits.max(axis=1, keepdims=True))
    with monkeypatch.context() as patch:
      patch.setattr(filters.lax, "while_loop", counted)
      patch.setattr(filters.lax, "cond", lambda which, yes, no: yes())
      filters.cutoff(weights.astype(jnp.float32), **options)
    return max(counts)

  @pytest.mark.parametrize("spread", [0.5, 3.0, 20.0])
  def test_normal_logits_need_few_trips(self, monkeypatch, spread):
    logits = np.random.default_rng(7).normal(size=(64, 513)) * spread
    top_ks = jnp.asarray(np.linspace(1, 500, 64), jnp.int32)
    top_ps = jnp.linspace(0.05, 0.999, 64)
    assert self._trips(monkeypatch, logits, top_k=top_ks) <= 12
    assert self._trips(monkeypatch, logits, top_p=top_ps) <= 14

  def test_equal_logits_need_few_trips(self, monkeypatch):
    """Nothing lies between them, down to the last bit."""
    logits = np.round(np.random.default_rng(8).normal(size=(64, 513)) * 4) / 4
    k = jnp.full((64,), 50, jnp.int32)
    p = jnp.full((64,), 0.9)
    assert self._trips(monkeypatch, logits, top_k=k, top_p=p) <= 18

  def test_masked_logits_need_few_trips(self, monkeypatch):
    """A grammar may leave fewer tokens than top-k."""
    logits = np.where(np.arange(513) < 3, 0.0, -np.inf)[None]
    k = jnp.full((1,), 50, jnp.int32)
    p = jnp.full((1,), 0.9999)
    assert self._trips(monkeypatch, logits, top_k=k) == 1
    assert self._trips(monkeypatch, logits, top_p=p) <= 16

  def test_rows_without_a_distribution_end(self, monkeypatch):
    options = {
      "top_k": jnp.full((1,), 2, jnp.int32),
      "top_p": jnp.full((1,), 0.5),
    }
    for value in (-np.inf, np.nan):
      logits = np.full((1, 5), value)
      with np.errstate(invalid="ignore"):
        assert self._trips(monkeypatch, logits, **options) < 100


class TestTheLargest:
  """A vocabulary as models have it."""

  @pytest.mark.parametrize("spread", [1.0, 5.0])
  def test_kept_tokens_of_a_large_vocabulary(self, spread):
    vocab_size = 50_257
    logits = np.random.default_rng(3).normal(size=(3, vocab_size)) * spread
    logits = logits.astype(np.float32).astype(np.float64)
    best = logits.max(axis=1, keepdims=True)
    weights = jnp.asarray(np.exp(logits - best), jnp.float32)
    rows = [Row(top_k=50), Row(top_p=0.9), Row(top_k=1000, top_p=0.5)]
    cutoff = _compiled(
      weights,
      top_k=jnp.asarray([row.top_k for row in rows], jnp.int32),
      top_p=jnp.asarray([row.top_p for row in rows], jnp.float32),
    )
    for i, row in enumerate(rows):
      kept_mask = np.asarray(weights[i] >= cutoff[i])
      expected = by_definition.weights(logits[i], row) > 0
      # At most a token at the edge: together they have 1e-6 or less.
      wrong = np.exp(logits[i] - best[i])[kept_mask != expected].sum()
      assert wrong <= 1e-6 * np.exp(logits[i] - best[i]).sum()

  def test_rows_in_several_parts_have_equal_cutoffs(self, monkeypatch):
    """A CPU filters as many rows at a time as its cache holds."""
    rng = np.random.default_rng(4)
    logits = rng.normal(size=(23, 300)).astype(np.float32) * 3
    weights = jnp.exp(logits - logits.max(axis=1, keepdims=True))
    options = {
      "top_k": jnp.asarray(rng.integers(-1, 40, 23), jnp.int32),
      "top_p": jnp.asarray(rng.choice([0.5, 0.9, 1.0], 23), jnp.float32),
    }
    for num_cached_elements in (1, 1000):
      monkeypatch.setattr(filters, "_IN_CACHE", num_cached_elements)
      # A new function: the other one is traced already.
      parts = jax.jit(lambda *some, **more: filters.cutoff(*some, **more))
      for left_out in ("", "top_k"):
        filter_options = {
          name: options[name] for name in options if name != left_out
        }
        kept_mask = weights >= parts(weights, **filter_options)[:, None]
        expected = weights >= _compiled(weights, **filter_options)[:, None]
        np.testing.assert_array_equal(kept_mask, expected)
