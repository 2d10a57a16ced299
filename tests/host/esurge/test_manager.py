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


class TestOneRequest:
  def test_admit_decode_free_and_again(self):
    cache, one = manager(), EngineRequest("a", range(9))
    assert admit(cache, one) == (([],), 0, ([1, 2, 3],))
    assert decode(cache, one, [9, 10, 11]) == ([],)
    assert decode(cache, one, [12]) == ([4],)
    assert cache.get_page_ids("a") == ([1, 2, 3, 4],)
    leave(cache, one)
    # The last page is evicted first, and all are behind the free pages.
    assert checked_queue(cache) == [*range(5, 40), 4, 3, 2, 1]
    assert cache.get_page_ids("a") == ([],)
    again = EngineRequest("b", range(13))
    assert admit(cache, again) == (([1, 2, 3],), 12, ([5],))
    checked_queue(cache)

  def test_positions_are_those_of_esurge(self):
    cache, one = manager(), EngineRequest("a", range(9))
    pages, num_found = cache.get_computed_pages(one)
    new = cache.allocate_slots(one, 9, num_found, pages, 8, True, None, None)
    assert new.get_page_ids() == ([1, 2, 3, 4, 5],)
    # The sixth argument delays publishing.
    assert new.get_unhashed_page_ids() == [1, 2, 3, 4, 5]
    assert len(cache.page_pool.cached_page_hash_to_page) == 0
    cache.cache_pages(one, 9)
    assert cache.host.cached_page_ids() == {1, 2}
    cache.cache_pages(one, 4)
    assert cache.host.cached_page_ids() == {1, 2}

  def test_no_room(self):
    cache, one = manager(num_pages=4), EngineRequest("a", range(13))
    assert admit(cache, one) == (([],), 0, None)
    assert cache.get_page_ids("a") == ([],)
    assert checked_queue(cache) == [1, 2, 3]

  def test_a_part_of_a_prompt_fits(self):
    """The whole sequence does not fit, and is not checked."""
    cache, one = manager(num_pages=4), EngineRequest("a", range(20))
    assert admit(cache, one, new=8)[2] == ([1, 2],)

  def test_prompt_logprobs_find_nothing_and_are_found(self):
    cache, one = manager(), EngineRequest("a", range(9))
    one.sampling_params = types.SimpleNamespace(prompt_logprobs=1)
    assert admit(cache, one)[1] == 0
    two = EngineRequest("b", range(9))
    assert admit(cache, two)[:2] == (([1, 2],), 8)
    three = EngineRequest("c", range(9))
    three.sampling_params = one.sampling_params
    assert admit(cache, three)[:2] == (([],), 0)

  def test_a_request_may_have_no_sampling_params(self):
    cache, one = manager(), EngineRequest("a", range(9), sampling_params=None)
    assert admit(cache, one)[2] == ([1, 2, 3],)

  def test_requests_of_this_library(self):
    cache = manager()
    one = Request("a", list(range(9)), cache_salt="s")
    assert cache.allocate_slots(one, 9).get_page_ids() == ([1, 2, 3],)
    assert cache.get_computed_pages(Request("b", list(range(9))))[1] == 0
    salted = Request("b", list(range(9)), cache_salt="s")
    assert cache.get_computed_pages(salted)[1] == 8

  def test_counted_without_pages(self):
    """Its scheduler counts on for one that it preempts in the same step."""
    cache, one = manager(), EngineRequest("a", range(9))
    one.num_computed_tokens = 5
    empty = cache.create_empty_page_list()
    assert cache.allocate_slots(one, 4, 0, empty).get_page_ids() == ([1, 2, 3],)
    assert cache.get_computed_pages(EngineRequest("b", range(9)))[1] == 8


