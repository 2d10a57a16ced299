"""eSurge's manager: its methods, attributes and errors."""

import types

import numpy as np
import pytest

from jaxkv import FullAttention
from jaxkv import SlidingWindow
from jaxkv.host import Request
from jaxkv.host.esurge import CacheManager
from tests.host.esurge.checks import checked_queue
from tests.host.esurge.requests import LONGEST
from tests.host.esurge.requests import EngineRequest
from tests.host.esurge.requests import Feature
from tests.host.esurge.requests import Place
from tests.host.esurge.requests import admit
from tests.host.esurge.requests import chunk
from tests.host.esurge.requests import decode
from tests.host.esurge.requests import full
from tests.host.esurge.requests import leave
from tests.host.esurge.requests import manager
from tests.host.esurge.requests import states
from tests.host.esurge.requests import window


@pytest.fixture
def cache():
  return manager()


class TestOneRequest:
  def test_freed_pages_are_hit_again(self, cache):
    req_a = EngineRequest("a", range(9))
    assert admit(cache, req_a) == (([],), 0, ([1, 2, 3],))
    assert decode(cache, req_a, [9, 10, 11]) == ([],)
    assert decode(cache, req_a, [12]) == ([4],)
    assert cache.get_page_ids("a") == ([1, 2, 3, 4],)
    leave(cache, req_a)
    # The last page is evicted first, and all are behind the free pages.
    assert checked_queue(cache) == [*range(5, 40), 4, 3, 2, 1]
    assert cache.get_page_ids("a") == ([],)
    req_b = EngineRequest("b", range(13))
    assert admit(cache, req_b) == (([1, 2, 3],), 12, ([5],))
    checked_queue(cache)

  def test_positional_arguments_are_those_of_esurge(self, cache):
    req = EngineRequest("a", range(9))
    pages, num_found = cache.get_computed_pages(req)
    new = cache.allocate_slots(req, 9, num_found, pages, 8, True, None, None)
    assert new.get_page_ids() == ([1, 2, 3, 4, 5],)
    # The sixth argument delays publishing.
    assert new.get_unhashed_page_ids() == [1, 2, 3, 4, 5]
    assert len(cache.page_pool.cached_page_hash_to_page) == 0
    cache.cache_pages(req, 9)
    assert cache.host.cached_page_ids() == {1, 2}
    cache.cache_pages(req, 4)
    assert cache.host.cached_page_ids() == {1, 2}

  def test_requests_with_prompt_logprobs_have_no_hits(self, cache):
    req_a = EngineRequest("a", range(9))
    req_a.sampling_params = types.SimpleNamespace(prompt_logprobs=1)
    assert admit(cache, req_a)[1] == 0
    req_b = EngineRequest("b", range(9))
    assert admit(cache, req_b)[:2] == (([1, 2],), 8)
    req_c = EngineRequest("c", range(9))
    req_c.sampling_params = req_a.sampling_params
    assert admit(cache, req_c)[:2] == (([],), 0)

  def test_requests_without_sampling_params(self, cache):
    req = EngineRequest("a", range(9), sampling_params=None)
    assert admit(cache, req)[2] == ([1, 2, 3],)

  def test_requests_of_this_library(self, cache):
    req = Request("a", list(range(9)), cache_salt="s")
    assert cache.allocate_slots(req, 9).get_page_ids() == ([1, 2, 3],)
    assert cache.get_computed_pages(Request("b", list(range(9))))[1] == 0
    salted = Request("b", list(range(9)), cache_salt="s")
    assert cache.get_computed_pages(salted)[1] == 8

  def test_computed_tokens_without_pages(self, cache):
    """ESurge's scheduler counts tokens of a request that it has preempted."""
    req = EngineRequest("a", range(9))
    req.num_computed_tokens = 5
    empty = cache.create_empty_page_list()
    assert cache.allocate_slots(req, 4, 0, empty).get_page_ids() == ([1, 2, 3],)
    assert cache.get_computed_pages(EngineRequest("b", range(9)))[1] == 8


