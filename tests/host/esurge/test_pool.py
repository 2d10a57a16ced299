"""A pool on its own, and that of a manager."""

import gc
import weakref

import pytest

from jaxkv.host.esurge import PageHash
from jaxkv.host.esurge import PageHashWithGroupId
from jaxkv.host.esurge import PagePool
from jaxkv.host.esurge import hash_request_tokens
from tests.host.esurge.checks import checked
from tests.host.esurge.requests import EngineRequest
from tests.host.esurge.requests import Feature
from tests.host.esurge.requests import admit
from tests.host.esurge.requests import full
from tests.host.esurge.requests import ids
from tests.host.esurge.requests import manager
from tests.host.esurge.requests import window
from tests.tools.threads import run_in_threads

SIX = EngineRequest("six", range(6))


def cached(pool, request, size=2, group=0, **fields):
  """Pages of a pool that were given the hashes of a request."""
  count = request.num_tokens // size
  pages, hashes = pool.get_new_pages(count), fields.pop("hashes", [])
  pool.cache_full_pages(request, pages, hashes, 0, count, size, group)
  return pages


class TestAlone:
  def test_at_first(self):
    pool = PagePool(5, True)
    assert (pool.num_pages, pool.enable_caching) == (5, True)
    assert ids(pool.pages) == [0, 1, 2, 3, 4]
    assert pool.null_page is pool.pages[0]
    assert checked(pool) == [1, 2, 3, 4]
    assert pool.get_usage() == pytest.approx(1 / 5)
    assert len(pool.cached_page_hash_to_page) == 0

  def test_new_pages(self):
    pool = PagePool(5, True)
    assert pool.get_new_pages(0) == []
    pages = pool.get_new_pages(3)
    assert pages == pool.pages[1:4]
    assert pool.references(pages) == [1, 1, 1]
    for count in (2, 100):
      with pytest.raises(ValueError, match="1 left"):
        pool.get_new_pages(count)
    assert checked(pool) == [4]

  def test_free_and_touch(self):
    pool = PagePool(5, True)
    one, two, three = pool.get_new_pages(3)
    pool.free_pages(reversed([one, two]))
    assert checked(pool) == [4, 2, 1]
    pool.touch(([two, three], [pool.null_page]))
    assert pool.references([one, two, three]) == [0, 1, 2]
    assert checked(pool) == [4, 1]
    pool.free_pages(iter([three, two, three]))
    assert checked(pool) == [4, 1, 2, 3]

  def test_more_than_there_are(self):
    pool = PagePool(5, True)
    one, two = pool.get_new_pages(2)
    with pytest.raises(RuntimeError, match="Page 2 must have as many"):
      pool.free_pages([one, two, two])
    assert pool.references([one, two]) == [1, 1]
    pool.free_pages([one])
    with pytest.raises(RuntimeError, match="Page 1 must have as many"):
      pool.free_pages([one])
    assert checked(pool) == [3, 4, 1]

  def test_a_page_outside_of_the_queue_is_not_touched(self):
    pool = PagePool(5, True)
    page = pool.free_page_queue.popleft()
    assert page.ref_cnt == 0
    with pytest.raises(RuntimeError, match="append it first"):
      pool.touch(([pool.pages[2], page],))
    assert checked(pool) == [2, 3, 4]
    page.incr_ref()
    pool.touch(([page],))
    assert page.ref_cnt == 2
    pool.free_pages([page, page])
    assert checked(pool) == [2, 3, 4, 1]

  def test_the_null_page_is_not_queued(self):
    pool = PagePool(5, True)
    with pytest.raises(RuntimeError, match="null page must stay out"):
      pool.free_page_queue.append(pool.null_page)

  def test_pages_of_others(self):
    pool, other = PagePool(5, True), PagePool(5, True)
    with pytest.raises(ValueError, match="must be a page of this pool"):
      pool.touch(([other.pages[1]],))

  @pytest.mark.parametrize("num_pages", [1, 0, -3])
  def test_too_few(self, num_pages):
    with pytest.raises(ValueError, match="`num_pages` must be at least 2"):
      PagePool(num_pages, True)

  def test_not_a_number(self):
    with pytest.raises(TypeError, match="`num_pages` must be an int"):
      PagePool(4.0, True)

  def test_many_pages(self):
    pool = PagePool(700, True)
    pages = pool.get_new_pages(600)
    request = EngineRequest("a", range(600))
    pool.cache_full_pages(request, pages, [], 0, 600, 1, 0)
    assert len(pool.cached_page_hash_to_page) == 600
    pool.free_pages(pages)
    assert checked(pool) == [*range(601, 700), *range(1, 601)]


