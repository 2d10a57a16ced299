"""Appending tokens to pages, copying pages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv_kernels as kernels
from tests.kernels.shapes import BF16

POOL = (12, 2, 4, 8)  # L * N = 3 * 4
STORAGE = ["float32", "float16", "uint16"]


def numbers(pages):
  """A pool as float64."""
  pages = np.asarray(pages)
  return pages.view(BF16 if pages.dtype == np.uint16 else pages.dtype).astype(
    np.float64
  )


def random_pool(storage, seed=0, shape=POOL):
  """A pool of normal draws."""
  values = np.random.default_rng(seed).standard_normal(shape)
  return kernels.store(jnp.asarray(values, jnp.float32), storage)


append = jax.jit(kernels.append_pages)


class TestAppend:
  @pytest.mark.parametrize("storage", [*STORAGE, "bfloat16"])
  @pytest.mark.parametrize("new", ["float32", "bfloat16"])
  def test_tokens_land_at_their_pages_and_offsets(self, storage, new):
    rng = np.random.default_rng(1)
    pool = random_pool(storage, 1)
    tokens = jnp.asarray(rng.standard_normal((5, 2, 8)), new)
    ids = np.array([3, 0, 3, 2, 1], np.int32)
    offsets = np.array([1, 0, 3, 2, 2], np.int32)
    expected = numbers(pool)
    rounded = np.asarray(tokens.astype(kernels.logical_dtype(storage)))
    for token, page, offset in zip(rounded, ids, offsets, strict=True):
      expected[page + 4, :, offset] = token.astype(np.float64)
    out = append(pool, tokens, ids, offsets, page_offset=jnp.int32(4))
    assert out.dtype == storage
    np.testing.assert_array_equal(numbers(out), expected)

  # page id, offset, page_offset: all out of the pool's range
  @pytest.mark.parametrize(
    ("page", "offset", "page_offset"),
    [
      (12, 0, 0),
      (4, 0, 8),
      (-1, 0, 0),
      (-1, 0, 4),  # page 3 exists, but the id is out of range
      (2, 4, 0),
      (2, -1, 0),
      (0, 0, -1),
      (2**31 - 1, 0, 8),
      (-(2**31), 0, 8),
      (12, 0, -4),  # page 8 exists, but the id is out of range
    ],
  )
  def test_tokens_out_of_range_are_dropped(self, page, offset, page_offset):
    pool = random_pool("float32")
    out = append(
      pool,
      jnp.ones((1, 2, 8)),
      jnp.asarray([page], jnp.int32),
      jnp.asarray([offset], jnp.int32),
      page_offset=page_offset,
    )
    np.testing.assert_array_equal(out, pool)

  @pytest.mark.parametrize(
    ("new", "ids", "message"),
    [
      (jnp.ones((2, 2, 7)), jnp.zeros(2, jnp.int32), "`new` .* float32"),
      (jnp.ones((3, 2, 8)), jnp.zeros(2, jnp.int32), "`new` .* float32"),
      (jnp.ones((2, 2, 8), jnp.int32), jnp.zeros(2, jnp.int32), "`new` .* i"),
      (jnp.ones((2, 2, 8)), jnp.zeros((2, 1), jnp.int32), "`page_ids` must be"),
      (jnp.ones((2, 2, 8)), jnp.zeros(2), "`page_ids` .* float32"),
    ],
  )
  def test_bad_arguments(self, new, ids, message):
    pool = random_pool("float32")
    with pytest.raises((TypeError, ValueError), match=message):
      kernels.append_pages(pool, new, ids, jnp.zeros(2, jnp.int32))

  @pytest.mark.parametrize("storage", ["uint16", "uint8", "int8"])
  def test_elements_of_the_pool_are_stored_as_they_are(self, storage):
    rng = np.random.default_rng(2)
    new = rng.integers(0, 256, (2, 2, 16), np.uint8).view(storage)[..., :8]
    pool, ids = jnp.zeros(POOL, storage), jnp.asarray([5, 7], jnp.int32)
    pages = kernels.append_pages(pool, new, ids, ids % 4)
    np.testing.assert_array_equal(pages[ids, :, ids % 4], new)


class TestCopy:
  # src, dst of one call over N = 4 pages
  @pytest.mark.parametrize(
    ("src", "dst"),
    [
      ([1], [2]),
      ([1, 2, 3], [2, 3, 1]),  # a rotation: read before written
      ([1, 0, 2], [4, 3, 9]),  # only the middle one
      ([4, -1], [1, 2]),
      ([1], [-1]),
      ([], []),
    ],
  )
  def test_copies_in_every_layer(self, src, dst):
    pool = random_pool("uint16")
    layers = numbers(pool).reshape(3, 4, *POOL[1:])
    expected = layers.copy()
    for source, target in zip(src, dst, strict=True):
      if 0 <= source < 4 and 0 <= target < 4:
        expected[:, target] = layers[:, source]
    out = kernels.copy_pages(
      pool,
      jnp.asarray(src, jnp.int32),
      jnp.asarray(dst, jnp.int32),
      num_layers=3,
    )
    np.testing.assert_array_equal(numbers(out), expected.reshape(POOL))

  def test_layers_must_divide_the_pool(self):
    ids = jnp.zeros(0, jnp.int32)
    with pytest.raises(ValueError, match=r"`num_layers` .* divisor .* 5"):
      kernels.copy_pages(random_pool("float32"), ids, ids, num_layers=5)
