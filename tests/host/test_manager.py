"""The host manager alone: contents, statistics, what it is given and says.

Page ids are in `tests.host.test_manager_traces`, many requests at once in
`tests.host.test_step`, bad calls in `tests.host.test_errors`.
"""

import numpy as np
import pytest

import jaxkv
from jaxkv import ChunkedLocal
from jaxkv import Recurrent
from jaxkv import SlidingWindow
from jaxkv.host import CacheManager
from jaxkv.host import CachePages
from jaxkv.host import MultimodalItem
from jaxkv.host import PrefixCacheStats
from tests.host.scheduling import LONGEST
from tests.host.scheduling import admit
from tests.host.scheduling import decode
from tests.host.scheduling import hit_of
from tests.host.scheduling import hybrid
from tests.host.scheduling import ids
from tests.host.scheduling import request
from tests.host.scheduling import single

IMAGE = MultimodalItem("image", 2, 5)
PLACEHOLDERS = [1, 2, 9, 9, 9, 9, 9, 3, 4, 5]


@pytest.fixture
def cache():
  """One group, 10 pages of 4 tokens."""
  return single(CacheManager)


class TestContents:
  def _cached(self, cache, **fields):
    """Tokens found by the same tokens, after a request with these fields."""
    admit(cache, request("first", PLACEHOLDERS, mm=[IMAGE]))
    return hit_of(cache, request("again", PLACEHOLDERS, **fields))[1]

  @pytest.mark.parametrize(
    ("items", "tokens"),
    [
      ([IMAGE], 8),
      ([IMAGE._replace(identifier="another")], 0),
      ([], 0),  # the placeholders themselves
      ([IMAGE._replace(offset=3)], 0),
      ([IMAGE, MultimodalItem("late", 9, 1)], 8),  # behind the full pages
      ([IMAGE._replace(length=4)], 4),  # its last placeholder is in page 2
    ],
  )
  def test_hits_end_before_other_items(self, cache, items, tokens):
    assert self._cached(cache, mm=items) == tokens

  def test_two_items_are_told_apart_behind_a_common_page(self, cache):
    tokens = [*range(4), *[9] * 6]
    first_item, second_item = (MultimodalItem(name, 4, 6) for name in "ab")
    admit(cache, request("0", tokens, mm=[first_item]))
    assert admit(cache, request("1", tokens, mm=[second_item])) == (
      [[1]],
      [[4, 5]],
    )
    assert hit_of(cache, request("2", tokens, mm=[second_item])) == (
      [[1, 4]],
      8,
    )

  def test_output_after_an_item_is_hit(self, cache):
    """A second turn finds what was decoded behind an item."""
    req = request("0", PLACEHOLDERS, mm=[IMAGE])
    admit(cache, req)
    decode(cache, req, [6, 7, 8])
    turn = request("1", [*req.token_ids, 8], mm=[IMAGE])
    assert hit_of(cache, turn) == ([[1, 2, 3]], 12)

  def test_a_salt_reaches_later_pages(self, cache):
    req = request("0", range(6), cache_salt="a")
    admit(cache, req)
    decode(cache, req, range(6, 13))
    assert hit_of(cache, request("1", range(13), cache_salt="a"))[1] == 12
    assert hit_of(cache, request("2", range(13)))[1] == 0

  def test_empty_names_are_none(self, cache):
    admit(cache, request("0", range(9)))
    empty = request("1", range(9), cache_salt="", lora_name="")
    assert hit_of(cache, empty)[1] == 8


