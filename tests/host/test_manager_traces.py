"""Page ids that the reference systems give, from both managers.

Traces are those of SEMANTICS section 6, repeated in small sequences. The
model in plain lists and the library's manager follow each of them.
"""

import pytest

from jaxkv import Recurrent
from jaxkv.host import CacheManager
from tests.host.scheduling import FULL
from tests.host.scheduling import LONGEST
from tests.host.scheduling import PAGE
from tests.host.scheduling import admit
from tests.host.scheduling import decode
from tests.host.scheduling import fill_pages
from tests.host.scheduling import hit_of
from tests.host.scheduling import hybrid
from tests.host.scheduling import references
from tests.host.scheduling import request
from tests.host.scheduling import single
from tests.model_of_the_cache.manager import ReferenceManager

_MANAGERS = {"reference": ReferenceManager, "host": CacheManager}


@pytest.fixture(params=_MANAGERS)
def make(request):
  """The class of the manager."""
  return _MANAGERS[request.param]


@pytest.fixture
def cache(make):
  """One group, 10 pages of 4 tokens."""
  return single(make)


class TestFull:
  def test_prefill(self, cache):
    common = range(12)
    req_a = request("0", [*common, *range(100, 103)])
    assert admit(cache, req_a) == ([[]], [[1, 2, 3, 4]])
    assert cache.cached_page_ids() == {1, 2, 3}
    req_b = request("1", [*common, *range(200, 202)])
    assert admit(cache, req_b) == ([[1, 2, 3]], [[5]])
    assert references(cache, range(1, 6)) == [2, 2, 2, 1, 1]
    cache.free(req_a)
    cache.free(req_b)
    assert cache.free_queue() == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]
    req_c = request("2", [*common, *range(300, 302)])
    assert admit(cache, req_c) == ([[1, 2, 3]], [[5]])
    cache.free(req_c)
    miss = request("3", range(1000, 1040))
    assert admit(cache, miss) == ([[]], [[5, 4, 6, 7, 8, 9, 10, 3, 2, 1]])

  def test_classic_policy_appends_all_freed_pages(self, make):
    cache = single(make, policy="classic")
    req = request("0", range(15))
    admit(cache, req)
    cache.free(req)
    assert cache.free_queue() == [5, 6, 7, 8, 9, 10, 4, 3, 2, 1]

  def test_decode(self, cache):
    req = request("0", range(13))
    admit(cache, req)
    assert decode(cache, req, [7] * 2) == [[]]
    assert cache.cached_page_ids() == {1, 2, 3}
    assert decode(cache, req, [7] * 3) == [[5]]
    assert cache.cached_page_ids() == {1, 2, 3, 4}

  def test_prefill_in_chunks(self, cache):
    req = request("0", range(20))
    assert admit(cache, req, 6) == ([[]], [[1, 2]])
    assert cache.cached_page_ids() == {1}
    assert decode(cache, req, []) == [[3, 4, 5]]
    assert cache.cached_page_ids() == {1, 2, 3, 4, 5}

  def test_evict(self, cache):
    req_a = request("0", range(5 * PAGE + 3))
    req_b = request("1", range(1000, 1000 + 3 * PAGE))
    admit(cache, req_a)
    admit(cache, req_b)
    cache.free(req_a)
    assert cache.free_queue() == [6, 10, 5, 4, 3, 2, 1]
    cache.free(req_b)
    assert cache.free_queue() == [6, 10, 5, 4, 3, 2, 1, 9, 8, 7]
    req_c = request("2", range(2 * PAGE + 3))
    assert admit(cache, req_c) == ([[1, 2]], [[6]])
    assert cache.free_queue() == [10, 5, 4, 3, 9, 8, 7]

  def test_aligned_repeat_computes_its_last_page_again(self, cache):
    admit(cache, request("0", range(8)))
    assert admit(cache, request("1", range(8))) == ([[1]], [[3]])
    # Two pages carry the second key; the one published first is found.
    assert hit_of(cache, request("2", range(10))) == ([[1, 2]], 8)
    cache.evict_pages([2])
    assert hit_of(cache, request("2", range(10))) == ([[1, 3]], 8)

  def test_hits_in_the_queue_are_not_room(self, cache):
    req_a = request("0", range(12))
    admit(cache, req_a)
    req_b = request("1", [*range(12), *range(100, 112)])
    admit(cache, req_b)
    cache.free(req_b)
    cache.free(req_a)
    holder = request("2", range(500, 520))
    admit(cache, holder)
    queue = cache.free_queue()
    assert len(queue) == 5
    newcomer = request("3", [*range(12), *range(200, 212)])
    # Three hits and three new pages, five free.
    assert admit(cache, newcomer) == ([[1, 2, 3]], None)
    assert cache.free_queue() == queue
    assert references(cache, [1, 2, 3]) == [0, 0, 0]

  def test_lookahead_pages_are_not_cached(self, cache):
    req = request("0", range(7))
    assert admit(cache, req, num_lookahead_tokens=2) == ([[]], [[1, 2, 3]])
    assert cache.cached_page_ids() == {1}

  def test_refused_drafts_are_published_when_they_are_computed(self, cache):
    req = request("0", range(6))
    admit(cache, req, num_lookahead_tokens=2)
    req.token_ids.append(6)
    # One token and two drafts, of which one is accepted.
    assert cache.allocate_slots(req, 3, num_lookahead_tokens=2) is not None
    assert cache.cached_page_ids() == {1}
    req.token_ids.extend([7, 8])
    cache.cache_pages(req, 8)
    assert cache.cached_page_ids() == {1, 2}

  def test_salt_and_adapter_separate(self, cache):
    admit(cache, request("0", range(10), cache_salt="a"))
    for fields, tokens in (
      ({"cache_salt": "a"}, 8),
      ({"cache_salt": "b"}, 0),
      ({"lora_name": "a"}, 0),
      ({"cache_salt": "a", "lora_name": "a"}, 0),
      ({"cache_salt": "a", "prompt_logprobs": True}, 0),
    ):
      assert hit_of(cache, request("1", range(10), **fields))[1] == tokens

  def test_preempted_request_finds_its_pages(self, cache):
    req = request("0", range(10))
    admit(cache, req)
    assert decode(cache, req, [10, 11, 12]) == [[4]]
    cache.free(req)
    req.num_computed_tokens = 0
    req.status = "preempted"
    assert cache.free_queue() == [4, 5, 6, 7, 8, 9, 10, 3, 2, 1]
    assert admit(cache, req) == ([[1, 2, 3]], [[4]])

  def test_reset_keeps_the_order(self, cache):
    req = request("0", range(10))
    admit(cache, req)
    assert not cache.reset_prefix_cache()
    assert cache.cached_page_ids() == {1, 2}
    cache.free(req)
    assert cache.reset_prefix_cache()
    assert cache.free_queue() == [3, 4, 5, 6, 7, 8, 9, 10, 2, 1]
    assert cache.cached_page_ids() == set()

  def test_room_for_others(self, make):
    cache = single(make, watermark=0.2)  # 2 of 11 pages
    req = request("0", range(9 * PAGE))
    assert admit(cache, req)[1] is None
    options = {"has_scheduled_requests": False}
    assert admit(cache, req, reserved_pages=2, **options)[1] is None
    assert admit(cache, req, reserved_pages=1, **options)[1]
    assert decode(cache, req, [1]) == [[10]]

  def test_whole_sequence_must_fit(self, cache):
    req = request("0", range(50))
    assert admit(cache, req, 4, full_sequence_must_fit=True)[1] is None
    assert admit(cache, req, 4) == ([[]], [[1]])

  def test_external_tokens_come_later(self, cache):
    admit(cache, request("0", range(8)))
    req = request("1", range(16))
    options = {"num_external_computed_tokens": 5, "delay_cache_pages": True}
    # The external pages are held but not returned.
    assert admit(cache, req, 0, **options) == ([[1, 2]], [[]])
    assert cache.get_page_ids("1") == ([1, 2, 3, 4],)
    assert cache.cached_page_ids() == {1, 2}
    cache.cache_pages(req, 13)
    assert cache.cached_page_ids() == {1, 2, 3}

  def test_common_pages(self, cache):
    admit(cache, request("0", range(10)))
    admit(cache, request("1", range(10)))
    assert cache.get_num_common_prefix_pages("1") == [2]
    admit(cache, request("2", range(100, 103)))
    assert cache.get_num_common_prefix_pages("1") == [0]

  def test_usage(self, cache):
    assert cache.usage == 0
    admit(cache, request("0", range(10)))
    assert cache.usage == pytest.approx(0.3)

  def test_wrong_calls(self, cache):
    req = request("0", range(4))
    with pytest.raises(ValueError, match=r"nothing|must not all be 0"):
      cache.allocate_slots(req, 0)
    with pytest.raises(KeyError):
      cache.cache_pages(req, 4)
    cache.free(req)
    cache.remove_skipped_pages("0", 4)
    assert cache.free_queue() == list(range(1, 11))


