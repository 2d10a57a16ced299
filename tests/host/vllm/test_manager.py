"""The facade alone: blocks, hits and errors. Needs no vLLM."""

import threading
import time

import pytest

from jaxkv.host.vllm import KVCacheBlocks
from jaxkv.host.vllm import KVCacheManager
from tests.host.vllm import stand_ins
from tests.host.vllm.stand_ins import admit
from tests.host.vllm.stand_ins import decode
from tests.host.vllm.stand_ins import free_ids
from tests.host.vllm.stand_ins import manager
from tests.host.vllm.stand_ins import request

FULL = stand_ins.FullAttentionSpec()
WINDOW = stand_ins.SlidingWindowSpec()


@pytest.fixture
def cache():
  return manager(log_stats=True)


def test_hits_and_free_order(cache):
  req_a = request("a", range(9))
  assert admit(cache, req_a) == ([1, 2, 3],)
  assert cache.usage == pytest.approx(0.3)
  req_b = request("b", [*range(8), 50, 51])
  assert admit(cache, req_b) == ([4],)
  assert cache.get_block_ids("b") == ([1, 2, 4],)
  cache.free(req_a)
  cache.free(req_b)
  assert free_ids(cache) == [4, 3, 5, 6, 7, 8, 9, 10, 2, 1]


def test_lookups_return_blocks_hits_and_boundary(cache):
  empty = cache.empty_kv_cache_blocks
  assert cache.get_computed_blocks(request("a", range(9))) == (empty, 0, 0)
  admit(cache, request("a", range(9)))
  blocks, num_hit, boundary = cache.get_computed_blocks(request("b", range(9)))
  assert (blocks.get_block_ids(), num_hit, boundary) == (([1, 2],), 8, 0)
  req = request("b", range(9))
  blocks, num_hit, _ = cache.get_computed_blocks(req, max_cache_hit_length=7)
  assert (blocks.get_block_ids(), num_hit) == (([1],), 4)
  skips = request("b", range(9), skip_reading_prefix_cache=True)
  assert cache.get_computed_blocks(skips)[0] is empty


def test_too_few_blocks_change_nothing(cache):
  admit(cache, request("a", range(30)))
  old_ids = free_ids(cache)
  assert admit(cache, request("b", range(50, 64))) is None
  assert free_ids(cache) == old_ids
  req = request("c", range(60, 64))
  assert cache.allocate_slots(req, 4, 0, None, 8) is None


def test_tokens_beyond_the_limit_get_no_block():
  cache = manager(num_blocks=21)
  req = request("a", range(stand_ins.LONGEST))
  admit(cache, req)
  assert decode(cache, req, [1]) == ([],)
  assert decode(cache, req, [2, 3]) == ([],)


def test_requests_beyond_the_slots_are_not_admitted():
  cache = manager(max_requests=1)
  req = request("a", range(3))
  assert admit(cache, req) == ([1],)
  assert admit(cache, request("b", range(3))) is None
  cache.free(req)
  assert admit(cache, request("b", range(3))) == ([1],)


class Interleaved(stand_ins.Request):
  """Runs `work` in a thread, but for at most 0.2 s, when `field` is read."""

  field = ""
  work = None

  def __getattribute__(self, name):
    if name == type(self).field:
      type(self).field = ""
      thread = threading.Thread(target=type(self).work)
      thread.start()
      thread.join(0.2)
    return super().__getattribute__(name)


def test_last_slot_taken_by_another_thread(monkeypatch):
  cache = manager(max_requests=1)
  req = request("b", range(3))
  monkeypatch.setattr(Interleaved, "work", lambda: admit(cache, req))
  monkeypatch.setattr(Interleaved, "field", "num_computed_tokens")
  assert cache.allocate_slots(Interleaved("a", [*range(3)]), 3) is None


def test_threads_count_every_lookup(cache, monkeypatch):
  req = request("b", range(3))

  def work():
    cache.record_prefix_cache_stats(req, 0)
    all_stats.append(cache.make_prefix_cache_stats())

  all_stats = []
  monkeypatch.setattr(Interleaved, "work", work)
  monkeypatch.setattr(Interleaved, "field", "num_tokens")
  cache.record_prefix_cache_stats(Interleaved("a", [*range(3)]), 0)
  deadline = time.monotonic() + 10
  while not all_stats and time.monotonic() < deadline:
    time.sleep(0.01)
  assert [stats.requests for stats in all_stats] == [2]


