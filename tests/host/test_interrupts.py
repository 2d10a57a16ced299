"""A call that is interrupted happened, or it did not."""

import gc
import signal
import threading

import jax
import numpy as np
import pytest

import jaxkv
from jaxkv.host import CacheManager
from tests.host import scheduling
from tests.tools.interrupts import Interrupted
from tests.tools.interrupts import check_atomic
from tests.tools.interrupts import interrupted
from tests.tools.threads import run_in_threads
from tests.tools.tiers import slow_except

KEY = jaxkv.salt("interrupts")


def begun(num_pages=61, offload_pages=0):
  """A manager with two requests that run and one that came back, and them."""
  manager = CacheManager(
    num_pages,
    scheduling.HYBRID,
    scheduling.LONGEST,
    key=KEY,
    num_events=64,
    track_new_pages=True,
    offload_pages=offload_pages,
  )
  requests = {
    name: scheduling.request(name, range(first_token, first_token + 13))
    for name, first_token in (("a", 0), ("b", 50), ("c", 0), ("new", 100))
  }
  for name in ("a", "b", "c"):
    assert manager.allocate_slots(requests[name], 13)
    requests[name].num_computed_tokens = 13
    requests[name].status = "running"
  manager.free(requests["c"])
  requests["c"].num_computed_tokens = 0
  for name in ("a", "b"):
    requests[name].token_ids += [7, 8, 9]
  return manager, requests


def admit(manager, requests, name):
  hit_pages, tokens = manager.get_computed_pages(requests[name])
  return manager.allocate_slots(requests[name], 13 - tokens, tokens, hit_pages)


CALLS = {
  "get_computed_pages": lambda m, r: m.get_computed_pages(r["c"]),
  "allocate_slots": lambda m, r: m.allocate_slots(r["a"], 3),
  "allocate_slots, new": lambda m, r: m.allocate_slots(r["new"], 13),
  "allocate_slots, moves": lambda m, r: admit(m, r, "d"),
  "take_moves": lambda m, r: m.take_moves(),
  "step": lambda m, r: m.step([r["a"], r["b"]], 3),
  "cache_pages": lambda m, r: m.cache_pages(r["a"], 16),
  "remove_skipped_pages": lambda m, r: m.remove_skipped_pages("a", 13),
  "free": lambda m, r: m.free(r["a"]),
  "pop_pages_for_free": lambda m, r: m.pop_pages_for_free(r["a"]),
  "pages.release": lambda m, r: m.pages.release(r["pages"]),
  "evict_pages": lambda m, r: m.evict_pages([1, 2]),
  "reset_prefix_cache": lambda m, r: m.reset_prefix_cache(),
  "take_events": lambda m, r: m.take_events(),
  "take_new_page_ids": lambda m, r: m.take_new_page_ids(),
  "make_prefix_cache_stats": lambda m, r: m.make_prefix_cache_stats(),
  "get_page_ids": lambda m, r: m.get_page_ids("a"),
}


def prepared(name):
  """A manager for which the call has something to do."""
  manager, requests = begun()
  if "moves" in name:
    # The pages of d are on the host, and those that it takes are cached.
    manager, requests = begun(num_pages=37, offload_pages=20)
    requests["d"] = scheduling.request("d", range(300, 313))
    for first_token in (300, 400, 500):
      req = scheduling.request("one", range(first_token, first_token + 13))
      admit(manager, {"one": req}, "one")
      manager.free(req)
  if name == "pages.release":
    requests["pages"] = manager.pop_pages_for_free(requests["b"])
  if name == "reset_prefix_cache":
    manager.free(requests["a"])
    manager.free(requests["b"])
  return manager, requests


def everything(manager):
  """Returns everything on which later calls depend."""
  manager.get_page_ids("a")  # Undoes what an interrupted undo has left.
  state = manager._state
  pool = state.pool
  saved = pool.saved
  slots = sorted(state.held.values(), key=lambda req: req.slot)
  return (
    [
      (req.request_id, req.slot, req.tables, req.skipped, req.length, req.room)
      for req in slots
    ],
    [state.vacant, state.statistics, state.step_clock],
    [pool.ref_count, pool.pin_count, pool.queue.in_order(), pool.num_free],
    [[node.digest for node in req.nodes] for req in slots],
    [page and page.digest for page in pool.content],
    [pool.is_cached, pool.stamp, pool.group, pool.clock, pool.new],
    [pool.index, pool.counts, len(state.events._events), state.events.num_lost],
    saved and [saved.queue.in_order(), saved.moves, saved.counts],
    len(manager.undo_log.entries),
  )


