"""Sets of tokens, a bit each."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st

from jaxkv._src.guides.bitmask import mask_logits
from jaxkv._src.guides.bitmask import pack_bits


class TestPackBits:
  def test_token_33_is_bit_1_of_word_1(self):
    allowed = np.zeros(40, bool)
    allowed[[0, 5, 31, 33]] = True
    words = pack_bits(allowed)
    assert words.tolist() == [1 + 2**5 + 2**31, 2]
    assert words.dtype == jnp.uint32

  @pytest.mark.parametrize("size", [1, 31, 32, 33, 64, 100])
  def test_what_is_past_the_last_token_is_0(self, size):
    words = pack_bits(jnp.ones((2, 3, size), bool))
    assert words.shape == (2, 3, -(-size // 32))
    ones = sum(int(word).bit_count() for word in words[0, 0].tolist())
    assert ones == size

  def test_no_bools(self):
    with pytest.raises(TypeError, match="`allowed` must hold True and False"):
      pack_bits(jnp.ones((4,), jnp.int32))

  def test_a_scalar(self):
    with pytest.raises(ValueError, match=r"the shape \[..., V\], got a scalar"):
      pack_bits(jnp.asarray(True))


@settings(max_examples=20)
@given(st.sampled_from([1, 31, 32, 33, 70]), st.integers(0, 2**32 - 1))
def test_only_what_is_allowed_stays(size, seed):
  random = np.random.default_rng(seed)
  allowed = random.random((3, size)) < 0.5
  logits = random.normal(size=(3, size)).astype(np.float32)
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
      found = jax.jit(masked)(logits, allowed)
      assert found.dtype == jnp.float32
      np.testing.assert_array_equal(found, expected)

  @pytest.mark.parametrize(
    ("logits", "bits", "error", "message"),
    [
      (jnp.ones((1, 4), jnp.int32), None, TypeError, "must be floats"),
      (None, jnp.ones((1, 2), jnp.int32), TypeError, "must be uint32, got int"),
      (None, jnp.ones((1, 1), jnp.uint32), ValueError, r"shape \[1, 2\]"),
      (None, jnp.ones((2,), jnp.uint32), ValueError, r"got \[2\]"),
    ],
  )
  def test_wrong_arguments(self, logits, bits, error, message):
    logits = jnp.ones((1, 33)) if logits is None else logits
    bits = jnp.ones((1, 2), jnp.uint32) if bits is None else bits
    with pytest.raises(error, match=message):
      mask_logits(logits, bits)
