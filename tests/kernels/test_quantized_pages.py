"""Pools of 8-bit numbers: rounding, scales, and writing both."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import jaxkv_kernels as kernels
from tests.tools.pool_copies import assert_in_place

POOL = (12, 2, 4, 8)
# Storage dtype: (format, largest number, half a step relative to 1).
FORMATS = {
  "int8": (np.int8, 127.0, 0.5 / 127),
  "float8_e4m3fn": (ml_dtypes.float8_e4m3fn, 448.0, 2**-4),
  "uint8": (ml_dtypes.float8_e4m3fn, 448.0, 2**-4),
  "float8_e5m2": (ml_dtypes.float8_e5m2, 57344.0, 2**-3),
}
PLACES = {
  "page_ids": jnp.asarray([3, 0, 12, 2, 1], jnp.int32),  # 12: out of range
  "offsets": jnp.asarray([1, 0, 3, 2, 2], jnp.int32),
}
over_storage = pytest.mark.parametrize("storage", FORMATS)


def numbers(pages):
  """A pool as float64, without its scales."""
  pages = np.asarray(pages)
  if pages.dtype == np.uint8:
    pages = pages.view(ml_dtypes.float8_e4m3fn)
  return pages.astype(np.float64)


def draw(seed, *shape):
  values = np.random.default_rng(seed).standard_normal(shape)
  return jnp.asarray(values, jnp.float32)


def append_quantized(pages, scales, new, *places, **keywords):
  """Appends tokens and their scales; returns both pools."""
  stored, factors = kernels.quantize(new, pages.dtype)
  return (
    kernels.append_pages(pages, stored, *places, **keywords),
    kernels.append_pages(scales, factors, *places, **keywords),
  )


class TestStore:
  @over_storage
  def test_rounds_to_nearest_and_saturates(self, storage):
    dtype, largest, _ = FORMATS[storage]
    values = np.array([0.0, -1.0, 2.5, 3.5, 1e9, -1e9, np.inf], np.float32)
    expected = np.clip(values, -largest, largest)
    expected = np.round(expected) if dtype is np.int8 else expected
    stored = kernels.store(jnp.asarray(values), storage)
    assert stored.dtype == storage
    expected = expected.astype(dtype).astype(np.float64)
    np.testing.assert_array_equal(numbers(stored), expected)
    loaded = kernels.load(stored)
    assert loaded.dtype == kernels.logical_dtype(storage)
    np.testing.assert_array_equal(numbers(loaded), numbers(stored))


class TestQuantize:
  @over_storage
  def test_error_is_half_a_step(self, storage):
    values = draw(0, 50, 16) * jnp.exp(draw(1, 50, 1) * 5)
    stored, scale = kernels.quantize(values, storage)
    assert scale.dtype == jnp.float32
    back = numbers(stored) * np.asarray(scale)[:, None]
    largest = np.abs(values).max(axis=1, keepdims=True)
    assert (np.abs(back - values) <= largest * FORMATS[storage][2] * 1.01).all()
    back_largest = np.abs(back).max(axis=1, keepdims=True)
    np.testing.assert_allclose(back_largest, largest, rtol=1e-6)

  @over_storage
  def test_zeros_stay_zeros(self, storage):
    stored, scale = kernels.quantize(jnp.zeros((3, 4)), storage)
    np.testing.assert_array_equal(numbers(stored), 0)
    np.testing.assert_array_equal(scale, 1)

  @over_storage
  @pytest.mark.parametrize("value", [1e-35, 1e-37, 3e-38])
  def test_tiny_numbers_stay_numbers(self, storage, value):
    """If largest / 448 is subnormal, numbers lose digits but not all."""
    values = np.array([value, 0, -value / 2], np.float32)
    stored, scale = kernels.quantize(jnp.asarray(values), storage)
    assert scale >= np.finfo(np.float32).tiny
    back = numbers(stored) * float(scale)
    step = max(value * FORMATS[storage][2], np.finfo(np.float32).tiny)
    np.testing.assert_allclose(back, values, rtol=0, atol=step)

  @over_storage
  @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
  def test_non_finite_numbers_are_not_hidden(self, storage, bad):
    values = jnp.asarray([[1.0, bad, 2.0], [1.0, 3.0, 2.0]])
    _, scale = kernels.quantize(values, storage)
    assert np.isnan(scale).tolist() == [True, False]

  def test_formats_without_scales(self):
    with pytest.raises(TypeError, match="to have scales"):
      kernels.quantize(jnp.ones((3, 4)), "uint16")


class TestAppend:
  @over_storage
  def test_a_scale_per_token_and_head(self, storage):
    pool = kernels.store(draw(0, *POOL), storage)
    scale = jnp.full(POOL[:3], np.nan)
    new = draw(2, 5, 2, 8)
    out, out_scale = append_quantized(
      pool, scale, new, **PLACES, page_offset=jnp.int32(4)
    )
    expected = numbers(pool).copy()
    expected_scale = np.array(scale)
    stored, factors = kernels.quantize(new, storage)
    for t in (0, 1, 3, 4):
      page, offset = (int(PLACES[name][t]) for name in ("page_ids", "offsets"))
      expected[page + 4, :, offset] = numbers(stored[t])
      expected_scale[page + 4, :, offset] = factors[t]
    np.testing.assert_array_equal(numbers(out), expected)
    np.testing.assert_array_equal(out_scale, expected_scale)

  @over_storage
  def test_a_scale_per_head(self, storage):
    pool = kernels.store(draw(0, *POOL), storage)
    new = draw(1, 5, 2, 8)
    scale = jnp.asarray([0.5, 2.0])
    pages = kernels.append_pages(pool, new, **PLACES, scale=scale)
    expected = kernels.store(new[0] / scale[:, None], storage)
    np.testing.assert_array_equal(pages[3, :, 1], expected)

  @pytest.mark.parametrize("storage", ["int8", "uint8"])
  def test_in_place_in_a_scan(self, storage):
    """float8 dtypes are not in place on a CPU, hence uint8."""
    shape = (512, 2, 16, 32)

    def loop(pages, scale):
      def step(carry, index):
        new = jnp.ones((1, 2, 32)) * index.astype(jnp.float32)
        return append_quantized(
          *carry, new, index[None], index[None] % 16
        ), None

      steps = jnp.arange(8, dtype=jnp.int32)
      return lax.scan(step, (pages, scale), steps)[0]

    pools = [jnp.zeros(shape, storage), jnp.zeros(shape[:3])]
    compiled = jax.jit(loop, donate_argnums=(0, 1)).lower(*pools)
    assert_in_place(compiled.compile(), pools)

  @pytest.mark.parametrize(
    ("scale", "message"),
    [
      (jnp.ones(3), r"`scale` .* got float32\[3\]; .* `quantize`"),
      (jnp.ones(POOL[:3]), r"`scale` must be float32\[2\]"),
      (jnp.ones(2, jnp.bfloat16), r"`scale` must be .* got bfloat16"),
    ],
  )
  def test_bad_scale_per_head(self, scale, message):
    pool, new = jnp.ones(POOL, jnp.int8), jnp.ones((5, 2, 8))
    with pytest.raises((TypeError, ValueError), match=message):
      kernels.append_pages(pool, new, **PLACES, scale=scale)
