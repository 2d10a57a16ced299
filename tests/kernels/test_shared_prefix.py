"""Decoding rows that begin with the same pages."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv_kernels as kernels
from jaxkv_kernels._src.attention import shared_prefix
from jaxkv_kernels._src.attention.xla import backend as xla
from tests.kernels import reference
from tests.kernels import shapes
from tests.kernels.backends import RUNNERS
from tests.kernels.backends import call_of
from tests.tools.tiers import slow_except

# Rows 0, 1, 3 and 6 share two pages of 16; 2 and 5 share four; 4 is alone.
CLUSTERS = {0: ([0, 1, 3, 6], 2), 1: ([2, 5], 4)}
LENGTHS = (33, 40, 150, 47, 80, 65, 38)


def sharing(shape, **changes):
  """A problem whose rows begin with the same pages, cluster by cluster."""
  shape = dataclasses.replace(shape, lengths=LENGTHS, page_size=16, **changes)
  case = shapes.problem(shape)
  for rows, pages in CLUSTERS.values():
    case.page_table[rows, :pages] = case.page_table[rows[0], :pages]
  return shape, case


# On a CPU only "auto" is quick.
BACKENDS, FLOAT32_L2 = ("auto",), 1e-6
if jax.default_backend() == "gpu":
  BACKENDS, FLOAT32_L2 = tuple(RUNNERS), 2e-6


def decode(case, q, **changes):
  """`cascade_decode` of a case, jitted with its plan."""
  clusters = changes.pop("clusters", None)
  backend = changes.pop("backend", "auto")

  @jax.jit
  def run(q, k_pages, v_pages, table, lengths, clusters, options):
    shared = kernels.plan_shared_prefix(
      table,
      lengths,
      k_pages,
      v_pages,
      clusters=clusters,
      num_clusters=changes.get("num_clusters", 2),
      cluster_size=changes.get("cluster_size", 4),
      backend=backend,
    )
    out = kernels.cascade_decode(
      q,
      k_pages,
      v_pages,
      shared,
      backend=backend,
      **call_of(soft_cap=case.options.get("soft_cap"), **options),
    )
    return shared, out

  options = {
    key: jnp.asarray(value)
    for key, value in case.options.items()
    if isinstance(value, np.ndarray)
  }
  return run(*shapes.put(q, *case.pools, case.lengths), clusters, options)


def checked(shape, case, **changes):
  """Compares a case with the reference; returns the clusters found."""
  q = shapes.queries(case, shape, len(LENGTHS))
  expected = reference.paged_decode(
    q, *case.pools, case.lengths, **case.options
  )
  shared, (out, lse) = decode(case, q, **changes)
  assert out.dtype == case.dtype
  shapes.assert_matches(out, lse, *expected, case.dtype, FLOAT32_L2)
  return shared


class TestSharedPrefix:
  @pytest.fixture
  def always(self, monkeypatch):
    """Sharing always pays."""
    thresholds = dict.fromkeys(shared_prefix._LEAST_SAVING, -(2**40))
    monkeypatch.setattr(shared_prefix, "_LEAST_SAVING", thresholds)

  @slow_except("name", shapes.SHAPES, "page16_gqa4_d128", "alibi")
  @pytest.mark.parametrize("backend", BACKENDS)
  @pytest.mark.parametrize(
    "name",
    [
      "page16_gqa4_d128",
      "bits_gqa4",
      "float16_gqa8",
      "bfloat16_page128_d256",
      "int8_scale_per_token",
      "e4m3_bits_scale_per_head",
      "soft_cap50_bits",
      "sinks",
      "alibi",
    ],
  )
  def test_equals_the_reference(self, always, backend, name):
    try:
      shared = checked(*sharing(shapes.SHAPES[name]), backend=backend)
    except NotImplementedError as error:
      pytest.skip(str(error))
    assert sorted(shared.tokens.tolist()) == [32, 64]

  def test_clusters_may_be_given(self, always):
    clusters = jnp.asarray([1, 1, 0, 1, 7, 0, -1], jnp.int32)
    shape, case = sharing(shapes.SHAPES["page16_gqa4_d128"])
    shared = checked(shape, case, clusters=clusters)
    np.testing.assert_array_equal(shared.members, [[2, 5, 7, 7], [0, 1, 3, 7]])
    np.testing.assert_array_equal(shared.tokens, [64, 32])
    np.testing.assert_array_equal(shared.own_tokens, [1, 8, 86, 15, 80, 1, 38])

  @pytest.mark.slow
  @pytest.mark.parametrize("max_rows", [1, 2, 3])
  @pytest.mark.parametrize("name", ["page16_gqa4_d128", "alibi"])
  def test_parts_of_clusters_that_a_backend_serves(
    self, always, monkeypatch, name, max_rows
  ):
    """Clusters of 4 rows are cut if the backend serves the heads of fewer."""
    shape, case = sharing(shapes.SHAPES[name])
    q = shapes.queries(case, shape, len(LENGTHS))
    expected = reference.paged_decode(
      q, *case.pools, case.lengths, **case.options
    )
    heads = q.shape[1]
    attend = xla.attend
    asked = set()

    def unsupported(platform, call):
      return "too many" if call.q.shape[1] > max_rows * heads else None

    def recorded(call):
      asked.add(call.q.shape[:3])
      return attend(call)

    monkeypatch.setattr(xla, "unsupported", unsupported)
    monkeypatch.setattr(xla, "attend", recorded)
    _, (out, lse) = decode(case, q, backend="xla")
    rows = min(max_rows, 2)
    assert asked == {(7, 1, heads), (8 // rows, 1, rows * heads)}
    shapes.assert_matches(out, lse, *expected, case.dtype)

  @pytest.mark.parametrize(("dim", "rows"), [(64, 3), (128, 1)])
  def test_the_gate_depends_on_the_backend_that_serves(self, dim, rows):
    """On a TPU `xla` serves head sizes of 64, with all rows in lockstep."""
    device = jax.sharding.AbstractDevice(
      device_kind="TPU v6 lite", num_cores=1, platform="tpu"
    )
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
    shape = jax.ShapeDtypeStruct
    pool = shape((1, 8, 256, dim), jnp.bfloat16)
    page_bytes = 2 * 8 * 256 * dim * 2
    min_columns = shared_prefix._LEAST_SAVING["other"] // page_bytes

    def planned(columns):
      with jax.sharding.use_abstract_mesh(mesh):
        return jax.eval_shape(
          functools.partial(
            kernels.plan_shared_prefix, num_clusters=1, cluster_size=2
          ),
          shape((4, columns), jnp.int32),
          shape((4,), jnp.int32),
          pool,
          pool,
        )

    assert planned(min_columns // rows - 1) is None
    assert planned(min_columns // rows + 1) is not None

  @pytest.mark.slow
  @pytest.mark.parametrize("backend", ["mosaic_gpu", "triton", "mosaic_tpu"])
  def test_many_query_heads_per_kv_head(self, always, backend):
    """16 samples with 8 query heads each: more rows than a tile may have."""
    shape = jax.ShapeDtypeStruct
    pool = shape((64, 1, 16, 128), jnp.bfloat16)

    def run(q, k_pages, v_pages, table, lengths):
      shared = kernels.plan_shared_prefix(
        table, lengths, k_pages, v_pages, num_clusters=2, cluster_size=16
      )
      return kernels.cascade_decode(
        q, k_pages, v_pages, shared, backend=backend
      )[0]

    out = jax.eval_shape(
      run,
      shape((32, 8, 128), jnp.bfloat16),
      pool,
      pool,
      shape((32, 9), jnp.int32),
      shape((32,), jnp.int32),
    )
    assert out.shape == (32, 8, 128)

  @pytest.mark.slow
  @pytest.mark.parametrize(
    ("num_clusters", "cluster_size"), [(1, 4), (2, 2), (7, 7), (1, 1)]
  )
  def test_rows_that_do_not_fit_are_decoded_alone(
    self, always, num_clusters, cluster_size
  ):
    limits = {"num_clusters": num_clusters, "cluster_size": cluster_size}
    shared = checked(*sharing(shapes.SHAPES["page16_gqa4_d128"]), **limits)
    assert shared.members.shape == (num_clusters, cluster_size)

  def test_many_rows_with_one_first_page_make_several_clusters(self, always):
    """Samples of several prompts that begin alike: all of them share."""
    shape, case = sharing(shapes.SHAPES["page16_gqa4_d128"])
    shared = checked(shape, case, num_clusters=3, cluster_size=2)
    clusters = [sorted(row) for row in shared.members.tolist()]
    assert sorted(clusters) == [[0, 1], [2, 5], [3, 6]]
    assert sorted(shared.tokens.tolist()) == [32, 32, 64]

  def test_idle_rows_are_in_no_cluster(self, always):
    shape, case = sharing(shapes.SHAPES["page16_gqa4_d128"])
    case.lengths[[0, 4]] = 0
    shared = checked(shape, case)
    assert sorted(shared.tokens.tolist()) == [32, 64]

  @pytest.mark.slow
  @pytest.mark.parametrize("name", ["page16_gqa4_d128", "sinks", "alibi"])
  def test_a_table_smaller_than_the_length(self, always, name):
    """Tokens past the table do not exist, with and without sharing."""
    shape, case = sharing(shapes.SHAPES[name])
    case = dataclasses.replace(case, page_table=case.page_table[:, :3])
    case.lengths[5] = 48  # and row 2, of the same cluster, has 150
    shared = checked(shape, case)
    np.testing.assert_array_equal(shared.own_tokens, [1, 8, 150, 15, 80, 48, 6])

  def test_the_last_token_is_never_shared(self, always):
    """Rows whose pages are all the same still keep one page to themselves."""
    shape, case = sharing(shapes.SHAPES["page16_gqa4_d128"])
    case.lengths[[0, 1, 3, 6]] = 32
    shared, _ = decode(case, shapes.queries(case, shape, len(LENGTHS)))
    assert sorted(shared.tokens.tolist()) == [16, 64]

  def test_a_cluster_shares_the_pages_of_all_its_rows(self, always):
    """Rows 2 and 5 share four pages, and row 4 has only two of them."""
    shape, case = sharing(shapes.SHAPES["page16_gqa4_d128"])
    case.page_table[4, :2] = case.page_table[2, :2]
    shared = checked(shape, case)
    np.testing.assert_array_equal(shared.tokens, [32, 32])
    np.testing.assert_array_equal(shared.own_tokens, [1, 8, 118, 15, 48, 33, 6])

  @pytest.mark.slow
  def test_small_savings_are_not_shared(self, monkeypatch):
    """With these lengths; longer rows in tables of this size could pay."""
    for platform in shared_prefix._LEAST_SAVING:
      monkeypatch.setitem(shared_prefix._LEAST_SAVING, platform, 2**20)
    shape, case = sharing(shapes.SHAPES["page16_gqa4_d128"])
    q = shapes.queries(case, shape, len(LENGTHS))
    plain = kernels.paged_decode(*shapes.put(q, *case.pools, case.lengths))
    shared, out = decode(case, q)
    np.testing.assert_array_equal(shared.tokens, 0)
    np.testing.assert_array_equal(shared.own_tokens, case.lengths)
    for a, b in zip(plain, out, strict=True):
      np.testing.assert_allclose(a, b, atol=1e-6)

  def test_no_plan_where_it_never_pays(self):
    """A decode without a plan says what to do."""
    table, lengths = jnp.ones((4, 2), jnp.int32), jnp.ones(4, jnp.int32)
    pool = jnp.zeros((3, 2, 16, 32))
    plan = kernels.plan_shared_prefix(
      table, lengths, pool, pool, num_clusters=2, cluster_size=2
    )
    assert plan is None
    with pytest.raises(TypeError, match=r"NoneType.*use paged_decode"):
      kernels.cascade_decode(jnp.ones((4, 2, 32)), pool, pool, plan)

  @pytest.mark.parametrize("lockstep", [False, True])
  def test_the_gate_counts_tokens_that_are_read(self, lockstep):
    lengths, shared = np.array([70, 80, 200]), np.array([64, 64, 0])
    tokens = np.array([64, 0])
    saved = shared_prefix._saved(*shapes.put(lengths, tokens, shared), lockstep)
    # In lockstep all rows, and 2 clusters, read the third row's 200 tokens.
    assert int(saved) == (-128 if lockstep else 64)

  @pytest.mark.parametrize(
    ("changes", "message"),
    [
      ({"num_clusters": 0}, "`num_clusters` .* at least 1, got 0"),
      ({"cluster_size": 2.0}, "`cluster_size` must be a Python int .*got 2.0"),
      ({"clusters": jnp.ones(3, jnp.int32)}, r"`clusters` .* int32\[2\], got"),
      ({"lengths": jnp.ones(2)}, "`lengths` must be int32, got float32"),
    ],
  )
  def test_bad_arguments(self, changes, message):
    call = {
      "page_table": jnp.ones((2, 3), jnp.int32),
      "lengths": jnp.ones(2, jnp.int32),
      "k_pages": jnp.ones((5, 2, 4, 8)),
      "v_pages": jnp.ones((5, 2, 4, 8)),
      "num_clusters": 1,
      "cluster_size": 2,
      **changes,
    }
    with pytest.raises((TypeError, ValueError), match=message):
      kernels.plan_shared_prefix(**call)

  @pytest.mark.slow
  def test_with_64_bit_types(self, always):
    shape, case = sharing(shapes.SHAPES["alibi"])
    q = shapes.queries(case, shape, len(LENGTHS))
    expected = decode(case, q)[1]
    with jax.enable_x64(True):
      shared, out = decode(case, q)
    assert {x.dtype for x in shared} == {np.dtype(np.int32)}
    for a, b in zip(out, expected, strict=True):
      assert a.dtype == jnp.float32
      np.testing.assert_allclose(a, b, atol=1e-6)

  @pytest.mark.slow
  def test_devices(self, always):
    case = sharing(shapes.SHAPES["page16_gqa4_d128"])[1]
    cpus = jax.devices("cpu")
    call = [case.page_table, case.lengths, *case.pools[:2]]
    table, lengths, *pools = jax.device_put(call, cpus[0])
    limits = {"num_clusters": 2, "cluster_size": 4}
    away = jax.device_put(lengths, cpus[1])
    with pytest.raises(ValueError, match=r"`lengths` .*:0 like page"):
      kernels.plan_shared_prefix(table, away, *pools, **limits)
    shared = kernels.plan_shared_prefix(table, lengths, *pools, **limits)
    q = jax.device_put(jnp.ones((7, 8, 128)), cpus[1])
    with pytest.raises(ValueError, match=r"`k_pages` .*:1 like q"):
      kernels.cascade_decode(q, *pools, shared)
    pools = jax.device_put(pools, cpus[1])
    with pytest.raises(ValueError, match=r"`shared.members` .*:1 like"):
      kernels.cascade_decode(q, *pools, shared)

  def test_unknown_backend(self):
    case = sharing(shapes.SHAPES["page16_gqa4_d128"])[1]
    with pytest.raises(NotImplementedError, match="must be one of auto, "):
      kernels.plan_shared_prefix(
        *shapes.put(case.page_table, case.lengths, *case.pools[:2]),
        num_clusters=1,
        cluster_size=2,
        backend="cudnn",
      )
