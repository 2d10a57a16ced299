"""Advantages, weights, divergences and the loss, against values by hand."""

import math
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import rl

_DRAW = np.random.default_rng(0)
_Q, _T = 6, 5
_ALL = np.ones((_Q, _T), bool)


@pytest.fixture(autouse=True)
def _draws_from_the_start(monkeypatch):
  """Gives each test the same numbers, whichever tests ran before it."""
  monkeypatch.setattr(sys.modules[__name__], "_DRAW", np.random.default_rng(0))


def _log_probs():
  return -_DRAW.exponential(1.0, (_Q, _T)).astype(np.float32)


def _mask():
  mask = np.arange(_T)[None] < np.array([5, 3, 0, 1, 4, 2])[:, None]
  return mask & (np.arange(_T)[None] != 1)


def _batch():
  """Returns log-probs and a mask."""
  return _log_probs(), _mask()


class TestAdvantages:
  def test_group_normalized_by_hand(self):
    rewards = np.array([1.0, 2.0, 6.0, 0.0, 0.0, 0.0])
    advantages = rl.group_normalized(rewards, num_samples=3, eps=0.0)
    deviation = math.sqrt((4 + 1 + 9) / 3)
    expected = [-2 / deviation, -1 / deviation, 3 / deviation]
    np.testing.assert_allclose(advantages[:3], expected, rtol=1e-6)
    assert np.isnan(advantages[3:]).all()  # 0 / 0, which eps prevents
    advantages = rl.group_normalized(rewards, num_samples=3)
    np.testing.assert_array_equal(advantages[3:], 0)
    plain = rl.group_normalized(rewards, num_samples=3, normalized=False)
    np.testing.assert_array_equal(plain, [-2, -1, 3, 0, 0, 0])

  def test_leave_one_out_by_hand(self):
    rewards = np.array([1.0, 2.0, 6.0, 4.0])
    advantages = rl.leave_one_out(rewards, num_samples=4)
    expected = [1 - 12 / 3, 2 - 11 / 3, 6 - 7 / 3, 4 - 9 / 3]
    np.testing.assert_allclose(advantages, expected, rtol=1e-6)

  @pytest.mark.parametrize(
    "advantages", [rl.group_normalized, rl.leave_one_out]
  )
  def test_a_row_for_each_prompt(self, advantages):
    rewards = _DRAW.normal(size=(4, 3)).astype(np.float32)
    mask = np.arange(12).reshape(4, 3) % 5 > 0
    values = advantages(rewards, mask=mask)
    flat = advantages(rewards.ravel(), num_samples=3, mask=mask.ravel())
    np.testing.assert_array_equal(values, flat.reshape(4, 3))
    with pytest.raises(ValueError, match=r"`rewards` must be \[N, 2\]"):
      advantages(rewards, num_samples=2)

  def test_equal_rewards_have_advantages_of_zero(self):
    """The rounding of the mean has no effect."""
    for value, count in ((1000.1, 3), (12345.678, 7), (0.9, 8), (0.1, 10)):
      rewards = np.full(2 * count, value, np.float32)
      for advantages in (rl.group_normalized, rl.leave_one_out):
        values = advantages(rewards, num_samples=count)
        np.testing.assert_array_equal(values, 0)
    mask = np.array([False, True, True])
    rewards = np.array([5.0, 0.1, 0.1])
    values = rl.group_normalized(rewards, num_samples=3, mask=mask)
    np.testing.assert_array_equal(values, 0)

  @pytest.mark.parametrize(
    "advantages", [rl.group_normalized, rl.leave_one_out]
  )
  def test_masked_samples_do_not_count(self, advantages):
    mask = np.array([True, False, True, True, False, False])
    rewards = np.array([1.0, np.nan, 2.0, 5.0, np.nan, np.nan])
    values = np.asarray(advantages(rewards, num_samples=3, mask=mask))
    expected = advantages(np.array([1.0, 2.0]), num_samples=2)
    np.testing.assert_allclose(values[[0, 2]], expected, rtol=1e-6)
    np.testing.assert_array_equal(values[[1, 3, 4, 5]], 0)

  @pytest.mark.parametrize(
    "advantages", [rl.group_normalized, rl.leave_one_out]
  )
  def test_rewards_may_be_bools_and_integers(self, advantages):
    right = np.array([True, False, False, True, True, True])
    expected = advantages(right.astype(np.float32), num_samples=3)
    for rewards in (right, right.astype(np.int32), right.tolist()):
      for num_samples in (3, np.int64(3)):
        values = advantages(rewards, num_samples=num_samples)
        np.testing.assert_array_equal(values, expected)

  @pytest.mark.parametrize(
    ("values", "message"),
    [
      ({"rewards": np.zeros(6, np.complex64)}, "`rewards` .* got complex64"),
      ({"num_samples": True}, "`num_samples` must be an int, got True"),
      ({"num_samples": 3.0}, "`num_samples` must be an int, got 3.0"),
      ({"eps": None}, "`eps` must be a number, got None"),
      ({"rewards": None}, "`rewards` must be an array of numbers, got None"),
      ({"rewards": "abc"}, "`rewards` must be an array of .*, got 'abc'"),
      ({"rewards": [None] * 6}, r"`rewards` must be an array of numbers"),
      ({"mask": "abc"}, "`mask` must be an array of numbers, got 'abc'"),
    ],
  )
  def test_other_types_are_refused(self, values, message):
    arguments = {"rewards": np.zeros(6), "num_samples": 3} | values
    with pytest.raises(TypeError, match=message):
      rl.group_normalized(arguments.pop("rewards"), **arguments)

  @pytest.mark.parametrize(
    ("values", "message"),
    [
      ({"rewards": np.zeros(5)}, "`rewards` must be .*num_samples, 3, got"),
      ({"rewards": np.zeros((2, 4))}, r"`rewards` must be .*got \[2, 4\]"),
      ({"mask": np.ones(5, bool)}, r"`mask` must have the shape \[6\]"),
      ({"rewards": [[1.0], [1.0, 2.0]]}, "`rewards` must be a rectangular"),
      ({"eps": -1}, "`eps` must be finite and at least 0, got -1"),
      ({"eps": np.float32(np.nan)}, "`eps` must be finite and at least 0"),
      ({"eps": np.inf}, "`eps` must be finite and at least 0, got inf"),
    ],
  )
  def test_refused(self, values, message):
    arguments = {"rewards": np.zeros(6), "num_samples": 3} | values
    with pytest.raises(ValueError, match=message):
      rl.group_normalized(arguments.pop("rewards"), **arguments)

  @pytest.mark.parametrize(
    "advantages", [rl.group_normalized, rl.leave_one_out]
  )
  def test_rewards_that_the_host_can_read_are_finite(self, advantages):
    rewards = np.zeros((2, 3), np.float32)
    rewards[1, 2] = np.nan
    message = r"`rewards` must be finite, got nan at \[1, 2\]; leave the sample"
    for values in (rewards, jnp.asarray(rewards), rewards.tolist()):
      with pytest.raises(ValueError, match=message):
        advantages(values)
    with pytest.raises(ValueError, match=r"got -inf at \[4\]"):
      advantages([0.0, 1.0, 2.0, 3.0, -np.inf, 4.0], num_samples=3)
    # Without a value, only the group of the NaN is NaN.
    found = jax.jit(advantages)(rewards)
    np.testing.assert_array_equal(np.isnan(found).any(axis=1), [False, True])
    mask = ~np.isnan(rewards)
    assert np.isfinite(advantages(rewards, mask=mask)).all()


