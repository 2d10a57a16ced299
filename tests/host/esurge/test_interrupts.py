"""A call that is interrupted takes effect completely or not at all."""

import gc

import pytest

import jaxkv
from jaxkv import FullAttention
from jaxkv import SlidingWindow
from jaxkv.host.esurge import CacheManager
from jaxkv.host.esurge import PageHash
from jaxkv.host.esurge import PageHashWithGroupId
from jaxkv.host.esurge import PagePool
from tests.host.esurge.checks import checked
from tests.host.esurge.requests import EngineRequest
from tests.host.esurge.requests import Status
from tests.host.esurge.requests import admit
from tests.tools.interrupts import interrupted

SIX = EngineRequest("six", range(6))
EVERY = 13
"""Without --deep, one point of so many is tried."""


@pytest.fixture(autouse=True)
def no_garbage_collection():
  """Jax has a callback in it, which must not be what is interrupted."""
  gc.disable()
  yield
  gc.enable()


def pool():
  """Pages 1 to 3 have references, 4 has a hash, 5 is loose."""
  one = PagePool(9, True)
  one.get_new_pages(3)
  one.pages[4].page_hash = PageHashWithGroupId(PageHash(1, (2,)), 0)
  one.free_page_queue.remove(one.pages[5])
  return one


def state_of_pool(one):
  """All that later calls depend on."""
  queue = checked(one)
  hashes = {
    tuple(name): list(pages)
    for name, pages in one.cached_page_hash_to_page.items()
  }
  return (
    queue,
    one.references(one.pages),
    sorted(one.free_page_queue.loose),
    hashes,
    {page: tuple(name) for page, name in one.hashes_in_order().items()},
  )


OF_POOL = {
  "get_new_pages": lambda one: one.get_new_pages(2),
  "free_pages": lambda one: one.free_pages(one.pages[1:3]),
  "touch": lambda one: one.touch((one.pages[1:5], one.pages[6:8])),
  "cache_full_pages": lambda one: one.cache_full_pages(
    SIX, one.pages[1:4], [], 0, 3, 2, 0
  ),
  "evict": lambda one: one.evict(one.pages[1:5]),
  "incr_ref": lambda one: one.pages[5].incr_ref(),
  "decr_ref": lambda one: one.pages[1].decr_ref(),
  "popleft_n": lambda one: one.free_page_queue.popleft_n(2),
  "remove": lambda one: one.free_page_queue.remove(one.pages[7]),
  "append": lambda one: one.free_page_queue.append(one.pages[5]),
}


def manager():
  """A manager in which "a" runs, "b" waits and "c" was preempted."""
  groups = FullAttention(page_size=4), SlidingWindow(9, page_size=4)
  cache = CacheManager(60, groups, 64, key=jaxkv.salt("interrupts"))
  requests = {
    name: EngineRequest(name, range(first, first + 13))
    for name, first in (("a", 0), ("b", 50), ("c", 0), ("new", 80))
  }
  for name in ("a", "c"):
    admit(cache, requests[name])
  cache.free(requests["c"])
  requests["c"].num_computed_tokens = 0
  requests["c"].status = Status.PREEMPTED
  requests["a"].append([7, 8, 9])
  cache.get_computed_pages(requests["b"])
  return cache, requests


def state_of_manager(cache):
  return (
    state_of_pool(cache.page_pool),
    [cache.get_page_ids(name) for name in ("a", "b", "c", "new")],
    {name: list(map(tuple, h)) for name, h in cache.req_to_page_hashes.items()},
  )


OF_MANAGER = {
  "get_computed_pages": lambda m, r: m.get_computed_pages(
    EngineRequest("new", range(9))
  ),
  "allocate_slots": lambda m, r: m.allocate_slots(r["a"], 3),
  "allocate_slots, new": lambda m, r: m.allocate_slots(r["b"], 13),
  "allocate_slots, without a lookup": lambda m, r: m.allocate_slots(
    r["new"], 13
  ),
  "cache_pages": lambda m, r: m.cache_pages(r["a"], 16),
  "free": lambda m, r: m.free(r["a"]),
  "free_page_hashes": lambda m, r: m.free_page_hashes(r["c"]),
}


def try_every_point(call, make, state, step):
  """Interrupts a call on new objects, and compares the states."""
  before, after = make(), make()
  call(after)
  outcomes = [state(before), state(after)]
  assert outcomes[0] != outcomes[1]
  point, seen = 1, set()
  while True:
    one = make()
    if not interrupted(lambda one=one: call(one), point):
      break
    seen.add(outcomes.index(state(one)))
    # Later calls undo nothing of this one.
    assert state(one) in outcomes
    point += step
  assert 0 in seen
  return seen


@pytest.mark.parametrize("name", OF_POOL)
def test_calls_of_a_pool(name, pytestconfig):
  deep = pytestconfig.getoption("deep")
  step = 1 if deep else EVERY
  seen = try_every_point(OF_POOL[name], pool, state_of_pool, step)
  assert seen == {0, 1} or not deep


def test_appended_hashes_are_removed():
  """The list belongs to the caller, and is a part of the change."""
  point = 1
  while True:
    one, hashes = pool(), []

    def call(one=one, hashes=hashes):
      one.cache_full_pages(SIX, one.pages[1:4], hashes, 0, 3, 2, 0)

    left = interrupted(call, point)
    is_done = one.are_hashed(one.pages[1:4]) == [True] * 3
    assert len(hashes) == (3 if is_done else 0)
    if not left:
      break
    point += 3


@pytest.mark.parametrize("name", OF_MANAGER)
def test_calls_of_a_manager(name, pytestconfig):
  deep = pytestconfig.getoption("deep")
  seen = try_every_point(
    lambda both: OF_MANAGER[name](*both),
    manager,
    lambda both: state_of_manager(both[0]),
    1 if deep else 2 * EVERY,
  )
  assert seen == {0, 1} or not deep
