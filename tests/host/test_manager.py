"""The host manager alone: contents, statistics, what it is given and says.

Page ids are in `tests.host.test_manager_traces`, many requests at once in
`tests.host.test_step`, bad calls in `tests.host.test_errors`.
"""

import numpy as np
import pytest

import jaxkv
from jaxkv import Recurrent
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
  def test_items(self, cache, items, tokens):
    assert self._cached(cache, mm=items) == tokens

  def test_two_items_are_told_apart_behind_a_common_page(self, cache):
    tokens = [*range(4), *[9] * 6]
    first, second = (MultimodalItem(name, 4, 6) for name in "ab")
    admit(cache, request("0", tokens, mm=[first]))
    assert admit(cache, request("1", tokens, mm=[second])) == ([[1]], [[4, 5]])
    assert hit_of(cache, request("2", tokens, mm=[second])) == ([[1, 4]], 8)

  def test_items_of_the_output_go_on(self, cache):
    """A second turn finds what was decoded behind an item."""
    one = request("0", PLACEHOLDERS, mm=[IMAGE])
    admit(cache, one)
    decode(cache, one, [6, 7, 8])
    turn = request("1", [*one.token_ids, 8], mm=[IMAGE])
    assert hit_of(cache, turn) == ([[1, 2, 3]], 12)

  @pytest.mark.parametrize(
    "fields",
    [
      {},
      {"cache_salt": "a"},
      {"cache_salt": "b"},
      {"lora_name": "a"},
      {"cache_salt": "a", "lora_name": "b"},
      {"cache_salt": "b", "lora_name": "a"},
    ],
  )
  def test_salts_and_adapters(self, cache, fields):
    """Of requests with all combinations, only the same one is found."""
    others = [
      {"cache_salt": salt, "lora_name": name}
      for salt in (None, "a", "b")
      for name in (None, "a", "b")
    ]
    wanted = {"cache_salt": None, "lora_name": None, **fields}
    for number, other in enumerate(others):
      if other != wanted:
        one = request(str(number), range(5), **other)
        admit(cache, one)
        cache.free(one)
    assert hit_of(cache, request("x", range(5), **fields)) == ([[]], 0)
    admit(cache, request("x", range(5), **fields))
    assert hit_of(cache, request("y", range(5), **fields))[1] == 4

  def test_a_salt_reaches_later_pages(self, cache):
    one = request("0", range(6), cache_salt="a")
    admit(cache, one)
    decode(cache, one, range(6, 13))
    assert hit_of(cache, request("1", range(13), cache_salt="a"))[1] == 12
    assert hit_of(cache, request("2", range(13)))[1] == 0

  def test_empty_names_are_none(self, cache):
    admit(cache, request("0", range(9)))
    empty = request("1", range(9), cache_salt="", lora_name="")
    assert hit_of(cache, empty)[1] == 8