class TestRatios:
  def test_estimators_are_as_defined(self):
    p, q = _log_probs(), _log_probs()
    ratio = np.exp(q.astype(np.float64) - p)
    expected = {
      "k1": -np.log(ratio),
      "k2": np.log(ratio) ** 2 / 2,
      "k3": ratio - 1 - np.log(ratio),
    }
    for name, divergences in expected.items():
      estimates = rl.kl(p, q, estimator=name)
      np.testing.assert_allclose(estimates, divergences, rtol=1e-5, atol=1e-6)
      np.testing.assert_array_equal(rl.kl(p, p, estimator=name), 0)

  def test_mean_estimates_equal_the_kl_divergence(self):
    """Over all tokens of a small distribution; k2 is approximate."""
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.4, 0.2])
    divergence = float(np.sum(p * np.log(p / q)))
    for name, tolerance in (("k1", 1e-7), ("k2", 1e-3), ("k3", 1e-7)):
      estimates = rl.kl(np.log(p)[None], np.log(q)[None], estimator=name)
      mean = float(np.sum(p * np.asarray(estimates)))
      assert abs(mean - divergence) < tolerance

  def test_masked_log_probs_have_no_gradient(self):
    p, mask = _batch()
    p[~mask] = np.nan
    for name in ("k1", "k2", "k3"):
      value, grad = jax.value_and_grad(
        lambda p, name=name: rl.kl(p, p - 1, mask=mask, estimator=name).sum()
      )(jnp.asarray(p))
      assert np.isfinite(value)
      chex.assert_tree_all_finite(grad)

  def test_weights_are_truncated_and_masked(self):
    new, old, mask = _log_probs(), _log_probs(), _mask()
    old[~mask] = -np.inf
    weights = rl.importance_weights(new, old, mask=mask, most=1.5)
    expected = np.minimum(np.exp(new - old), 1.5)
    np.testing.assert_allclose(weights, np.where(mask, expected, 0), rtol=1e-6)
    whole = rl.importance_weights(new, old, mask=mask, most=None)
    assert float(whole.max()) > 1.5

  def test_weights_of_one_policy_are_exactly_one(self):
    new, mask = _batch()
    weights = rl.importance_weights(new, new, mask=mask)
    np.testing.assert_array_equal(weights, mask.astype(np.float32))

  def test_tokens_beyond_the_max_lag_weigh_nothing(self):
    new = _log_probs()
    versions = _DRAW.integers(0, 4, (_Q, _T))
    weights = rl.importance_weights(
      new, new, mask=_ALL, lag=3 - versions, max_lag=1
    )
    expected = (versions >= 2).astype(np.float32)
    np.testing.assert_array_equal(weights, expected)
    for limit in (np.int64(1), jnp.int32(1)):
      weights = rl.importance_weights(
        new, new, mask=_ALL, lag=3 - versions, max_lag=limit
      )
      np.testing.assert_array_equal(weights, expected)
    # A limit may not fit the dtype of lags.
    short = jnp.asarray(3 - versions, jnp.int8)
    for limit, uniform_weight in ((1000, 1), (-1, 0)):
      weights = rl.importance_weights(
        new, new, mask=_ALL, lag=short, max_lag=limit
      )
      np.testing.assert_array_equal(weights, uniform_weight)
    weights = jax.jit(
      lambda most, limit: rl.importance_weights(
        new, new, mask=_ALL, most=most, lag=3 - versions, max_lag=limit
      )
    )(0.5, 1)
    np.testing.assert_array_equal(weights, expected / 2)

  @pytest.mark.parametrize(
    ("values", "error", "message"),
    [
      ({"most": 0.0}, ValueError, "`most` must be positive, got 0.0"),
      ({"most": "a"}, TypeError, "`most` must be a number"),
      (
        {"lag": np.ones((2, 3), int), "max_lag": "a"},
        TypeError,
        "`max_lag` must be an integer scalar, got 'a'",
      ),
      (
        {"lag": np.ones((2, 3), int), "max_lag": 1.5},
        TypeError,
        "`max_lag` must be an integer scalar, got 1.5",
      ),
      ({"max_lag": 1}, ValueError, "given together, got max_lag alone"),
      ({"lag": np.ones((2, 3), int)}, ValueError, "got lag alone"),
      ({"lag": np.ones((2, 3)), "max_lag": 1}, TypeError, "`lag` must be int"),
      ({"mask": np.ones((2, 3), int)}, TypeError, "`mask` must be bool"),
      ({"mask": np.ones(3, bool)}, ValueError, "`mask` must have the shape"),
      ({"lag": np.ones(3, int), "max_lag": 1}, ValueError, "`lag` must have"),
    ],
  )
  def test_refused(self, values, error, message):
    arguments = {"mask": np.ones((2, 3), bool)} | values
    zeros = np.zeros((2, 3), np.float32)
    with pytest.raises(error, match=message):
      rl.importance_weights(zeros, zeros, **arguments)
    with pytest.raises(ValueError, match='`estimator` must be "k1"'):
      rl.kl(zeros, zeros, estimator="k4")
    with pytest.raises(ValueError, match="`other` must have the shape"):
      rl.kl(zeros, zeros[0])

  @pytest.mark.parametrize("value", [None, "abc", [["a"] * 3] * 2, object()])
  def test_other_types_are_refused_by_name(self, value):
    floats, mask = np.zeros((2, 3), np.float32), np.ones((2, 3), bool)
    lag = np.zeros((2, 3), np.int32)
    calls = [
      (rl.kl, {"log_probs": floats, "other": floats}, {"mask": mask}),
      (
        rl.importance_weights,
        {"log_probs": floats, "behavior": floats},
        {"mask": mask, "lag": lag, "max_lag": 1},
      ),
      (
        rl.grpo_loss,
        {
          "log_probs": floats,
          "old": floats,
          "advantages": floats[:, 0],
          "mask": mask,
        },
        {"weights": floats, "reference": floats, "entropy": floats},
      ),
    ]
    for function, required, optional in calls:
      for name in required | ({} if value is None else optional):
        with pytest.raises(
          TypeError, match=f"`{name}` must be (an array of numbers|an integer)"
        ):
          function(**(required | optional | {name: value}))


