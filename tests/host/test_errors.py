"""Bad calls of the host manager: an error that says which, and no change."""

import numpy as np
import pytest

from jaxkv import ChunkedLocal
from jaxkv import FullAttention
from jaxkv import SlidingWindow
from jaxkv.host import CacheManager
from jaxkv.host import CachePages
from jaxkv.host import CrossAttention
from jaxkv.host import SpeculativeRecurrent
from tests.host.scheduling import FULL
from tests.host.scheduling import WINDOW
from tests.host.scheduling import admit
from tests.host.scheduling import request
from tests.host.scheduling import running
from tests.host.scheduling import single
from tests.host.scheduling import unchanged

NEW = request("new", range(9))
LONG = request("long", range(70))


@pytest.fixture
def cache():
  """Request a runs, b was freed and is cached, 7 of 10 pages are free."""
  cache = single(CacheManager)
  admit(cache, request("a", range(9)))
  req = request("b", range(100, 110))
  admit(cache, req)
  cache.free(req)
  assert (cache.num_free_pages, cache.cached_page_ids()) == (7, {1, 2, 4, 5})
  return cache


@pytest.mark.parametrize(
  ("arguments", "text"),
  [
    ({"num_new_tokens": 0}, "'new' must not all be 0"),
    ({"num_new_tokens": -1}, "num_new_tokens.* -1"),
    ({"num_new_computed_tokens": -4}, "num_new_computed_tokens.* -4"),
    ({"num_lookahead_tokens": -2}, "num_lookahead_tokens.* -2"),
    ({"num_external_computed_tokens": -3}, "num_external_computed_tokens"),
    ({"reserved_pages": -1}, "reserved_pages.* -1"),
    ({"num_new_tokens": 65}, "'new' must have .* got 65"),
    ({"num_external_computed_tokens": 64}, "'new' must have .* got 65"),
  ],
)
def test_bad_counts_are_refused(cache, arguments, text):
  with unchanged(cache), pytest.raises(ValueError, match=text):
    cache.allocate_slots(NEW, **{"num_new_tokens": 1, **arguments})
  assert admit(cache, request("new", range(9))) == ([[1, 2]], [[6]])


def test_sequences_that_are_too_long(cache):
  with unchanged(cache):
    with pytest.raises(ValueError, match=r"'long' must have .* got 70"):
      cache.get_computed_pages(LONG)
    with pytest.raises(ValueError, match=r"'a' must have .* got 65"):
      cache.allocate_slots(running(), 56)


def test_unknown_requests(cache):
  with unchanged(cache):
    with pytest.raises(KeyError, match="'new' holds no page"):
      cache.cache_pages(NEW, 4)
    with pytest.raises(KeyError, match="'new' holds no page"):
      cache.step([running(), NEW])
    # What only gives back has nothing to give.
    cache.free(NEW)
    cache.remove_skipped_pages("new", 9)
    assert cache.get_page_ids("new") == ([],)
    assert cache.get_num_common_prefix_pages("new") == [0]


def test_requests_may_be_freed_twice(cache):
  req = running()
  cache.free(req)
  with unchanged(cache):
    cache.free(req)
    with pytest.raises(KeyError, match="a"):
      cache.cache_pages(req, 9)
    with pytest.raises(KeyError, match="a"):
      cache.step([req])


def test_hits_for_a_request_that_runs(cache):
  with unchanged(cache), pytest.raises(ValueError, match="'a' must be empty"):
    cache.allocate_slots(running(), 1, 4, CachePages(([4],)))


