"""`step`: many running requests in one call, as if one after the other."""

import chex
import pytest

import jaxkv
from jaxkv.host import CacheManager
from jaxkv.host import MultimodalItem
from tests.host.scheduling import admit
from tests.host.scheduling import hit_of
from tests.host.scheduling import hybrid
from tests.host.scheduling import ids
from tests.host.scheduling import request
from tests.host.scheduling import single

KEY = jaxkv.salt("one key for both")


class Pair:
  """The same requests in two managers, one of which steps.

  Attributes:
    alone, together: a manager and its requests.
  """

  def __init__(self, make, prompts, **fields):
    self.alone, self.together = (
      (cache, [request(str(n), p, **fields) for n, p in enumerate(prompts)])
      for cache in (make(CacheManager, key=KEY), make(CacheManager, key=KEY))
    )
    for cache, requests in (self.alone, self.together):
      for req in requests:
        assert admit(cache, req)[1] is not None

  def step(self, new=1, lookahead=0, tokens=()):
    """Returns new ids or None by request: of single calls, and of a step."""
    rows = range(len(self.alone[1]))
    counts = [new] * len(rows) if isinstance(new, int) else new
    for _, requests in (self.alone, self.together):
      for row in rows:
        row_tokens = tokens or [row] * counts[row]
        requests[row].token_ids.extend(row_tokens)
    cache, requests = self.alone
    expected = [
      cache.allocate_slots(req, count, num_lookahead_tokens=lookahead)
      for req, count in zip(requests, counts, strict=True)
    ]
    cache, requests = self.together
    got = cache.step(requests, new, lookahead)
    for _, requests in (self.alone, self.together):
      for row in rows:
        if expected[row] is not None:
          requests[row].num_computed_tokens += counts[row]
    return [[out and ids(out) for out in side] for side in (expected, got)]

  def pages(self):
    """Tables by request, of both."""
    return [
      [cache.get_page_ids(req.request_id) for req in requests]
      for cache, requests in (self.alone, self.together)
    ]


def ready(cache, *prompts):
  """Returns running requests of `prompts`, each with a token to compute."""
  requests = [request(str(n), prompt) for n, prompt in enumerate(prompts)]
  for req in requests:
    assert admit(cache, req)[1] is not None
    req.token_ids.append(3)
  return requests


def assert_equal_states(manager_a, manager_b):
  chex.assert_trees_all_equal(manager_a.state, manager_b.state, strict=True)


class TestFull:
  def test_decode_equals_single_calls(self):
    pair = Pair(single, [range(5), range(50, 57), range(90, 98)])
    for _ in range(6):
      expected, got = pair.step()
      assert expected == got
    assert_equal_states(pair.alone[0], pair.together[0])
    jaxkv.check(pair.together[0].state)

  def test_pages_are_taken_in_the_order_of_the_call(self):
    cache = single(CacheManager)
    req_a, req_b = ready(cache, range(4), range(50, 53))
    # The order is that of the call, not of the slots.
    assert [ids(p) for p in cache.step([req_b, req_a])] == [[[]], [[3]]]
    assert cache.cached_page_ids() == {1, 2}

  def test_requests_without_room_get_none_and_later_ones_their_pages(self):
    # 9 of 10 pages are held.
    pair = Pair(single, [range(12), range(50, 62), range(90, 101)])
    answers = [[[[10]], None, [[]]]] * 2
    assert pair.step() == answers
    tables = pair.pages()
    assert tables[0] == tables[1]
    assert pair.together[0].num_free_pages == 0
    assert hit_of(pair.together[0], request("x", range(90, 101)))[1] == 8
    jaxkv.check(pair.together[0].state)

  def test_refused_requests_are_served_when_pages_are_free(self):
    pair = Pair(single, [range(16), range(50, 66), range(90, 98)])
    for side in pair.step():
      assert side == [None, None, None]
    for cache, requests in (pair.alone, pair.together):
      cache.free(requests.pop())
    # The refused tokens are still to be computed.
    assert pair.step() == [[[[10]], [[9]]]] * 2
    jaxkv.check(pair.together[0].state)

  def test_chunks_of_many_pages(self):
    pair = Pair(single, [range(3), range(50, 54)])
    expected, got = pair.step([15, 8])
    assert expected == got == [[[3, 4, 5, 6]], [[7, 8]]]
    assert_equal_states(pair.alone[0], pair.together[0])

  def test_drafts_and_lookahead(self):
    """Room for tokens that are not known; they are not published."""
    pair = Pair(single, [range(5), range(50, 58)])
    for req in (*pair.alone[1], *pair.together[1]):
      req.token_ids.append(1)
    cache, requests = pair.alone
    expected = [
      ids(cache.allocate_slots(req, 3, num_lookahead_tokens=2))
      for req in requests
    ]
    cache, requests = pair.together
    got = [ids(out) for out in cache.step(requests, 3, 2)]
    assert expected == got == [[[5]], [[6, 7]]]
    assert_equal_states(pair.alone[0], pair.together[0])
    assert cache.cached_page_ids() == {1, 3, 4}
    requests[0].token_ids.extend([2, 3])
    cache.cache_pages(requests[0], 8)
    assert cache.cached_page_ids() == {1, 2, 3, 4}

  def test_lookahead_ends_with_the_longest_sequence(self):
    cache = single(CacheManager)
    req = request("0", range(35))
    admit(cache, req)
    assert ids(cache.step([req], 1, 100)[0] or cache.create_empty_page_list())
    assert cache.get_page_ids("0") == ([*range(1, 10)],)

  def test_placeholders_of_later_chunks_are_content(self):
    tokens = [1, 2, 9, 9, 9, 9, 9, 3, 4, 5, 6, 7, 8]
    image = MultimodalItem("image", 2, 5)
    cache = single(CacheManager)
    req = request("0", tokens, mm=[image])
    plain = request("1", range(50, 54))
    admit(cache, req, 3)
    admit(cache, plain)
    plain.token_ids.extend([54, 55])
    assert cache.step([req, plain], [7, 2]) is not None
    req.num_computed_tokens = 10
    for new in (1, 1, 1):
      cache.step([req], new)
      req.num_computed_tokens += new
    repeat = request("2", tokens, mm=[image])
    assert hit_of(cache, repeat)[1] == 12
    other_items = [image._replace(identifier="another")]
    assert hit_of(cache, request("3", tokens, mm=other_items))[1] == 0
    assert hit_of(cache, request("4", tokens))[1] == 0

  def test_images_computed_token_by_token_are_told_apart(self):
    """Equal tokens without the image do not hit its pages."""
    tokens = [1, 2, 3, 4, 9, 9, 9, 9, 5]
    image = MultimodalItem("image", 4, 4)
    cache = single(CacheManager)
    req = request("0", tokens, mm=[image])
    plain = request("1", range(50, 54))
    admit(cache, req, 4)
    admit(cache, plain)
    for token in range(60, 64):
      plain.token_ids.append(token)
      cache.step([plain, req])
      plain.num_computed_tokens += 1
      req.num_computed_tokens += 1
    assert hit_of(cache, request("2", tokens, mm=[image]))[1] == 8
    assert hit_of(cache, request("3", tokens))[1] == 4
    other_image = image._replace(identifier="another")
    assert hit_of(cache, request("4", tokens, mm=[other_image]))[1] == 4
    assert hit_of(cache, request("5", [*plain.token_ids, 1]))[1] == 8

  @pytest.mark.parametrize("new", [1, 3])
  def test_requests_without_tokens_get_pages(self, new):
    """It gets room for tokens to come, and the others are served."""
    pair = Pair(single, [range(5), range(50, 57)])
    for cache, requests in (pair.alone, pair.together):
      requests.insert(1, request("empty", []))
      assert ids(cache.allocate_slots(requests[1], 2)) == [[5]]
      for req in (requests[0], requests[2]):
        req.token_ids.extend(range(new))
    for computed in (2, 4):
      for _, requests in (pair.alone, pair.together):
        requests[1].num_computed_tokens = computed
      cache, requests = pair.alone
      expected = [cache.allocate_slots(req, new) for req in requests]
      got = pair.together[0].step(pair.together[1], new)
      assert [ids(out) for out in got] == [ids(out) for out in expected]
    assert_equal_states(pair.alone[0], pair.together[0])
    jaxkv.check(pair.together[0].state)

  def test_first_of_equal_pages_in_a_call_is_found(self):
    """Two copies of one page, of which the first in the call is found."""
    cache = single(CacheManager)
    req_a, req_b = ready(cache, range(3), range(3))
    cache.step([req_b, req_a])
    assert cache.cached_page_ids() == {1, 2}
    assert hit_of(cache, request("2", range(5))) == ([[2]], 4)


