"""Hashes: those of a function, those of a manager, and keys of both."""

import subprocess
import sys

import numpy as np
import pytest

import jaxkv
from jaxkv import FullAttention
from jaxkv import SlidingWindow
from jaxkv import host
from jaxkv.host import MultimodalItem
from jaxkv.host import Request
from jaxkv.host.esurge import NONE_HASH
from jaxkv.host.esurge import CacheManager
from jaxkv.host.esurge import PageHash
from jaxkv.host.esurge import PageHashWithGroupId
from jaxkv.host.esurge import hash_page_tokens
from jaxkv.host.esurge import hash_request_tokens
from jaxkv.host.esurge import init_none_hash
from tests.host.esurge.requests import EngineRequest
from tests.host.esurge.requests import Feature
from tests.host.esurge.requests import ids

# Two groups of pages of 4 tokens, one of 8.
GROUPS = (
  FullAttention(page_size=4),
  SlidingWindow(6, page_size=4),
  FullAttention(page_size=8),
)
CACHE = CacheManager(30, GROUPS, 32, key=jaxkv.salt("the same for all"))
IMAGE = MultimodalItem("cat", 5, 2)


@pytest.mark.slow
class TestOfAFunction:
  def test_the_function_gets_parent_tokens_and_extra_keys(self):
    seen = []
    page = hash_page_tokens(
      lambda one: seen.append(one) or 7, 3, [1, 2], ("x",)
    )
    assert seen == [(3, (1, 2), ("x",))]
    assert page == PageHash(7, (1, 2), ("x",))

  def test_the_first_page_has_a_parent_too(self):
    init_none_hash()
    page = hash_page_tokens(hash, None, [1, 2])
    assert page == (hash((NONE_HASH, (1, 2), None)), (1, 2), None)

  def test_requests(self):
    one = EngineRequest("a", range(9))
    first, second = hash_request_tokens(hash, 4, one)
    assert first == hash_page_tokens(hash, None, range(4))
    assert second == hash_page_tokens(hash, first.hash_value, range(4, 8))
    assert hash_request_tokens(hash, 10, one) == []
    assert hash_request_tokens(hash, 4, Request("a", list(range(9)))) == [
      first,
      second,
    ]

  def test_images_are_extra_keys_of_every_page(self):
    features = [Feature("cat"), Feature("dog", modality="video")]
    one = EngineRequest("a", range(8), mm_features=features)
    keys = {page.extra_keys for page in hash_request_tokens(hash, 4, one)}
    assert keys == {(("image", "cat"), ("video", "dog"))}

  def test_with_a_group(self):
    page = PageHashWithGroupId(PageHash(5, (1,)), 2)
    assert page.get_hash_value() == 5

  @pytest.mark.parametrize(
    ("seed", "same"), [("0", True), ("7", True), ("random", False)]
  )
  def test_the_first_parent_follows_the_seed(self, seed, same):
    code = (
      "from jaxkv._src.host.esurge.hashes import NONE_HASH; print(NONE_HASH)"
    )
    values = {
      subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
      ).stdout
      for _ in range(2)
    }
    assert (len(values) == 1) == same


def hashes(tokens=range(22), **fields):
  """The hashes of a request that has been looked up."""
  one = Request("one", list(tokens), **fields)
  CACHE.free_page_hashes(one)
  CACHE.get_computed_pages(one)
  return CACHE.req_to_page_hashes["one"]


def values(*args, **fields):
  return [page.hash_value for page in hashes(*args, **fields)]