def _definition(new, old, good, mask, low, high, weights, reference, kl_weight):
  """Losses of tokens, in float64."""
  out = np.zeros((_Q, _T))
  for q, t in zip(*np.nonzero(mask), strict=True):
    ratio = math.exp(float(new[q, t]) - float(old[q, t]))
    bounded = min(max(ratio, 1 - low), 1 + high)
    out[q, t] = -min(ratio * good[q], bounded * good[q]) * weights[q, t]
    away = float(reference[q, t]) - float(new[q, t])
    out[q, t] += kl_weight * (math.exp(away) - 1 - away)
  return out


class TestGrpo:
  @pytest.mark.parametrize("mean", ["sequence", "token", 37])
  def test_the_loss_is_as_defined(self, mean):
    new, old, reference = (_log_probs() for _ in range(3))
    mask, good = _mask(), _DRAW.normal(size=_Q).astype(np.float32)
    weights = _DRAW.uniform(0.5, 2, (_Q, _T)).astype(np.float32)
    tokens = _definition(
      new, old, good, mask, 0.1, 0.3, weights, reference, 0.2
    )
    counts = mask.sum(axis=1)
    expected = {
      "token": tokens.sum() / mask.sum(),
      "sequence": np.mean(
        (tokens.sum(axis=1) / np.maximum(counts, 1))[counts > 0]
      ),
    }.get(mean, tokens.sum() / 37)
    for array in (new, old, weights, reference):
      array[~mask] = np.nan
    loss, metrics = rl.grpo_loss(
      new,
      old,
      good,
      mask,
      clip=(0.1, 0.3),
      weights=weights,
      reference=reference,
      kl_weight=0.2,
      mean=mean,
    )
    assert abs(float(loss) - expected) < 1e-5 * max(1, abs(expected))
    chex.assert_tree_all_finite(metrics)

  def test_clipped_tokens_have_no_gradient(self):
    mask = np.ones((2, 2), bool)
    old = np.log(np.full((2, 2), 0.4, np.float32))
    new = old + np.log(np.array([[2.0, 1.1], [2.0, 0.5]], np.float32))
    good = np.array([1.0, -1.0], np.float32)

    def loss(new):
      return rl.grpo_loss(new, old, good, mask, mean="token")

    grad, metrics = jax.grad(loss, has_aux=True)(jnp.asarray(new))
    # Good and too likely, or bad and too unlikely: nothing to gain any more.
    expected = np.array([[0.0, -1.1], [2.0, 0.0]]) / 4
    np.testing.assert_allclose(grad, expected, rtol=1e-5, atol=1e-7)
    assert float(metrics.clipped) == 0.5

  def test_masked_tokens_have_no_gradient(self):
    new, mask = _batch()
    new[~mask] = np.nan
    grad = jax.grad(
      lambda new: rl.grpo_loss(new, new, jnp.ones(_Q), mask, reference=new)[0]
    )(jnp.asarray(new))
    chex.assert_tree_all_finite(grad)
    np.testing.assert_array_equal(grad != 0, mask)

  def test_equal_log_probs_have_ratios_of_exactly_one(self):
    new, mask = _batch()
    good = _DRAW.normal(size=_Q).astype(np.float32)
    _, metrics = jax.jit(rl.grpo_loss)(new, new, good, mask)
    assert float(metrics.ratio) == 1.0
    assert float(metrics.kl) == 0.0 and float(metrics.clipped) == 0.0

  @pytest.mark.parametrize("away", [100.0, np.inf, -100.0, -np.inf])
  def test_infinite_ratios_of_clipped_tokens_give_no_nan(self, away):
    """A good token that is too likely, and tokens without a weight."""
    new = np.full((3, 1), -1.0, np.float32)
    old, mask = new - np.float32(away), np.ones((3, 1), bool)
    good = np.array([np.sign(away), 0.0, 1.0], np.float32)
    weights = np.array([[1.0], [1.0], [0.0]], np.float32)
    (loss, _), grad = jax.value_and_grad(
      lambda new: rl.grpo_loss(new, old, good, mask, weights=weights),
      has_aux=True,
    )(jnp.asarray(new))
    bound = -1.2 if away > 0 else 0.8
    np.testing.assert_allclose(loss, bound / 3, rtol=1e-6)
    np.testing.assert_array_equal(grad, 0)

  def test_a_lower_clip_of_zero_keeps_the_first_gradient(self):
    new = _log_probs()
    grad = jax.grad(
      lambda x: rl.grpo_loss(x, new, -jnp.ones(_Q), _ALL, clip=(0.0, 0.2))[0]
    )(jnp.asarray(new))
    np.testing.assert_allclose(grad, 1 / (_Q * _T), rtol=1e-6)

  @pytest.mark.parametrize("count", [30, 30.0, np.int64(30), jnp.int32(30)])
  def test_the_sum_may_be_divided_by_a_given_number(self, count):
    new = _log_probs()
    good = _DRAW.normal(size=_Q).astype(np.float32)
    expected, _ = rl.grpo_loss(new, new, good, _ALL, mean="token")
    loss, _ = rl.grpo_loss(new, new, good, _ALL, mean=count)
    traced_loss, _ = jax.jit(
      lambda count: rl.grpo_loss(new, new, good, _ALL, mean=count)
    )(count)
    np.testing.assert_allclose([loss, traced_loss], expected, rtol=1e-6)

  def test_advantages_may_be_given_by_token(self):
    new, mask = _batch()
    good = _DRAW.normal(size=_Q).astype(np.float32)
    spread = np.broadcast_to(good[:, None], mask.shape)
    loss, _ = rl.grpo_loss(new, new, good, mask)
    spread_loss, _ = rl.grpo_loss(new, new, spread, mask)
    assert float(loss) == float(spread_loss)

  def test_the_entropy_bonus_is_subtracted(self):
    """The mean entropy of drawn tokens, subtracted, with its gradient."""
    new, mask = _batch()
    good = _DRAW.normal(size=_Q).astype(np.float32)
    entropy = np.where(mask, _DRAW.exponential(1.0, mask.shape), np.nan)
    entropy = entropy.astype(np.float32)
    plain, _ = rl.grpo_loss(new, new, good, mask, mean="token")

    def loss(entropy):
      return rl.grpo_loss(
        new, new, good, mask, entropy=entropy, entropy_weight=0.3, mean="token"
      )[0]

    value, gradient = jax.value_and_grad(loss)(entropy)
    bonus = 0.3 * np.nansum(entropy) / mask.sum()
    np.testing.assert_allclose(value, plain - bonus, rtol=1e-5)
    expected = np.where(mask, -0.3 / mask.sum(), 0)
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)

  def test_a_batch_without_tokens_has_a_loss_of_zero(self):
    zeros, mask = np.zeros((2, 3), np.float32), np.zeros((2, 3), bool)
    for mean in ("sequence", "token", 3):
      loss, metrics = rl.grpo_loss(zeros, zeros, np.ones(2), mask, mean=mean)
      assert float(loss) == 0.0
      chex.assert_tree_all_finite(metrics)

  @pytest.mark.parametrize(
    ("values", "message"),
    [
      ({"clip": -0.1}, "`clip` must be a number from 0 to 1, .* got -0.1"),
      ({"clip": (0.1, -1.0)}, "`above` at least 0, got .0.1, -1.0"),
      ({"mean": "batch"}, '`mean` must be "sequence"'),
      ({"mean": 0}, '`mean` must be "sequence"'),
      ({"mean": True}, '`mean` must be "sequence"'),
      ({"mean": None}, '`mean` must be "sequence".*got None'),
      ({"clip": (0.1, 0.2, 0.3)}, "`clip` must be"),
      ({"clip": None}, "`clip` must be"),
      ({"clip": True}, "`clip` must be"),
      ({"estimator": "k9"}, '`estimator` must be "k1"'),
      (
        {"log_probs": np.zeros(3, np.float32)},
        r"`log_probs` must be \[Q, T\] or",
      ),
      ({"weights": np.ones(3)}, "`weights` must have the shape"),
      ({"reference": np.ones(3)}, "`reference` must have the shape"),
      ({"advantages": np.ones(3)}, "`advantages` must have the shape"),
      ({"old": np.ones((2, 2))}, "`old` must have the shape"),
    ],
  )
  def test_refused(self, values, message):
    zeros = np.zeros((2, 3), np.float32)
    arguments = {
      "log_probs": zeros,
      "old": zeros,
      "advantages": np.ones(2),
      "mask": np.ones((2, 3), bool),
    } | values
    with pytest.raises(ValueError, match=message):
      rl.grpo_loss(**arguments)

  @pytest.mark.parametrize("wrong", [None, "a", True, np.ones(2)])
  def test_a_kl_weight_of_another_type_is_refused(self, wrong):
    zeros, mask = np.zeros((2, 3), np.float32), np.ones((2, 3), bool)
    with pytest.raises(TypeError, match="`kl_weight` must be a number, got"):
      rl.grpo_loss(zeros, zeros, np.ones(2), mask, kl_weight=wrong)
