"""CacheConfig: sizes and options that do not go together are refused."""

import dataclasses

import numpy as np
import pytest

import jaxkv
from jaxkv import CacheConfig
from jaxkv import FullAttention
from jaxkv import Recurrent
from jaxkv import SlidingWindow
from jaxkv import StateRetention
from jaxkv.host import CrossAttention
from jaxkv.host import SpeculativeRecurrent
from tests.cache.by_hand import config

_KV_AND_STATES = (FullAttention(), Recurrent(pool=1))
_TWO_POOLS = {"num_pages": (8, 8), "groups": _KV_AND_STATES}


def test_groups_share_the_smallest_page_size():
  """Sizes 4 and 6 in a slot of 12 tokens: hits end at multiples of 12."""
  two = config(
    page_size=2,
    pages_per_slot=6,
    groups=(FullAttention(page_size=4), SlidingWindow(3, page_size=6)),
  )
  assert two.page_sizes == (4, 6)
  assert two.alignment == 12
  assert two.slot_tokens == 12
  assert two.no_page == two.num_pages == 16


def test_numpy_integers_become_ints():
  sizes = config(num_pages=np.int64(9), prefix_retention_interval=np.int32(8))
  assert type(sizes.num_pages) is type(sizes.prefix_retention_interval) is int
  assert type(SlidingWindow(np.int64(8)).window) is int


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"num_pages": 1}, "`CacheConfig.num_pages` must be at least 2 and .* 1"),
    ({"page_size": 0}, "page_size` must be at least 1 and .*, got 0"),
    ({"num_pages": 2**28 + 1}, r"must be at most 2\*\*28"),
    ({"num_pages": 2**27, "offload_pages": 2**27}, r"must be at most 2\*\*28"),
    ({"offload_policy": 3}, r"'never'\) or an OffloadPolicy, got 3"),
    ({"offload_policy": "an OffloadPolicy"}, "got 'an OffloadPolicy'"),
    (
      {"num_slots": 2**20, "pages_per_slot": 2**12},
      r"num_slots \* pages_per_slot` must be below 2\*\*31",
    ),
    (
      {"prefix_caching": False, "merge_duplicates": True},
      "merge_duplicates` needs prefix_caching",
    ),
    (
      {"groups": (FullAttention(page_size=6),)},
      r"multiple of CacheConfig.page_size \(4\) .* got 6",
    ),
    (
      {"groups": (FullAttention(), SlidingWindow(3, page_size=12))},
      "divide the slot's 16 tokens, got 12",
    ),
    (
      {"groups": (FullAttention(page_size=8),), "prefix_retention_interval": 4},
      "retention_interval` must be a multiple of 8, .* got 4",
    ),
    ({"prefix_retention_interval": -4}, "interval` must be at least 0 .* -4"),
    (
      {"prefix_retention_interval": 0, "prefix_rules": "classic"},
      'interval` must be None with prefix_rules="classic", got 0',
    ),
    ({"prefix_rules": "new"}, "must be one of .*'classic'.*, got 'new'"),
    ({"free_policy": 1}, "free_policy` must be one of .*, got 1"),
    (
      {"num_pages": (8, 8), "groups": (FullAttention(),)},
      r"num_pages` must have a number for each pool .* no group has .*pool=1",
    ),
    (
      {"groups": (FullAttention(), SlidingWindow(3, pool=1))},
      r"GroupKind.pool` must be the index of a pool .* got 1 with num_pages=16",
    ),
    ({**_TWO_POOLS, "num_pages": (8, 1)}, "at least 2 and .*, got 1"),
    (
      {**_TWO_POOLS, "groups": (FullAttention(), Recurrent())},
      "no group has GroupKind.pool=1",
    ),
    (
      {**_TWO_POOLS, "groups": (*_KV_AND_STATES, SlidingWindow(3, pool=1))},
      r"GroupKind.pool` must differ for groups .* got pool 1 for SlidingWindow",
    ),
    (
      {
        **_TWO_POOLS,
        "groups": (*_KV_AND_STATES, FullAttention(page_size=8)),
      },
      r"GroupKind.pool` must differ for groups .* got pool 0 for FullAttention",
    ),
    ({**_TWO_POOLS, "offload_pages": 4}, "for each of 2 pools, got 4"),
    ({**_TWO_POOLS, "offload_pages": (4, 0)}, r"for all pools.* got \(4, 0\)"),
    ({**_TWO_POOLS, "page_bytes": (4, 4, 4)}, "for each of 2 pools"),
    (
      {**_TWO_POOLS, "prefix_retention_interval": StateRetention(6)},
      "retention_interval` must be a multiple of 4, .* got 6",
    ),
    (
      {
        "prefix_retention_interval": StateRetention(),
        "prefix_rules": "classic",
      },
      'interval` must be None with prefix_rules="classic", got 0',
    ),
  ],
)
def test_bad_values_are_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    config(**changes)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"page_size": 2.5}, "page_size` must be an int, got 2.5"),
    ({"prefix_retention_interval": True}, "must be an int, got True"),
    ({"prefix_caching": "no"}, "prefix_caching` must be True or False, got "),
    ({"use_eagle": 1}, "use_eagle` must be True or False, got 1"),
    ({"groups": ()}, r"must be a tuple of one or more group kinds, got \(\)"),
    ({"groups": [FullAttention()]}, "must be a tuple of one or more"),
    ({"groups": (FullAttention,)}, "must hold group kinds, got <class"),
    ({"groups": (4,)}, "must hold group kinds, got 4; use"),
  ],
)
def test_bad_types_are_refused(changes, message):
  with pytest.raises(TypeError, match=message):
    config(**changes)


@pytest.mark.parametrize(
  "group", [CrossAttention(page_size=4), SpeculativeRecurrent(2, page_size=4)]
)
def test_kinds_of_the_host_are_refused(group):
  text = r"must hold kinds that a device has, got .*jaxkv.host.CacheManager"
  with pytest.raises(ValueError, match=text):
    jaxkv.init(config(groups=(FullAttention(), group)))


def test_offload_pages_need_prefix_caching():
  with pytest.raises(ValueError, match="offload_pages` needs prefix_caching"):
    config(offload_pages=4, prefix_caching=False)


def test_fields():
  """Each field makes every verb longer, so a new one needs a reason."""
  assert [field.name for field in dataclasses.fields(CacheConfig)] == [
    *("num_pages", "page_size", "num_slots", "pages_per_slot", "groups"),
    *("prefix_caching", "free_policy", "prefix_rules", "merge_duplicates"),
    *("use_eagle", "prefix_retention_interval", "offload_pages"),
    *("offload_policy", "page_bytes"),
  ]


def test_equal_configs_are_equal_keys():
  assert config() == config() and hash(config()) == hash(config())
  assert config() != dataclasses.replace(config(), offload_pages=1)