def test_boundary_of_a_shared_prefix():
  cache = manager(
    FULL, WINDOW, num_blocks=41, prefix_cache_retention_interval=0
  )
  admit(cache, request("a", [*range(20), *[50] * 9]))
  sibling = request("b", [*range(20), *[60] * 9])
  blocks, num_hit, boundary = cache.get_computed_blocks(sibling)
  assert (num_hit, boundary) == (0, 20)
  assert blocks is cache.empty_kv_cache_blocks
  admit(cache, sibling)
  assert cache.get_computed_blocks(request("c", [*range(20), 7]))[1] == 20


class TestBlocks:
  def test_blocks_read_the_newest_state(self, cache):
    req = request("a", range(9))
    blocks = cache.get_blocks("a")
    assert blocks is cache.empty_kv_cache_blocks
    admit(cache, req)
    block, _, last_block = cache.get_blocks("a").blocks[0]
    assert (block.block_id, block.ref_cnt, block.is_null) == (1, 1, False)
    assert block.block_hash_num_tokens == 4
    assert block.block_hash.endswith(bytes(4))
    assert last_block.block_hash is None
    pool = cache.block_pool
    assert pool.get_cached_block(block.block_hash[:-4], [0]) == [block]
    names = pool.cached_block_hash_to_block
    assert names.get_one_block(block.block_hash) == block
    cache.free(req)
    assert block.ref_cnt == 0 and block.block_hash is not None
    cache.evict_blocks({1})
    assert block.block_hash is None
    assert pool.blocks[1] == block != last_block

  def test_ids_of_blocks(self, cache):
    admit(cache, request("a", range(9)))
    blocks = cache.get_blocks("a")
    assert blocks.get_unhashed_block_ids() == [3]
    assert blocks.get_unhashed_block_ids_all_groups() == [[3]]
    assert (blocks + blocks).get_block_ids() == ([1, 2, 3, 1, 2, 3],)
    assert blocks.get_block_ids(group_ids=[]) == ()
    empty = blocks.new_empty()
    assert empty == cache.empty_kv_cache_blocks
    assert empty.get_block_ids(allow_none=True) is None
    with pytest.raises(ValueError, match="unpack"):
      KVCacheBlocks(((), ())).get_unhashed_block_ids()

  def test_truncated_blocks_of_a_lookup_are_allocated(self, cache):
    admit(cache, request("a", range(13)))
    req = request("b", range(13))
    blocks, num_hit, _ = cache.get_computed_blocks(req)
    shorter = cache.truncate_computed_blocks(blocks, 8)
    assert (num_hit, shorter.get_block_ids()) == (12, ([1, 2],))
    assert cache.allocate_slots(req, 5, 8, shorter).get_block_ids() == ([5, 6],)

  def test_other_contents_are_refused(self, cache):
    admit(cache, request("a", range(13)))
    blocks = cache.truncate_computed_blocks(cache.get_blocks("a"), 8)
    with pytest.raises(ValueError, match="new_computed_pages"):
      cache.allocate_slots(request("b", [9] * 13), 5, 8, blocks)


