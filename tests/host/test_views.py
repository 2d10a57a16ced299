"""Keys, the pool and its queue, as a scheduler looks at them."""

import numpy as np
import pytest

import jaxkv
from jaxkv import CacheConfig
from jaxkv import FullAttention
from jaxkv import SlidingWindow
from jaxkv.host import CacheManager
from jaxkv.host import MultimodalItem
from jaxkv.host import hash_page_tokens
from jaxkv.host import hash_request_tokens
from tests.host.scheduling import admit
from tests.host.scheduling import request
from tests.host.scheduling import single

# Two groups of pages of 4 tokens, one of 8.
CONFIG = CacheConfig(
  num_pages=8,
  page_size=4,
  num_slots=1,
  pages_per_slot=4,
  groups=(FullAttention(), SlidingWindow(6), FullAttention(page_size=8)),
)
STATE = jaxkv.init(CONFIG, jaxkv.salt("the same for all"))
LONG, IMAGE = request("a", range(22)), MultimodalItem("cat", 5, 2)


def keys(one=LONG, group=0, **options):
  return [
    page.key for page in hash_request_tokens(STATE, one, group=group, **options)
  ]


class TestKeys:
  def test_full_pages_have_one_each(self):
    pages = hash_request_tokens(STATE, LONG)
    assert [page.tokens for page in pages] == [
      tuple(range(first, first + 4)) for first in range(0, 20, 4)
    ]
    assert len({page.key for page in pages}) == 5
    assert keys(request("a", range(3))) == []

  def test_page_by_page_is_the_same(self):
    parent, chained = None, []
    for first in range(0, 20, 4):
      tokens = range(first, first + 4)
      parent = hash_page_tokens(STATE, parent, tokens)
      chained.append(parent)
    assert chained == hash_request_tokens(STATE, LONG)

  def test_tokens_that_come_later_change_none(self):
    for image in ((), (IMAGE,)):
      short, whole = (request("a", range(n), mm=image) for n in (11, 22))
      assert keys(whole)[:2] == keys(short)

  def test_a_key_tells_all_before_it(self):
    other = request("b", [99, *range(1, 22)])
    assert not {*keys(LONG)} & {*keys(other)}
    late = request("b", [*range(8), 99, *range(9, 22)])
    assert [a == b for a, b in zip(keys(LONG), keys(late), strict=True)] == [
      *[True] * 2,
      *[False] * 3,
    ]

  @pytest.mark.parametrize(
    ("fields", "first"),
    [
      ({"cache_salt": "a"}, 0),
      ({"lora_name": "a"}, 0),
      # Placeholders 5 and 6 are in the second page.
      ({"mm": [IMAGE]}, 1),
      ({"mm": [IMAGE._replace(identifier="dog")]}, 1),
    ],
  )
  def test_what_is_not_in_the_tokens(self, fields, first):
    plain, other = keys(), keys(request("b", range(22), **fields))
    assert other[:first] == plain[:first]
    assert not {*other[first:]} & {*plain[first:]}

  def test_groups_are_told_apart(self):
    assert not {*keys(group=0)} & {*keys(group=1)}

  def test_a_larger_page_goes_on_where_small_ones_do(self):
    small = hash_request_tokens(STATE, LONG)
    large = hash_request_tokens(STATE, LONG, group=2)
    assert [page.tokens for page in large] == [
      tuple(range(8)),
      tuple(range(8, 16)),
    ]
    assert [page.chain for page in large] == [
      page.chain for page in (small[1], small[3])
    ]

  def test_epochs_are_told_apart(self):
    assert not {*keys(epoch=0)} & {*keys(epoch=1)}

  @pytest.mark.parametrize("count", [3, 5])
  def test_half_a_page_has_none(self, count):
    with pytest.raises(ValueError, match=f"a page of 4 .* got {count}"):
      hash_page_tokens(STATE, None, np.arange(count))

  @pytest.mark.parametrize("tokens", [[0.0] * 4, "0123", [0, 1, 2, 2**31]])
  def test_tokens_are_integers(self, tokens):
    with pytest.raises(ValueError, match="`tokens` must be 32-bit integers"):
      hash_page_tokens(STATE, None, tokens)


class TestPool:
  @pytest.fixture
  def cache(self):
    """One group, 10 pages of 4 tokens."""
    return single(CacheManager, num_events=16, track_new_pages=True)

  def test_pages_are_found_by_their_keys(self, cache):
    one = request("a", range(11), cache_salt="s")
    pages = hash_request_tokens(cache.state, one)
    assert [cache.page_pool.get_cached_page(page) for page in pages] == [
      None
    ] * 2
    admit(cache, one)
    assert [event.key for event in cache.take_events().events] == [
      page.key for page in pages
    ]
    assert [cache.page_pool.get_cached_page(page) for page in pages] == [1, 2]
    cache.evict_pages([1])
    assert [cache.page_pool.get_cached_page(page) for page in pages] == [
      None,
      2,
    ]

  def test_of_equal_pages_the_oldest_that_is_left(self, cache):
    one, two = request("a", range(4)), request("b", range(4))
    (page,) = hash_request_tokens(cache.state, one)
    pool = cache.page_pool
    # The last token of a prompt is always computed, so its page is doubled.
    admit(cache, one)
    admit(cache, two)
    assert cache.get_page_ids("b") == ([2],)
    assert pool.get_cached_page(page) == 1
    cache.evict_pages([1])
    assert pool.get_cached_page(page) == 2
    cache.evict_pages([1])
    assert pool.get_cached_page(page) == 2
    cache.evict_pages([2])
    assert pool.get_cached_page(page) is None

  def test_it_is_that_of_the_newest_state(self, cache):
    pool, queue = cache.page_pool, cache.page_pool.free_page_queue
    assert (pool.num_pages, pool.get_num_free_pages(), len(queue)) == (
      11,
      10,
      10,
    )
    one = request("a", range(11))
    admit(cache, one)
    assert [pool.ref_count(page) for page in range(5)] == [0, 1, 1, 1, 0]
    assert list(queue) == queue.get_all_free_pages() == [*range(4, 11)]
    assert pool.get_usage() == pytest.approx(0.3)
    cache.free(one)
    assert list(queue) == cache.free_queue() == [3, *range(4, 11), 2, 1]
    assert queue.num_free_pages == pool.get_num_free_pages() == 10
