"""From logits to a token and its log-probability."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import rollout

_LOGITS = jnp.asarray([[0.0, 1.0, 3.0, -2.0], [5.0, 5.0, 1.0, 0.0]])


def _keys(count, seed=0):
  key = jax.random.key(seed)
  numbers = jnp.arange(count, dtype=jnp.int32)
  return jax.vmap(lambda number: jax.random.fold_in(key, number))(numbers)


def _sample(temperature, logits=_LOGITS, counts=None, keys=None):
  rows = logits.shape[0]
  counts = jnp.zeros((rows,), jnp.int32) if counts is None else counts
  keys = _keys(rows) if keys is None else keys
  return rollout.sample(keys, counts, logits, jnp.float32(temperature))


class TestGreedy:
  def test_takes_the_best_and_the_first_of_equals(self):
    tokens, log_probs = _sample(0.0)
    assert tokens.tolist() == [2, 0]
    expected = jax.nn.log_softmax(_LOGITS)[jnp.arange(2), tokens]
    np.testing.assert_allclose(log_probs, expected, rtol=1e-6)

  @pytest.mark.parametrize("temperature", [1.2e-38, 1e-30, 1e-6])
  def test_a_low_temperature_takes_the_best(self, temperature):
    """Nothing overflows: the best two of the second row stay equal."""
    logits = jnp.asarray([[0.0, 80.0, 3.0], [80.0, 80.0, 1.0]])
    tokens, log_probs = _sample(temperature, logits)
    assert int(tokens[0]) == 1 and int(tokens[1]) in (0, 1)
    np.testing.assert_allclose(log_probs, [0, -np.log(2)], rtol=1e-6)

  def test_the_highest_temperature_is_uniform(self):
    tokens, log_probs = _sample(3e38)
    assert max(tokens.tolist()) < 4
    np.testing.assert_allclose(log_probs, -np.log(4), rtol=1e-6)


class TestDraws:
  def test_frequencies_are_those_of_the_softmax(self):
    count = 20_000
    logits = jnp.broadcast_to(_LOGITS[:1], (count, 4))
    tokens, log_probs = _sample(2.0, logits)
    expected = np.asarray(jax.nn.softmax(_LOGITS[0] / 2))
    found = np.bincount(np.asarray(tokens), minlength=4) / count
    # Five standard deviations of a share.
    np.testing.assert_allclose(found, expected, atol=5 * 0.5 / count**0.5)
    np.testing.assert_allclose(
      log_probs, np.log(expected)[np.asarray(tokens)], rtol=1e-5
    )

  def test_a_draw_depends_on_key_and_count_alone(self):
    logits, keys = jnp.zeros((6, 50)), _keys(6)
    counts = jnp.arange(6, dtype=jnp.int32)
    tokens, _ = _sample(1.0, logits, counts, keys)
    order = jnp.asarray([4, 0, 5])
    some, _ = _sample(1.0, logits[order], counts[order], keys[order])
    assert some.tolist() == tokens[order].tolist()
    later, _ = _sample(1.0, logits, counts + 1, keys)
    others, _ = _sample(1.0, logits, counts, _keys(6, seed=1))
    assert tokens.tolist() != later.tolist()
    assert tokens.tolist() != others.tolist()

  @pytest.mark.parametrize("size", [1, 2, 3, 100, 513])
  def test_every_token_is_drawn_as_often_as_its_probability(self, size):
    """Whatever the size of the vocabulary: blocks may be padded."""
    count = 400 * size
    weights = np.random.default_rng(size).integers(0, 4, size)
    weights[-1] = 2
    logits = jnp.log(jnp.asarray(weights, jnp.float32))
    rows = jnp.broadcast_to(logits[None], (count, size))
    tokens, log_probs = _sample(1.0, rows)
    expected = weights / weights.sum()
    found = np.bincount(np.asarray(tokens), minlength=size)
    assert len(found) == size
    assert not np.any(found[weights == 0])
    spread = (count * expected * (1 - expected)) ** 0.5
    assert np.all(np.abs(found - count * expected) <= 6 * spread)
    np.testing.assert_allclose(
      log_probs, np.log(expected[np.asarray(tokens)]), rtol=1e-4, atol=1e-6
    )

  def test_masked_tokens_are_never_drawn(self):
    logits = jnp.where(jnp.arange(4) == 1, 0.0, -jnp.inf)[None]
    tokens, log_probs = _sample(1.0, jnp.repeat(logits, 100, axis=0))
    assert set(tokens.tolist()) == {1}
    np.testing.assert_array_equal(log_probs, 0)
