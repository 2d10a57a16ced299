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


def as_integer(block_hash):
  """Returns the form of a hash in events."""
  return int.from_bytes(block_hash[-8:], "big")


@pytest.fixture
def cache():
  return manager(enable_kv_cache_events=True)


def test_no_events_unless_enabled():
  cache = manager()
  admit(cache, request("a", range(9)))
  assert cache.take_events() == []
  assert manager(enable_caching=False).take_events() == []


def test_events_of_a_prompt_and_its_decoding(cache):
  req = request("a", range(9), hashes=HASHES, session_id="talk")
  admit(cache, req)
  (stored,) = cache.take_events()
  assert stored == BlockStored(
    block_hashes=[as_integer(HASHES[0]), as_integer(HASHES[1])],
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
  decode(cache, req, [9, 10])
  assert cache.take_events() == []
  decode(cache, req, [11])
  (stored,) = cache.take_events()
  assert stored.parent_block_hash == as_integer(HASHES[1])
  assert stored.token_ids == [8, 9, 10, 11]


def test_events_of_evictions_and_a_reset(cache):
  req = request("a", range(9), hashes=HASHES)
  admit(cache, req)
  cache.free(req)
  admit(cache, request("b", range(50, 87), hashes=HASHES[::-1]))
  stored, *removed, new = cache.take_events()
  assert [type(event) for event in removed] == [BlockRemoved] * 2
  assert [event.block_hashes for event in removed] == [
    [as_integer(HASHES[1])],
    [as_integer(HASHES[0])],
  ]
  assert len(stored.block_hashes) == 2 and len(new.block_hashes) == 9
  cache.free(request("b", []))
  assert cache.reset_prefix_cache()
  assert cache.block_pool.kv_event_queue == [AllBlocksCleared()]
  assert cache.take_events() == [AllBlocksCleared()]
  assert cache.take_events() == []


def test_more_events_than_one_read():
  cache = manager(num_blocks=16, enable_kv_cache_events=True)
  for turn in range(40):
    req = request(f"{turn}", [turn] * 60)
    admit(cache, req)
    cache.free(req)
  events = cache.take_events()
  assert sum(isinstance(event, BlockStored) for event in events) == 40
  assert sum(isinstance(event, BlockRemoved) for event in events) == 39 * 15


def test_hashes_as_bytes(cache, monkeypatch):
  monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
  admit(cache, request("a", range(5), hashes=HASHES))
  assert cache.take_events()[0].block_hashes == HASHES[:1]


def test_too_few_hashes_change_nothing(cache):
  with pytest.raises(ValueError, match="`block_hashes` of 'a'"):
    admit(cache, request("a", range(9), hashes=HASHES[:1]))
  assert cache.take_events() == [] and cache.usage == 0


def test_uncached_blocks_have_tokens_but_no_hash():
  """The events are those of vLLM."""
  cache = manager(
    stand_ins.SlidingWindowSpec(sliding_window=5),
    enable_kv_cache_events=True,
    prefix_cache_retention_interval=0,
  )
  req = request("a", range(9), hashes=HASHES)
  admit(cache, req)
  decode(cache, req, [9, 10, 11])
  prompt, later = cache.take_events()
  assert prompt.block_hashes == [as_integer(HASHES[1])]
  assert prompt.token_ids == list(range(8))
  assert prompt.kv_cache_spec_kind == "sliding_window"
  assert prompt.kv_cache_spec_sliding_window == 5
  assert (later.block_hashes, later.token_ids) == ([], [8, 9, 10, 11])
  assert later.extra_keys is None


def test_events_are_in_the_order_of_groups():
  cache = manager(
    stand_ins.FullAttentionSpec(),
    stand_ins.SlidingWindowSpec(sliding_window=60),
    enable_kv_cache_events=True,
  )
  admit(cache, request("a", range(9), hashes=HASHES))
  events = cache.take_events()
  assert [event.group_idx for event in events] == [0, 1]
  assert events[0].block_hashes == events[1].block_hashes


def test_extra_keys_of_adapters_images_and_salts(cache):
  position = types.SimpleNamespace(offset=3, length=3)
  image = types.SimpleNamespace(identifier="cat", mm_position=position)
  adapter = types.SimpleNamespace(
    name="lora", lora_name="lora", lora_path="/l", lora_int_id=7, adapter_id=7
  )
  fields = {"cache_salt": "s", "lora_request": adapter, "mm_features": [image]}
  admit(cache, request("a", range(13), hashes=HASHES, **fields))
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


def test_full_reports_repeat_the_hits(cache):
  admit(cache, request("a", range(9), hashes=HASHES))
  cache.take_events()
  req = request("b", range(9), hashes=HASHES, kv_cache_report_mode="full")
  cache.get_computed_blocks(req)
  (stored,) = cache.take_events()
  assert stored.block_hashes == [as_integer(HASHES[0]), as_integer(HASHES[1])]
  assert stored.token_ids == list(range(8))


def test_delayed_blocks_have_events_when_cached(cache):
  req = request("a", range(13), hashes=HASHES)
  loads = {"num_external_computed_tokens": 12, "delay_cache_blocks": True}
  admit(cache, req, 0, **loads)
  assert cache.take_events() == []
  cache.cache_blocks(req, 12)
  assert len(cache.take_events()[0].block_hashes) == 3


def test_hashes_are_removed_with_their_blocks():
  cache = manager(num_blocks=6)
  for turn in range(20):
    req = request(f"{turn}", [turn] * 20)
    admit(cache, req)
    cache.free(req)
  names = cache.block_pool.cached_block_hash_to_block
  assert len(names) == 5
  assert cache.block_pool.get_cached_block(b"unknown", [0]) is None
