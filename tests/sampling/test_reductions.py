"""Sums and maxima of rows, and of blocks of their tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv._src.sampling import reductions

_INF = float("inf")
_NAN = float("nan")
over_sizes = pytest.mark.parametrize(
  "num_columns", [1, 2, 3, 4, 5, 17, 64, 513, 5000]
)


def _values(num_columns, rows=3):
  values = np.random.default_rng(num_columns).normal(size=(rows, num_columns))
  return jnp.asarray(values, jnp.float32)


class TestRows:
  @pytest.mark.parametrize(
    ("row", "highest"),
    [
      ([-1.0, -2.0, -0.5], -0.5),
      ([-_INF, -3e38, -1e38], -1e38),
      ([-_INF] * 3, -_INF),
      ([1.0, _INF, 3e38], _INF),
      ([1.0, _NAN, _INF], _NAN),
      ([1.0, -_NAN, 2.0], _NAN),
      ([-0.0, -1.0, -2.0], 0),
      ([1e-40, -1e-40, 0.0], 1e-40),
    ],
  )
  def test_maxima(self, row, highest):
    maxima = reductions.maxima(jnp.asarray([row], jnp.float32))
    np.testing.assert_array_equal(maxima, np.float32([highest]))

  @over_sizes
  def test_sums_and_maxima_are_those_of_numpy(self, num_columns):
    values = _values(num_columns)
    np.testing.assert_allclose(
      jax.jit(reductions.sums)(values),
      np.sum(np.asarray(values, np.float64), axis=1),
      atol=1e-6 * num_columns,
    )
    np.testing.assert_array_equal(
      jax.jit(reductions.maxima)(values), np.max(values, axis=1)
    )

  def test_first_of(self):
    condition = jnp.asarray([[0, 1, 1], [1, 0, 1], [0, 0, 0]]) > 0
    first_columns = reductions.first_of(condition)
    assert (first_columns.tolist(), first_columns.dtype) == (
      [1, 0, 0],
      jnp.int32,
    )


class TestBlocks:
  def test_by_hand(self):
    """Nine tokens are blocks of four, four and one."""
    values = jnp.arange(9, dtype=jnp.float32)[None]
    sums = reductions.by_block(reductions.sums, values)
    assert sums.tolist() == [[6, 22, 8]]
    highest = reductions.by_block(reductions.maxima, values)
    assert highest.tolist() == [[3, 7, 8]]
    block = reductions.read_block(values, jnp.asarray([2], jnp.int32))
    assert block.columns.tolist() == [[5, 6, 7, 8]]
    assert block.values.tolist() == [[5, 6, 7, 8]]
    assert block.valid.tolist() == [[False, False, False, True]]

  @pytest.mark.slow
  @over_sizes
  def test_each_token_is_in_one_block(self, num_columns):
    values = _values(num_columns)
    width = reductions.width_of(num_columns)
    assert width**2 >= num_columns > (width // 2) ** 2
    sums = reductions.by_block(reductions.sums, values)
    columns = []
    for block_index in range(sums.shape[1]):
      block = reductions.read_block(
        values, jnp.full((3,), block_index, jnp.int32)
      )
      inside = np.where(block.valid, block.values, 0)
      np.testing.assert_allclose(
        inside.sum(axis=1), sums[:, block_index], atol=1e-5 * width
      )
      columns += block.columns[0][block.valid[0]].tolist()
    assert columns == list(range(num_columns))