@pytest.mark.slow
class TestHashes:
  def test_hashes_are_completed(self):
    pool, hashes = PagePool(9, True), []
    pages = cached(pool, SIX, hashes=hashes)
    assert hashes == hash_request_tokens(hash, 2, SIX)
    assert [page.page_hash for page in pages] == [
      PageHashWithGroupId(one, 0) for one in hashes
    ]
    assert pool.get_cached_page(hashes[2], [0]) == [pages[2]]
    assert pool.get_cached_page(hashes[2], []) == []
    assert pool.get_cached_page(hashes[2], [0, 1]) is None

  def test_known_hashes_are_taken(self):
    pool, hashes = PagePool(9, True), hash_request_tokens(hash, 2, SIX)
    other = EngineRequest("other", range(50, 56))
    pages = cached(pool, other, hashes=hashes)
    assert pages[1].page_hash.page_hash == hashes[1]

  def test_only_a_part(self):
    pool, hashes = PagePool(9, True), hash_request_tokens(hash, 2, SIX)[:1]
    pages = pool.get_new_pages(3)
    pool.cache_full_pages(SIX, pages, hashes, 1, 2, 2, 0)
    assert pool.are_hashed(pages) == [False, True, False]
    pool.cache_full_pages(SIX, pages, hashes, 2, 2, 2, 0)
    assert len(hashes) == 2

  def test_null_pages_are_passed_over(self):
    pool = PagePool(9, True)
    pages = [pool.null_page, *pool.get_new_pages(2)]
    pool.cache_full_pages(SIX, pages, [], 0, 3, 2, 0)
    assert pool.are_hashed(pages) == [False, True, True]

  def test_images_count_in_output_too(self):
    pool, hashes = PagePool(9, True), []
    one = EngineRequest("a", range(6), mm_features=[Feature("cat")])
    cached(pool, one, hashes=hashes)
    assert hashes[2].extra_keys == (("image", "cat"),)

  def test_refused(self):
    pool, pages = PagePool(9, True), []
    pages = cached(pool, SIX)
    with pytest.raises(RuntimeError, match="Page 1 must have no hash"):
      pool.cache_full_pages(SIX, pages, [], 0, 3, 2, 0)
    with pytest.raises(ValueError, match="`page_hashes` must be at least 2"):
      pool.cache_full_pages(SIX, pages, [], 2, 3, 2, 0)
    with pytest.raises(RuntimeError, match="'six' must fill 4 pages of 2"):
      pool.cache_full_pages(SIX, pages, [], 0, 4, 2, 0)
    page = pool.get_new_pages(1)[0]
    with pytest.raises(ValueError, match="Page 4 must be named once"):
      pool.cache_full_pages(SIX, [page, page], [], 0, 2, 2, 0)
    with pytest.raises(ValueError, match="`enable_caching` must be True"):
      cached(PagePool(9, False), SIX)

  def test_of_equal_pages_the_oldest_that_is_left(self):
    pool = PagePool(9, True)
    first = cached(pool, SIX)
    second = cached(pool, SIX)
    key = first[0].page_hash
    view = pool.cached_page_hash_to_page
    assert len(view) == 3
    assert list(view[key]) == [1, 4]
    assert view[key][4] is second[0]
    pool.evict(first)
    assert pool.get_cached_page(key.page_hash, [0]) == [second[0]]
    assert list(view) == [page.page_hash for page in second]
    pool.evict([*second, *second])
    assert pool.get_cached_page(key.page_hash, [0]) is None
    assert key not in view
    assert view.get(key) is None
    with pytest.raises(KeyError):
      view[key]

  def test_a_page_that_is_used_again_loses_its_hash(self):
    pool = PagePool(4, True)
    pages = cached(pool, SIX)
    pool.free_pages(pages)
    assert pool.are_hashed(pages) == [True] * 3
    assert pool.get_new_pages(2) == pages[:2]
    assert pool.are_hashed(pages) == [False, False, True]
    checked(pool)

  def test_equal_values_of_other_tokens(self):
    """What tells pages apart is all of the hash."""
    pool = PagePool(9, True)
    one = PageHash(1, (7,))
    pool.pages[1].page_hash = PageHashWithGroupId(one, 0)
    for other in (
      one._replace(token_ids=(8,)),
      one._replace(extra_keys=("x",)),
      one._replace(hash_value=2),
    ):
      assert pool.get_cached_page(other, [0]) is None
    assert pool.get_cached_page(one, [0]) == [pool.pages[1]]

  def test_reset(self):
    pool = PagePool(9, True)
    pages = cached(pool, SIX)
    assert not pool.reset_prefix_cache()
    pool.free_pages(pages)
    order = checked(pool)
    assert pool.reset_prefix_cache()
    assert len(pool.cached_page_hash_to_page) == 0
    assert pages[0].page_hash is None
    assert checked(pool) == order

  def test_without_caching(self):
    pool = PagePool(9, False)
    assert pool.get_cached_page(PageHash(1, (1,)), [0]) is None
    assert len(pool.cached_page_hash_to_page) == 0
    assert list(pool.cached_page_hash_to_page) == []
    pool.free_pages(pool.get_new_pages(2))
    pool.evict(pool.pages)
    assert pool.reset_prefix_cache()

  def test_hashes_that_no_page_has_are_forgotten(self):
    class Value:
      pass

    pool, values = PagePool(5, True), []
    page = pool.pages[1]
    for number in range(3):
      value = Value()
      values.append(weakref.ref(value))
      page.reset_hash()
      page.page_hash = PageHashWithGroupId(PageHash(value, (number,)), 0)
      del value
    gc.collect()
    assert [value() is None for value in values] == [True, True, False]
    assert page.page_hash.page_hash.token_ids == (2,)


