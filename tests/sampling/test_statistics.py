"""Statistics of the model's own distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv._src.sampling.statistics import most_likely
from jaxkv._src.sampling.statistics import observe

_compiled = jax.jit(most_likely, static_argnums=1)


class TestMostLikely:
  def test_by_hand(self):
    """Equal logits are ordered by token, in one block or in two."""
    logits = jnp.asarray([[1.0, 3.0, 2.0, 3.0, 3.0, 0.0, 2.0]])
    tokens, values = most_likely(logits, 6)
    assert tokens.tolist() == [[1, 3, 4, 2, 6, 0]]
    assert values.tolist() == [[3, 3, 3, 2, 2, 1]]

  @pytest.mark.parametrize("vocab_size", [1, 2, 5, 33, 513, 5000])
  @pytest.mark.parametrize("rounded", [False, True])
  def test_order_is_that_of_a_stable_sort(self, vocab_size, rounded):
    logits = np.random.default_rng(vocab_size).normal(size=(20, vocab_size)) * 2
    logits = (np.round(logits) if rounded else logits).astype(np.float32)
    count = min(vocab_size, 20)
    tokens, values = _compiled(jnp.asarray(logits), count)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :count]
    np.testing.assert_array_equal(tokens, order)
    np.testing.assert_array_equal(
      values, np.take_along_axis(logits, order, axis=1)
    )

  def test_fewer_possible_tokens_than_requested(self):
    logits = jnp.where(jnp.arange(30) % 10 == 4, 1.0, -jnp.inf)[None]
    tokens, values = _compiled(logits, 6)
    assert tokens[0, :3].tolist() == [4, 14, 24]
    assert values[0].tolist() == [1, 1, 1] + [-np.inf] * 3
    assert 0 <= int(tokens.min()) and int(tokens.max()) < 30

  def test_tokens_of_a_row_of_nan_are_in_range(self):
    tokens, _ = _compiled(jnp.full((1, 30), jnp.nan), 3)
    assert 0 <= int(tokens.min()) and int(tokens.max()) < 30

  def test_more_tokens_than_the_vocabulary_are_refused(self):
    message = "`top_log_probs` must be at most 3, the size of the vocabulary"
    with pytest.raises(ValueError, match=message):
      most_likely(jnp.zeros((1, 3)), 4)


class TestObserve:
  @pytest.mark.parametrize("vocab_size", [1, 2, 50, 513])
  def test_records_are_as_defined(self, vocab_size):
    rng = np.random.default_rng(vocab_size)
    logits = rng.normal(size=(8, vocab_size)) * 4 + 100
    logits[:, vocab_size // 2 + 1 :: 3] = -np.inf
    tokens = np.random.default_rng(1).integers(0, vocab_size // 2 + 1, 8)
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares = shares / shares.sum(axis=1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
      scores = np.log(shares)
      nats = -np.where(shares > 0, shares * scores, 0).sum(axis=1)
    records = observe(
      jnp.asarray(logits, jnp.float32),
      jnp.asarray(tokens, jnp.int32),
      jnp.zeros((8,)),
      entropy=True,
      top_log_probs=1,
    )
    np.testing.assert_allclose(
      records.raw_log_probs, scores[np.arange(8), tokens], atol=1e-4
    )
    np.testing.assert_allclose(records.entropy, nats, atol=1e-4)
    np.testing.assert_allclose(
      records.top_log_probs[:, 0], scores.max(axis=1), atol=1e-4
    )

  def test_one_token_is_certain(self):
    logits = jnp.asarray([[-jnp.inf, 3.0, -jnp.inf]])
    token = jnp.ones((1,), jnp.int32)
    score = jnp.full((1,), jnp.nan)
    records = observe(logits, token, score, entropy=True, top_log_probs=0)
    assert records.raw_log_probs.tolist() == records.entropy.tolist() == [0]
    assert records.top_tokens is None