@pytest.mark.slow
class TestGroups:
  def test_a_window_gives_pages_back(self):
    cache, one = manager(window(5)), EngineRequest("a", range(12))
    admit(cache, one)
    assert decode(cache, one, [12]) == ([4],)
    assert cache.get_page_ids("a") == ([0, 0, 3, 4],)
    assert checked_queue(cache)[-2:] == [2, 1]

  def test_a_window_hits_behind_null_pages(self):
    cache, one = manager(window(5)), EngineRequest("a", range(12))
    admit(cache, one)
    leave(cache, one)
    pages, num_found = cache.get_computed_pages(EngineRequest("b", range(13)))
    assert (pages.get_page_ids(), num_found) == (([0, 0, 3],), 12)

  def test_full_attention_and_a_window(self):
    cache = manager(full(), window(5))
    one, two = EngineRequest("a", range(12)), EngineRequest("b", range(13))
    assert admit(cache, one)[2] == ([1, 2, 3], [4, 5, 6])
    assert admit(cache, two) == (([1, 2, 3], [0, 0, 6]), 12, ([7], [8]))

  def test_a_chunk_keeps_its_last_full_page(self):
    """Until the next one is full, though no token attends to it."""
    cache, one = manager(full(), chunk(8)), EngineRequest("a", range(8))
    admit(cache, one)
    decode(cache, one, [8])
    assert cache.get_page_ids("a")[1] == [0, 4, 6]
    decode(cache, one, [9, 10, 11])
    assert cache.get_page_ids("a")[1] == [0, 4, 6]
    decode(cache, one, [12])
    assert cache.get_page_ids("a")[1] == [0, 0, 6, 8]

  def test_a_chunk_without_caching_keeps_none(self):
    cache = manager(full(), chunk(8), enable_caching=False)
    one = EngineRequest("a", range(8))
    admit(cache, one)
    decode(cache, one, [8])
    assert cache.get_page_ids("a")[1] == [0, 0, 6]

  def test_a_chunk_that_hits_needs_no_kept_page(self):
    cache = manager(full(), chunk(8))
    admit(cache, EngineRequest("a", range(8)))
    two = EngineRequest("b", range(9))
    assert admit(cache, two)[:2] == (([1, 2], [0, 0]), 8)

  def test_states_have_one_page(self):
    cache, one = manager(full(), states()), EngineRequest("a", range(9))
    assert admit(cache, one)[2] == ([1, 2, 3], [4])
    assert decode(cache, one, range(30)) == ([*range(5, 12)], [])
    leave(cache, one)
    # No lookup can find a state.
    assert admit(cache, EngineRequest("b", range(9)))[1] == 0

  def test_states_alone(self):
    cache = manager(states(page_size=1))
    for name, page in (("a", 1), ("b", 2)):
      assert admit(cache, EngineRequest(name, range(9)))[2] == ([page],)

  def test_no_groups(self):
    cache = CacheManager(40, [], LONGEST)
    one = EngineRequest("a", range(9))
    assert not cache.enable_caching
    assert admit(cache, one) == ((), 0, ())
    assert cache.get_page_ids("a") == ()
    assert cache.create_empty_page_list().pages == ()
    cache.cache_pages(one, 9)
    assert cache.get_num_common_prefix_pages(one, 1) == []
    leave(cache, one)
    assert cache.page_pool.get_num_free_pages() == 39

  def test_kinds_of_this_library(self):
    kinds = [FullAttention(page_size=4), SlidingWindow(5, page_size=4)]
    cache = manager(*kinds)
    one = EngineRequest("a", range(5))
    assert admit(cache, one)[2] == ([1, 2], [3, 4])
    assert cache.get_num_common_prefix_pages(one, 1) == [2, 0]

  def test_caching_is_off(self):
    cache = manager(full(), window(5), enable_caching=False)
    one = EngineRequest("a", range(9))
    assert admit(cache, one)[2] == ([1, 2, 3], [4, 5, 6])
    cache.cache_pages(one, 9)
    assert cache.get_num_common_prefix_pages(one, 1) == [0, 0]
    leave(cache, one)
    assert admit(cache, EngineRequest("b", range(9)))[1] == 0
    assert len(cache.page_pool.cached_page_hash_to_page) == 0

  def test_a_draft_model_computes_the_last_page_again(self):
    cache = manager(use_eagle=True)
    admit(cache, EngineRequest("a", range(12)))
    assert admit(cache, EngineRequest("b", range(13)))[:2] == (([1, 2],), 8)


