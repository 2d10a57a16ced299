"""Merges of attention over disjoint parts of the keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv_kernels as kernels
from tests.kernels import reference
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