class TestStatistics:
  def test_admissions_are_counted(self, cache):
    one = request("0", range(9))
    hit_of(cache, one)  # a lookup alone counts nothing
    assert cache.make_prefix_cache_stats() == PrefixCacheStats()
    admit(cache, one)
    admit(cache, request("1", range(12)))
    wanted = PrefixCacheStats(requests=2, queries=21, hits=8)
    assert cache.make_prefix_cache_stats() == wanted
    # A reading begins a new interval, and decoding is no admission.
    decode(cache, one, [9])
    assert cache.make_prefix_cache_stats() == PrefixCacheStats()

  def test_preempted_requests_are_counted_apart(self, cache):
    one = request("0", range(9))
    admit(cache, one)
    cache.free(one)
    one.num_computed_tokens, one.status = 0, "preempted"
    admit(cache, one)
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
    first, holder = request("0", range(9)), request("1", range(100, 120))
    admit(cache, first)
    admit(cache, holder)
    cache.make_prefix_cache_stats()
    late = request("2", [*range(9), *range(200, 211)])
    for _ in range(2):
      assert admit(cache, late) == ([[1, 2]], None)
    cache.free(holder)
    assert admit(cache, late)[1] is not None
    wanted = PrefixCacheStats(requests=1, queries=20, hits=8)
    assert cache.make_prefix_cache_stats() == wanted

  def test_nothing_is_counted_where_nothing_is_cached(self):
    cache = single(CacheManager, enable_caching=False)
    assert admit(cache, request("0", range(9))) == ([[]], [[1, 2, 3]])
    assert cache.make_prefix_cache_stats() == PrefixCacheStats()

  def test_reset_is_marked_when_it_was_done(self, cache):
    one = request("0", range(9))
    admit(cache, one)
    cache.reset_prefix_cache()
    assert not cache.make_prefix_cache_stats().reset
    cache.free(one)
    cache.reset_prefix_cache()
    assert cache.make_prefix_cache_stats().reset
    assert not cache.make_prefix_cache_stats().reset

  def test_ages_are_reported_once(self):
    cache = single(CacheManager, track_residency=True)
    for name in range(3):
      one = request(str(name), range(100 * name, 100 * name + 20))
      admit(cache, one)
      cache.free(one)
    # Ten pages for three times five: the first text was evicted after ten.
    taken = cache.make_prefix_cache_stats()
    assert (sum(taken.lifetime), sum(taken.idle), taken.reset) == (5, 5, False)
    # Published at 0 to 4 and given back at 5; the clock stood at 10.
    assert {bits: n for bits, n in enumerate(taken.lifetime) if n} == {
      3: 3,
      4: 2,
    }
    assert {bits: n for bits, n in enumerate(taken.idle) if n} == {3: 5}
    cache.reset_prefix_cache()
    taken = cache.make_prefix_cache_stats()
    assert (sum(taken.lifetime), taken.reset) == (0, True)
    assert single(CacheManager).make_prefix_cache_stats().lifetime == []

  def test_ages_that_the_device_cannot_count(self):
    """They are in the last bin."""
    cache = single(CacheManager, track_residency=True)
    one = request("a", range(4))
    admit(cache, one)
    cache._state.pool.clock += 2**40
    cache.free(one)
    cache._state.pool.clock += 2**40
    admit(cache, request("b", range(100, 140)))
    taken = cache.make_prefix_cache_stats()
    assert taken.lifetime[-1] == taken.idle[-1] == 1