@pytest.mark.parametrize(
  ("pages", "tokens"),
  [
    pytest.param(None if pages is None else CachePages(pages), tokens, id=name)
    for name, pages, tokens in (
      ("none", None, 4),
      ("two groups", ([1], [2]), 4),
      ("no group", (), 4),
      ("no group for no tokens", (), 0),
      ("no page", ([],), 4),
      ("beyond the pool", ([11],), 4),
      ("far beyond the pool", ([2**31 - 1],), 4),
      ("negative", ([-1],), 4),
      ("the null page", ([0],), 4),
      ("not cached", ([7],), 4),
      ("twice", ([1, 1],), 8),
      ("in the wrong order", ([2, 1],), 8),
      ("of another request", ([4, 5],), 8),
      ("more than a slot has", (list(range(1, 18)),), 8),
      ("more than tokens", ([1, 2],), 4),
      ("pages for no tokens", ([1, 2],), 0),
      ("fewer than tokens", ([1],), 8),
      ("half a page", ([1],), 6),
    )
  ],
)
def test_hits_of_no_lookup_are_refused(cache, pages, tokens):
  with unchanged(cache), pytest.raises(ValueError, match="'new'"):
    cache.allocate_slots(NEW, 1, tokens, pages)
  assert admit(cache, request("new", range(9))) == ([[1, 2]], [[6]])


@pytest.mark.parametrize(
  ("pages", "error", "message"),
  [
    (CachePages(([1.0],)), TypeError, "'new' must be lists of page ids, got"),
    (CachePages((["1"],)), TypeError, "'new' must be lists of page ids, got"),
    (CachePages(([None],)), TypeError, "'new' must be lists of page ids"),
    (CachePages(([2**40],)), ValueError, "'new' must be 0 to 10, got"),
    (([1],), TypeError, "'new' must be CachePages or None, got"),
  ],
)
def test_hits_of_bad_types_are_refused(cache, pages, error, message):
  with unchanged(cache), pytest.raises(error, match=message):
    cache.allocate_slots(NEW, 1, 4, pages)


def test_a_null_page_is_no_hit(cache):
  """Even where no page is cached."""
  with unchanged(cache), pytest.raises(ValueError, match="'c' begins with"):
    cache.allocate_slots(request("c", range(40, 49)), 5, 4, CachePages(([0],)))


def test_running_requests_are_a_list(cache):
  with unchanged(cache), pytest.raises(TypeError, match="must be a list of"):
    cache.step(req for req in [running()])


@pytest.mark.parametrize("salt", ["a", None])
def test_hits_under_another_salt(cache, salt):
  req = request("c", range(9), cache_salt=None if salt else "a")
  admit(cache, req)
  hit_pages, tokens = cache.get_computed_pages(req)
  other_req = request("new", range(9), cache_salt=salt)
  with unchanged(cache), pytest.raises(ValueError, match="'new'"):
    cache.allocate_slots(other_req, 1, tokens, hit_pages)


@pytest.mark.parametrize("computed", [-5, 9])
def test_computed_tokens_of_a_newcomer(cache, computed):
  req = request("new", range(12), num_computed_tokens=computed)
  text = f"num_computed_tokens.* {computed}"
  with unchanged(cache), pytest.raises(ValueError, match=text):
    cache.allocate_slots(req, 6)


@pytest.mark.parametrize("count", [1.5, "1", None, True, np.bool_(True)])
def test_counts_are_ints(cache, count):
  with unchanged(cache):
    with pytest.raises(TypeError, match="num_new_tokens"):
      cache.allocate_slots(NEW, count)
    with pytest.raises(TypeError, match="num_new_tokens"):
      cache.step([running()], [count])
    with pytest.raises(TypeError, match="num_lookahead_tokens"):
      cache.step([running()], 1, count)
    # The place of another argument in the reference systems.
    with pytest.raises(TypeError, match="num_lookahead_tokens"):
      cache.allocate_slots(NEW, 9, 0, None, count)
    with pytest.raises(TypeError, match="num_external_computed_tokens"):
      cache.allocate_slots(NEW, 9, num_external_computed_tokens=count)


