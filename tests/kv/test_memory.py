"""K/V memory: writes, attention, copies."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxkv
from jaxkv import kv as memory
from tests.kernels import reference
from tests.kernels.shapes import assert_matches
from tests.kv.memory import DIM
from tests.kv.memory import DTYPES
from tests.kv.memory import HEADS
from tests.kv.memory import KV_HEADS
from tests.kv.memory import LAYERS
from tests.kv.memory import PAGES
from tests.kv.memory import SIZE
from tests.kv.memory import TABLE
from tests.kv.memory import attend
from tests.kv.memory import dense
from tests.kv.memory import draw
from tests.kv.memory import make
from tests.kv.memory import poisoned
from tests.kv.memory import view
from tests.kv.memory import write


class TestInit:
  def test_storage_on_a_cpu(self):
    """bfloat16 is stored as its bits, float16 as itself."""
    assert make("bfloat16").k.dtype == np.uint16
    assert make("bfloat16").dtype == "bfloat16"
    assert make("float16").k.dtype == np.float16
    assert make("bfloat16", storage_dtype="bfloat16").k.dtype == jnp.bfloat16

  def test_sizes(self):
    kv = make()
    assert kv.k.shape == (LAYERS * PAGES, KV_HEADS, SIZE, DIM)
    assert (kv.num_pages, kv.page_size) == (PAGES, SIZE)
    assert (kv.num_kv_heads, kv.head_dim) == (KV_HEADS, DIM)

  def test_no_shared_buffer(self):
    kv = make()
    donated = jax.jit(lambda kv: kv, donate_argnums=0)(kv)
    assert kv.k.is_deleted()
    assert kv.v.is_deleted()
    np.testing.assert_array_equal(donated.k, 0)

  @pytest.mark.parametrize(
    ("changes", "message"),
    [
      ({"num_layers": 0}, "`num_layers` must be at least 1 .* got 0"),
      ({"head_dim": 2.0}, "`head_dim` must be an int, got 2.0"),
      ({"num_layers": 2**30}, "`num_layers` .* fits int32, got 1073741824"),
      ({"group": 1}, "`group` must be from 0 to 0, got 1"),
      ({"group": True}, "`group` must be a Python int, got True"),
      ({"dtype": "int16"}, "`dtype` must be one of .* got int16"),
      ({"dtype": "fp8"}, "`dtype` must be one of .* got 'fp8'"),
      (
        {"dtype": "float32", "storage_dtype": "uint16"},
        "`storage_dtype` must be float32, got 'uint16'",
      ),
      (
        {"dtype": "bfloat16", "storage_dtype": "uint8"},
        "`storage_dtype` must be bfloat16, or uint16 .* got 'uint8'",
      ),
      (
        {"dtype": "bfloat16", "storage_dtype": "int32"},
        "`storage_dtype` must be bfloat16, or uint16 .* got 'int32'",
      ),
    ],
  )
  def test_bad_arguments(self, changes, message):
    with pytest.raises((TypeError, ValueError), match=message):
      make(**changes)

  def test_configs_of_other_types_are_refused(self):
    with pytest.raises(TypeError, match="`config` must be a CacheConfig, got"):
      memory.init({}, num_layers=1, num_kv_heads=1, head_dim=8)

  def test_pages_have_the_size_of_their_group(self):
    groups = (jaxkv.FullAttention(page_size=8), jaxkv.SlidingWindow(3))
    config = jaxkv.CacheConfig(
      num_pages=9, page_size=4, num_slots=1, pages_per_slot=2, groups=groups
    )
    options = {"num_layers": 1, "num_kv_heads": 2, "head_dim": 8}
    for group, page_size in enumerate((8, 4)):
      kv = memory.init(config, group=group, **options)
      assert (kv.num_pages, kv.page_size) == (9, page_size)
      memory.check(kv, config)

  def test_pages_are_a_pytree_of_two_leaves(self):
    kv = make()
    leaves, structure = jax.tree.flatten(kv)
    assert len(leaves) == 2
    assert jax.tree.unflatten(structure, leaves).dtype == "float32"


class TestWrite:
  @pytest.mark.parametrize("dtype", DTYPES)
  def test_tokens_are_written_to_their_pages_only(self, dtype):
    kv = make(dtype)
    where = view(TABLE, [6, 3, 0], [5, 2, 3])
    k, v = (draw(seed, 3, 5, KV_HEADS, DIM, dtype=dtype) for seed in (0, 1))
    out = write(kv, where, jnp.int32(1), k, v)
    for new, pages in ((k, out.k), (v, out.v)):
      expected = np.zeros(kv.k.shape, new.dtype)
      for row, start, count in ((0, 6, 5), (1, 3, 2)):  # row 2 has no pages
        for column in range(count):
          position = start + column
          page = TABLE[row][position // SIZE] + PAGES
          expected[page, :, position % SIZE] = new[row, column]
      np.testing.assert_array_equal(pages, expected.view(kv.k.dtype))

  # a table entry and a position where nothing can be written
  @pytest.mark.parametrize(
    ("entry", "start"),
    [
      (0, 0),  # the null page
      (PAGES, 0),  # would be the next layer's null page
      (PAGES + 3, 0),  # would be the next layer's page 3
      (LAYERS * PAGES, 0),
      (-1, 0),  # would be the layer before's last page
      (-(2**31), 0),
      (2**31 - 1, 0),
      (3, SIZE),  # past the table's end
      (3, 2**31 - 2),
      (3, -2),  # before the sequence
    ],
  )
  def test_invalid_entries_write_nothing(self, entry, start):
    kv = make()
    new = jnp.ones((1, 1, KV_HEADS, DIM))
    out = write(kv, view([[entry]], [start], [1]), jnp.int32(1), new, new)
    np.testing.assert_array_equal(out.k, 0)
    np.testing.assert_array_equal(out.v, 0)

  def test_layer_out_of_range_writes_nothing(self):
    kv = make()
    new = jnp.ones((1, 1, KV_HEADS, DIM))
    where = view([[3]], [0], [1])
    with pytest.raises(ValueError, match="`layer` must be from 0 to 2, got 3"):
      memory.write(kv, where, 3, new, new)
    for layer in (3, -1):
      out = write(kv, where, jnp.int32(layer), new, new)
      np.testing.assert_array_equal(out.k, 0)

  @pytest.mark.parametrize(
    ("shape", "message"),
    [
      ((1, 1, KV_HEADS, 5), "`k` must be"),
      ((1, KV_HEADS, DIM), "`k` must be"),
      ((2, 1, KV_HEADS, DIM), r"`k` must be \[1, ...\], with the rows"),
    ],
  )
  def test_bad_shapes(self, shape, message):
    new = jnp.ones(shape)
    with pytest.raises(ValueError, match=message):
      memory.write(make(), view([[3]], [0], [1]), 0, new, new)

  @pytest.mark.parametrize(
    ("changes", "message"),
    [
      ({"page_table": jnp.ones((1, 1))}, "`view.page_table` must be int32"),
      ({"starts": jnp.ones(2, jnp.int32)}, "`view.starts` must be"),
      (
        {"num_tokens": jnp.ones(1, jnp.int16)},
        "`view.num_tokens` .* got int16",
      ),
    ],
  )
  def test_bad_views(self, changes, message):
    new = jnp.ones((1, 1, KV_HEADS, DIM))
    where = dataclasses.replace(view([[3]], [0], [1]), **changes)
    with pytest.raises((TypeError, ValueError), match=message):
      memory.write(make(), where, 0, new, new)


class TestAttend:
  @pytest.mark.parametrize("dtype", DTYPES)
  def test_written_tokens_are_attended_to(self, dtype):
    kv = poisoned(dtype)
    table = jnp.asarray(TABLE, jnp.int32)
    k, v = (draw(seed, 3, 11, KV_HEADS, DIM, dtype=dtype) for seed in (0, 1))
    kv = write(kv, view(TABLE, [0] * 3, [11, 7, 0]), jnp.int32(2), k, v)
    where = view(table, [6, 5, 0], [5, 2, 0])
    q = draw(2, 3, 5, HEADS, DIM, dtype=dtype)
    expected = reference.paged_attention_padded(
      np.asarray(q),
      np.asarray(kv.k),
      np.asarray(kv.v),
      np.asarray(table),
      np.asarray(where.starts),
      np.asarray(where.num_tokens),
      page_offset=2 * PAGES,
    )
    out, lse = attend(kv, where, jnp.int32(2), q)
    assert out.dtype == dtype
    assert_matches(out, lse, *expected, dtype)

  def test_one_column_equals_the_first_of_two(self):
    """The decode path and the general one, idle rows and sinks included."""
    kv = poisoned()
    k, v = (draw(seed, 3, 11, KV_HEADS, DIM) for seed in (0, 1))
    kv = write(kv, view(TABLE, [0] * 3, [11, 7, 0]), jnp.int32(0), k, v)
    q = draw(2, 3, 2, HEADS, DIM)
    options = {"sinks": draw(3, HEADS), "window": 6}
    where = view(TABLE, [10, 6, 0], [1, 0, 0])
    one_column = attend(kv, where, jnp.int32(0), q[:, :1], **options)
    two_columns = attend(kv, where, jnp.int32(0), q, **options)
    for a, b in zip(one_column, two_columns, strict=True):
      np.testing.assert_array_equal(a[:, 0], b[:, 0])
    np.testing.assert_array_equal(one_column[0][1:], 0)
    np.testing.assert_array_equal(one_column[1][1:], -np.inf)

  def test_bad_arguments(self):
    kv = make()
    where = view([[3]], [0], [1])
    with pytest.raises(ValueError, match=r"`q` must be \[B, T, H, D\]"):
      memory.attend(kv, where, 0, jnp.ones((1, HEADS, DIM)))
    with pytest.raises(ValueError, match=r"`q` must be \[1, ...\], with"):
      memory.attend(kv, where, 0, jnp.ones((2, 1, HEADS, DIM)))
    with pytest.raises(NotImplementedError, match=r"`backend` .* got 'cuda'"):
      memory.attend(kv, where, 0, jnp.ones((1, 1, HEADS, DIM)), backend="cuda")


class TestCopyAndGather:
  def test_copy(self):
    kv = make("bfloat16")
    everything = draw(0, *kv.k.shape, dtype="bfloat16")
    kv = dataclasses.replace(
      kv, k=lax.bitcast_convert_type(everything, jnp.uint16)
    )
    src = jnp.asarray([3, 4, 5, 6, 7], jnp.int32)
    dst = jnp.asarray([4, 5, 0, PAGES, -1], jnp.int32)
    out = jax.jit(memory.copy)(kv, src, dst)
    old_pages = np.asarray(kv.k).reshape(LAYERS, PAGES, -1)
    expected = old_pages.copy()
    expected[:, 4] = old_pages[:, 3]
    expected[:, 5] = old_pages[:, 4]
    np.testing.assert_array_equal(out.k, expected.reshape(kv.k.shape))
    np.testing.assert_array_equal(out.v, 0)

  @pytest.mark.parametrize("dtype", DTYPES)
  def test_new_tokens_are_stored_in_order(self, dtype):
    k, v = (draw(seed, 3, 7, KV_HEADS, DIM, dtype=dtype) for seed in (0, 1))
    kv = memory.write(
      make(dtype), view(TABLE, [0] * 3, [7, 5, 0]), jnp.int32(1), k, v
    )
    for stored, new in zip(dense(kv, 1, TABLE), (k, v), strict=True):
      expected = np.zeros((3, 20, KV_HEADS, DIM), np.float32)
      expected[0, :7] = new[0]
      expected[1, :5] = new[1, :5]
      np.testing.assert_array_equal(stored, expected)