@pytest.mark.slow
class TestOfAManager:
  @pytest.fixture
  def cache(self):
    return manager(full(), window(9), num_pages=20)

  def test_it_tells_of_the_newest_state(self, cache):
    pool, one = cache.page_pool, EngineRequest("a", range(9))
    assert pool.get_num_free_pages() == 19
    admit(cache, one)
    assert pool.references(pool.pages[:8]) == [0, *[1] * 6, 0]
    assert pool.are_hashed(pool.pages[1:7]) == [True, True, False] * 2
    assert len(pool.cached_page_hash_to_page) == 4
    keys = list(pool.cached_page_hash_to_page)
    assert [key.group_id for key in keys] == [0, 0, 1, 1]
    assert [key.page_hash for key in keys] == (
      cache.req_to_page_hashes["a"] * 2
    )
    assert list(pool.cached_page_hash_to_page[keys[3]]) == [5]
    cache.free(one)
    assert checked(pool)[-6:] == [3, 2, 1, 6, 5, 4]

  def test_its_own_references_hold(self, cache):
    pool, one = cache.page_pool, EngineRequest("a", range(9))
    admit(cache, one)
    held = cache.get_computed_pages(EngineRequest("b", range(9)))[0]
    pool.touch(held.pages)
    cache.free(one)
    assert pool.references(pool.pages[1:4]) == [1, 1, 0]
    assert checked(pool)[-2:] == [3, 6]
    pool.free_pages(held.pages[0])
    assert checked(pool)[-2:] == [1, 2]

  def test_references_of_requests_are_not_taken(self, cache):
    pool = cache.page_pool
    admit(cache, EngineRequest("a", range(9)))
    for call in (
      lambda: pool.free_pages([pool.pages[1]]),
      lambda: pool.pages[1].decr_ref(),
    ):
      with pytest.raises(RuntimeError, match="must have as many references"):
        call()
    assert pool.pages[1].ref_cnt == 1
    checked(pool)

  def test_pages_taken_by_hand_are_not_given_out(self, cache):
    pool, queue = cache.page_pool, cache.page_pool.free_page_queue
    mine = [*queue.popleft_n(3), *pool.get_new_pages(3)]
    admit(cache, EngineRequest("a", range(9)))
    assert cache.get_page_ids("a") == ([7, 8, 9], [10, 11, 12])
    queue.append_n(mine[:3])
    pool.free_pages(mine[3:])
    assert checked(pool)[-6:] == [1, 2, 3, 4, 5, 6]

  def test_a_loose_page_can_be_hit(self, cache):
    pool, one = cache.page_pool, EngineRequest("a", range(5))
    admit(cache, one)
    cache.free(one)
    page = pool.pages[1]
    pool.free_page_queue.remove(page)
    two = EngineRequest("b", range(5))
    assert admit(cache, two)[1] == 4
    assert page.ref_cnt == 1
    cache.free(two)
    assert page.ref_cnt == 0
    assert 1 not in checked(pool)
    pool.free_page_queue.append(page)
    assert checked(pool)[-1] == 1

  def test_a_loose_page_that_was_hit_is_touched(self, cache):
    pool, one = cache.page_pool, EngineRequest("a", range(5))
    admit(cache, one)
    cache.free(one)
    page = pool.pages[1]
    pool.free_page_queue.remove(page)
    two = EngineRequest("b", range(5))
    admit(cache, two)
    pool.touch(([page],))
    cache.free(two)
    assert page.ref_cnt == 1
    page.decr_ref()
    assert page.ref_cnt == 0
    pool.free_page_queue.append(page)
    assert checked(pool)[-1] == 1

  def test_hashes_by_hand(self, cache):
    pool, one = cache.page_pool, EngineRequest("a", range(9))
    cache.get_computed_pages(one)
    hashes = cache.req_to_page_hashes["a"]
    pages = [pool.get_new_pages(2) for _ in range(2)]
    for group in (0, 1):
      pool.cache_full_pages(one, pages[group], hashes[:1], 0, 2, 4, group)
    found, count = cache.get_computed_pages(one)
    assert (found.get_page_ids(), count) == (([1, 2], [3, 4]), 8)
    other = PageHash(5, (1, 2))
    with pytest.raises(ValueError, match="take it from req_to_page_hashes"):
      pool.get_new_pages(1)[0].page_hash = PageHashWithGroupId(other, 0)
    checked(pool)

  def test_reset(self, cache):
    pool, one = cache.page_pool, EngineRequest("a", range(9))
    admit(cache, one)
    assert not pool.reset_prefix_cache()
    cache.free(one)
    assert pool.reset_prefix_cache()
    assert cache.get_computed_pages(EngineRequest("b", range(9)))[1] == 0


@pytest.mark.slow
def test_threads():
  pool = PagePool(40, True)

  def work(thread):
    for turn in range(15):
      pages = pool.get_new_pages(3)
      key = PageHash((thread, turn), ())
      pages[0].page_hash = PageHashWithGroupId(key, 0)
      pool.touch((pages[:1],))
      assert pool.get_cached_page(key, [0]) == pages[:1]
      pool.free_pages([*pages, pages[0]])

  run_in_threads(work)
  assert sorted(checked(pool)) == [*range(1, 40)]