class TestPool:
  def test_deferred_frees(self):
    """Unlike `free`, the last group's blocks go first, as in vLLM."""
    cache = manager(FULL, stand_ins.SlidingWindowSpec(sliding_window=60))
    req = request("a", range(9))
    assert admit(cache, req) == ([1, 2, 3], [4, 5, 6])
    blocks = cache.pop_blocks_for_free(req)
    assert cache.pop_blocks_for_free(req) == []
    assert cache.get_blocks("a") is cache.empty_kv_cache_blocks
    assert cache.usage == pytest.approx(0.6)
    cache.block_pool.free_blocks(reversed(blocks))
    assert free_ids(cache) == [6, 3, 7, 8, 9, 10, 5, 4, 2, 1]
    with pytest.raises(ValueError, match=r"references to it, got \[1\]"):
      cache.block_pool.free_blocks(blocks[:1])

  def test_request_restarts_before_its_blocks_are_free(self, cache):
    req = request("a", range(9))
    admit(cache, req)
    blocks = cache.pop_blocks_for_free(req)
    req.num_computed_tokens = 0
    assert admit(cache, req) == ([4],)
    assert cache.get_block_ids("a") == ([1, 2, 4],)
    cache.block_pool.free_blocks(reversed(blocks))
    cache.free(req)
    assert cache.usage == 0

  def test_touched_blocks_leave_the_free_queue(self, cache):
    req = request("a", range(9))
    admit(cache, req)
    cache.free(req)
    pool = cache.block_pool
    pool.touch([pool.blocks[2], pool.null_block])
    assert 2 not in free_ids(cache) and pool.blocks[2].ref_cnt == 1
    assert not cache.reset_prefix_cache()
    pool.free_blocks([pool.blocks[2]])
    assert free_ids(cache)[-1] == 2
    pool.touch([pool.blocks[7]])
    assert 7 not in free_ids(cache)
    pool.free_blocks([pool.blocks[7]])
    assert free_ids(cache)[0] == 7
    assert cache.reset_prefix_cache()
    assert len(pool.cached_block_hash_to_block) == 0

  def test_new_blocks_are_taken_in_queue_order(self, cache):
    req = request("a", range(9))
    admit(cache, req)
    cache.free(req)
    pool = cache.block_pool
    blocks = pool.get_new_blocks(9)
    assert [block.block_id for block in blocks] == [3, 4, 5, 6, 7, 8, 9, 10, 2]
    assert blocks[-1].block_hash is None and blocks[-1].ref_cnt == 1
    assert admit(cache, request("b", range(50, 60))) is None
    pool.free_blocks(blocks)
    assert free_ids(cache) == [3, 4, 5, 6, 7, 8, 9, 10, 2, 1]
    with pytest.raises(ValueError, match=r"at most 10, .* got 11"):
      pool.get_new_blocks(11)

  def test_calls_with_a_raising_collector_are_atomic(self):

    class Collector:
      fails = False

      def __getattr__(self, name):
        def on_block(*_):
          if self.fails:
            raise RuntimeError(name)

        return on_block

    collector = Collector()
    cache = manager(metrics_collector=collector)
    req = request("a", range(9))
    admit(cache, req)
    cache.free(req)
    collector.fails = True
    pool = cache.block_pool
    block = pool.blocks[1]
    for call in (
      lambda: pool.get_new_blocks(9),
      lambda: pool.touch([block]),
      lambda: pool.evict_blocks([1]),
      pool.reset_prefix_cache,
    ):
      with pytest.raises(RuntimeError):
        call()
      assert free_ids(cache) == [3, 4, 5, 6, 7, 8, 9, 10, 2, 1]
      assert block.block_hash is not None

  def test_oldest_block_of_a_hash_is_found(self, cache):
    hashes = [b"one", b"two", b"three"]
    for name in "ab":
      admit(cache, request(name, range(8), hashes=hashes))
    names = cache.block_pool.cached_block_hash_to_block
    name = b"one" + bytes(4)
    assert len(names) == 2
    assert cache.get_block_ids("b") == ([1, 3],)
    second = b"two" + bytes(4)
    assert names.get_one_block(second).block_id == 2
    assert names.pop(second, 2) == cache.block_pool.blocks[2]
    assert names.get_one_block(second).block_id == 3
    assert names.pop(second, 2) is None
    assert cache.reset_prefix_cache() is False

  def test_ends_of_the_queue(self, cache):
    queue = cache.block_pool.free_block_queue
    head = queue.fake_free_list_head
    tail = queue.fake_free_list_tail
    assert head.next_free_block.block_id == 1
    assert tail.prev_free_block.block_id == 10
    admit(cache, request("a", range(40)))
    assert head.next_free_block is tail and tail.prev_free_block is head


