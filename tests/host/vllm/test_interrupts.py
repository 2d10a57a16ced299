"""Interrupted calls of the facade are atomic. Needs no vLLM."""

import pytest

from tests.host.vllm import stand_ins
from tests.host.vllm.stand_ins import admit
from tests.host.vllm.stand_ins import manager
from tests.host.vllm.stand_ins import request
from tests.tools.interrupts import check_atomic

HASHES = [bytes([n]) * 32 for n in range(1, 16)]


def begun():
  """Returns a manager with two requests that run, and its requests."""
  cache = manager(
    stand_ins.FullAttentionSpec(),
    stand_ins.SlidingWindowSpec(sliding_window=5),
    stand_ins.MambaSpec(),
    num_blocks=41,
    enable_kv_cache_events=True,
    needs_kv_cache_zeroing=True,
    log_stats=True,
  )
  requests = {
    "a": request("a", range(13), hashes=HASHES),
    "b": request("b", range(50, 63)),
    "c": request("c", range(13), hashes=HASHES),
    "loaded": request("loaded", range(80, 93), hashes=HASHES[::-1]),
  }
  for name in "abc":
    assert admit(cache, requests[name]) is not None
  cache.free(requests["c"])
  requests["c"].num_computed_tokens = 0
  requests["a"].all_token_ids += [7, 8, 9]
  return cache, requests


def load(cache, requests):
  """Admits a request with external tokens, which evicts what is free."""
  cache.allocate_slots(
    requests["loaded"], 1, 0, None, 24, num_external_computed_tokens=12
  )


CALLS = {
  "allocate_slots": lambda m, r: m.allocate_slots(r["a"], 3),
  "allocate_slots, new": lambda m, r: admit(m, r["c"]),
  "allocate_slots, loaded": load,
  "free": lambda m, r: m.free(r["a"]),
  "pop_blocks_for_free": lambda m, r: m.pop_blocks_for_free(r["b"]),
  "evict_blocks": lambda m, r: m.evict_blocks({1, 2, 3}),
  "reset_prefix_cache": lambda m, r: m.reset_prefix_cache(),
  "take_events": lambda m, r: m.take_events(),
  "take_new_block_ids": lambda m, r: m.take_new_block_ids(),
  "find": lambda m, r: len(m.block_pool.cached_block_hash_to_block),
}


def prepared(name):
  """Returns a manager for which the call has something to do."""
  cache, requests = begun()
  if name == "reset_prefix_cache":
    cache.free(requests["a"])
    cache.free(requests["b"])
  return cache, requests


def everything(cache):
  """Returns all that later calls depend on."""
  tables = [cache.get_block_ids(name) for name in ("a", "b", "c", "loaded")]
  pool = cache.block_pool
  state = [
    tables,
    stand_ins.free_ids(cache),
    [block.ref_cnt for block in pool.blocks],
    repr(pool.kv_event_queue),
    repr(cache.prefix_cache_stats),
    [(block.block_hash, block.block_hash_num_tokens) for block in pool.blocks],
    len(pool.cached_block_hash_to_block),
    [
      pool.cached_block_hash_to_block.get_one_block(block.block_hash).block_id
      for block in pool.blocks
      if block.block_hash is not None
    ],
  ]
  # These calls change the manager, which is not used again.
  return [
    *state,
    cache.take_new_block_ids(),
    cache.take_boundary_state_offloads(),
  ]


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_interrupted_calls_are_atomic(name, pytestconfig):
  check_atomic(
    lambda: prepared(name),
    CALLS[name],
    everything,
    is_deep=pytestconfig.getoption("deep"),
    may_change_nothing=name == "find",
  )