class TestHybrid:
  def test_windows_wait_for_steps_in_flight(self, make):
    cache = hybrid(make)
    req = request("0", range(16))
    admit(cache, req)
    req.num_in_flight_tokens = 9  # one more than lies behind the window
    decode(cache, req, [1])
    assert all(map(all, cache.get_page_ids("0")))
    req.num_in_flight_tokens = 0
    decode(cache, req, [2])
    full, *windows = cache.get_page_ids("0")
    assert all(full)
    assert [pages[:3].count(0) for pages in windows] == [2, 2]

  def _filled(self, make):
    cache = hybrid(make)
    return cache, fill_pages(cache)

  def test_prefill(self, make):
    cache, second = self._filled(make)
    assert admit(cache, second) == (
      [[1, 2, 3], [0, 6, 7], [0, 10, 11]],
      [[13], [14], [15]],
    )

  @pytest.mark.parametrize(
    ("evicted", "pages"),
    [
      ([5, 9], 3),  # outside the window
      ([1], 0),  # the first page of the full group
      ([3], 2),  # the last one of each group
      ([7], 2),
      ([11], 2),
      ([7, 9], 0),  # the two windows agree nowhere
      ([2, 6, 10], 1),
      ([1, 7], 0),
    ],
  )
  def test_eviction(self, make, evicted, pages):
    cache, second = self._filled(make)
    cache.evict_pages(evicted)
    assert hit_of(cache, second)[1] == pages * PAGE

  def test_windows_move_on(self, make):
    cache, _ = self._filled(make)
    cache.remove_skipped_pages("0", 15)
    assert cache.get_page_ids("0") == (
      [1, 2, 3, 4],
      [0, 0, 7, 8],
      [0, 0, 11, 12],
    )
    # The later page is given back first, group by group.
    assert cache.free_queue() == [*range(13, 25), 6, 5, 10, 9]

  def test_a_refused_request_still_gives_windows_back(self, make):
    cache, _ = self._filled(make)
    req = request("0", [*range(12), *range(100, 103)])
    req.num_computed_tokens = 15
    req.status = "running"
    # 12 pages are free before, 16 then; 12 more in each group are asked for.
    assert cache.allocate_slots(req, 48) is None
    assert cache.num_free_pages == 16
    assert cache.get_page_ids("0")[1] == [0, 0, 7, 8]

  def test_free(self, make):
    """The example of 4.7."""
    cache = hybrid(make)
    req = request("0", range(6 * PAGE + 3))
    admit(cache, req)
    pages = [*range(1, 8)], [*range(8, 15)], [*range(15, 22)]
    assert cache.get_page_ids("0") == pages
    cache.free(req)
    ends = [*range(6, 0, -1), *range(13, 7, -1), *range(20, 14, -1)]
    assert cache.free_queue() == [21, 14, 7, 22, 23, 24, *ends]

  def test_junction(self, make):
    cache, second = self._filled(make)
    cache.evict_pages([7])
    hit_pages, _ = cache.get_computed_pages(second)
    # The model of the manager notes it on the request.
    boundary = getattr(hit_pages, "shared_prefix_boundary", 0)
    assert (boundary or second.shared_prefix_boundary) == 12

  def test_common_pages(self, make):
    cache, second = self._filled(make)
    admit(cache, second)
    assert cache.get_num_common_prefix_pages("1") == [3, 0, 0]

  def test_external_tokens(self, make):
    cache, second = self._filled(make)
    second.token_ids.extend(range(300, 340))
    external = {"num_external_computed_tokens": 20}
    hit, new = admit(cache, second, 2, **external)
    assert hit == [[1, 2, 3], [0, 6, 7], [0, 10, 11]]
    # 32 tokens are there; windows begin to look at the 26th of them.
    assert cache.get_page_ids("1")[1][:6] == [0] * 6
    assert [len(column) for column in new] == [1, 1, 1]
    assert len(cache.get_page_ids("1")[0]) * PAGE < LONGEST


