"""Faults that the reference systems were seen to have, and this one has not.

Each is told by what goes wrong there; SEMANTICS section 9 lists them. Sequences
are smaller than where the faults were found.
"""

import pytest

from jaxkv import ChunkedLocal
from jaxkv import FullAttention
from jaxkv import Recurrent
from jaxkv import SlidingWindow
from jaxkv.host import CacheManager
from jaxkv.host import Request

FULL_AND_WINDOW = (FullAttention(page_size=8), SlidingWindow(6, page_size=4))


def manager(groups=FULL_AND_WINDOW, num_pages=40, **options):
  return CacheManager(num_pages, groups, 64, **options)


def run(cache, request, new=None, **options):
  """Looks a request up and allocates for it; the tokens that were found."""
  num_hit = 0
  if request.num_computed_tokens == 0:
    pages, num_hit = cache.get_computed_pages(request)
    options |= {"num_new_computed_tokens": num_hit, "new_computed_pages": pages}
  num_computed = request.num_computed_tokens + num_hit
  new = request.num_tokens - num_computed if new is None else new
  assert cache.allocate_slots(request, new, **options) is not None
  request.num_computed_tokens = num_computed + new
  request.status = "running"
  return num_hit


def decode(cache, request, tokens):
  """Appends and computes tokens one by one."""
  for token in tokens:
    request.token_ids.append(token)
    run(cache, request, 1)


class TestVllm:
  def test_external_states_are_counted(self):
    """A page too few was reserved, and the allocation raised."""
    cache = manager((Recurrent(page_size=4),), num_pages=2)
    request = Request("a", list(range(9)))
    answer = cache.allocate_slots(request, 1, num_external_computed_tokens=8)
    assert answer is None
    assert cache.num_free_pages == 1

  def test_unpublished_pages_have_no_event(self):
    """Pages that retention leaves out were announced, with tokens only."""
    cache = manager(
      (SlidingWindow(5, page_size=4),),
      prefix_retention_interval=0,
      num_events=9,
    )
    request = Request("a", list(range(9)))
    run(cache, request)
    decode(cache, request, range(100, 120))
    events = cache.take_events().events
    assert [event.tokens for event in events] == [(4, 5, 6, 7)]
    assert {event.page for event in events} == cache.cached_page_ids()

  def test_the_end_of_a_prompt_is_not_published(self):
    """A page with less than its tokens was, and changed the free order."""
    cache = manager()
    request = Request("a", list(range(13)))
    run(cache, request)
    first_page, second_page = cache.get_page_ids("a")[0]
    assert first_page in cache.cached_page_ids()
    assert second_page not in cache.cached_page_ids()

  def test_requests_without_a_page_leave_room_for_others(self):
    """Their slots were counted as pages, and later requests had to wait."""
    cache = manager((ChunkedLocal(8, page_size=4),), num_pages=4)
    for token in range(9):
      run(cache, Request(str(token), [token] * 8))
      cache.remove_skipped_pages(str(token), 8)
      assert cache.num_free_pages == 3
    assert len(cache.request_ids()) == 9

  def test_a_chunk_alone_does_not_hit_an_empty_cache(self):
    """Skipped chunks were reported as found."""
    cache = manager((ChunkedLocal(8, page_size=4),))
    pages, num_hit = cache.get_computed_pages(Request("a", list(range(30))))
    assert num_hit == 0 and pages.pages == ([],)


@pytest.mark.slow
class TestESurge:
  def test_middles_of_a_sequence_are_no_hit(self):
    """Behind a window the chain of keys began anew."""
    cache = manager((SlidingWindow(4, page_size=4),))
    request = Request("a", list(range(8)))
    run(cache, request)
    decode(cache, request, range(8, 28))
    tokens = list(request.token_ids)
    cache.free(request)
    for start in range(4, 24, 4):
      middle = Request("b", tokens[start:])
      assert cache.get_computed_pages(middle)[1] == 0
    turn = Request("c", [*tokens, 1, 2, 3])
    assert cache.get_computed_pages(turn)[1] == 28

  def test_half_a_large_page_is_no_hit(self):
    """Large pages were found under the key of their first small one."""
    cache = manager()
    run(cache, Request("a", list(range(17))))
    tokens = [*range(4), *range(50, 63)]
    assert cache.get_computed_pages(Request("b", tokens))[1] == 0

  def test_a_failed_allocation_takes_nothing(self):
    """The first group kept its pages when the second found none."""
    cache = manager(num_pages=7)
    run(cache, Request("a", list(range(8))))
    old_queue = cache.free_queue()
    assert len(old_queue) == 3
    assert cache.allocate_slots(Request("b", list(range(50, 64))), 14) is None
    assert cache.free_queue() == old_queue
    assert cache.get_page_ids("b") == ([], [])

  def test_common_pages_are_those_of_all_requests(self):
    """Pages of two of three requests were counted."""
    cache = manager()
    shared = list(range(24))
    for name, tokens in {"a": shared, "b": shared, "x": [60] * 24}.items():
      run(cache, Request(name, [*tokens, 1]))
    assert cache.get_num_common_prefix_pages("a") == [0, 0]
    cache.free(Request("x", []))
    assert cache.get_num_common_prefix_pages("a") == [3, 0]
