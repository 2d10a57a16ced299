"""Pages of latent vectors (MLA): the value of a token is part of its key."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkv
from jaxkv import kv as memory
from jaxkv.kernels import AttentionOptions
from tests.kernels import reference
from tests.kernels.shapes import assert_matches
from tests.kv.memory import LAYERS
from tests.kv.memory import PAGES
from tests.kv.memory import SIZE
from tests.kv.memory import TABLE
from tests.kv.memory import attend
from tests.kv.memory import dense
from tests.kv.memory import draw
from tests.kv.memory import make
from tests.kv.memory import view
from tests.kv.memory import write
from tests.tools.pool_copies import assert_in_place
from tests.tools.tiers import slow_except

pytestmark = pytest.mark.slow

DIM = 24
VALUE = 16
HEADS = 6
FORMATS = ["float32", "bfloat16", "float16", "int8", "float8_e4m3fn"]
SCALE = 0.3


def latents(dtype="float32", **changes):
  """Small pages that hold NaN everywhere, or scales of NaN."""
  fields = {"num_kv_heads": 1, "head_dim": DIM, "value_dim": VALUE}
  kv = make(dtype, **{**fields, **changes})
  if kv.k_scale is not None:
    return dataclasses.replace(kv, k_scale=kv.k_scale * jnp.nan)
  nan = np.full(kv.k.shape, np.nan, jnp.dtype(dtype)).view(kv.k.dtype)
  return dataclasses.replace(kv, k=jnp.asarray(nan))


def filled(dtype="float32"):
  """Rows of 11 and 7 tokens in layer 2."""
  new = draw(0, 3, 11, 1, DIM)
  if dtype in ("bfloat16", "float16"):
    new = new.astype(dtype)
  where = view(TABLE, [0] * 3, [11, 7, 0])
  return write(latents(dtype), where, jnp.int32(2), new)


def by_reference(kv, where, q, **options):
  """Returns the outputs and log-sum-exps of the float64 reference."""
  pages = np.asarray(kv.k)
  scale = None if kv.k_scale is None else np.asarray(kv.k_scale)
  return reference.paged_attention_padded(
    np.asarray(q),
    pages,
    pages[..., :VALUE],
    *map(np.asarray, (where.page_table, where.starts, where.num_tokens)),
    page_offset=2 * PAGES,
    scale=SCALE,
    k_scale=scale,
    v_scale=scale,
    **options,
  )


def queries(dtype, *shape):
  eight_bits = dtype not in ("float32", "bfloat16", "float16")
  return draw(2, *shape, HEADS, DIM, dtype="float32" if eight_bits else dtype)


class TestInit:
  def test_one_pool(self):
    kv = make("float32", num_kv_heads=1, head_dim=DIM, value_dim=VALUE)
    assert kv.v is None
    assert kv.value_dim == VALUE
    assert len(jax.tree.leaves(kv)) == 1
    assert make("float32").value_dim is None

  def test_one_pool_of_scales(self):
    kv = make("int8", num_kv_heads=1, head_dim=DIM, value_dim=VALUE)
    assert kv.k_scale.shape == kv.k.shape[:3]
    assert kv.v_scale is None

  @pytest.mark.parametrize(
    ("changes", "message"),
    [
      ({"value_dim": DIM + 1}, "`value_dim` must be at most head_dim, 24, got"),
      ({"value_dim": 0}, "`value_dim` must be at least 1 .* got 0"),
      ({"num_kv_heads": 2}, "`num_kv_heads` must be 1 with value_dim"),
    ],
  )
  def test_bad_sizes(self, changes, message):
    with pytest.raises(ValueError, match=message):
      latents(**changes)


class TestWrite:
  @pytest.mark.parametrize("dtype", FORMATS)
  def test_written_latents_are_near_the_originals(self, dtype):
    keys, _ = dense(filled(dtype), 2, TABLE[:1])
    error = {"int8": 0.02, "float8_e4m3fn": 0.15, "bfloat16": 0.02}
    np.testing.assert_allclose(
      keys[0, :11],
      draw(0, 3, 11, 1, DIM)[0],
      atol=error.get(dtype, 2e-3),
      rtol=error.get(dtype, 2e-3),
    )

  def test_values_are_refused(self):
    kv = latents()
    new = draw(0, 1, 1, 1, DIM)
    where = view([[3]], [0], [1])
    with pytest.raises(TypeError, match="`v` must be None for latents"):
      memory.write(kv, where, 0, new, new)

  def test_missing_values_are_refused(self):
    kv = make(num_kv_heads=1, head_dim=DIM)
    with pytest.raises(TypeError, match=r"`v` .* latents, got None"):
      memory.write(kv, view([[3]], [0], [1]), 0, draw(0, 1, 1, 1, DIM))


class TestAttend:
  @pytest.mark.parametrize("dtype", FORMATS)
  @pytest.mark.parametrize("columns", [1, 5])
  @pytest.mark.parametrize("options", [{}, {"window": 5, "soft_cap": 2.0}])
  def test_rows_equal_the_reference(self, dtype, columns, options):
    kv = filled(dtype)
    counts = np.array([columns, min(columns, 2), 0], np.int32)
    where = view(TABLE, np.array([11, 7, 0]) - counts, counts)
    q = queries(dtype, 3, columns)
    out, lse = attend(kv, where, jnp.int32(2), q, scale=SCALE, **options)
    assert out.shape == (3, columns, HEADS, VALUE)
    expected = by_reference(kv, where, q, **options)
    assert_matches(out, lse, *expected, np.dtype(q.dtype))

  def test_tree_mask_equals_the_reference(self):
    kv = filled()
    where = view(TABLE, [8, 4, 0], [3, 2, 0])
    q = queries("float32", 3, 3)
    tree = jnp.tril(jnp.ones((3, 3, 3), bool)).at[:, 2, 1].set(False)
    out, lse = attend(kv, where, jnp.int32(2), q, scale=SCALE, tree_mask=tree)
    expected = by_reference(kv, where, q, tree_mask=np.asarray(tree))
    assert_matches(out, lse, *expected, np.dtype("float32"))

  @pytest.mark.fast
  @slow_except("dtype", ["float32", "int8"], "int8")
  @slow_except("window", [None, 3], 3)
  @pytest.mark.parametrize("dtype", ["float32", "int8"])
  @pytest.mark.parametrize("window", [None, 3])
  def test_packed_view_equals_the_reference(self, dtype, window):
    """Decode rows, then chunks; the same as in a rectangle."""
    kv = filled(dtype)
    q = queries(dtype, 1, 2 + 6)
    decode = view([TABLE[2], TABLE[1]], [0, 6], [0, 1])
    prefill = view([TABLE[0]], [6], [5])
    packed = memory.PackedView(decode=decode, prefill=prefill)
    out, lse = attend(kv, packed, jnp.int32(2), q, scale=SCALE, window=window)
    assert out.shape == (1, 8, HEADS, VALUE)
    parts = [
      (q[0, :2, None], decode, out[0, :2, None], lse[0, :2, None]),
      (q[:, 2:], prefill, out[:, 2:], lse[:, 2:]),
    ]
    for part, where, part_out, its_lse in parts:
      right = by_reference(kv, where, part, window=window)
      assert_matches(part_out, its_lse, *right, np.dtype("float32"))

  @pytest.mark.parametrize("chunk", [1, 3, 7])
  def test_chunks_equal_the_whole(self, chunk):
    """A sequence written and read in pieces, from pages of NaN."""
    length = 21
    table = [[5, 9, 2, 11, 3, 8]]
    new = draw(0, 1, length, 1, DIM)
    q = queries("float32", 1, length)
    options = AttentionOptions(scale=SCALE)
    whole = view(table, [0], [length])
    kv = memory.write(latents(), whole, 1, new)
    expected = memory.attend(kv, whole, 1, q, options=options)

    def step(kv, start):
      where = view(table, start[None], [chunk])
      k, part = (lax.dynamic_slice_in_dim(x, start, chunk, 1) for x in (new, q))
      kv = memory.write(kv, where, 1, k)
      return kv, memory.attend(kv, where, 1, part, options=options)

    starts = jnp.arange(0, length, chunk, dtype=jnp.int32)
    kv_after, out = jax.jit(lambda kv: lax.scan(step, kv, starts))(latents())
    np.testing.assert_array_equal(kv_after.k, kv.k)
    out = out.swapaxes(0, 1).reshape(expected.shape)
    np.testing.assert_allclose(out, expected, atol=2e-6)

  def test_the_scale_is_required(self):
    where = view(TABLE, [6, 5, 0], [1, 1, 0])
    q = queries("float32", 3, 1)
    for columns in (1, 2):
      with pytest.raises(TypeError, match=r"`options.scale` must be a float"):
        memory.attend(filled(), where, 2, jnp.repeat(q, columns, axis=1))

  @pytest.mark.parametrize("backend", ["mosaic_tpu", "mosaic_gpu"])
  @pytest.mark.parametrize("columns", [1, 2])
  def test_unsupported_backends_are_refused(self, backend, columns):
    where = view(TABLE, [5, 4, 0], [1, 1, 0])
    q = queries("float32", 3, columns)
    options = AttentionOptions(scale=SCALE)
    with pytest.raises(NotImplementedError, match="`value_dim` must be None"):
      memory.attend(filled(), where, 2, q, options=options, backend=backend)


class TestOtherCalls:
  """Calls that take a memory, other than `write` and `attend`."""

  def test_shared_pages_are_ignored(self):
    kv = filled()
    where = view(TABLE, [6, 5, 0], [1, 1, 0])
    shared = memory.share(kv, where, num_clusters=1, cluster_size=2)
    assert shared.shared is None
    fresh = memory.refresh_shared(kv, where)
    q = queries("float32", 3, 1)
    options = AttentionOptions(scale=SCALE)
    out = memory.attend(kv, fresh, 2, q, options=options)
    expected = memory.attend(kv, where, 2, q, options=options)
    np.testing.assert_array_equal(out, expected)

  def test_check(self):
    config = jaxkv.CacheConfig(
      num_pages=PAGES, page_size=SIZE, num_slots=1, pages_per_slot=1
    )
    memory.check(latents(), config)
    with pytest.raises(ValueError, match="`kv` must have 24 pages of 4"):
      memory.check(latents(page_size=8), config)

  @pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
  @pytest.mark.parametrize("columns", [1, 3])
  def test_query_heads_of_two_devices(self, columns):
    """Both devices hold all latents, and each a part of the query heads."""
    kv = filled()
    q = queries("float32", 3, columns)
    where = view(TABLE, [8, 4, 0], [columns, 1, 0])
    mesh = jax.make_mesh((2,), ("heads",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, P(None, None, "heads"))
    step = functools.partial(
      memory.attend, layer=2, options=AttentionOptions(scale=SCALE)
    )
    expected = step(kv, where, q=q)
    run = functools.partial(step, head_sharding=NamedSharding(mesh, P("heads")))
    kv = jax.device_put(kv, NamedSharding(mesh, P()))
    out = jax.jit(lambda kv, q: run(kv, where, q=q))(
      kv, jax.device_put(q, split)
    )
    np.testing.assert_allclose(out, expected, atol=1e-6)

  @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
  def test_loops_are_in_place(self, dtype):
    kv = latents(dtype, num_pages=400, page_size=16)
    table = jnp.arange(1, 17, dtype=jnp.int32).reshape(4, 4)
    q = draw(0, 4, 1, HEADS, DIM)

    def token(kv, step):
      where = view(table, jnp.full((4,), step, jnp.int32), [1] * 4)

      def layer(index, carry):
        kv, x = carry
        kv = memory.write(kv, where, index, x[:, :, :1])
        options = AttentionOptions(scale=SCALE)
        out = memory.attend(kv, where, index, x, options=options)
        return kv, x.at[..., :VALUE].add(out)

      kv, x = lax.fori_loop(0, LAYERS, layer, (kv, q))
      return memory.copy(kv, where.starts, where.starts + 30), x

    def run(kv):
      return lax.scan(token, kv, jnp.arange(9, dtype=jnp.int32))

    compiled = jax.jit(run, donate_argnums=0).lower(kv).compile()
    assert_in_place(compiled, (kv.k,))