class TestPages:
  def test_sum(self):
    one, other = CachePages(([1], [0, 2])), CachePages(([3], []))
    assert (one + other).get_page_ids() == ([1, 3], [0, 2])
    assert one.get_page_ids() == ([1], [0, 2])
    with pytest.raises(
      ValueError, match="must have 2 groups to be added, got 1"
    ):
      _ = one + CachePages(([1],))

  def test_full_pages_are_cached_when_the_call_ends(self, cache):
    """Of 9 tokens the first two pages are full; 14 tokens fill page 4."""
    new = cache.allocate_slots(request("0", range(9)), 9)
    assert new.get_page_ids() == ([1, 2, 3],)
    assert new.get_unhashed_page_ids() == [3]
    one = request("1", range(14))
    found, tokens = cache.get_computed_pages(one)
    new = cache.allocate_slots(one, 6, tokens, found)
    assert found.get_unhashed_page_ids() == []
    assert new.get_page_ids() == ([4, 5],)
    both = found + new
    assert both.get_page_ids() == cache.get_page_ids("1") == ([1, 2, 4, 5],)
    assert both.get_unhashed_page_ids() == [5]
    assert both.get_unhashed_page_ids_all_groups() == ([5],)

  def test_pages_that_were_not_cached_by_group(self):
    found = CachePages(([1, 2], [0, 3]))
    new = CachePages(([4], []), unhashed=([4], []))
    assert found.get_unhashed_page_ids_all_groups() == ([], [])
    assert (found + new).get_unhashed_page_ids_all_groups() == ([4], [])
    assert (new + found).get_unhashed_page_ids() == [4]

  def test_empty(self):
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
  first = request("first", range(9))
  admit(cache, first)
  cache.free(first)
  again = request("again", range(length))
  hit, new = admit(cache, again, 1, full_sequence_must_fit=True)
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
    one = request("first", range(9))
    admit(cache, one, 8)
    cache.free(one)
    cache.new_step_starts()
    if free == 1:
      admit(cache, request("other", [50]))
    again = request("again", range(30))
    hit, found = cache.get_computed_pages(again)
    assert (ids(hit), found) == ([[0, 1]], 8)
    out = cache.allocate_slots(
      again, 4, found, hit, num_external_computed_tokens=8
    )
    assert (out and ids(out)) == pages
    jaxkv.check(cache.state)

  def test_an_evicted_state_is_not_published_again(self):
    cache = CacheManager(9, self.GROUPS, LONGEST)
    one = request("first", range(20))
    admit(cache, one, 8)
    assert cache.get_page_ids("first") == ([0, 1],)
    cache.evict_pages([1])
    for publish in (cache.cache_pages, cache.allocate_slots):
      cache.new_step_starts()
      publish(one, 8)
      assert 1 not in cache.cached_page_ids()
    assert hit_of(cache, request("again", range(12)))[1] == 0
    jaxkv.check(cache.state)

  def test_a_state_is_found_in_the_step_after_it_is_written(self):
    """In the same step its request is still to compute it."""
    cache = CacheManager(9, self.GROUPS, LONGEST)
    cache.new_step_starts()
    admit(cache, request("first", range(9)), 4)
    again = request("again", range(9))
    hit, found = cache.get_computed_pages(again)
    assert found == 4
    assert cache.allocate_slots(again, 5, found, hit) is None
    cache.new_step_starts()
    assert cache.allocate_slots(again, 5, found, hit) is not None
    jaxkv.check(cache.state)


class TestDeferredFree:
  def _two(self, cache):
    """Two requests that hold 3 pages each."""
    both = [request(str(n), range(100 * n, 100 * n + 9)) for n in range(2)]
    for one in both:
      admit(cache, one)
    return both

  def test_pages_are_held_until_they_are_given_back(self, cache):
    one, two = self._two(cache)
    popped = cache.pop_pages_for_free(one)
    assert popped.pages == ([1, 2, 3],)
    assert cache.get_page_ids("0") == ([],)
    assert (cache.num_free_pages, cache.reset_prefix_cache()) == (4, False)
    # The name may come back before the pages do.
    assert admit(cache, request("0", range(9))) == ([[1, 2]], [[7]])
    cache.free(two)
    cache.free_pages(popped)
    assert cache.free_queue() == [3, 6, 8, 9, 10, 5, 4]
    jaxkv.check(cache.state)

  def test_the_newest_pages_of_a_name_are_returned_again(self, cache):
    one, _ = self._two(cache)
    first = cache.pop_pages_for_free(one)
    admit(cache, request("0", range(9)))
    second = cache.pop_pages_for_free(one)
    assert cache.pop_pages_for_free(one) is second
    cache.free_pages(second)
    assert cache.pop_pages_for_free(one) is first

  def test_room_comes_with_the_pages(self, cache):
    one, two = self._two(cache)
    popped = [cache.pop_pages_for_free(name) for name in (one, two)]
    late = request("late", range(500, 540))
    for pages in popped:
      assert admit(cache, late) == ([[]], None)
      cache.free_pages(pages)
    assert admit(cache, late) == ([[]], [[6, 3, 7, 8, 9, 10, 2, 1, 5, 4]])

  def test_order_is_that_of_free(self):
    queues = []
    for deferred in (True, False):
      cache = hybrid(CacheManager)
      both = self._two(cache)
      if deferred:
        for popped in [cache.pop_pages_for_free(one) for one in both]:
          cache.free_pages(popped)
      else:
        for one in both:
          cache.free(one)
      queues.append(cache.free_queue())
    assert queues[0] == queues[1]