class TestStates:
  def test_an_external_state_is_counted(self, make):
    """A reference system counts one page and pops two."""
    for free, fits in ((1, False), (2, True)):
      cache = make(free + 1, (Recurrent(page_size=PAGE),), LONGEST)
      external = {"num_external_computed_tokens": 8}
      new = admit(cache, request("0", range(10)), 2, **external)[1]
      assert new == ([[2]] if fits else None)
      assert len(cache.free_queue()) == (0 if fits else free)

  def test_a_draft_model_finds_the_state_before_the_last_page(self, make):
    groups = FULL, Recurrent(page_size=PAGE)
    cache = make(
      31, groups, LONGEST, use_eagle=True, prefix_retention_interval=0
    )
    # A prompt that ends with a page, and one that ends just behind it.
    for first_token, length, shorter in ((0, 16, 8), (100, 17, 0)):
      text = range(first_token, first_token + 30)
      req = request(str(first_token), text[:length])
      admit(cache, req, PAGE)
      while req.num_computed_tokens < length:
        cache.new_step_starts()
        left = length - req.num_computed_tokens
        assert cache.allocate_slots(req, min(PAGE, left)) is not None
        req.num_computed_tokens += min(PAGE, left)
      cache.free(req)
      cache.new_step_starts()
      # The fourth page is left out, whether the same comes again or more. The
      # state before it is kept for both; for the first, whose last token must
      # be computed, the one before that too.
      for tokens, num_hit in ((length, 12), (22, 12), (12, shorter)):
        assert hit_of(cache, request("x", text[:tokens]))[1] == num_hit

  @pytest.mark.parametrize(("num_others", "fits"), [(0, True), (1, False)])
  def test_a_whole_sequence_ends_with_one_state(self, make, num_others, fits):
    """Another state arrives for external tokens, but does not stay."""
    groups = (FULL, Recurrent(page_size=PAGE))
    cache = make(1 + 12 + 1 + num_others, groups, LONGEST)
    if num_others:
      assert admit(cache, request("0", [9])) == ([[], []], [[1], [2]])
    out = cache.allocate_slots(
      request("1", range(48)),
      0,
      num_external_computed_tokens=32,
      delay_cache_pages=True,
      full_sequence_must_fit=True,
    )
    assert (out is not None) == fits
