"""Log-probs of tokens, a few rows at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv._src.exact import log_probs


def test_log_probs_are_those_of_log_softmax():
  logits = jax.random.normal(jax.random.key(0), (11, 7)) * 3
  tokens = jnp.arange(11, dtype=jnp.int32) % 7
  temperature = jnp.linspace(0.5, 2, 11, dtype=jnp.float32)
  scores = jax.nn.log_softmax(logits / temperature[:, None])
  expected = scores[jnp.arange(11), tokens]
  out = log_probs.of_tokens(logits, tokens, temperature)
  np.testing.assert_allclose(out, expected, atol=1e-6)


@pytest.mark.parametrize("token", [-1, -7, -8, 7])
def test_tokens_out_of_range_give_nan(token):
  """Numbers below 0 do not count from the end."""
  tokens = jnp.asarray([token, 0], jnp.int32)
  out = log_probs.of_tokens(jnp.zeros((2, 7)), tokens, jnp.ones((2,)))
  assert np.isnan(out[0])
  np.testing.assert_allclose(out[1], -np.log(7), rtol=1e-6)
