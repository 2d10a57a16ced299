"""The pool of a manager: references that the engine holds."""

import numpy as np
import pytest

from tests.host.esurge import easydel
from tests.host.esurge import requests
from tests.host.esurge.checks import checked_queue
from tests.tools.threads import run_in_threads


class TestPages:
  def test_a_new_pool(self):
    cache = requests.manager(num_pages=5)
    pool = cache.page_pool
    assert (pool.num_pages, pool.enable_caching) == (5, True)
    assert checked_queue(cache) == [1, 2, 3, 4]
    assert pool.get_usage() == pytest.approx(1 / 5)
    assert len(pool.cached_page_hash_to_page) == 0

  def test_get_new_pages(self):
    cache = requests.manager(num_pages=5)
    assert cache.page_pool.get_new_pages(0) == []
    assert cache.page_pool.get_new_pages(3) == [1, 2, 3]
    assert cache.host.pages.ref_counts() == [0, 1, 1, 1, 0]
    assert checked_queue(cache) == [4]

  def test_free_and_touched_pages_change_the_queue(self):
    cache = requests.manager(num_pages=5)
    pool = cache.page_pool
    pool.get_new_pages(3)
    pool.free_pages(reversed([1, 2]))
    assert checked_queue(cache) == [4, 2, 1]
    pool.touch(([2, 3], [0]))
    assert cache.host.pages.ref_counts([1, 2, 3]) == [0, 1, 2]
    pool.free_pages(iter([3, 2, 0, 3]))
    assert checked_queue(cache) == [4, 1, 2, 3]

  def test_reused_pages_are_not_cached(self):
    cache = requests.manager(num_pages=5)
    req = requests.EngineRequest("a", range(17))
    requests.admit(cache, req, new=16)
    assert len(cache.page_pool.cached_page_hash_to_page) == 4
    requests.leave(cache, req)
    assert cache.page_pool.get_new_pages(1) == [4]
    assert cache.get_computed_pages(req)[1] == 12
    assert len(cache.page_pool.cached_page_hash_to_page) == 3

  def test_equal_pages_have_one_hash(self):
    cache = requests.manager()
    for name in "ab":
      cache.allocate_slots(requests.EngineRequest(name, range(9)), 9)
    assert cache.host.cached_page_ids() == {1, 2, 4, 5}
    assert len(cache.page_pool.cached_page_hash_to_page) == 2

  def test_reset(self):
    cache = requests.manager()
    req = requests.EngineRequest("a", range(9))
    requests.admit(cache, req)
    assert not cache.page_pool.reset_prefix_cache()
    requests.leave(cache, req)
    order = checked_queue(cache)
    assert cache.page_pool.reset_prefix_cache()
    assert checked_queue(cache) == order
    assert cache.get_computed_pages(req)[1] == 0


class TestBesideRequests:
  @pytest.fixture
  def cache(self):
    return requests.manager(requests.full(), requests.window(9), num_pages=20)

  def test_references_of_the_pool_hold_pages(self, cache):
    pool = cache.page_pool
    req = requests.EngineRequest("a", range(9))
    requests.admit(cache, req)
    hit, _ = cache.get_computed_pages(requests.EngineRequest("b", range(9)))
    pool.touch(hit.pages)
    cache.free(req)
    assert cache.host.pages.ref_counts([1, 2, 3]) == [1, 1, 0]
    assert checked_queue(cache)[-2:] == [3, 6]
    pool.free_pages(hit.pages[0])
    assert checked_queue(cache)[-2:] == [1, 2]

  def test_pages_of_the_pool_are_not_allocated(self, cache):
    pages = cache.page_pool.get_new_pages(6)
    requests.admit(cache, requests.EngineRequest("a", range(9)))
    assert cache.get_page_ids("a") == ([7, 8, 9], [10, 11, 12])
    cache.page_pool.free_pages(pages)
    assert checked_queue(cache)[-6:] == [1, 2, 3, 4, 5, 6]


class TestErrors:
  @pytest.mark.parametrize("count", [2, 100, -1])
  def test_bad_counts_of_new_pages_are_refused(self, count):
    cache = requests.manager(num_pages=5)
    cache.page_pool.get_new_pages(3)
    with pytest.raises(ValueError, match="`count` must be at"):
      cache.page_pool.get_new_pages(count)
    assert checked_queue(cache) == [4]

  @pytest.mark.parametrize("pages", [[1, 2, 2], [3], [1, 3], [5]])
  def test_pages_without_references_are_refused(self, pages):
    """Page 3 is free, page 5 belongs to a request."""
    cache = requests.manager(num_pages=9)
    cache.page_pool.get_new_pages(4)
    requests.admit(cache, requests.EngineRequest("a", range(4)))
    cache.page_pool.free_pages([3])
    with pytest.raises(ValueError, match="`page_ids` must name no page more"):
      cache.page_pool.free_pages(pages)
    assert cache.host.pages.ref_counts() == [0, 1, 1, 0, 1, 1, 0, 0, 0]
    assert checked_queue(cache) == [6, 7, 8, 3]

  def test_unknown_pages_are_refused(self):
    with pytest.raises(ValueError, match="`page_ids` must be 1 to 4"):
      requests.manager(num_pages=5).page_pool.touch(([5],))

  @pytest.mark.parametrize("num_pages", [1, 0, -3])
  def test_too_few_pages_are_refused(self, num_pages):
    with pytest.raises(ValueError, match="num_pages` must be at least 2"):
      requests.manager(num_pages=num_pages)


def test_calls_from_several_threads():
  cache = requests.manager()
  pool = cache.page_pool

  def work(thread):
    for _ in range(15):
      pages = pool.get_new_pages(3)
      pool.touch((pages[:1],))
      pool.free_pages([*pages, pages[0]])

  run_in_threads(work)
  assert sorted(checked_queue(cache)) == [*range(1, 40)]


@easydel.needed
@pytest.mark.parametrize("seed", range(3))
def test_random_calls_equal_esurge(seed):
  """The queues are equal after every call of both pools."""
  random = np.random.default_rng(seed)
  reference = easydel.module("core.page_pool").PagePool(20, True)
  cache = requests.manager(num_pages=20)
  pool = cache.page_pool
  held_pages: list[int] = []  # a page for each of its references

  def pages_of(page_ids):
    return [reference.pages[page] for page in page_ids]

  for _ in range(1000):
    name = random.choice(["new", "touch", "free"])
    if name == "new":
      count = int(random.integers(min(pool.get_num_free_pages(), 4) + 1))
      page_ids = pool.get_new_pages(count)
      new_pages = reference.get_new_pages(count)
      assert page_ids == [page.page_id for page in new_pages]
      held_pages += page_ids
    elif name == "touch":
      page_ids = random.choice(np.arange(20), 2, replace=False).tolist()
      pool.touch((page_ids,))
      # eSurge counts the references of the null page.
      page_ids = [page for page in page_ids if page]
      reference.touch((pages_of(page_ids),))
      held_pages += page_ids
    else:
      # eSurge would queue a page twice that is named twice.
      page_ids = random.permutation(held_pages)[:6].tolist()
      page_ids = list(dict.fromkeys(page_ids))
      pool.free_pages(page_ids)
      reference.free_pages(pages_of(page_ids))
      for page in page_ids:
        held_pages.remove(page)
    queue = reference.free_page_queue.get_all_free_pages()
    assert checked_queue(cache) == [page.page_id for page in queue]
    counts = [page.ref_cnt for page in reference.pages]
    assert cache.host.pages.ref_counts()[1:] == counts[1:]
    assert pool.get_usage() == reference.get_usage()
