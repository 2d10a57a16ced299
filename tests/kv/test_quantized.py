"""K/V memory of 8-bit numbers, each token and head with a scale."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import kv as memory
from tests.kernels import reference
from tests.kernels.shapes import assert_matches
from tests.kv.memory import DIM
from tests.kv.memory import HEADS
from tests.kv.memory import KV_HEADS
from tests.kv.memory import LAYERS
from tests.kv.memory import PAGES
from tests.kv.memory import TABLE
from tests.kv.memory import attend
from tests.kv.memory import dense
from tests.kv.memory import draw
from tests.kv.memory import make
from tests.kv.memory import view
from tests.kv.memory import write

# For each format, the error of a rounded number in a vector whose largest is 1.
FORMATS = {"int8": 0.5 / 127, "float8_e4m3fn": 2**-4, "float8_e5m2": 2**-3}
over_formats = pytest.mark.parametrize("dtype", FORMATS)


def filled(dtype):
  """Rows of 11 and 7 tokens in layer 2, NaN scales everywhere else."""
  kv = make(dtype)
  nan = jnp.full(kv.k_scale.shape, np.nan)
  kv = dataclasses.replace(kv, k_scale=nan, v_scale=nan + 0)
  k, v = (draw(seed, 3, 11, KV_HEADS, DIM) for seed in (0, 1))
  where = view(TABLE, [0] * 3, [11, 7, 0])
  return write(kv, where, jnp.int32(2), k, v), k, v


class TestInit:
  @over_formats
  def test_scales_beside_the_pages(self, dtype):
    kv = make(dtype)
    assert kv.dtype == dtype
    on_cpu = {"float8_e4m3fn": "uint8"}.get(dtype, dtype)
    assert kv.k.dtype == on_cpu
    assert kv.k_scale.shape == kv.v_scale.shape == kv.k.shape[:3]
    assert len(jax.tree.leaves(kv)) == 4

  def test_no_shared_buffer(self):
    kv = make("int8")
    jax.jit(lambda kv: kv, donate_argnums=0)(kv)
    assert kv.k_scale.is_deleted()
    assert kv.v_scale.is_deleted()


@over_formats
class TestUse:
  @pytest.mark.slow
  def test_attention_equals_the_reference(self, dtype):
    kv, _, _ = filled(dtype)
    where = view(TABLE, [6, 5, 0], [5, 2, 0])
    q = draw(2, 3, 5, HEADS, DIM)
    expected = reference.paged_attention_padded(
      *map(np.asarray, (q, kv.k, kv.v)),
      *map(np.asarray, (where.page_table, where.starts, where.num_tokens)),
      page_offset=2 * PAGES,
      k_scale=np.asarray(kv.k_scale),
      v_scale=np.asarray(kv.v_scale),
    )
    out, lse = attend(kv, where, jnp.int32(2), q)
    assert_matches(out, lse, *expected, np.float32)

  def test_written_tokens_are_near_the_originals(self, dtype):
    kv, *new = filled(dtype)
    for tokens, expected in zip(dense(kv, 2, TABLE), new, strict=True):
      for row, count in ((0, 11), (1, 7)):
        error = np.abs(tokens[row, :count] - expected[row, :count])
        largest = np.abs(expected[row, :count]).max(axis=-1, keepdims=True)
        assert (error <= largest * FORMATS[dtype] * 1.01).all()

  def test_copy_includes_the_scales(self, dtype):
    kv, _, _ = filled(dtype)
    src = jnp.asarray([5, 9], jnp.int32)
    dst = jnp.asarray([11, 0], jnp.int32)
    out = jax.jit(memory.copy)(kv, src, dst)
    for name in ("k", "v", "k_scale", "v_scale"):
      expected = np.asarray(getattr(kv, name)).copy()
      pages = expected.reshape(LAYERS, PAGES, -1)
      pages[:, 11] = pages[:, 5]
      np.testing.assert_array_equal(getattr(out, name), expected)
