"""Events of the facade. Needs no vLLM."""

import types

import numpy as np
import pytest

from jaxkv.host.vllm import AllBlocksCleared
from jaxkv.host.vllm import BlockRemoved
from jaxkv.host.vllm import BlockStored
from tests.host.vllm import stand_ins
from tests.host.vllm.stand_ins import admit
from tests.host.vllm.stand_ins import decode
from tests.host.vllm.stand_ins import manager
from tests.host.vllm.stand_ins import request

HASHES = [bytes([n]) * 32 for n in range(1, 12)]


def number(block_hash):
  """As events carry it."""
  return int.from_bytes(block_hash[-8:], "big")


@pytest.fixture
def cache():
  return manager(enable_kv_cache_events=True)


def test_none_unless_enabled():
  cache = manager()
  admit(cache, request("a", range(9)))
  assert cache.take_events() == []
  assert manager(enable_caching=False).take_events() == []


def test_a_request_and_its_decoding(cache):
  one = request("a", range(9), hashes=HASHES, session_id="talk")
  admit(cache, one)
  (stored,) = cache.take_events()
  assert stored == BlockStored(
    block_hashes=[number(HASHES[0]), number(HASHES[1])],
    parent_block_hash=None,
    token_ids=list(range(8)),
    block_size=4,
    lora_id=None,
    medium="GPU",
    lora_name=None,
    extra_keys=[None, None],
    group_idx=0,
    kv_cache_spec_kind="full_attention",
    session_id="talk",
  )
  decode(cache, one, [9, 10])
  assert cache.take_events() == []
  decode(cache, one, [11])
  (stored,) = cache.take_events()
  assert stored.parent_block_hash == number(HASHES[1])
  assert stored.token_ids == [8, 9, 10, 11]


def test_what_is_evicted_and_cleared(cache):
  one = request("a", range(9), hashes=HASHES)
  admit(cache, one)
  cache.free(one)
  admit(cache, request("b", range(50, 87), hashes=HASHES[::-1]))
  stored, *removed, new = cache.take_events()
  assert [type(one) for one in removed] == [BlockRemoved] * 2
  assert [one.block_hashes for one in removed] == [
    [number(HASHES[1])],
    [number(HASHES[0])],
  ]
  assert len(stored.block_hashes) == 2 and len(new.block_hashes) == 9
  cache.free(request("b", []))
  assert cache.reset_prefix_cache()
  assert cache.block_pool.kv_event_queue == [AllBlocksCleared()]
  assert cache.take_events() == [AllBlocksCleared()]
  assert cache.take_events() == []


@pytest.mark.slow
def test_more_events_than_are_read_at_once():
  cache = manager(num_blocks=16, enable_kv_cache_events=True)
  for turn in range(40):
    one = request(f"{turn}", [turn] * 60)
    admit(cache, one)
    cache.free(one)
  events = cache.take_events()
  assert sum(isinstance(one, BlockStored) for one in events) == 40
  assert sum(isinstance(one, BlockRemoved) for one in events) == 39 * 15


def test_hashes_as_bytes(cache, monkeypatch):
  monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
  admit(cache, request("a", range(5), hashes=HASHES))
  assert cache.take_events()[0].block_hashes == HASHES[:1]


def test_too_few_hashes(cache):
  with pytest.raises(ValueError, match="`block_hashes` of 'a'"):
    admit(cache, request("a", range(9), hashes=HASHES[:1]))
  assert cache.take_events() == [] and cache.usage == 0


@pytest.mark.slow
def test_blocks_that_are_not_kept_have_tokens_but_no_hash():
  """As vLLM tells it."""
  cache = manager(
    stand_ins.SlidingWindowSpec(sliding_window=5),
    enable_kv_cache_events=True,
    prefix_cache_retention_interval=0,
  )
  one = request("a", range(9), hashes=HASHES)
  admit(cache, one)
  decode(cache, one, [9, 10, 11])
  prompt, later = cache.take_events()
  assert prompt.block_hashes == [number(HASHES[1])]
  assert prompt.token_ids == list(range(8))
  assert prompt.kv_cache_spec_kind == "sliding_window"
  assert prompt.kv_cache_spec_sliding_window == 5
  assert (later.block_hashes, later.token_ids) == ([], [8, 9, 10, 11])
  assert later.extra_keys is None


@pytest.mark.slow
def test_groups_in_order():
  cache = manager(
    stand_ins.FullAttentionSpec(),
    stand_ins.SlidingWindowSpec(sliding_window=60),
    enable_kv_cache_events=True,
  )
  admit(cache, request("a", range(9), hashes=HASHES))
  events = cache.take_events()
  assert [one.group_idx for one in events] == [0, 1]
  assert events[0].block_hashes == events[1].block_hashes


def test_what_tells_blocks_apart(cache):
  place = types.SimpleNamespace(offset=3, length=3)
  image = types.SimpleNamespace(identifier="cat", mm_position=place)
  adapter = types.SimpleNamespace(
    name="lora", lora_name="lora", lora_path="/l", lora_int_id=7, adapter_id=7
  )
  told = {"cache_salt": "s", "lora_request": adapter, "mm_features": [image]}
  admit(cache, request("a", range(13), hashes=HASHES, **told))
  (stored,) = cache.take_events()
  assert (stored.lora_id, stored.lora_name) == (7, "lora")
  assert stored.extra_keys == [
    ("lora", ("cat", 3), "s"),
    ("lora", ("cat", -1)),
    ("lora",),
  ]
  rows = np.ones((4, 2), np.float32)
  admit(cache, request("b", range(50, 59), prompt_embeds=rows))
  (stored,) = cache.take_events()
  assert len(stored.extra_keys[0][0]) == 32
  assert len(stored.extra_keys) == 2


def test_a_full_report_repeats_what_was_found(cache):
  admit(cache, request("a", range(9), hashes=HASHES))
  cache.take_events()
  again = request("b", range(9), hashes=HASHES, kv_cache_report_mode="full")
  cache.get_computed_blocks(again)
  (stored,) = cache.take_events()
  assert stored.block_hashes == [number(HASHES[0]), number(HASHES[1])]
  assert stored.token_ids == list(range(8))


def test_delayed_blocks_are_told_when_they_are_cached(cache):
  one = request("a", range(13), hashes=HASHES)
  loads = {"num_external_computed_tokens": 12, "delay_cache_blocks": True}
  admit(cache, one, 0, **loads)
  assert cache.take_events() == []
  cache.cache_blocks(one, 12)
  assert len(cache.take_events()[0].block_hashes) == 3


@pytest.mark.slow
def test_names_are_forgotten_with_their_blocks():
  cache = manager(num_blocks=6)
  for turn in range(20):
    one = request(f"{turn}", [turn] * 20)
    admit(cache, one)
    cache.free(one)
  names = cache.block_pool.cached_block_hash_to_block
  assert len(names) == 5
  assert cache.block_pool.get_cached_block(b"unknown", [0]) is None
