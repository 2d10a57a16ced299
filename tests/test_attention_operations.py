"""Merging, shared prefixes, equal-work plans and latent attention."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv_kernels as kernels
from jaxkv_kernels.attention import definition
from jaxkv_kernels.attention import prefix as prefix_module
from tests.kernels_shapes import SHAPES
from tests.kernels_shapes import Shape
from tests.kernels_shapes import assert_matches
from tests.kernels_shapes import problem
from tests.kernels_shapes import put
from tests.kernels_shapes import queries


class TestMerge:
  def test_equals_the_definition(self):
    rng = np.random.default_rng(0)
    out = rng.standard_normal((4, 3, 5, 2, 8)).astype(np.float32)
    lse = (rng.standard_normal(out.shape[:-1]) * 20).astype(np.float32)
    lse[rng.random(lse.shape) < 0.4] = -np.inf
    lse[:, 1, 2] = -np.inf
    out[lse == -np.inf] = np.nan  # a part without keys
    wanted = definition.merge_states(np.nan_to_num(out), lse)
    merged, total = jax.jit(kernels.merge_states)(*put(out, lse))
    np.testing.assert_allclose(merged, wanted[0], atol=1e-6)
    np.testing.assert_allclose(total, wanted[1], rtol=1e-6)
    np.testing.assert_array_equal(merged[1, 2], 0)
    np.testing.assert_array_equal(total[1, 2], -np.inf)

  def test_parts_may_be_merged_in_steps(self):
    rng = np.random.default_rng(1)
    out, lse = put(
      rng.standard_normal((3, 2, 4)).astype(np.float32),
      rng.standard_normal((3, 2)).astype(np.float32),
    )
    first = kernels.merge_states(out[:2], lse[:2])
    second = kernels.merge_states(
      jnp.stack([first[0], out[2]]), jnp.stack([first[1], lse[2]])
    )
    whole = kernels.merge_states(out, lse)
    for a, b in zip(second, whole, strict=True):
      np.testing.assert_allclose(a, b, atol=1e-6)

  def test_extreme_log_sum_exps(self):
    out, lse = put(
      np.array([[[1.0]], [[2.0]]], np.float32),
      np.array([[5e5], [-5e5]], np.float32),
    )
    merged, total = kernels.merge_states(out, lse)
    assert (float(merged[0, 0]), float(total[0])) == (1.0, 5e5)

  @pytest.mark.parametrize(
    ("out", "lse", "message"),
    [
      (jnp.ones((2, 3, 4)), jnp.ones((2, 4)), "lse is float32"),
      (jnp.ones((2, 3, 4)), jnp.ones((2, 3), jnp.bfloat16), "lse is bfloat16"),
      (jnp.ones((2, 3, 4), jnp.int32), jnp.ones((2, 3)), "out is int32"),
      (jnp.ones((0, 3, 4)), jnp.ones((0, 3)), "there must be a part"),
    ],
  )
  def test_bad_arguments(self, out, lse, message):
    with pytest.raises(ValueError, match=message):
      kernels.merge_states(out, lse)


class TestPlan:
  @pytest.mark.parametrize("workers", [1, 5, 64])
  @pytest.mark.parametrize("window", [None, 100, 5000])
  def test_pieces_cover_every_token_once(self, workers, window):
    rng = np.random.default_rng(workers)
    lengths = rng.integers(-3, 3000, 17).astype(np.int32)
    lengths[::5] = [0, 1, 64, 65]
    plan = kernels.plan_decode(
      jnp.asarray(lengths), workers=workers, window=window
    )
    plan = kernels.Plan(*map(np.asarray, plan))
    assert len(plan.row) == 17 + workers
    sizes = plan.end - plan.first
    assert sizes.max() <= plan.tokens
    assert (plan.first % 64 == 0).all()
    assert (sizes[plan.begins[-1] :] == 0).all()
    blocks = 0
    for b, length in enumerate(lengths):
      items = range(plan.begins[b], plan.begins[b + 1])
      assert (plan.row[items] == b).all()
      held = [p for i in items for p in range(plan.first[i], plan.end[i])]
      first = 0 if window is None else max(0, length - window)
      assert held == list(range(first // 64 * 64, length))
      blocks += -(-len(held) // 64)
    assert plan.tokens == max(1, -(-blocks // workers)) * 64

  def test_values_do_not_retrace(self):
    traces = []

    @jax.jit
    def step(lengths, window):
      traces.append(1)
      return kernels.plan_decode(lengths, workers=3, window=window)

    for length in (4, 9):
      step(jnp.full((3,), length, jnp.int32), jnp.int32(length))
    assert len(traces) == 1


# Rows 0, 1, 3 and 6 share two pages of 16; 2 and 5 share four; 4 is alone.
GROUPS = {0: ([0, 1, 3, 6], 2), 1: ([2, 5], 4)}
LENGTHS = (33, 40, 150, 47, 80, 65, 38)


def sharing(shape, **changes):
  """A problem whose rows begin with the same pages, group by group."""
  shape = dataclasses.replace(shape, lengths=LENGTHS, page_size=16, **changes)
  case = problem(shape)
  for rows, pages in GROUPS.values():
    case.page_table[rows, :pages] = case.page_table[rows[0], :pages]
  return shape, case


def decode(case, q, **changes):
  """`shared_prefix_decode` of a case, jitted with its plan."""
  groups = changes.pop("groups", None)

  @jax.jit
  def run(q, k_pages, v_pages, table, lengths, groups, options):
    shared = kernels.plan_shared_prefix(
      table,
      lengths,
      k_pages,
      v_pages,
      groups=groups,
      num_groups=changes.get("num_groups", 2),
      group_size=changes.get("group_size", 4),
    )
    out = kernels.shared_prefix_decode(
      q,
      k_pages,
      v_pages,
      shared,
      return_lse=True,
      soft_cap=case.options.get("soft_cap"),
      **options,
    )
    return shared, out

  options = {
    key: jnp.asarray(value)
    for key, value in case.options.items()
    if isinstance(value, np.ndarray)
  }
  return run(*put(q, *case.pools, case.lengths), groups, options)


class TestSharedPrefix:
  @pytest.fixture
  def always(self, monkeypatch):
    """Sharing always pays."""
    least = dict.fromkeys(prefix_module._LEAST_SAVING, -(2**40))
    monkeypatch.setattr(prefix_module, "_LEAST_SAVING", least)

  @pytest.mark.parametrize(
    "name",
    [
      "page16_gqa4_d128",
      "bits_gqa4",
      "int8_scale_per_token",
      "e4m3_bits_scale_per_head",
      "soft_cap50_bits",
      "sinks",
      "alibi",
    ],
  )
  def test_equals_the_definition(self, always, name):
    shape, case = sharing(SHAPES[name])
    q = queries(case, shape, len(LENGTHS))
    wanted = definition.paged_decode(
      q, *case.pools, case.lengths, **case.options
    )
    shared, (out, lse) = decode(case, q)
    assert sorted(shared.tokens.tolist()) == [32, 64]
    assert out.dtype == case.dtype
    assert_matches(out, lse, *wanted, case.dtype)

  def test_groups_may_be_told(self, always):
    shape, case = sharing(SHAPES["page16_gqa4_d128"])
    q = queries(case, shape, len(LENGTHS))
    groups = jnp.asarray([1, 1, 0, 1, 7, 0, -1], jnp.int32)
    wanted = definition.paged_decode(q, *case.pools, case.lengths)
    shared, out = decode(case, q, groups=groups)
    np.testing.assert_array_equal(shared.members, [[2, 5, 7, 7], [0, 1, 3, 7]])
    np.testing.assert_array_equal(shared.tokens, [64, 32])
    np.testing.assert_array_equal(shared.own_tokens, [1, 8, 86, 15, 80, 1, 38])
    assert_matches(*out, *wanted, np.float32)

  @pytest.mark.parametrize(
    ("num_groups", "group_size"), [(1, 4), (2, 2), (7, 7), (1, 1)]
  )
  def test_rows_that_do_not_fit_are_decoded_alone(
    self, always, num_groups, group_size
  ):
    shape, case = sharing(SHAPES["page16_gqa4_d128"])
    q = queries(case, shape, len(LENGTHS))
    wanted = definition.paged_decode(q, *case.pools, case.lengths)
    shared, out = decode(case, q, num_groups=num_groups, group_size=group_size)
    assert shared.members.shape == (num_groups, group_size)
    assert_matches(*out, *wanted, np.float32)

  def test_idle_rows_are_in_no_group(self, always):
    shape, case = sharing(SHAPES["page16_gqa4_d128"])
    case.lengths[[0, 4]] = 0
    q = queries(case, shape, len(LENGTHS))
    wanted = definition.paged_decode(q, *case.pools, case.lengths)
    shared, out = decode(case, q)
    assert sorted(shared.tokens.tolist()) == [32, 64]
    assert_matches(*out, *wanted, np.float32)

  def test_the_last_token_is_never_shared(self, always):
    """Rows whose pages are all the same still have one of their own."""
    shape, case = sharing(SHAPES["page16_gqa4_d128"])
    case.lengths[[0, 1, 3, 6]] = 32
    shared, _ = decode(case, queries(case, shape, len(LENGTHS)))
    assert sorted(shared.tokens.tolist()) == [16, 64]

  def test_what_saves_little_is_not_shared(self, monkeypatch):
    """Not with these lengths, though tables of this size might."""
    monkeypatch.setitem(prefix_module._LEAST_SAVING, "cpu", 2**20)
    shape, case = sharing(SHAPES["page16_gqa4_d128"])
    q = queries(case, shape, len(LENGTHS))
    plain = kernels.paged_decode(
      *put(q, *case.pools, case.lengths), return_lse=True
    )
    shared, out = decode(case, q)
    np.testing.assert_array_equal(shared.tokens, 0)
    np.testing.assert_array_equal(shared.own_tokens, case.lengths)
    for a, b in zip(plain, out, strict=True):
      np.testing.assert_allclose(a, b, atol=1e-6)

  def test_no_plan_where_it_never_pays(self):
    table, lengths = jnp.ones((4, 2), jnp.int32), jnp.ones(4, jnp.int32)
    pool = jnp.zeros((3, 2, 16, 32))
    plan = kernels.plan_shared_prefix(
      table, lengths, pool, pool, num_groups=2, group_size=2
    )
    assert plan is None

  @pytest.mark.parametrize("lockstep", [False, True])
  def test_the_gate_counts_what_is_read(self, lockstep):
    lengths, shared = np.array([70, 80, 200]), np.array([64, 64, 0])
    tokens = np.array([64, 0])
    saved = prefix_module._saved(*put(lengths, tokens, shared), lockstep)
    # In lockstep the third row keeps all reading 200 tokens, and 2 groups more.
    assert int(saved) == (-128 if lockstep else 64)

  @pytest.mark.parametrize(
    ("changes", "message"),
    [
      ({"num_groups": 0}, "num_groups=0"),
      ({"group_size": 2.0}, "group_size=2.0"),
      ({"groups": jnp.ones(3, jnp.int32)}, "groups has shape"),
      ({"lengths": jnp.ones(2)}, "lengths is float32"),
    ],
  )
  def test_bad_arguments(self, changes, message):
    call = {
      "page_table": jnp.ones((2, 3), jnp.int32),
      "lengths": jnp.ones(2, jnp.int32),
      "k_pages": jnp.ones((5, 2, 4, 8)),
      "v_pages": jnp.ones((5, 2, 4, 8)),
      "num_groups": 1,
      "group_size": 2,
      **changes,
    }
    with pytest.raises(ValueError, match=message):
      kernels.plan_shared_prefix(**call)

  def test_unknown_backend(self):
    case = sharing(SHAPES["page16_gqa4_d128"])[1]
    with pytest.raises(NotImplementedError, match="there are auto, "):
      kernels.plan_shared_prefix(
        *put(case.page_table, case.lengths, *case.pools[:2]),
        num_groups=1,
        group_size=2,
        backend="cudnn",
      )


class TestLatent:
  @pytest.mark.parametrize(
    ("dtype", "scales"),
    [("float32", None), ("bits", None), ("bits8", "token"), ("int8", "head")],
  )
  def test_equals_the_definition(self, dtype, scales):
    shape = Shape(
      heads=(16, 1),
      head_dim=576,
      page_size=16,
      lengths=(0, 1, 15, 16, 17, 100),
      dtype=dtype,
      scales=scales,
    )
    case = problem(shape)
    q = queries(case, shape, 6)
    arguments = put(q, case.k_pages, case.page_table, case.lengths)
    options = {"value_dim": 512, "scale": 192**-0.5, "window": 50}
    factors = case.options.get("k_scale")
    wanted = definition.latent_decode(
      q,
      case.k_pages,
      case.page_table,
      case.lengths,
      k_scale=factors,
      **options,
    )
    out, lse = kernels.latent_decode(
      *arguments,
      latent_scale=None if factors is None else jnp.asarray(factors),
      return_lse=True,
      **options,
    )
    assert out.shape == (6, 16, 512)
    assert_matches(out, lse, *wanted, case.dtype)

  @pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
      ({"value_dim": 9}, ValueError, "value_dim=9"),
      ({"value_dim": 0}, ValueError, "value_dim=0"),
      ({"pages": jnp.ones((5, 2, 4, 8))}, ValueError, "pages has shape"),
      ({"pages": jnp.ones((5, 1, 4, 6))}, ValueError, "pages has shape"),
      ({"latent_scale": jnp.ones(2)}, ValueError, "latent_scale is float32"),
      ({"backend": "triton"}, NotImplementedError, "supported are auto, xla"),
    ],
  )
  def test_bad_arguments(self, changes, error, message):
    call = {
      "q": jnp.ones((2, 4, 8)),
      "pages": jnp.ones((5, 1, 4, 8)),
      "page_table": jnp.ones((2, 3), jnp.int32),
      "lengths": jnp.ones(2, jnp.int32),
      "value_dim": 6,
      "scale": 1.0,
      **changes,
    }
    with pytest.raises(error, match=message):
      kernels.latent_decode(**call)
