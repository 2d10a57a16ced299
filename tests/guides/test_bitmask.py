"""Sets of tokens, a bit each."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from jaxkv._src.guides.bitmask import mask_logits


def pack_bits(allowed):
  """uint32[..., ceil(V / 32)] of bool[..., V]."""
  *lead, vocab_size = allowed.shape
  num_padding = -vocab_size % 32
  bits = jnp.pad(allowed, [(0, 0)] * len(lead) + [(0, num_padding)])
  bits = jnp.packbits(bits, axis=-1, bitorder="little")
  words = bits.reshape(*lead, (vocab_size + num_padding) // 32, 4)
  return jax.lax.bitcast_convert_type(words, jnp.uint32)


@settings(max_examples=20)
@given(st.sampled_from([1, 31, 32, 33, 70]), st.integers(0, 2**32 - 1))
def test_logits_of_forbidden_tokens_are_minus_infinity(vocab_size, seed):
  random = np.random.default_rng(seed)
  allowed = random.random((3, vocab_size)) < 0.5
  logits = random.normal(size=(3, vocab_size)).astype(np.float32)
  masked = mask_logits(jnp.asarray(logits), pack_bits(allowed))
  np.testing.assert_array_equal(masked, np.where(allowed, logits, -np.inf))


class TestMaskLogits:
  @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
  def test_the_width_stays(self, dtype):
    logits = jnp.full((1, 3), jnp.nan, dtype)
    bits = pack_bits(jnp.asarray([[False, True, False]]))
    masked = mask_logits(logits, bits)
    assert masked.dtype == dtype
    assert masked[0, 0] == -jnp.inf and jnp.isnan(masked[0, 1])

  def test_transformed(self):
    """Under jit, vmap and x64."""
    logits = jnp.arange(40, dtype=jnp.float32).reshape(1, 40) + 1
    allowed = jnp.arange(40).reshape(1, 40) % 3 == 0
    expected = jnp.where(allowed, logits, -jnp.inf)

    def masked(logits, allowed):
      return mask_logits(logits, pack_bits(allowed))

    np.testing.assert_array_equal(jax.jit(masked)(logits, allowed), expected)
    np.testing.assert_array_equal(jax.vmap(masked)(logits, allowed), expected)
    with jax.enable_x64(True):
      out = jax.jit(masked)(logits, allowed)
      assert out.dtype == jnp.float32
      np.testing.assert_array_equal(out, expected)

  def test_token_33_is_bit_1_of_word_1(self):
    bits = jnp.asarray([[1 + 2**5 + 2**31, 2]], jnp.uint32)
    masked = mask_logits(jnp.ones((1, 40)), bits)
    assert np.flatnonzero(masked[0] == 1).tolist() == [0, 5, 31, 33]
