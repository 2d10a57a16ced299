"""Merging and equal-work plans."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv_kernels as kernels
from jaxkv_kernels._src.attention import reference
from tests.kernels.shapes import put


class TestMerge:
  def test_equals_the_reference(self):
    rng = np.random.default_rng(0)
    out = rng.standard_normal((4, 3, 5, 2, 8)).astype(np.float32)
    lse = (rng.standard_normal(out.shape[:-1]) * 20).astype(np.float32)
    lse[rng.random(lse.shape) < 0.4] = -np.inf
    lse[:, 1, 2] = -np.inf
    out[lse == -np.inf] = np.nan  # a part without keys
    expected = reference.merge_states(np.nan_to_num(out), lse)
    merged, merged_lse = jax.jit(kernels.merge_states)(*put(out, lse))
    np.testing.assert_allclose(merged, expected[0], atol=1e-6)
    np.testing.assert_allclose(merged_lse, expected[1], rtol=1e-6)
    np.testing.assert_array_equal(merged[1, 2], 0)
    np.testing.assert_array_equal(merged_lse[1, 2], -np.inf)

  def test_parts_may_be_merged_in_steps(self):
    rng = np.random.default_rng(1)
    out, lse = put(
      rng.standard_normal((3, 2, 4)).astype(np.float32),
      rng.standard_normal((3, 2)).astype(np.float32),
    )
    two_parts = kernels.merge_states(out[:2], lse[:2])
    all_parts = kernels.merge_states(
      jnp.stack([two_parts[0], out[2]]), jnp.stack([two_parts[1], lse[2]])
    )
    whole = kernels.merge_states(out, lse)
    for a, b in zip(all_parts, whole, strict=True):
      np.testing.assert_allclose(a, b, atol=1e-6)

  def test_extreme_log_sum_exps_do_not_overflow(self):
    out, lse = put(
      np.array([[[1.0]], [[2.0]]], np.float32),
      np.array([[5e5], [-5e5]], np.float32),
    )
    merged, merged_lse = kernels.merge_states(out, lse)
    assert (float(merged[0, 0]), float(merged_lse[0])) == (1.0, 5e5)

  @pytest.mark.parametrize(
    ("out", "lse", "message"),
    [
      (jnp.ones((2, 3, 4)), jnp.ones((2, 4)), "`lse` must be"),
      (jnp.ones((2, 3, 4)), jnp.ones((2, 3), jnp.bfloat16), "`lse` .*got bfl"),
      (jnp.ones((2, 3, 4), jnp.int32), jnp.ones((2, 3)), "`out` .* got"),
      (jnp.ones((0, 3, 4)), jnp.ones((0, 3)), "`out` must"),
    ],
  )
  def test_bad_arguments(self, out, lse, message):
    with pytest.raises((TypeError, ValueError), match=message):
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
    plan = kernels.DecodePlan(*map(np.asarray, plan))
    assert len(plan.row) == 17 + workers
    assert plan.begins[-1] <= len(plan.row)
    assert (plan.first % 64 == 0).all()
    assert (plan.end[plan.begins[-1] :] == 0).all()
    blocks = 0
    for b, length in enumerate(lengths):
      items = range(plan.begins[b], plan.begins[b + 1])
      assert (plan.row[items] == b).all()
      assert plan.first[items[0]] == 0
      assert plan.end[items[-1]] == np.iinfo(np.int32).max
      np.testing.assert_array_equal(plan.first[items[1:]], plan.end[items[:-1]])
      window_start = 0 if window is None else max(0, length - window) // 64 * 64
      piece_lengths = np.minimum(plan.end[items], length) - np.maximum(
        plan.first[items], window_start
      )
      assert piece_lengths.max() <= plan.tokens
      blocks += -(-max(length - window_start, 0) // 64)
    assert plan.tokens == max(1, -(-blocks // workers)) * 64

  def test_workers(self):
    """The pieces that a backend processes at once, for each K/V head."""
    for kv_heads, workers in ((8, 33), (1, 264), (1000, 1)):
      pool = jnp.zeros((1, kv_heads, 8, 64), jnp.bfloat16)
      assert kernels.decode_workers(pool, backend="mosaic_gpu") == workers
      for backend in ("xla", "triton", "mosaic_tpu", "auto"):
        assert kernels.decode_workers(pool, backend=backend) is None
    with pytest.raises(NotImplementedError, match=r"`backend` .* got 'cuda'"):
      kernels.decode_workers(pool, backend="cuda")
    with pytest.raises(ValueError, match=r"`k_pages` must be \[N, K, S, D\]"):
      kernels.decode_workers(jnp.zeros(3), backend="xla")

  def test_with_64_bit_types(self):
    with jax.enable_x64(True):
      lengths = jnp.asarray([100, 0, 7], jnp.int32)
      plan = kernels.plan_decode(lengths, workers=2)
    assert {x.dtype for x in plan} == {np.dtype(np.int32)}
    plan_x64 = kernels.plan_decode(lengths, workers=2)
    for a, b in zip(plan, plan_x64, strict=True):
      np.testing.assert_array_equal(a, b)

  def test_values_do_not_retrace(self):
    traces = []

    @jax.jit
    def step(lengths, window):
      traces.append(1)
      return kernels.plan_decode(lengths, workers=3, window=window)

    for length in (4, 9):
      step(jnp.full((3,), length, jnp.int32), jnp.int32(length))
    assert len(traces) == 1
