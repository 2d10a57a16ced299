"""Bounds-safe gathers and scatters, XLA idioms, windows of work."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import loops
from jaxkv._src.arrays import sharding
from tests.cache.by_hand import ints

OUTSIDE = (-1, 3, indexing.NOWHERE, -(2**31), 2**31 - 1)
"""No index of an array of three; a plain `x[-1]` would be its last row."""


@pytest.mark.parametrize("index", OUTSIDE)
def test_indices_out_of_range_read_the_fill_and_write_nothing(index):
  array = ints(10, 20, 30)
  assert indexing.take(array, ints(index, 1), fill=-7).tolist() == [-7, 20]
  for write in (indexing.put, indexing.add, indexing.put_max, indexing.put_min):
    assert write(array, ints(index), values=5).tolist() == [10, 20, 30]


def test_indices_in_range_are_written():
  array = ints(10, 20, 30)
  changed = indexing.put(array, ints(0, 2), values=ints(1, 3))
  assert changed.tolist() == [1, 20, 3]
  # Duplicates add up; the largest and the smallest win.
  assert indexing.add(array, ints(1, 1), values=2).tolist() == [10, 24, 30]
  values = ints(25, 5)
  assert indexing.put_max(array, ints(1, 1), values=values)[1] == 25
  assert indexing.put_min(array, ints(1, 1), values=values)[1] == 5


def test_an_index_of_two_axes():
  array = ints((1, 2), (3, 4))
  index = ints(0, 1, 2, 1), ints(1, 2, 0, 0)
  assert indexing.take(array, *index).tolist() == [2, 0, 0, 3]
  changed = indexing.put(array, *index, values=9)
  assert changed.tolist() == [[1, 9], [9, 4]]


def test_masked_indices_are_out_of_range():
  valid = jnp.asarray([True, False])
  indices = indexing.where_valid(valid, ints(4, 5))
  assert indices.tolist() == [4, indexing.NOWHERE]


def test_a_fence_changes_no_index():
  """It only makes an index depend on a count that is never negative."""
  assert loops.read_before(ints(0)[0], ints(1, 2)).tolist() == [1, 2]
  text = jax.jit(loops.read_before).lower(ints(0)[0], ints(1, 2)).as_text()
  assert "compare" in text and "select" in text


def test_a_body_runs_once_or_not_at_all():
  for condition, expected in ((True, 6), (False, 5)):
    out = loops.at_most_once(jnp.asarray(condition), lambda x: x + 1, ints(5))
    assert out.tolist() == [expected]


def test_zeros_keep_the_dtype():
  for dtype in (jnp.int32, jnp.uint32, jnp.bool_):
    ones = jnp.ones((2,), dtype)
    zeros = sharding.zeros_like(ones)
    assert zeros.dtype == dtype and not zeros.any()


@pytest.mark.parametrize(
  "find", [loops._num_ended_by_search, loops._num_ended_by_comparison]
)
@pytest.mark.parametrize("rows", [1, 7, 300])
def test_rows_of_items_on_every_platform(find, rows):
  counts = np.random.default_rng(rows).integers(0, 4, rows)
  expected = np.repeat(np.arange(rows), counts)
  ends = jnp.cumsum(jnp.asarray(counts, jnp.int32), dtype=jnp.int32)
  items = jnp.arange(len(expected) + 5, dtype=jnp.int32)
  rows_of_items = np.asarray(find(ends, items))
  np.testing.assert_array_equal(rows_of_items[: len(expected)], expected)
  np.testing.assert_array_equal(rows_of_items[len(expected) :], rows)


def test_positions_between_two_columns():
  inside = indexing.between(ints(1, 0), ints(3, 0), 4)
  assert inside.tolist() == [[False, True, True, False], [False] * 4]