class TestGroups:
  def test_windows_free_their_pages(self):
    cache = manager(window(5))
    req = EngineRequest("a", range(12))
    admit(cache, req)
    assert decode(cache, req, [12]) == ([4],)
    assert cache.get_page_ids("a") == ([0, 0, 3, 4],)
    assert checked_queue(cache)[-2:] == [2, 1]

  def test_full_attention_and_a_window(self):
    cache = manager(full(), window(5))
    req = EngineRequest("a", range(12))
    req_b = EngineRequest("b", range(13))
    assert admit(cache, req)[2] == ([1, 2, 3], [4, 5, 6])
    assert admit(cache, req_b) == (([1, 2, 3], [0, 0, 6]), 12, ([7], [8]))

  def test_chunks_keep_their_last_full_page(self):
    """A chunk's last page is held, unread, until the next one is full."""
    cache = manager(full(), chunk(8))
    req_a = EngineRequest("a", range(8))
    admit(cache, req_a)
    decode(cache, req_a, [8])
    assert cache.get_page_ids("a")[1] == [0, 4, 6]
    decode(cache, req_a, [9, 10, 11])
    assert cache.get_page_ids("a")[1] == [0, 4, 6]
    decode(cache, req_a, [12])
    assert cache.get_page_ids("a")[1] == [0, 0, 6, 8]

  def test_chunks_without_caching_keep_no_page(self):
    cache = manager(full(), chunk(8), enable_caching=False)
    req = EngineRequest("a", range(8))
    admit(cache, req)
    decode(cache, req, [8])
    assert cache.get_page_ids("a")[1] == [0, 0, 6]

  def test_chunks_hit_without_a_kept_page(self):
    cache = manager(full(), chunk(8))
    admit(cache, EngineRequest("a", range(8)))
    req = EngineRequest("b", range(9))
    assert admit(cache, req)[:2] == (([1, 2], [0, 0]), 8)

  def test_states_have_one_page(self):
    cache = manager(full(), states())
    req = EngineRequest("a", range(9))
    assert admit(cache, req)[2] == ([1, 2, 3], [4])
    assert decode(cache, req, range(30)) == ([*range(5, 12)], [])
    leave(cache, req)
    # No lookup can find a state.
    assert admit(cache, EngineRequest("b", range(9)))[1] == 0

  def test_states_alone(self):
    cache = manager(states(page_size=1))
    for name, page in (("a", 1), ("b", 2)):
      assert admit(cache, EngineRequest(name, range(9)))[2] == ([page],)

  def test_no_groups(self):
    cache = CacheManager(40, [], LONGEST)
    req = EngineRequest("a", range(9))
    assert not cache.enable_caching
    assert admit(cache, req) == ((), 0, ())
    assert cache.get_page_ids("a") == ()
    assert cache.create_empty_page_list().pages == ()
    cache.cache_pages(req, 9)
    assert cache.get_num_common_prefix_pages(req, 1) == []
    leave(cache, req)
    assert cache.page_pool.get_num_free_pages() == 39

  def test_group_classes_of_this_library(self):
    kinds = [FullAttention(page_size=4), SlidingWindow(5, page_size=4)]
    cache = manager(*kinds)
    req = EngineRequest("a", range(5))
    assert admit(cache, req)[2] == ([1, 2], [3, 4])
    assert cache.get_num_common_prefix_pages(req, 1) == [2, 0]

  def test_managers_without_caching(self):
    cache = manager(full(), window(5), enable_caching=False)
    req = EngineRequest("a", range(9))
    assert admit(cache, req)[2] == ([1, 2, 3], [4, 5, 6])
    cache.cache_pages(req, 9)
    assert cache.get_num_common_prefix_pages(req, 1) == [0, 0]
    leave(cache, req)
    assert admit(cache, EngineRequest("b", range(9)))[1] == 0
    assert len(cache.page_pool.cached_page_hash_to_page) == 0


class TestDifferences:
  def test_windows_within_a_page_hit_only_equal_prefixes(self):
    """In eSurge, hashes restart after freed pages, so other sequences hit."""
    cache = manager(window(4))
    req = EngineRequest("a", range(8))
    admit(cache, req)
    for token in range(8, 16):
      decode(cache, req, [token])
    stranger = EngineRequest("b", [*range(12, 16), 1])
    assert admit(cache, stranger)[1] == 0
    second_turn = EngineRequest("c", range(17))
    assert admit(cache, second_turn)[1] == 16

  def test_large_pages_are_hit_only_if_full(self):
    """In eSurge, a large page is hit if half of its tokens match."""
    cache = manager(full(), window(8, page_size=8))
    admit(cache, EngineRequest("a", range(16)))
    half = EngineRequest("b", [*range(12), 90, 91, 92, 93, 94])
    assert admit(cache, half)[1] == 8
    req = EngineRequest("c", range(17))
    assert admit(cache, req)[1] == 16

  def test_output_after_an_image_is_hit(self, cache):
    """In eSurge, its hash lacks the image, so a second turn misses it."""
    image = [Feature("cat", Place(2, 3))]
    req = EngineRequest("a", range(8), mm_features=image)
    admit(cache, req)
    decode(cache, req, range(8, 12))
    second = EngineRequest("b", range(13), mm_features=image)
    assert admit(cache, second)[1] == 12
    dog = [Feature("dog", Place(2, 3))]
    assert admit(cache, EngineRequest("c", range(13), mm_features=dog))[1] == 0

  def test_images_without_a_position(self, cache):
    admit(cache, EngineRequest("a", range(9), mm_features=[Feature("cat")]))
    for name, hit in (("cat", 8), ("dog", 0)):
      request = EngineRequest("b", range(9), mm_features=[Feature(name)])
      assert cache.get_computed_pages(request)[1] == hit

  def test_pixels_without_a_hash_are_refused(self):
    req = EngineRequest("a", range(9), pixel_values=np.zeros(2))
    with pytest.raises(ValueError, match="`pixel_values` of 'a' must come"):
      manager().get_computed_pages(req)

  def test_chunks_in_an_empty_cache_have_no_hit(self):
    cache = manager(chunk(8))
    assert cache.get_computed_pages(EngineRequest("a", range(20)))[1] == 0

  def test_null_page_has_no_references(self):
    cache = manager(window(5))
    req = EngineRequest("a", range(20))
    admit(cache, req)
    decode(cache, req, range(4))
    leave(cache, req)
    assert cache.host.pages.ref_counts([0]) == [0]

  def test_second_managers_keep_the_hashes(self, cache):
    """A new manager of eSurge replaces the first hash of all managers."""
    admit(cache, EngineRequest("a", range(9)))
    manager()
    assert admit(cache, EngineRequest("b", range(9)))[1] == 8