@pytest.mark.parametrize(
  ("arguments", "text"),
  [
    (
      {"num_new_tokens": 0},
      "num_new_tokens` must be at least 1 and below 2..31, got 0",
    ),
    (
      {"num_new_tokens": [-1]},
      "num_new_tokens` must be at least 1 and below 2..31, got -1",
    ),
    ({"num_new_tokens": [1, 2]}, r"each of 1 requests, got.* \(2,\)"),
    ({"num_new_tokens": [[1]]}, r"each of 1 requests, got.* \(1, 1\)"),
    ({"num_lookahead_tokens": -1}, "num_lookahead_tokens` must be at least 0"),
    ({"num_new_tokens": 56}, "`max_model_len` is 64; 'a' must have .* got 65"),
    ({"num_new_tokens": [2**32 + 1]}, "below 2..31, got 4294967297"),
  ],
)
def test_bad_steps_are_refused(cache, arguments, text):
  with unchanged(cache), pytest.raises(ValueError, match=text):
    cache.step([running()], **arguments)


def test_step_names_a_request_twice(cache):
  with (
    unchanged(cache),
    pytest.raises(ValueError, match="each request once, got 'a'"),
  ):
    cache.step([running(), running()])


def test_deferred_pages_are_given_back_once(cache):
  pages = cache.pop_pages_for_free(running())
  cache.pages.release(pages)
  with unchanged(cache):
    with pytest.raises(ValueError, match="more often than callers have"):
      cache.pages.release(pages)
    assert cache.pop_pages_for_free(running()) == []


def test_readings_that_are_off_are_refused(cache):
  with unchanged(cache):
    with pytest.raises(ValueError, match="`num_events` must be at least 1"):
      cache.take_events()
    with pytest.raises(ValueError, match="`track_new_pages` must be True"):
      cache.take_new_page_ids()


def test_empty_steps_change_nothing(cache):
  with unchanged(cache):
    assert cache.step([]) == []


def test_cache_pages(cache):
  with unchanged(cache), pytest.raises(ValueError, match="-1"):
    cache.cache_pages(running(), -1)
  # Tokens that are not known, or have no page, are left for later.
  cache.cache_pages(running(), 1000)
  with unchanged(cache):
    cache.cache_pages(request("a", range(70)), 9)
    cache.cache_pages(running(), 1000)
    cache.cache_pages(running(), 4)


@pytest.mark.parametrize("pages", [[11], [-1], [1, 99], [2**40]])
def test_evicted_pages_exist(cache, pages):
  with unchanged(cache), pytest.raises(ValueError, match=str(pages[-1])):
    cache.evict_pages(pages)


def test_uncached_pages_are_not_evicted(cache):
  with unchanged(cache):
    cache.evict_pages([])
    cache.evict_pages([0, 3, 10])
  cache.evict_pages([4, 4])
  assert cache.cached_page_ids() == {1, 2, 5}


def test_too_few_pages_return_none(cache):
  with unchanged(cache):
    assert cache.allocate_slots(request("c", range(40)), 40) is None
    assert cache.allocate_slots(running(), 40) is None
    assert cache.step([running()], 40) == [None]


@pytest.mark.parametrize("count", [0, -1, 1.5, True])
def test_bad_numbers_of_scratch_pages(count):
  with pytest.raises((TypeError, ValueError), match="num_speculative"):
    SpeculativeRecurrent(count, page_size=4)


def test_cross_attention_alone_is_refused():
  groups = [CrossAttention(page_size=4)]
  with pytest.raises(ValueError, match="group for the sequences' own tokens"):
    CacheManager(12, groups, 24, enable_caching=False)


def test_more_requests_than_slots():
  cache = single(CacheManager, max_requests=1)
  req_a = request("a", range(9))
  admit(cache, req_a)
  req_b = request("b", range(9))
  with unchanged(cache), pytest.raises(RuntimeError, match="max_requests"):
    cache.allocate_slots(req_b, 9)
  cache.free(req_a)
  assert admit(cache, req_b) == ([[1, 2]], [[3]])


def test_more_requests_than_pages(cache):
  cache.free(running())
  for token in range(10):
    assert cache.allocate_slots(request(str(token), [token]), 1)
  with unchanged(cache):
    assert cache.allocate_slots(request("c", [11]), 1) is None


