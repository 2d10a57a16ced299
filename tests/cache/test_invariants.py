"""Every invariant is broken by hand, and `check` names it and no other."""

import dataclasses

import jax.numpy as jnp
import pytest

import jaxkv
from tests.cache.by_hand import ints
from tests.cache.by_hand import tiny
from tests.cache.by_hand import write

replace = dataclasses.replace


def lived_in() -> jaxkv.CacheState:
  """Slot 0 holds 1 2 | 3 4 | 5 in pages 1, 2 and 3; page 1 is pinned."""
  state = write(tiny(), 0, 1, 2, 3, 4, 5)
  return jaxkv.touch(state, ints(1))[0]


def with_pool(state, **changes):
  return replace(state, pool=replace(state.pool, **changes))


def _null_page_in_the_middle(state):
  return replace(state, page_table=state.page_table.at[0, 0, 1].set(0))


def _page_behind_the_last(state):
  return replace(state, page_table=state.page_table.at[0, 0, 3].set(0))


def _too_long(state):
  return replace(state, length=state.length.at[0].set(7))


def _one_reference_more(state):
  return with_pool(state, ref_count=state.pool.ref_count.at[2].add(1))


def _one_pin_less(state):
  return with_pool(state, pin_count=state.pool.pin_count.at[1].add(-1))


def _count_of_free_pages(state):
  queue = replace(state.pool.queue, num_free=state.pool.queue.num_free + 1)
  return with_pool(state, queue=queue)


def _free_page_twice(state):
  """Page 4 stands where page 5 should stand too."""
  queue = state.pool.queue
  ring = queue.ring.at[queue.position[5]].set(4)
  return with_pool(state, queue=replace(queue, ring=ring))


def _bucket_of_another_page(state):
  index = state.pool.index
  buckets = jnp.where(index.buckets == 2, 3, index.buckets)
  return with_pool(state, index=replace(index, buckets=buckets))


def _count_of_overflows(state):
  index = state.pool.index
  overflow = index.overflow.at[0].add(1)
  return with_pool(state, index=replace(index, overflow=overflow))


def _other_chain(state):
  chain = state.hashes.chain.at[0, 0].add(jnp.uint32(1))
  return replace(state, hashes=replace(state.hashes, chain=chain))


def _other_tokens(state):
  """The key of page 2 is no longer that of its tokens."""
  index = state.pool.index
  tokens = index.tokens.at[2, 0].set(9)
  return with_pool(state, index=replace(index, tokens=tokens))


@pytest.mark.parametrize(
  ("broken", "laws"),
  [
    (_null_page_in_the_middle, {"tables", "refs"}),
    (_page_behind_the_last, {"tables"}),
    (_too_long, {"lengths"}),
    (_one_reference_more, {"refs"}),
    (_one_pin_less, {"refs"}),
    (_count_of_free_pages, {"free"}),
    (_free_page_twice, {"free"}),
    (_bucket_of_another_page, {"index"}),
    (_count_of_overflows, {"index"}),
    (_other_chain, {"keys"}),
    (_other_tokens, {"keys"}),
  ],
)
def test_broken_invariants_are_named(broken, laws):
  state = broken(lived_in())
  checks = jaxkv.check_invariants(state)
  assert {name for name, holds in checks.items() if not holds} >= laws
  with pytest.raises(jaxkv.CacheError, match="broke its invariants"):
    jaxkv.check(state)


def test_a_cache_in_use_keeps_its_invariants():
  assert all(jaxkv.check_invariants(lived_in()).values())