class TestReports:
  def test_attributes(self):
    groups = [full(), window(5)]
    cache = manager(*groups, use_eagle=True)
    assert (cache.num_pages, cache.max_model_len) == (40, LONGEST)
    assert cache.kv_cache_groups == groups
    assert cache.enable_caching and cache.use_eagle

  def test_state_of_the_host_manager(self, cache):
    admit(cache, EngineRequest("a", range(9)))
    assert int(cache.host.state.num_pages.sum()) == 3

  def test_usage_counts_the_null_page(self, cache):
    assert cache.usage == pytest.approx(1 / 40)
    admit(cache, EngineRequest("a", range(9)))
    assert cache.usage == pytest.approx(4 / 40)

  def test_common_prefix_pages_are_counted_by_references(self, cache):
    """Pages count by their references, whichever requests hold them."""
    requests = [EngineRequest(name, range(9)) for name in "abc"]
    for req in requests:
      admit(cache, req)
    counts = [
      cache.get_num_common_prefix_pages(requests[0], n) for n in (0, 1, 3, 4)
    ]
    assert counts == [[3], [3], [2], [0]]

  def test_common_prefix_pages_of_a_waiting_request_are_refused(self):
    with pytest.raises(ValueError, match="`status` of 'a' must be RUNNING"):
      manager().get_num_common_prefix_pages(EngineRequest("a", []), 1)

  def test_reset(self, cache):
    req = EngineRequest("a", range(9))
    admit(cache, req)
    assert not cache.reset_prefix_cache()
    cache.free(req)
    assert cache.reset_prefix_cache()
    assert cache.get_computed_pages(EngineRequest("b", range(9)))[1] == 0


class TestErrors:
  @pytest.mark.parametrize(
    "fields",
    [
      {"dp_shard_hint": 1},
      {"data_parallel_size": 2},
      {"dp_shard_hint": 0, "data_parallel_size": 4},
    ],
  )
  def test_shards_are_refused(self, fields, cache):
    req = EngineRequest("a", range(9))
    for call in (
      lambda: cache.get_computed_pages(req, **fields),
      lambda: cache.allocate_slots(req, 9, **fields),
      lambda: cache.page_pool.get_new_pages(1, **fields),
    ):
      with pytest.raises(ValueError, match="a CacheManager for each shard"):
        call()

  def test_one_shard_is_served(self, cache):
    req = EngineRequest("a", range(9))
    fields = {"dp_shard_hint": 0, "data_parallel_size": 1}
    cache.get_computed_pages(req, **fields)
    assert cache.allocate_slots(req, 9, **fields) is not None

  def test_indivisible_pages_have_no_shards(self, cache):
    req = EngineRequest("a", range(9))
    fields = {"dp_shard_hint": 2, "data_parallel_size": 3}
    cache.get_computed_pages(req, **fields)
    assert cache.allocate_slots(req, 9, **fields) is not None

  def test_no_new_token_is_refused(self):
    with pytest.raises(ValueError, match="`num_new_tokens` must be at least 1"):
      manager().allocate_slots(EngineRequest("a", range(9)), 0)

  @pytest.mark.parametrize("group", [3, types.SimpleNamespace(page_size=4)])
  def test_unknown_groups_are_refused(self, group):
    with pytest.raises(TypeError, match="`kv_cache_groups` must hold"):
      manager(group)
