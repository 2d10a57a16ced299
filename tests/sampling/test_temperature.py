"""Temperatures of rollouts, scores and trainers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv._src.sampling.temperature import as_temperature
from jaxkv._src.sampling.temperature import divisor


@pytest.mark.parametrize(
  ("value", "error", "message"),
  [
    (float("nan"), ValueError, "must be 0, or a finite .* got nan; use 0"),
    (float("inf"), ValueError, "finite float32 .* got inf"),
    (-0.5, ValueError, "got -0.5"),
    (1e39, ValueError, r"finite float32 .* got 1e\+39"),
    (3e38, ValueError, r"finite float32 .* got 3e\+38"),
    (1e-46, ValueError, r"of 1.2e-38 .. 8.5e\+37, got 1e-46"),
    (jnp.float32(jnp.nan), ValueError, "got nan"),
    (True, TypeError, "must hold real numbers, got bool"),
    (None, TypeError, "must hold real numbers, got object"),
    ("hot", TypeError, "must hold real numbers"),
    (1j, TypeError, "must hold real numbers, got complex128"),
    ([0.5], ValueError, r"must have the shape \[\], got \[1\]"),
  ],
)
def test_invalid_temperatures_are_refused(value, error, message):
  with pytest.raises(error, match=f"`temperature` .*{message}"):
    as_temperature(value)


@pytest.mark.parametrize("value", [0, 1, np.float64(0.5), jnp.bfloat16(2)])
def test_numbers_of_any_width_are_cast_to_float32(value):
  cast = as_temperature(value)
  assert (cast.dtype, cast.shape) == (jnp.float32, ())
  traced = jax.jit(as_temperature)(value)
  assert (traced.dtype, float(traced)) == (jnp.float32, float(value))


def test_the_divisor_of_greedy_rows_is_one():
  temperature = jnp.asarray([0, 0.5, 3, -1, jnp.inf, jnp.nan], jnp.float32)
  expected = [1, 0.5, 3] + [np.nan] * 3
  np.testing.assert_array_equal(divisor(temperature), np.float32(expected))
