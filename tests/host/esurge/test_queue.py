"""A queue of pages without a pool."""

import pytest

from jaxkv.host.esurge import CachePage
from jaxkv.host.esurge import FreeCachePageQueue
from jaxkv.host.esurge import PagePool
from tests.host.esurge.requests import ids


def made(count=6):
  pages = [CachePage(page) for page in range(count)]
  return FreeCachePageQueue(pages), pages


def order(queue):
  assert queue.num_free_pages == len(queue.get_all_free_pages())
  return ids(queue.get_all_free_pages())


def test_popleft():
  queue, pages = made(2)
  assert queue.popleft() is pages[0]
  assert queue.popleft() is pages[1]
  with pytest.raises(ValueError, match="Cannot get so many free pages; 0 left"):
    queue.popleft()


def test_popleft_n():
  queue, pages = made()
  assert queue.popleft_n(0) == []
  assert queue.popleft_n(2) == pages[:2]
  assert order(queue) == [2, 3, 4, 5]
  for count in (5, 100):
    with pytest.raises(ValueError, match="4 left"):
      queue.popleft_n(count)
  with pytest.raises(ValueError, match="`n` must be at least 0"):
    queue.popleft_n(-1)
  assert queue.popleft_n(4) == pages[2:]
  assert order(queue) == []


def test_remove_and_append():
  queue, pages = made()
  queue.remove(pages[3])
  queue.remove(pages[0])
  queue.append(pages[3])
  assert order(queue) == [1, 2, 4, 5, 3]
  queue.append_n([])
  popped = queue.popleft_n(2)
  queue.append_n([pages[0], *reversed(popped)])
  assert order(queue) == [4, 5, 3, 0, 2, 1]


def test_many_times():
  queue, _ = made(3)
  for _ in range(40):
    queue.append_n(reversed(queue.popleft_n(2)))
  assert sorted(order(queue)) == [0, 1, 2]


def test_what_stands_where_it_must_not():
  queue, pages = made()
  with pytest.raises(RuntimeError, match="outside of the free queue"):
    queue.append(pages[2])
  queue.remove(pages[2])
  with pytest.raises(RuntimeError, match="must stand in the free queue"):
    queue.remove(pages[2])
  with pytest.raises(ValueError, match="must be named once"):
    queue.append_n([pages[2], pages[2]])
  assert order(queue) == [0, 1, 3, 4, 5]


def test_neighbors():
  queue, pages = made(3)
  head, tail = queue.fake_free_list_head, queue.fake_free_list_tail
  assert head.page_id == tail.page_id == -1
  assert head.next_free_page is pages[0]
  assert head.prev_free_page is None
  assert pages[0].prev_free_page is head
  assert pages[1].prev_free_page is pages[0]
  assert pages[2].next_free_page is tail
  assert tail.prev_free_page is pages[2]
  assert tail.next_free_page is None
  queue.remove(pages[1])
  assert pages[1].prev_free_page is pages[1].next_free_page is None
  assert pages[0].next_free_page is pages[2]


def test_an_empty_queue():
  queue = FreeCachePageQueue([])
  assert order(queue) == []
  assert queue.fake_free_list_head.next_free_page is queue.fake_free_list_tail
  with pytest.raises(ValueError, match="0 left"):
    queue.popleft()


def test_ids_are_any():
  pages = [CachePage(page) for page in (7, 900, 3)]
  queue = FreeCachePageQueue(pages)
  queue.remove(pages[1])
  assert order(queue) == [7, 3]
  queue.append(pages[1])
  assert queue.popleft_n(3) == [pages[0], pages[2], pages[1]]


def test_pages_that_are_not_its_own():
  queue, pages = made()
  with pytest.raises(RuntimeError, match="one of this queue's own"):
    queue.remove(CachePage(2))
  with pytest.raises(ValueError, match="ids of their own"):
    FreeCachePageQueue([CachePage(1), CachePage(1)])
  with pytest.raises(ValueError, match="and no pool"):
    FreeCachePageQueue(PagePool(4, True).pages)
  FreeCachePageQueue(pages)
  with pytest.raises(RuntimeError, match="one of this queue's own"):
    queue.remove(pages[0])


def test_references_are_another_matter():
  queue, pages = made()
  pages[0].incr_ref()
  assert order(queue)[0] == 0
  assert queue.popleft().ref_cnt == 1