class TestOfAManager:
  def test_full_pages_have_one_each(self):
    assert [page.token_ids for page in hashes()] == [
      tuple(range(first, first + 4)) for first in range(0, 20, 4)
    ]
    assert len({*values()}) == 5
    assert hashes(range(3)) == []

  def test_they_are_told_by_the_key_alone(self):
    other = CacheManager(30, GROUPS, 32, key=jaxkv.salt("the same for all"))
    one = Request("one", list(range(22)))
    other.get_computed_pages(one)
    assert other.req_to_page_hashes["one"] == hashes()
    secret = CacheManager(30, GROUPS, 32)
    secret.get_computed_pages(one)
    assert not {*secret.req_to_page_hashes["one"]} & {*hashes()}

  def test_tokens_that_come_later_change_none(self):
    for image in ((), (IMAGE,)):
      assert values(mm=image)[:2] == values(range(11), mm=image)

  def test_a_hash_tells_all_before_it(self):
    assert not {*values([99, *range(1, 22)])} & {*values()}
    late = values([*range(8), 99, *range(9, 22)])
    same = [a == b for a, b in zip(values(), late, strict=True)]
    assert same == [True, True, False, False, False]

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
    plain, other = values(), values(**fields)
    assert other[:first] == plain[:first]
    assert not {*other[first:]} & {*plain[first:]}

  def test_they_are_the_keys_of_the_first_group(self):
    """So they are as secret as those, which events tell too."""
    key = jaxkv.salt("the same for all")
    other = host.CacheManager(
      30, GROUPS, 32, policy="classic", num_events=9, key=key
    )
    other.allocate_slots(Request("one", list(range(22))), 22)
    events = other.take_events().events[:5]
    keys = [int.from_bytes(event.key, "little") for event in events]
    assert keys == values()

  def test_groups_are_told_apart(self):
    cache = CacheManager(30, GROUPS, 32)
    one = Request("a", list(range(17)))
    cache.allocate_slots(one, 17)
    pool, own = cache.page_pool, cache.req_to_page_hashes["a"]
    assert cache.get_page_ids("a") == (
      [1, 2, 3, 4, 5],
      [6, 7, 8, 9, 10],
      [11, 12, 13],
    )
    assert ids(pool.get_cached_page(own[1], [0, 1])) == [2, 7]
    # A page of 8 tokens is known by them, and its hash goes on from there.
    assert pool.get_cached_page(own[1], [2]) is None
    large = PageHash(own[1].hash_value, tuple(range(8)))
    assert ids(pool.get_cached_page(large, [2])) == [11]
    assert pool.pages[11].page_hash == PageHashWithGroupId(large, 2)
    assert pool.pages[7].page_hash == PageHashWithGroupId(own[1], 1)

  @pytest.mark.parametrize(
    "page_hash",
    [
      PageHash(-1, (0, 1, 2, 3)),
      PageHash(2**128, (0, 1, 2, 3)),
      PageHash("0", (0, 1, 2, 3)),
      PageHash(0, (0, 1, 2)),
      PageHash(0, (0, 1, 2, 2**40)),
      PageHash(0, (0, 1, 2, 0.5)),
      hash_page_tokens(hash, None, range(4)),
    ],
  )
  def test_others_are_found_nowhere(self, page_hash):
    assert CACHE.page_pool.get_cached_page(page_hash, [0]) is None
    assert CACHE.page_pool.get_cached_page(hashes()[0], [9]) is None

  def test_other_tokens_under_a_hash_are_not_found(self):
    cache = CacheManager(30, GROUPS[:1], 32)
    cache.allocate_slots(Request("a", list(range(9))), 9)
    one = cache.req_to_page_hashes["a"][0]
    other = one._replace(token_ids=(9, 9, 9, 9))
    assert cache.page_pool.get_cached_page(other, [0]) is None
    assert ids(cache.page_pool.get_cached_page(one, [0])) == [1]

  def test_masked_tokens_are_found(self):
    cache = CacheManager(30, GROUPS[:1], 32)
    one = Request("a", list(range(9)), mm=[IMAGE])
    cache.allocate_slots(one, 9)
    own = cache.req_to_page_hashes["a"]
    assert own[0].token_ids == (0, 1, 2, 3)
    assert own[1].token_ids != (4, 5, 6, 7)
    assert ids(cache.page_pool.get_cached_page(own[1], [0])) == [2]
    assert np.all(np.abs(own[1].token_ids) < 2**31)