class TestStatistics:
  def test_admissions_are_counted(self, cache):
    req = request("0", range(9))
    hit_of(cache, req)  # a lookup alone counts nothing
    assert cache.make_prefix_cache_stats() == PrefixCacheStats()
    admit(cache, req)
    admit(cache, request("1", range(12)))
    expected = PrefixCacheStats(requests=2, queries=21, hits=8)
    assert cache.make_prefix_cache_stats() == expected
    # A reading begins a new interval, and decoding is no admission.
    decode(cache, req, [9])
    assert cache.make_prefix_cache_stats() == PrefixCacheStats()

  def test_preempted_requests_are_counted_apart(self, cache):
    req = request("0", range(9))
    admit(cache, req)
    cache.free(req)
    req.num_computed_tokens = 0
    req.status = "preempted"
    admit(cache, req)
    assert cache.make_prefix_cache_stats() == PrefixCacheStats(
      requests=1,
      queries=9,
      preempted_requests=1,
      preempted_queries=9,
      preempted_hits=8,
    )

  def test_refused_and_unread_requests_are_not_counted(self, cache):
    assert admit(cache, request("0", range(60)))[1] is None
    admit(cache, request("1", range(9), prompt_logprobs=True))
    assert cache.make_prefix_cache_stats() == PrefixCacheStats()

  def test_a_refused_request_is_counted_when_it_is_admitted(self, cache):
    admit(cache, request("0", range(9)))
    holder = request("1", range(100, 120))
    admit(cache, holder)
    cache.make_prefix_cache_stats()
    newcomer = request("2", [*range(9), *range(200, 211)])
    for _ in range(2):
      assert admit(cache, newcomer) == ([[1, 2]], None)
    cache.free(holder)
    assert admit(cache, newcomer)[1] is not None
    expected = PrefixCacheStats(requests=1, queries=20, hits=8)
    assert cache.make_prefix_cache_stats() == expected

  def test_managers_without_caching_count_nothing(self):
    cache = single(CacheManager, enable_caching=False)
    assert admit(cache, request("0", range(9))) == ([[]], [[1, 2, 3]])
    assert cache.make_prefix_cache_stats() == PrefixCacheStats()

  def test_only_complete_resets_are_reported(self, cache):
    req = request("0", range(9))
    admit(cache, req)
    cache.reset_prefix_cache()
    assert not cache.make_prefix_cache_stats().reset
    cache.free(req)
    cache.reset_prefix_cache()
    assert cache.make_prefix_cache_stats().reset
    assert not cache.make_prefix_cache_stats().reset

  def test_ages_are_reported_once(self):
    cache = single(CacheManager, track_residency=True)
    for name in range(3):
      req = request(str(name), range(100 * name, 100 * name + 20))
      admit(cache, req)
      cache.free(req)
    # Ten pages for three times five: the first text was evicted after ten.
    stats = cache.make_prefix_cache_stats()
    assert (sum(stats.lifetime), sum(stats.idle), stats.reset) == (5, 5, False)
    # Published at 0 to 4 and given back at 5; the clock stood at 10.
    assert {bits: n for bits, n in enumerate(stats.lifetime) if n} == {
      3: 3,
      4: 2,
    }
    assert {bits: n for bits, n in enumerate(stats.idle) if n} == {3: 5}
    cache.reset_prefix_cache()
    stats = cache.make_prefix_cache_stats()
    assert (sum(stats.lifetime), stats.reset) == (0, True)
    assert single(CacheManager).make_prefix_cache_stats().lifetime == []

  def test_large_ages_are_in_the_last_bin(self):
    cache = single(CacheManager, track_residency=True)
    req = request("a", range(4))
    admit(cache, req)
    cache._state.pool.clock += 2**40
    cache.free(req)
    cache._state.pool.clock += 2**40
    admit(cache, request("b", range(100, 140)))
    stats = cache.make_prefix_cache_stats()
    assert stats.lifetime[-1] == stats.idle[-1] == 1


