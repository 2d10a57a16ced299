"""A manager with offloaded pages, and the moves that it asks for.

`test_conformance` and `test_bridge` compare its moves and queues with those of
the reference model and of the device.
"""

import jax
import numpy as np
import pytest

import jaxkv
from jaxkv.host import CacheManager
from tests.host.scheduling import FULL
from tests.host.scheduling import LONGEST
from tests.host.scheduling import admit
from tests.host.scheduling import hit_of
from tests.host.scheduling import move_rows
from tests.host.scheduling import request

KEY = np.arange(4, dtype=np.uint32)
NONE = jaxkv.results.Moves.NONE


def manager(**options):
  """Makes a manager of one group with 6 usable pages and 8 offload pages."""
  options = {"offload_pages": 8, "key": KEY, **options}
  return CacheManager(7, [FULL], LONGEST, **options)


def used_manager(**options):
  """Makes a manager that served more requests than it has device pages for."""
  cache = manager(**options)
  for name, first_token in (("a", 0), ("b", 100), ("c", 200)):
    serve(cache, name, first_token)
  return cache


def serve(cache, name, first_token, count=10):
  """Serves a request of the tokens from `first_token` on; returns its hit."""
  req = request(name, range(first_token, first_token + count))
  hit = admit(cache, req)[0]
  pages = cache.get_page_ids(name)[0]
  cache.free(req)
  return hit[0], pages


def test_evicted_pages_return():
  cache = manager()
  assert serve(cache, "a", 0) == ([], [1, 2, 3])
  serve(cache, "b", 100)
  assert move_rows(cache.take_moves()) == []
  # Pages without a key are used first, then the second page of a.
  assert serve(cache, "c", 200)[1] == [5, 6, 2]
  assert move_rows(cache.take_moves()) == [[2, 0, NONE]]
  # It returns to page 2, which has no key, and page 4 of b takes its place.
  assert serve(cache, "a", 0) == ([1, 8], [1, 2, 4])
  assert move_rows(cache.take_moves()) == [[2, NONE, 0], [4, 0, NONE]]
  assert cache.make_prefix_cache_stats().restored == 1
  assert cache.make_prefix_cache_stats().restored == 0


def test_contents_follow_the_moves():
  """Random prompts over real memory: each hit has the K/V of its tokens."""
  cache = manager(track_new_pages=True)
  kv = jaxkv.kv.init(cache.config, num_layers=1, num_kv_heads=1, head_dim=4)
  kv = jax.tree.map(lambda pool: pool.astype("uint16"), kv)
  offload = jaxkv.kv.init_offload(kv, cache.config)
  move = jax.jit(jaxkv.kv.move, donate_argnums=(0, 1))

  @jax.jit
  def write(kv, pages, marks):
    return jax.tree.map(
      lambda pool: pool.at[pages].set(marks[:, None, None, None]), kv
    )

  draws = np.random.default_rng(0)
  restored = 0
  for turn in range(60):
    first_token = 100 * int(draws.integers(4))
    req = request(str(turn), range(first_token, first_token + 10))
    hit, _ = admit(cache, req)
    moves = cache.take_moves()
    kv, offload = move(kv, offload, moves)
    pages = cache.get_page_ids(req.request_id)[0]
    restored += int(np.sum(moves.restored_from[: moves.count] != NONE))
    new = cache.take_new_page_ids()
    assert set(new) == set(pages[len(hit[0]) :])
    marks = np.arange(first_token, first_token + 3, dtype=np.uint16)
    actual = np.asarray(jax.tree.leaves(kv)[0])[pages[: len(hit[0])], 0, 0, 0]
    np.testing.assert_array_equal(actual, marks[: len(hit[0])])
    kv = write(kv, np.asarray(pages), marks)
    cache.free(req)
  assert restored > 10


def test_pages_in_neither_memory_are_removed():
  cache = used_manager(offload_pages=1, num_events=64)
  removed = [
    event.page
    for event in cache.take_events().events
    if isinstance(event, jaxkv.host.Removed)
  ]
  # The page saved last is on the host; each earlier one was forgotten there.
  statistics = cache.make_prefix_cache_stats()
  assert statistics.saved == statistics.forgotten + 1
  assert removed == [8] * statistics.forgotten


def test_evict_and_reset_reach_offload_memory():
  cache = used_manager()
  assert hit_of(cache, request("d", range(10)))[0] == [[1, 8]]
  cache.evict_pages([8])
  assert hit_of(cache, request("d", range(10)))[0] == [[1]]
  assert cache.reset_prefix_cache()
  assert cache.cached_page_ids() == set()
  assert hit_of(cache, request("d", range(10)))[1] == 0


def test_a_policy_of_never_moves_nothing():
  cache = used_manager(offload_policy="never")
  assert move_rows(cache.take_moves()) == []
  assert cache.make_prefix_cache_stats().dropped == 1


@pytest.mark.slow
def test_a_loop_goes_on_with_both_memories():
  """The device finds a page on the host, and the manager one that it moved."""
  cache = used_manager()
  with pytest.raises(ValueError, match="take_moves"):
    _ = cache.state
  cache.take_moves()
  state = cache.state
  jaxkv.check(state)
  tokens = np.arange(10, dtype=np.int32)[None]
  state, out = jaxkv.admit(state, [0], tokens, [10])
  assert out.num_cached_tokens.tolist() == [8]
  assert move_rows(out.moves)[0][2] == 0
  state, _ = jaxkv.free(state, slots=[0])
  assert cache.take(state) == []
  assert hit_of(cache, request("d", range(10)))[1] == 8
  assert cache.make_prefix_cache_stats().restored == 1
  assert move_rows(cache.take_moves()) == []


def test_moves_need_offload_pages():
  cache = CacheManager(7, [FULL], LONGEST)
  with pytest.raises(ValueError, match="offload_pages"):
    cache.take_moves()


def test_more_moves_than_pages():
  """The arrays grow by whole pools, so that few shapes are compiled."""
  cache = manager(offload_pages=30)
  for turn in range(8):
    serve(cache, str(turn), 100 * turn)
  moves = cache.take_moves()
  assert len(moves.page) == 14
  assert 7 < int(moves.count) <= 14