@pytest.mark.parametrize(
  ("change", "error", "text"),
  [
    ({"groups": ()}, ValueError, "groups"),
    ({"groups": FULL}, TypeError, "groups.* FullAttention"),
    ({"groups": ["full"]}, ValueError, "groups.*'full'"),
    ({"groups": [FullAttention()]}, ValueError, "page_size"),
    ({"groups": [FULL, SlidingWindow(8)]}, ValueError, "page_size"),
    ({"num_pages": 1}, ValueError, "num_pages` must be at least 2 .* got 1"),
    ({"num_pages": 8.0}, TypeError, "num_pages.* 8.0"),
    ({"max_model_len": 0}, ValueError, "max_model_len.* 0"),
    ({"max_model_len": 6.5}, TypeError, "max_model_len.* 6.5"),
    ({"max_requests": 0}, ValueError, "max_requests.* 0"),
    ({"max_in_flight": 0}, ValueError, "max_in_flight.* 0"),
    ({"policy": "newest"}, ValueError, "policy.* 'newest'"),
    ({"watermark": 1}, ValueError, "watermark.* 1"),
    ({"watermark": -0.1}, ValueError, "watermark.* -0.1"),
    ({"watermark": "0.1"}, ValueError, "watermark.* '0.1'"),
    ({"prefix_retention_interval": 8}, ValueError, "retention"),
    (
      {"groups": [WINDOW], "prefix_retention_interval": 3},
      ValueError,
      "interval.* 3",
    ),
    (
      {"groups": [WINDOW], "prefix_retention_interval": -4},
      ValueError,
      "interval.* -4",
    ),
    (
      {"groups": [WINDOW], "prefix_retention_interval": 0, "policy": "classic"},
      ValueError,
      "prefix_rules=.classic.",
    ),
    ({"key": 1.5}, TypeError, "`key` must be uint32, got float64"),
    ({"key": [1, 2]}, TypeError, "`key` must be uint32"),
    ({"key": "random"}, TypeError, "`key` must be uint32"),
    ({"enable_caching": "yes"}, TypeError, "enable_caching.* 'yes'"),
    ({"use_eagle": 1}, TypeError, "use_eagle` must be True or False, got 1"),
    ({"track_new_pages": "no"}, TypeError, "track_new_pages.* 'no'"),
    ({"num_events": -1}, ValueError, "num_events.* -1"),
    ({"num_events": 2.0}, TypeError, "num_events.* 2.0"),
    (
      {"num_events": 9, "enable_caching": False},
      ValueError,
      "num_events.* need enable_caching=True",
    ),
    (
      {"offload_pages": 9, "enable_caching": False},
      ValueError,
      "offload_pages` need enable_caching=True",
    ),
    ({"offload_pages": -1}, ValueError, "offload_pages.* -1"),
    ({"offload_policy": "often"}, ValueError, "offload_policy.*'often'"),
  ],
)
def test_bad_options_are_refused(change, error, text):
  options = {"num_pages": 11, "groups": [FULL], "max_model_len": 64, **change}
  with pytest.raises(error, match=text):
    CacheManager(**options)


def test_full_attention_accepts_retention_zero():
  cache = CacheManager(11, [FULL], 64, prefix_retention_interval=0)
  assert cache.config.prefix_retention_interval == 0


def test_retention_of_chunks_is_refused():
  groups = [FULL, ChunkedLocal(8, page_size=4)]
  with pytest.raises(ValueError, match="retention"):
    CacheManager(11, groups, 64, prefix_retention_interval=8)


def test_a_failed_call_leaves_the_request_alone(cache):
  """The scheduler's counts are its own."""
  req = running()
  old_fields = vars(req).copy()
  with pytest.raises(ValueError, match="'a'"):
    cache.allocate_slots(req, 60)
  assert vars(req) == old_fields