class TestPages:
  def test_sums_add_the_pages_of_each_group(self):
    pages = CachePages(([1], [0, 2]))
    assert (pages + CachePages(([3], []))).get_page_ids() == ([1, 3], [0, 2])
    assert pages.get_page_ids() == ([1], [0, 2])
    with pytest.raises(
      ValueError, match="must have 2 groups to be added, got 1"
    ):
      _ = pages + CachePages(([1],))

  def test_full_pages_are_cached_when_the_call_ends(self, cache):
    """Of 9 tokens the first two pages are full; 14 tokens fill page 4."""
    new = cache.allocate_slots(request("0", range(9)), 9)
    assert new.get_page_ids() == ([1, 2, 3],)
    assert new.get_unhashed_page_ids() == [3]
    req = request("1", range(14))
    hit_pages, tokens = cache.get_computed_pages(req)
    new = cache.allocate_slots(req, 6, tokens, hit_pages)
    assert hit_pages.get_unhashed_page_ids() == []
    assert new.get_page_ids() == ([4, 5],)
    all_pages = hit_pages + new
    assert all_pages.get_page_ids() == cache.get_page_ids("1")
    assert all_pages.get_page_ids() == ([1, 2, 4, 5],)
    assert all_pages.get_unhashed_page_ids() == [5]
    assert all_pages.get_unhashed_page_ids_all_groups() == ([5],)

  def test_unhashed_page_ids_by_group(self):
    hit_pages = CachePages(([1, 2], [0, 3]))
    new = CachePages(([4], []), unhashed=([4], []))
    assert hit_pages.get_unhashed_page_ids_all_groups() == ([], [])
    assert (hit_pages + new).get_unhashed_page_ids_all_groups() == ([4], [])
    assert (new + hit_pages).get_unhashed_page_ids() == [4]

  def test_empty_pages_have_all_groups(self):
    cache = hybrid(CacheManager)
    empty = cache.create_empty_page_list()
    assert empty == CachePages(([], [], []))
    assert CachePages(([1], [0], [2])).new_empty() == empty
    assert cache.get_page_ids("nobody") == ([], [], [])


@pytest.mark.parametrize(("length", "fits"), [(40, True), (41, False)])
def test_a_whole_sequence_counts_free_pages_that_it_hits(cache, length, fits):
  """Two hits and eight fresh pages are all ten; an eleventh is not there.

  Of the sequence only one page more than the hits is asked for now.
  """
  req = request("first", range(9))
  admit(cache, req)
  cache.free(req)
  repeat = request("again", range(length))
  hit, new = admit(cache, repeat, 1, full_sequence_must_fit=True)
  assert hit == [[1, 2]]
  assert (new is not None) == fits
  jaxkv.check(cache.state)


class TestStates:
  """Recurrent groups, where they differ from vLLM's on purpose."""

  GROUPS = (Recurrent(page_size=4),)

  @pytest.mark.parametrize(("free", "pages"), [(2, [[1]]), (1, None)])
  def test_a_state_that_an_external_one_replaces_is_not_counted(
    self, free, pages
  ):
    """One page for the external state and one for the running state."""
    cache = CacheManager(1 + 2, self.GROUPS, LONGEST)
    req = request("first", range(9))
    admit(cache, req, 8)
    cache.free(req)
    cache.new_step_starts()
    if free == 1:
      admit(cache, request("other", [50]))
    repeat = request("again", range(30))
    hit, num_hit = cache.get_computed_pages(repeat)
    assert (ids(hit), num_hit) == ([[0, 1]], 8)
    out = cache.allocate_slots(
      repeat, 4, num_hit, hit, num_external_computed_tokens=8
    )
    assert (out and ids(out)) == pages
    jaxkv.check(cache.state)

  def test_an_evicted_state_is_not_published_again(self):
    cache = CacheManager(9, self.GROUPS, LONGEST)
    req = request("first", range(20))
    admit(cache, req, 8)
    assert cache.get_page_ids("first") == ([0, 1],)
    cache.evict_pages([1])
    for publish in (cache.cache_pages, cache.allocate_slots):
      cache.new_step_starts()
      publish(req, 8)
      assert 1 not in cache.cached_page_ids()
    assert hit_of(cache, request("again", range(12)))[1] == 0
    jaxkv.check(cache.state)

  def test_a_state_is_found_in_the_step_after_it_is_written(self):
    """In the same step its request is still to compute it."""
    cache = CacheManager(9, self.GROUPS, LONGEST)
    cache.new_step_starts()
    admit(cache, request("first", range(9)), 4)
    repeat = request("again", range(9))
    hit, num_hit = cache.get_computed_pages(repeat)
    assert num_hit == 4
    assert cache.allocate_slots(repeat, 5, num_hit, hit) is None
    cache.new_step_starts()
    assert cache.allocate_slots(repeat, 5, num_hit, hit) is not None
    jaxkv.check(cache.state)


