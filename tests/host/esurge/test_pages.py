"""A page alone, a page of a pool, and lists of them."""

import pytest

from jaxkv.host.esurge import CachePage
from jaxkv.host.esurge import CachePages
from jaxkv.host.esurge import PageHash
from jaxkv.host.esurge import PageHashWithGroupId
from jaxkv.host.esurge import PagePool

HASH = PageHashWithGroupId(PageHash(11, (1, 2)), 0)


@pytest.fixture(params=["alone", "of a pool"])
def page(request):
  return (
    CachePage(2) if request.param == "alone" else PagePool(4, True).pages[2]
  )


class TestAPage:
  def test_references(self, page):
    assert (page.page_id, page.ref_cnt, page.is_null) == (2, 0, False)
    page.incr_ref()
    page.incr_ref()
    page.decr_ref()
    assert page.ref_cnt == 1
    page.decr_ref()
    with pytest.raises(RuntimeError, match="must have a reference to lose one"):
      page.decr_ref()
    assert page.ref_cnt == 0

  def test_a_hash_is_given_once(self, page):
    assert page.page_hash is None
    page.page_hash = HASH
    assert page.page_hash == HASH
    with pytest.raises(RuntimeError, match="must have no hash"):
      page.page_hash = HASH
    page.reset_hash()
    assert page.page_hash is None
    page.page_hash = HASH

  def test_its_text(self, page):
    page.incr_ref()
    assert str(page).startswith("CachePage(page_id=2, ref_cnt=1, _page_hash=")

  def test_equality(self, page):
    assert page == page
    assert page != 2
    assert page in {page}

  def test_pages_alone_are_compared(self):
    one, two = CachePage(2), CachePage(2)
    assert one == two
    two.incr_ref()
    assert one != two
    one.ref_cnt = 1
    assert one == two
    assert one != PagePool(4, True).pages[2]


class TestAPageOfAPool:
  def test_its_count_is_not_written(self):
    with pytest.raises(AttributeError, match="touch and free_pages"):
      PagePool(4, True).pages[2].ref_cnt = 3

  def test_no_count_for_the_null_page(self):
    pool = PagePool(4, True)
    pool.null_page.incr_ref()
    pool.touch(([pool.null_page],))
    pool.free_pages([pool.null_page])
    assert pool.null_page.is_null
    assert pool.null_page.ref_cnt == 0
    assert pool.get_num_free_pages() == 3

  def test_a_reference_takes_it_out_of_the_queue(self):
    pool = PagePool(4, True)
    page = pool.pages[2]
    page.incr_ref()
    assert pool.get_num_free_pages() == 2
    assert page.next_free_page is None
    # Nobody put it back.
    page.decr_ref()
    assert pool.get_num_free_pages() == 2
    pool.free_page_queue.append(page)
    assert page.prev_free_page is pool.pages[3]

  def test_hashes_need_caching(self):
    page = PagePool(4, False).pages[2]
    with pytest.raises(ValueError, match="`enable_caching` must be True"):
      page.page_hash = HASH
    page.reset_hash()
    assert page.page_hash is None


class TestLists:
  def test_ids(self):
    one, two = (
      CachePages(([CachePage(1)], [])),
      CachePages(([], [CachePage(2)])),
    )
    assert (one + two).get_page_ids() == ([1], [2])
    assert one.new_empty().get_page_ids() == ([], [])
    assert one == CachePages(([CachePage(1)], []))

  def test_unhashed(self):
    pool = PagePool(5, True)
    pool.pages[2].page_hash = HASH
    assert CachePages((pool.pages[1:],)).get_unhashed_page_ids() == [1, 3, 4]
    assert CachePages(([],)).get_unhashed_page_ids() == []
    alone = [CachePage(1), CachePage(2)]
    alone[0].page_hash = HASH
    assert CachePages((alone,)).get_unhashed_page_ids() == [2]

  def test_groups_are_counted(self):
    two = CachePages(([], []))
    with pytest.raises(ValueError, match="must have one group"):
      two.get_unhashed_page_ids()
    with pytest.raises(ValueError, match="must have 2 groups"):
      _ = two + CachePages(([],))
