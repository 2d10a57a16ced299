"""A call that is interrupted takes effect completely or not at all."""

import pytest

import jaxkv
from jaxkv import FullAttention
from jaxkv import SlidingWindow
from jaxkv.host.esurge import CacheManager
from tests.host.esurge.checks import checked_queue
from tests.host.esurge.requests import EngineRequest
from tests.host.esurge.requests import Status
from tests.host.esurge.requests import admit
from tests.tools.interrupts import check_atomic

NAMES = ("a", "b", "c", "new", "lost")


def make():
  """Makes a manager and its requests.

  "a" runs, "b" waits, "c" was preempted, "lost" was preempted in the step that
  scheduled it, and the pool holds references to pages 1 to 3.
  """
  groups = FullAttention(page_size=4), SlidingWindow(9, page_size=4)
  cache = CacheManager(60, groups, 64, key=jaxkv.salt("interrupts"))
  cache.page_pool.get_new_pages(3)
  starts = zip(NAMES, (0, 50, 0, 80, 110), strict=True)
  requests = {
    name: EngineRequest(name, range(start, start + 13))
    for name, start in starts
  }
  for name in ("a", "c"):
    admit(cache, requests[name])
  cache.free(requests["c"])
  requests["c"].num_computed_tokens = 0
  requests["c"].status = Status.PREEMPTED
  requests["lost"].num_computed_tokens = 5
  requests["a"].append([7, 8, 9])
  return cache, requests


def state_of(cache):
  """Returns all that later calls depend on."""
  pages = cache.host.pages
  return (
    checked_queue(cache),
    pages.ref_counts(),
    pages.keys(range(1, 60)),
    [cache.get_page_ids(name) for name in NAMES],
  )


CALLS = {
  "allocate_slots": lambda m, r: m.allocate_slots(r["a"], 3),
  "allocate_slots, new": lambda m, r: m.allocate_slots(r["new"], 13),
  "allocate_slots, lost": lambda m, r: m.allocate_slots(r["lost"], 8),
  "cache_pages": lambda m, r: m.cache_pages(r["a"], 16),
  "free": lambda m, r: m.free(r["a"]),
  "get_new_pages": lambda m, r: m.page_pool.get_new_pages(2),
  "touch": lambda m, r: m.page_pool.touch(([1, 20, 0], [4, 21])),
  "free_pages": lambda m, r: m.page_pool.free_pages([3, 0, 1]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_interrupted_calls_are_atomic(name, pytestconfig):
  check_atomic(
    make, CALLS[name], state_of, is_deep=pytestconfig.getoption("deep")
  )