class TestDeferredFree:
  def _two(self, cache):
    """Two requests that hold 3 pages each."""
    requests = [request(str(n), range(100 * n, 100 * n + 9)) for n in range(2)]
    for req in requests:
      admit(cache, req)
    return requests

  def test_pages_are_held_until_they_are_given_back(self, cache):
    req_a, req_b = self._two(cache)
    pages = cache.pop_pages_for_free(req_a)
    assert pages == [1, 2, 3]
    assert cache.pop_pages_for_free(req_a) == []
    assert cache.get_page_ids("0") == ([],)
    assert (cache.num_free_pages, cache.reset_prefix_cache()) == (4, False)
    # The name may come back before the pages do.
    assert admit(cache, request("0", range(9))) == ([[1, 2]], [[7]])
    cache.free(req_b)
    cache.pages.release(reversed(pages))
    assert cache.free_queue() == [3, 6, 8, 9, 10, 5, 4]
    jaxkv.check(cache.state)

  def test_requests_wait_for_deferred_pages(self, cache):
    popped = [cache.pop_pages_for_free(req) for req in self._two(cache)]
    newcomer = request("late", range(500, 540))
    for pages in popped:
      assert admit(cache, newcomer) == ([[]], None)
      cache.pages.release(reversed(pages))
    assert admit(cache, newcomer) == ([[]], [[6, 3, 7, 8, 9, 10, 2, 1, 5, 4]])

  def test_deferred_pages_have_the_order_of_free(self):
    queues = []
    for deferred in (True, False):
      cache = single(CacheManager)
      requests = self._two(cache)
      if deferred:
        for pages in [cache.pop_pages_for_free(req) for req in requests]:
          cache.pages.release(reversed(pages))
      else:
        for req in requests:
          cache.free(req)
      queues.append(cache.free_queue())
    assert queues[0] == queues[1]

  def test_loops_keep_deferred_pages(self, cache):
    req_a, _ = self._two(cache)
    pages = cache.pop_pages_for_free(req_a)
    state, _ = jaxkv.free(cache.state, slots=[1])
    assert cache.take(state) == ["1"]
    cache.pages.release(reversed(pages))
    assert cache.num_free_pages == 10


class TestReadings:
  """Events and pages to be zeroed, which schedulers read."""

  @pytest.fixture
  def cache(self):
    """A manager that keeps both."""
    return single(CacheManager, num_events=16, track_new_pages=True)

  def test_events_of_a_request_an_eviction_and_a_reset(self, cache):
    req = request("0", range(9))
    admit(cache, req)
    events, lost = cache.take_events()
    assert [(event.page, event.tokens) for event in events] == [
      (1, (0, 1, 2, 3)),
      (2, (4, 5, 6, 7)),
    ]
    assert (events[0].parent, events[1].parent) == (None, events[0].key)
    assert lost == 0
    cache.free(req)
    cache.evict_pages([1])
    (removed,) = cache.take_events().events
    assert (removed.page, removed.key) == (1, events[0].key)
    cache.reset_prefix_cache()
    (cleared,) = cache.take_events().events
    assert type(cleared).__name__ == "Cleared"
    assert cache.take_events().events == []

  def test_unpublished_pages_have_no_event(self):
    """A reference system announces what retention leaves out, by its tokens."""
    cache = CacheManager(
      40,
      [SlidingWindow(5, page_size=4)],
      LONGEST,
      prefix_retention_interval=0,
      num_events=9,
    )
    req = request("0", range(9))
    admit(cache, req)
    decode(cache, req, range(100, 120))
    events = cache.take_events().events
    assert [event.tokens for event in events] == [(4, 5, 6, 7)]
    assert {event.page for event in events} == cache.cached_page_ids()

  def test_new_pages_are_reported_once(self, cache):
    req = request("0", range(9))
    admit(cache, req)
    assert cache.take_new_page_ids() == [1, 2, 3]
    cache.free(req)
    # A page that was found is not new, a page of the free queue is.
    assert admit(cache, request("1", range(10))) == ([[1, 2]], [[3]])
    assert cache.take_new_page_ids() == [3]
    assert cache.take_new_page_ids() == []

  def test_hits_are_not_new_pages(self):
    cache = hybrid(CacheManager, track_new_pages=True)
    admit(cache, request("0", range(17)))
    assert cache.take_new_page_ids() == [*range(1, 16)]
    assert admit(cache, request("1", range(20))) == (
      [[1, 2, 3, 4], [0, 0, 8, 9], [0, 0, 13, 14]],
      [[16], [17], [18]],
    )
    assert cache.take_new_page_ids() == [16, 17, 18]