class TestReadings:
  """What schedulers read besides: events, and pages to be zeroed."""

  @pytest.fixture
  def cache(self):
    """A manager that keeps both."""
    return single(CacheManager, num_events=16, track_new_pages=True)

  def test_events(self, cache):
    one = request("0", range(9))
    admit(cache, one)
    events, lost = cache.take_events()
    assert [(event.page, event.tokens) for event in events] == [
      (1, (0, 1, 2, 3)),
      (2, (4, 5, 6, 7)),
    ]
    assert (events[0].parent, events[1].parent) == (None, events[0].key)
    assert lost == 0
    cache.free(one)
    cache.evict_pages([1])
    assert [(e.page, e.key) for e in cache.take_events().events] == [
      (1, events[0].key)
    ]
    cache.reset_prefix_cache()
    (cleared,) = cache.take_events().events
    assert type(cleared).__name__ == "Cleared"
    assert cache.take_events().events == []

  def test_new_pages(self, cache):
    one = request("0", range(9))
    admit(cache, one)
    assert cache.take_new_page_ids() == [1, 2, 3]
    cache.free(one)
    # A page that was found is not new, a page of the free queue is.
    assert admit(cache, request("1", range(10))) == ([[1, 2]], [[3]])
    assert cache.take_new_page_ids() == [3]
    assert cache.take_new_page_ids() == []

  def test_new_pages_of_some_groups(self):
    """What another request found is left to whoever got it first."""
    cache = hybrid(CacheManager, track_new_pages=True)
    one, two = request("0", range(17)), request("1", range(20))
    admit(cache, one, skip_zeroing_group_ids=[2])
    assert admit(cache, two, skip_zeroing_group_ids=[0, 1]) == (
      [[1, 2, 3, 4], [0, 0, 8, 9], [0, 0, 13, 14]],
      [[16], [17], [18]],
    )
    assert cache.take_new_page_ids() == [*range(1, 11), 18]


class TestRequests:
  def test_names_come_back(self, cache):
    """A finished request's name and slot serve the next one."""
    for number in range(40):
      one = request("same", range(100 * number, 100 * number + 9))
      admit(cache, one)
      cache.free(one)
    assert cache.num_free_pages == 10
    jaxkv.check(cache.state)

  def test_prompt_length_is_taken_at_first(self):
    one = request("0", range(5))
    one.token_ids.append(5)
    assert (one.num_prompt_tokens, one.num_tokens) == (5, 6)

  def test_an_old_state_is_a_value(self, cache):
    """It does not change when the manager goes on."""
    before = cache.state
    admit(cache, request("0", range(9)))
    jaxkv.check(before)
    assert jaxkv.free_pages(before) == list(range(1, 11))
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
  popped = cache.pop_pages_for_free(request("c", range(9)))
  assert cache.get_num_common_prefix_pages("a") == [0]
  cache.free_pages(popped)
  cache.free(request("b", []))
  admit(cache, request("d", range(9)))
  assert cache.get_num_common_prefix_pages("a") == [2]


def test_numbers_of_numpy_do_not_overflow():
  cache = single(CacheManager)
  one = request("a", range(20))
  admit(cache, one, 16)
  one.num_computed_tokens = np.uint8(16)
  assert ids(cache.allocate_slots(one, np.uint8(4)))[0]


def test_the_hit_of_another_manager_is_hashed_again():
  first, second = single(CacheManager), single(CacheManager)
  one = request("a", range(9))
  pages, _ = first.get_computed_pages(one)
  second.allocate_slots(one, 9, 0, pages)
  assert hit_of(second, request("b", range(9)))[1] == 8


def test_a_call_that_fails_keeps_the_request_of_before():
  cache = single(CacheManager)
  admit(cache, request("a", range(9)))
  with pytest.raises(ValueError, match="num_computed_tokens"):
    cache.cache_pages(request("a", [1]), -1)
  with pytest.raises(ValueError, match="num_new_tokens"):
    cache.allocate_slots(request("a", [1]), -1)
  jaxkv.check(cache.state)