class TestHybrid:
  def test_tables_and_free_counts_equal_those_of_single_calls(self):
    """Only the ids differ: all give back before any takes."""
    pair = Pair(hybrid, [range(6), range(50, 61)])
    for turn in range(16):
      expected, got = pair.step()
      shapes = [
        [answer and list(map(len, answer)) for answer in side]
        for side in (expected, got)
      ]
      assert shapes[0] == shapes[1], turn
      is_held = [
        [[list(map(bool, column)) for column in pages] for pages in tables]
        for tables in pair.pages()
      ]
      assert is_held[0] == is_held[1], turn
      free = [side[0].num_free_pages for side in (pair.alone, pair.together)]
      assert free[0] == free[1], turn
    jaxkv.check(pair.together[0].state)

  def test_all_requests_give_back_before_any_takes(self):
    """A page behind the second window serves the first request."""
    cache = hybrid(CacheManager)
    requests = ready(cache, range(16), range(50, 66))
    assert cache.num_free_pages == 0
    # Each request gives 2 pages back in both windows, and takes 3.
    answers = cache.step(requests)
    assert [list(map(len, ids(out))) for out in answers] == [[1, 1, 1]] * 2
    assert cache.num_free_pages == 2

  def test_a_refused_request_still_gives_windows_back(self):
    cache = hybrid(CacheManager)
    req = request("0", range(16))
    admit(cache, req)
    assert cache.step([req], 48) == [None]
    assert cache.get_page_ids("0") == (
      [1, 2, 3, 4],
      [0, 0, 7, 8],
      [0, 0, 11, 12],
    )
    assert cache.num_free_pages == 16
    jaxkv.check(cache.state)


@pytest.mark.parametrize("make", [single, hybrid])
def test_requests_that_hold_all_pages_step(make):
  cache = make(CacheManager)
  count = (cache.config.num_pages - 1) // cache.config.num_groups
  requests = ready(cache, *[[n] for n in range(count)])
  answers = cache.step(requests)
  assert [len(answer.get_page_ids()[0]) for answer in answers] == [0] * count
  jaxkv.check(cache.state)


def test_freed_requests_are_refused():
  """The same requests again, of which one holds nothing any more."""
  cache = single(CacheManager)
  requests = [request("a", range(5)), request("b", range(50, 57))]
  for req in requests:
    admit(cache, req)
  assert None not in cache.step(requests)
  cache.free(requests[1])
  with pytest.raises(KeyError, match="'b' holds no page"):
    cache.step(requests)
