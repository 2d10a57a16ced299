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
SIDES = ("k_pages", "v_pages")
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
    pools = [kernels.store(draw(s, *POOL), storage) for s in (0, 1)]
    scales = [jnp.full(POOL[:3], np.nan), jnp.full(POOL[:3], np.nan)]
    new = [draw(s, 5, 2, 8) for s in (2, 3)]
    out = kernels.append_quantized(
      *pools, *scales, *new, **PLACES, page_offset=jnp.int32(4)
    )
    for side in range(2):
      pool, scale = numbers(pools[side]).copy(), np.array(scales[side])
      stored, factors = kernels.quantize(new[side], storage)
      for t in (0, 1, 3, 4):
        page, offset = (
          int(PLACES[name][t]) for name in ("page_ids", "offsets")
        )
        pool[page + 4, :, offset] = numbers(stored[t])
        scale[page + 4, :, offset] = factors[t]
      np.testing.assert_array_equal(numbers(out[side]), pool)
      np.testing.assert_array_equal(out[side + 2], scale)

  @over_storage
  def test_a_scale_per_head(self, storage):
    pool = kernels.store(draw(0, *POOL), storage)
    new = draw(1, 5, 2, 8)
    scale = jnp.asarray([0.5, 2.0])
    k_pages, v_pages = kernels.append_kv(
      pool, pool, new, new, **PLACES, k_scale=scale, v_scale=scale * 2
    )
    for pages, factor in ((k_pages, scale), (v_pages, scale * 2)):
      expected = kernels.store(new[0] / factor[:, None], storage)
      np.testing.assert_array_equal(pages[3, :, 1], expected)

  def test_one_pool_is_written_as_both_pools_are(self):
    pool = draw(0, 12, 1, 4, 24)
    new = draw(1, 5, 1, 24)
    out = kernels.append_pages(pool, new, **PLACES, page_offset=4)
    pools = kernels.append_kv(pool, pool, new, new, **PLACES, page_offset=4)
    np.testing.assert_array_equal(out, pools[0])
    np.testing.assert_array_equal(out[7, 0, 1], new[0, 0])

  @pytest.mark.parametrize("storage", ["int8", "uint8"])
  def test_in_place_in_a_scan(self, storage):
    """float8 dtypes are not in place on a CPU, hence uint8."""
    shape = (512, 2, 16, 32)

    def loop(k_pages, v_pages, k_scale, v_scale):
      def step(carry, index):
        new = jnp.ones((1, 2, 32)) * index.astype(jnp.float32)
        carry = kernels.append_quantized(
          *carry, new, new, index[None], index[None] % 16
        )
        return carry, None

      steps = jnp.arange(8, dtype=jnp.int32)
      pools = (k_pages, v_pages, k_scale, v_scale)
      return lax.scan(step, pools, steps)[0]

    pools = [jnp.zeros(shape, storage) for _ in "kv"]
    pools += [jnp.zeros(shape[:3]) for _ in "kv"]
    compiled = jax.jit(loop, donate_argnums=(0, 1, 2, 3)).lower(*pools)
    assert_in_place(compiled.compile(), pools)

  @pytest.mark.parametrize(
    ("changes", "message"),
    [
      ({"k_scale": jnp.ones(2)}, r"`k_scale` .* got float32\[2\]"),
      (
        {"v_scale": jnp.ones(POOL[:3], jnp.bfloat16)},
        "`v_scale` must be .* got bfloat16",
      ),
      (
        {"k_pages": jnp.ones(POOL)},
        "`v_pages` must be float32, the dtype of k_p",
      ),
      (dict.fromkeys(SIDES, jnp.ones(POOL)), "to have scales"),
      ({"k_new": jnp.ones((5, 2, 7))}, "`k_new` must be .* got float32"),
    ],
  )
  def test_bad_arguments(self, changes, message):
    pool, new = jnp.ones(POOL, jnp.int8), jnp.ones((5, 2, 8))
    scale = jnp.ones(POOL[:3])
    call = {
      "k_pages": pool,
      "v_pages": pool,
      "k_scale": scale,
      "v_scale": scale,
      "k_new": new,
      "v_new": new,
      **changes,
    }
    with pytest.raises((TypeError, ValueError), match=message):
      kernels.append_quantized(**call, **PLACES)

  def test_bad_scale_per_head(self):
    pool, new = jnp.ones(POOL, jnp.int8), jnp.ones((5, 2, 8))
    with pytest.raises(ValueError, match=r"`v_scale` .* got float32\[3\]"):
      kernels.append_kv(
        pool,
        pool,
        new,
        new,
        **PLACES,
        k_scale=jnp.ones(2),
        v_scale=jnp.ones(3),
      )
