"""Ranges of page-table rows: filled, grown, shrunk and attached, by hand."""

import jax.numpy as jnp
import pytest

import jaxkv
from jaxkv._src.arrays import indexing
from jaxkv._src.cache.pool import page_pool
from jaxkv._src.cache.pool import page_table
from tests.cache.by_hand import free_list
from tests.cache.by_hand import ints

NONE = 8
"""NO_PAGE of a pool with pages 1 to 7."""


@pytest.fixture
def pool():
  config = jaxkv.CacheConfig(
    num_pages=NONE, page_size=2, num_slots=2, pages_per_slot=4
  )
  return page_pool.init(config)


@pytest.fixture
def table():
  """int32[2, 2, 4]: two slots, two groups, nothing attached."""
  return jnp.full((2, 2, 4), NONE, jnp.int32)


def test_ranges_go_group_by_group_within_a_slot():
  made = page_table.ranges(
    ints(1, 0), ints((0, 1), (2, 3)), ints((2, 1), (1, 4))
  )
  assert made.slot.tolist() == [1, 1, 0, 0]
  assert made.group.tolist() == [0, 1, 0, 1]
  assert made.counts.tolist() == [2, 0, 0, 1]


def test_pages_are_popped_in_the_order_of_the_ranges(pool, table):
  ranges = page_table.ranges(
    ints(1, 0), ints((0, 1), (0, 0)), ints((2, 2), (1, 0))
  )
  pool, table, evicted = page_table.grow(pool, table, [ranges])
  assert table[1].tolist() == [[1, 2, NONE, NONE], [NONE, 3, NONE, NONE]]
  assert table[0, 0].tolist() == [4, NONE, NONE, NONE]
  assert (free_list(pool.queue), int(evicted)) == ([5, 6, 7], 0)


def test_the_last_column_goes_back_first(pool, table):
  """No page has a key, so they come before all others, in that order."""
  ranges = page_table.ranges(ints(0), ints((0, 0)), ints((3, 0)))
  pool, table, _ = page_table.grow(pool, table, [ranges])
  cleared = page_table.ranges(ints(0), ints((1, 0)), ints((3, 0)))
  pool, table = page_table.shrink(pool, table, cleared, replacement=NONE)
  assert table[0, 0].tolist() == [1, NONE, NONE, NONE]
  assert free_list(pool.queue) == [3, 2, 4, 5, 6, 7]


def test_null_pages_are_not_freed(pool, table):
  table = page_table.fill_before(table, ints(0), ints((2, 1)), 0)
  assert table[0].tolist() == [[0, 0, NONE, NONE], [0, NONE, NONE, NONE]]
  cleared = page_table.ranges(ints(0), ints((0, 0)), ints((4, 4)))
  pool, table = page_table.shrink(pool, table, cleared, replacement=NONE)
  assert (table == NONE).all()
  assert free_list(pool.queue) == [1, 2, 3, 4, 5, 6, 7]


def test_an_attached_page_has_one_more_reference(pool, table):
  """Both slots get page 5; the null page needs no reference."""
  pages = ints((0, 5, 0, 0))
  pool, table = page_table.attach(
    pool,
    table,
    ints(0, 1),
    ints((0, 0), (0, 0)),
    ints((2, 0), (2, 0)),
    lambda _table, _row, _group, column: indexing.take(pages[0], column),
  )
  assert table[:, 0, :2].tolist() == [[0, 5], [0, 5]]
  assert pool.ref_count[ints(0, 5)].tolist() == [0, 2]
  assert free_list(pool.queue) == [1, 2, 3, 4, 6, 7]