@pytest.mark.slow
class TestDifferences:
  def test_a_window_within_a_page(self):
    """The hashes started over behind it: strangers had a hit."""
    cache = manager(window(4))
    one = EngineRequest("a", range(8))
    admit(cache, one)
    for token in range(8, 16):
      decode(cache, one, [token])
    stranger = EngineRequest("b", [*range(12, 16), 1])
    assert admit(cache, stranger)[1] == 0
    second_turn = EngineRequest("c", range(17))
    assert admit(cache, second_turn)[1] == 16

  def test_pages_of_two_sizes(self):
    """Half of a large page's tokens were enough for a hit."""
    cache = manager(full(), window(8, page_size=8))
    admit(cache, EngineRequest("a", range(16)))
    half = EngineRequest("b", [*range(12), 90, 91, 92, 93, 94])
    assert admit(cache, half)[1] == 8
    same = EngineRequest("c", range(17))
    assert admit(cache, same)[1] == 16

  def test_the_output_behind_an_image(self):
    """It was hashed without the image, so a second turn missed it."""
    cache = manager()
    image = [Feature("cat", Place(2, 3))]
    one = EngineRequest("a", range(8), mm_features=image)
    admit(cache, one)
    decode(cache, one, range(8, 12))
    second = EngineRequest("b", range(13), mm_features=image)
    assert admit(cache, second)[1] == 12
    dog = [Feature("dog", Place(2, 3))]
    assert admit(cache, EngineRequest("c", range(13), mm_features=dog))[1] == 0

  def test_an_image_that_is_anywhere(self):
    cache = manager()
    admit(cache, EngineRequest("a", range(9), mm_features=[Feature("cat")]))
    for name, hit in (("cat", 8), ("dog", 0)):
      request = EngineRequest("b", range(9), mm_features=[Feature(name)])
      assert cache.get_computed_pages(request)[1] == hit

  def test_pixels_without_a_name(self):
    one = EngineRequest("a", range(9), pixel_values=np.zeros(2))
    with pytest.raises(ValueError, match="`pixel_values` of 'a' must come"):
      manager().get_computed_pages(one)

  def test_a_chunk_alone_finds_nothing_in_nothing(self):
    cache = manager(chunk(8))
    assert cache.get_computed_pages(EngineRequest("a", range(20)))[1] == 0

  def test_the_null_page_is_not_counted(self):
    cache, one = manager(window(5)), EngineRequest("a", range(20))
    admit(cache, one)
    decode(cache, one, range(4))
    leave(cache, one)
    assert cache.host.pages.ref_counts([0]) == [0]

  def test_a_second_manager_changes_nothing(self):
    """The first hash was drawn anew, for all managers."""
    cache = manager()
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

  def test_the_state_for_jitted_loops(self):
    cache = manager()
    admit(cache, EngineRequest("a", range(9)))
    assert int(cache.host.state.num_pages.sum()) == 3

  def test_usage_counts_the_null_page(self):
    cache = manager()
    assert cache.usage == pytest.approx(1 / 40)
    admit(cache, EngineRequest("a", range(9)))
    assert cache.usage == pytest.approx(4 / 40)

  def test_common_prefix_pages_are_those_with_many_references(self):
    """They need not be common to the same requests."""
    cache = manager()
    requests = [EngineRequest(name, range(9)) for name in "abc"]
    for one in requests:
      admit(cache, one)
    counts = [
      cache.get_num_common_prefix_pages(requests[0], n) for n in (0, 1, 3, 4)
    ]
    assert counts == [[3], [3], [2], [0]]

  def test_common_prefix_pages_of_one_that_waits(self):
    with pytest.raises(ValueError, match="`status` of 'a' must be RUNNING"):
      manager().get_num_common_prefix_pages(EngineRequest("a", []), 1)

  def test_reset(self):
    cache, one = manager(), EngineRequest("a", range(9))
    admit(cache, one)
    assert not cache.reset_prefix_cache()
    cache.free(one)
    assert cache.reset_prefix_cache()
    assert cache.get_computed_pages(EngineRequest("b", range(9)))[1] == 0


class TestRefused:
  @pytest.mark.parametrize(
    "fields",
    [
      {"dp_shard_hint": 1},
      {"data_parallel_size": 2},
      {"dp_shard_hint": 0, "data_parallel_size": 4},
    ],
  )
  def test_shards(self, fields):
    cache, one = manager(), EngineRequest("a", range(9))
    for call in (
      lambda: cache.get_computed_pages(one, **fields),
      lambda: cache.allocate_slots(one, 9, **fields),
      lambda: cache.page_pool.get_new_pages(1, **fields),
    ):
      with pytest.raises(ValueError, match="a CacheManager for each shard"):
        call()

  def test_one_shard_is_no_shard(self):
    cache, one = manager(), EngineRequest("a", range(9))
    fields = {"dp_shard_hint": 0, "data_parallel_size": 1}
    cache.get_computed_pages(one, **fields)
    assert cache.allocate_slots(one, 9, **fields) is not None

  def test_pages_that_cannot_be_divided_are_in_no_shards(self):
    cache, one = manager(), EngineRequest("a", range(9))
    fields = {"dp_shard_hint": 2, "data_parallel_size": 3}
    cache.get_computed_pages(one, **fields)
    assert cache.allocate_slots(one, 9, **fields) is not None

  def test_no_new_token(self):
    with pytest.raises(ValueError, match="`num_new_tokens` must be at least 1"):
      manager().allocate_slots(EngineRequest("a", range(9)), 0)

  def test_a_sequence_that_is_too_long(self):
    with pytest.raises(ValueError, match="`max_model_len` is 64"):
      manager().allocate_slots(EngineRequest("a", range(9)), 65)

  def test_pages_that_no_lookup_found(self):
    cache, one = manager(), EngineRequest("a", range(9))
    admit(cache, one)
    other = EngineRequest("b", range(50, 59))
    pages = cache.get_computed_pages(EngineRequest("c", range(9)))[0]
    with pytest.raises(ValueError, match="must hold the tokens"):
      cache.allocate_slots(other, 1, 8, pages)

  def test_too_many_requests(self):
    cache = manager(max_requests=1)
    admit(cache, EngineRequest("a", range(9)))
    with pytest.raises(RuntimeError, match="`max_requests` must be more"):
      admit(cache, EngineRequest("b", range(9)))

  def test_a_request_without_pages_is_not_published(self):
    with pytest.raises(KeyError, match="'a' holds no page"):
      manager().cache_pages(EngineRequest("a", range(9)), 8)

  @pytest.mark.parametrize("group", [3, types.SimpleNamespace(page_size=4)])
  def test_groups(self, group):
    with pytest.raises(TypeError, match="`kv_cache_groups` must hold"):
      manager(group)

  def test_a_group_without_a_page_size(self):
    with pytest.raises(ValueError, match="page_size"):
      manager(FullAttention())
