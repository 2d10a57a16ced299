"""The page pool: pop, hold and drop keep references and the queue in step."""

import jax.numpy as jnp
import pytest

import jaxkv
from jaxkv._src.cache.pool import page_pool
from tests.cache.by_hand import free_list
from tests.cache.by_hand import ints

YES = jnp.asarray([True])


@pytest.fixture
def pool():
  """Pages 1 to 7, all of them free; unreferenced pages go to the back."""
  return page_pool.init(
    jaxkv.CacheConfig(
      num_pages=8, page_size=2, num_slots=1, pages_per_slot=4, free_policy="lru"
    )
  )


def test_pop_takes_the_first_pages(pool):
  pool, popped = page_pool.pop(pool, ints(2), window=4)
  assert popped.pages[popped.valid].tolist() == [1, 2]
  assert pool.ref_count.tolist() == [0, 1, 1, 0, 0, 0, 0, 0]
  assert free_list(pool.queue) == [3, 4, 5, 6, 7]


def test_holding_a_free_page_takes_it_out_of_the_middle(pool):
  pool = page_pool.hold(pool, ints(4, 4), jnp.asarray([True, True]))
  assert int(pool.ref_count[4]) == 2
  assert free_list(pool.queue) == [1, 2, 3, 5, 6, 7]


def test_the_last_reference_puts_a_page_at_the_back(pool):
  pool = page_pool.hold(pool, ints(4, 4), jnp.asarray([True, True]))
  pool, outside = page_pool.drop(pool, ints(4), ints(0), YES)
  assert free_list(pool.queue) == [1, 2, 3, 5, 6, 7]
  pool, outside = page_pool.drop(pool, ints(4), ints(0), YES)
  assert free_list(pool.queue) == [1, 2, 3, 5, 6, 7, 4]
  assert not outside.any()


def test_pages_without_a_key_wait_outside_for_the_front():
  """Of two pages that one owner drops, the last one comes to the front."""
  pool = page_pool.init(
    jaxkv.CacheConfig(num_pages=8, page_size=2, num_slots=1, pages_per_slot=4)
  )
  mask = jnp.asarray([True, True])
  owner = ints(0, 0)
  pool = page_pool.hold(pool, ints(4, 6), mask)
  pool, outside = page_pool.drop(pool, ints(4, 6), owner, mask)
  assert outside.tolist() == [True, True]
  assert free_list(pool.queue) == [1, 2, 3, 5, 7]
  pool = page_pool.to_front(pool, ints(4, 6), owner, mask)
  assert free_list(pool.queue) == [6, 4, 1, 2, 3, 5, 7]