class TestScheduling:
  def test_collectors_are_called_for_each_block(self):
    heard = []

    class Collector:
      def on_block_allocated(self, block):
        heard.append(("allocated", block.block_id))

      def on_block_accessed(self, block):
        heard.append(("accessed", block.block_id))

      def on_block_evicted(self, block):
        heard.append(("evicted", block.block_id))

      def reset(self):
        heard.append("reset")

    cache = manager(num_blocks=6, metrics_collector=Collector())
    req_a = request("a", range(5))
    admit(cache, req_a)
    new = [(event, n) for n in (1, 2) for event in ("evicted", "allocated")]
    assert heard == new
    heard.clear()
    req_b = request("b", range(9))
    external = {"num_external_computed_tokens": 4}
    admit(cache, req_b, **external)
    new = [(event, n) for n in (3, 4) for event in ("evicted", "allocated")]
    assert heard == [("accessed", 1), *new]
    heard.clear()
    cache.evict_blocks({1})
    cache.free(req_a)
    cache.free(req_b)
    cache.reset_prefix_cache()
    assert heard == [("evicted", 1), "reset"]
    heard.clear()
    pool = cache.block_pool
    (block,) = pool.get_new_blocks(1)
    pool.touch([block])
    block_id = block.block_id
    assert heard == [
      (event, block_id) for event in ("evicted", "allocated", "accessed")
    ]

  def test_hits_with_a_draft_model_are_shorter(self):
    """In several groups, the lookup drops a block past the longest hit."""
    for specs, expected in (
      ([FULL], [24, 24, 16, 12, 0]),
      ([FULL, WINDOW], [24, 24, 20, 16, 4]),
    ):
      cache = manager(*specs, num_blocks=41, use_eagle=True)
      admit(cache, request("a", range(29)))
      req = request("b", range(29))
      num_hits = [
        cache.get_computed_blocks(req, max_cache_hit_length=max_hit)[1]
        for max_hit in (None, 28, 20, 19, 4)
      ]
      assert num_hits == expected

  def test_windows_recycle_unread_blocks(self):
    cache = manager(stand_ins.SlidingWindowSpec(sliding_window=5))
    req = request("a", range(16))
    admit(cache, req)
    req.num_in_flight_tokens = 16
    assert decode(cache, req, [1]) == ([5],)
    assert cache.get_block_ids("a") == ([1, 2, 3, 4, 5],)
    req.num_in_flight_tokens = 0
    assert decode(cache, req, [2]) == ([],)
    assert cache.get_block_ids("a") == ([0, 0, 0, 4, 5],)
    cache.remove_skipped_blocks("a", 20, 16)
    assert cache.get_block_ids("a") == ([0, 0, 0, 0, 5],)

  def test_external_tokens_are_cached_later(self):
    cache = manager(num_blocks=21, needs_kv_cache_zeroing=True)
    req_a = request("a", range(13))
    loads = {"num_external_computed_tokens": 12, "delay_cache_blocks": True}
    assert admit(cache, req_a, 0, **loads) == ([],)
    assert cache.get_block_ids("a") == ([1, 2, 3],)
    assert cache.get_computed_blocks(request("b", range(13)))[1] == 0
    cache.cache_blocks(req_a, 12)
    assert cache.estimate_cached_tokens(req_a) == 12
    assert cache.take_new_block_ids() == [1, 2, 3]
    assert decode(cache, req_a, []) == ([4],)
    assert cache.get_block_ids_for_computed_tokens("a", 8) == ([1, 2],)
    assert cache.take_new_block_ids() == [4]
    req_c = request("c", range(50, 59))
    admit(
      cache,
      req_c,
      0,
      **loads | {"num_external_computed_tokens": 8},
      skip_zeroing_group_ids=(0,),
    )
    assert cache.take_new_block_ids() == []
    cache.record_blocks_for_zeroing("c", 4)
    assert cache.take_new_block_ids() == [6]

  def test_num_blocks_to_allocate(self):
    cache = manager(FULL, stand_ins.MambaSpec(), num_blocks=31)
    req = request("a", range(40))
    admit(cache, req, 8)
    ask = cache.coordinator.get_num_blocks_to_allocate
    empty = cache.empty_kv_cache_blocks.blocks
    assert ask("a", 40, empty, 0, 8, 8, 40, apply_admission_cap=True) == 9
    with pytest.raises(ValueError, match="must be empty"):
      ask("a", 40, cache.get_blocks("a").blocks, 0, 8, 8, 40)

  def test_states_are_offered(self):
    cache = manager(stand_ins.MambaSpec())
    req = request("a", range(8))
    admit(cache, req)
    assert cache.take_boundary_state_offloads() == {"a": [(0, 1, 8)]}
    assert cache.take_boundary_state_offloads() == {}
    assert cache.take_kv_cache_block_copies() == ([], [])

  def test_blocks_of_a_single_group(self, cache):
    admit(cache, request("a", range(9)))
    (group,) = cache.coordinator.single_type_managers
    assert [block.block_id for block in group.req_to_blocks["a"]] == [1, 2, 3]
    assert list(group.req_to_blocks) == ["a"]
    assert group.req_to_blocks.get("b") is None
    assert group.block_size == 4

  def test_prefix_cache_statistics(self, cache):
    req = request("a", range(9))
    cache.record_prefix_cache_stats(req, 4)
    req.num_preemptions = 1
    cache.record_prefix_cache_stats(req, 8)
    cache.reset_prefix_cache()
    stats = cache.make_prefix_cache_stats()
    assert (stats.requests, stats.queries, stats.hits) == (1, 9, 4)
    assert (stats.preempted_requests, stats.preempted_hits) == (1, 8)
    assert stats.reset and not cache.make_prefix_cache_stats().reset
    assert manager(enable_caching=False).make_prefix_cache_stats() is None