class TestRequests:
  def test_names_of_finished_requests_serve_again(self, cache):
    """A finished request's name and slot serve the next one."""
    for turn in range(40):
      req = request("same", range(100 * turn, 100 * turn + 9))
      admit(cache, req)
      cache.free(req)
    assert cache.num_free_pages == 10
    jaxkv.check(cache.state)

  def test_requests_without_a_page_leave_room_for_others(self):
    """Only pages limit the number of requests, not their slots."""
    cache = CacheManager(4, [ChunkedLocal(8, page_size=4)], LONGEST)
    for token in range(9):
      admit(cache, request(str(token), [token] * 8))
      cache.remove_skipped_pages(str(token), 8)
      assert cache.num_free_pages == 3
    assert len(cache.request_ids()) == 9

  def test_prompt_length_is_that_of_the_first_tokens(self):
    req = request("0", range(5))
    req.token_ids.append(5)
    assert (req.num_prompt_tokens, req.num_tokens) == (5, 6)

  def test_old_states_do_not_change(self, cache):
    """It does not change when the manager goes on."""
    old_state = cache.state
    admit(cache, request("0", range(9)))
    jaxkv.check(old_state)
    assert jaxkv.free_pages(old_state) == list(range(1, 11))
    assert jaxkv.free_pages(cache.state) == cache.free_queue()


def test_common_pages_are_those_of_all_requests():
  """References of others than requests do not count."""
  cache = single(CacheManager)
  admit(cache, request("a", range(9)))
  admit(cache, request("b", range(100, 105)))
  assert cache.get_num_common_prefix_pages("a") == [0]
  pages = cache.get_page_ids("a")[0]
  cache.pages.hold(pages[:1])
  assert cache.get_num_common_prefix_pages("a") == [0]
  admit(cache, request("c", range(9)))
  pages = cache.pop_pages_for_free(request("c", range(9)))
  assert cache.get_num_common_prefix_pages("a") == [0]
  cache.pages.release(pages)
  cache.free(request("b", []))
  admit(cache, request("d", range(9)))
  assert cache.get_num_common_prefix_pages("a") == [2]


def test_numbers_of_numpy_do_not_overflow():
  cache = single(CacheManager)
  req = request("a", range(20))
  admit(cache, req, 16)
  req.num_computed_tokens = np.uint8(16)
  assert ids(cache.allocate_slots(req, np.uint8(4)))[0]


def test_the_hit_of_another_manager_is_hashed_again():
  req = request("a", range(9))
  pages, _ = single(CacheManager).get_computed_pages(req)
  cache = single(CacheManager)
  cache.allocate_slots(req, 9, 0, pages)
  assert hit_of(cache, request("b", range(9)))[1] == 8


def test_failed_calls_keep_the_known_request():
  cache = single(CacheManager)
  admit(cache, request("a", range(9)))
  with pytest.raises(ValueError, match="num_computed_tokens"):
    cache.cache_pages(request("a", [1]), -1)
  with pytest.raises(ValueError, match="num_new_tokens"):
    cache.allocate_slots(request("a", [1]), -1)
  jaxkv.check(cache.state)
