"""Bounds-safe gather and scatter: out-of-range reads fill, writes drop."""

import jax.numpy as jnp
import pytest

from jaxkv._src.cache import masked
from tests.cache.by_hand import ints

OUTSIDE = (-1, 3, masked.NOWHERE, -(2**31), 2**31 - 1)
"""No index of an array of three; a plain `x[-1]` would be its last row."""


@pytest.mark.parametrize("index", OUTSIDE)
def test_nothing_is_outside(index):
  array = ints(10, 20, 30)
  assert masked.take(array, ints(index, 1), fill=-7).tolist() == [-7, 20]
  for write in (masked.put, masked.add, masked.put_max, masked.put_min):
    assert write(array, ints(index), values=5).tolist() == [10, 20, 30]


def test_what_is_inside_is_read_and_written():
  array = ints(10, 20, 30)
  assert masked.put(array, ints(0, 2), values=ints(1, 3)).tolist() == [1, 20, 3]
  # Duplicates add up; the largest and the smallest win.
  assert masked.add(array, ints(1, 1), values=2).tolist() == [10, 24, 30]
  values = ints(25, 5)
  assert masked.put_max(array, ints(1, 1), values=values)[1] == 25
  assert masked.put_min(array, ints(1, 1), values=values)[1] == 5


def test_an_index_of_two_axes():
  array = ints((1, 2), (3, 4))
  rows, columns = ints(0, 1, 2, 1), ints(1, 2, 0, 0)
  assert masked.take(array, rows, columns).tolist() == [2, 0, 0, 3]
  after = masked.put(array, rows, columns, values=9)
  assert after.tolist() == [[1, 9], [9, 4]]


def test_a_masked_index_is_nowhere():
  valid = jnp.asarray([True, False])
  assert masked.where_valid(valid, ints(4, 5)).tolist() == [4, masked.NOWHERE]