class TestErrors:
  @pytest.mark.parametrize(
    "options",
    [
      {"num_hash_lookahead_tokens": 1},
      {"num_prefill_lookahead": 2},
      {"dcp_world_size": 2},
      {"pcp_world_size": 2},
    ],
    ids=str,
  )
  def test_unsupported_options_are_refused(self, options):
    with pytest.raises(ValueError, match=f"`{next(iter(options))}`"):
      manager(**options)

  @pytest.mark.parametrize(
    ("spec", "name"),
    [
      (stand_ins.RSWASpec(), "RSWASpec"),
      (stand_ins.KVCacheSpec(), "kv_cache_spec"),
      (stand_ins.SlidingWindowSpec(extra_retained_tokens=1), "extra_retained"),
      (stand_ins.MambaSpec(64, mamba_cache_mode="none"), "mamba_cache_mode"),
      (stand_ins.MambaSpec(mamba_cache_mode="none"), "block_size"),
      (stand_ins.MambaSpec(8), "scheduler_block_size"),
      (stand_ins.MambaSpec(num_prefill_checkpoint_blocks=1), "num_prefill"),
      (stand_ins.CrossAttentionSpec(), "enable_caching"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
  )
  def test_unsupported_groups_are_refused(self, spec, name):
    with pytest.raises(ValueError, match=name):
      manager(FULL, spec)

  @pytest.mark.parametrize("interval", [8, -4])
  def test_bad_retention_intervals_are_refused(self, interval):
    with pytest.raises(ValueError, match="`prefix_cache_retention_interval`"):
      manager(prefix_cache_retention_interval=interval)

  def test_hits_inside_a_block_are_refused(self):
    groups = [stand_ins.Group(spec) for spec in (FULL, stand_ins.MambaSpec(8))]
    config = stand_ins.Config(11, groups)
    with pytest.raises(ValueError, match="`hash_block_size`"):
      KVCacheManager(config, 64, 8, 4)

  def test_some_draft_groups_are_refused(self):
    groups = [stand_ins.Group(FULL), stand_ins.Group(WINDOW, True)]
    config = stand_ins.Config(11, groups)
    with pytest.raises(ValueError, match="`is_eagle_group`"):
      KVCacheManager(config, 64, 4, 4, use_eagle=True)

  def test_no_groups_and_other_roles_are_refused(self):
    with pytest.raises(ValueError, match="`groups`"):
      KVCacheManager(stand_ins.Config(11, []), 64, 4, 4)
    host = stand_ins.Config(11, [stand_ins.Group(FULL, role="hisparse_source")])
    with pytest.raises(ValueError, match="`role`"):
      KVCacheManager(host, 64, 4, 4)


def test_running_states_have_one_block():
  state = stand_ins.MambaSpec(64, "none", num_speculative_blocks=2)
  groups = [stand_ins.Group(FULL), stand_ins.Group(state)]
  config = stand_ins.Config(31, groups)
  cache = KVCacheManager(config, 64, 64, 4, enable_caching=False)
  req = request("a", range(9))
  assert admit(cache, req) == ([1, 2, 3], [4, 5, 6])
  assert decode(cache, req, range(8)) == ([7, 8], [])