# A few seconds each.
@slow_except("name", CALLS, "step")
@pytest.mark.parametrize("name", CALLS)
def test_interrupted_calls_are_atomic(name, pytestconfig):
  manager = check_atomic(
    lambda: prepared(name),
    CALLS[name],
    everything,
    is_deep=pytestconfig.getoption("deep"),
    may_change_nothing=True,
    go_on=lambda manager, requests: admit(manager, requests, "c"),
  )
  if manager.config.offload_pages:
    manager.take_moves()
  jaxkv.check(manager.state)


@pytest.mark.slow
def test_interrupted_undos_are_completed():
  """The next call undoes the rest."""
  old_state = everything(begun()[0])
  done, requests = begun()
  admit(done, requests, "c")
  new_state = everything(done)
  num_points = 0
  point = 100
  left = True
  while left:
    manager, requests = begun()
    left = interrupted(
      lambda m=manager, r=requests: admit(m, r, "c"), point, point + point % 90
    )
    state = everything(manager)
    # An interrupt after the last step of a call comes too late.
    assert state in (old_state, new_state), f"left before bytecode {point}"
    num_points += state == old_state
    point += 15
  assert num_points > 30


@pytest.mark.slow
@pytest.mark.parametrize("name", ["state", "take"])
def test_an_interrupted_crossing(name):
  """The next state has the prefix index of a manager without interrupts."""
  crossings = {
    "state": lambda manager, _: manager.state,
    "take": lambda manager, state: manager.take(state),
  }

  def crossed(point):
    manager, requests = begun()
    state, _ = jaxkv.evict(manager.state, [1])
    manager.evict_pages([2])
    admit(manager, requests, "c")
    left = point is None or interrupted(
      lambda: crossings[name](manager, state), point
    )
    # An interrupt after the last step of a call comes too late.
    return left, manager.holds_pages("c"), manager.state

  expected = crossed(None)[-1]
  num_points = 0
  point = 60
  left = True
  while left:
    left, is_undone, state = crossed(point)
    jaxkv.check(state)
    if left and is_undone:
      jax.tree.map(np.testing.assert_array_equal, state, expected)
      num_points += 1
    point += 400
  assert num_points > 9


def test_calls_left_by_signals_are_atomic():
  """Real signals, at 200 times."""

  def handler(*_):
    raise Interrupted

  done, requests = begun()
  CALLS["step"](done, requests)
  outcomes = [everything(begun()[0]), everything(done)]
  old_handler = signal.signal(signal.SIGALRM, handler)
  # Python drops an exception that is raised in a callback of the collector.
  gc.disable()
  try:
    for trial in range(200):
      manager, requests = begun()
      try:
        signal.setitimer(signal.ITIMER_REAL, 1e-6 + 1e-6 * trial)
        CALLS["step"](manager, requests)
        signal.setitimer(signal.ITIMER_REAL, 0)
      except Interrupted:
        pass
      assert everything(manager) in outcomes, f"trial {trial}"
  finally:
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, old_handler)
    gc.enable()


def test_readings_wait_for_calls():
  """Another thread sees nothing of a call that is undone."""
  manager = scheduling.single(CacheManager)
  readings = []

  def read():
    readings.append(
      (
        manager.num_free_pages,
        manager.num_published_tokens("a"),
        manager.is_full,
        manager.request_ids(),
      )
    )

  thread = threading.Thread(target=read)

  class Listener:
    def stored(self, *_):
      thread.start()
      thread.join(0.2)
      raise Interrupted

  manager.pages.add_listener(Listener())
  req = scheduling.request("a", range(3))
  manager.allocate_slots(req, 3)
  req.token_ids += range(20)
  req.num_computed_tokens = 3
  with pytest.raises(Interrupted):
    manager.allocate_slots(req, 20)
  thread.join()
  assert readings == [(9, 3, False, ["a"])]


def test_threads_share_a_manager():
  """Several threads share a manager: every call is whole."""
  manager = scheduling.single(CacheManager)

  def work(thread):
    for turn in range(12):
      req = scheduling.request(f"{thread} {turn}", range(thread, thread + 9))
      if manager.allocate_slots(req, 9) is not None:
        req.num_computed_tokens = 9
        req.token_ids += [1]
        manager.step([req])
        manager.free(req)

  run_in_threads(work)
  assert manager.num_free_pages == 10
  jaxkv.check(manager.state)
