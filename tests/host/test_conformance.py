"""The host manager against the reference model, and what it compiles."""

from typing import Any

import jax
import pytest

from jaxkv.host import CacheManager
from jaxkv.host import Removed
from jaxkv.host import Request
from jaxkv.host import Stored
from tests import fuzz
from tests.host.fuzz_setups import SETUPS
from tests.host.fuzz_trace import Trace

_FAST = {"full", "full_window_sizes"}
_SHORT = _FAST | {"full_window_kept"}
_OPERATIONS = 150
_DEEP_OPERATIONS = 300
_PAIRS = [
  (name, policy) for name, setup in SETUPS.items() for policy in setup.policies
]

_compiled: list[str] = []


def _note(event, _, **metadata):
  if "backend_compile" in event:
    _compiled.append(str(metadata.get("fun_name", event)))


jax.monitoring.register_event_duration_secs_listener(_note)


@pytest.mark.parametrize(
  ("name", "policy", "operations"),
  [
    pytest.param(
      *pair,
      _OPERATIONS,
      id="-".join(pair),
      marks=() if pair[0] in _FAST else pytest.mark.slow,
    )
    for pair in _PAIRS
    if pair[0] in _SHORT
  ]
  + [
    pytest.param(
      *pair,
      _DEEP_OPERATIONS,
      id="-".join((*pair, "deep")),
      marks=[pytest.mark.deep],
    )
    for pair in _PAIRS
  ],
)
def test_answers_equal_those_of_the_reference(name, policy, operations):
  counts = fuzz.run(SETUPS[name], policy, 0, operations, fuzz.host())
  assert counts["operations"] == operations
  assert counts["hits"] > 0 or name not in _SHORT


def test_ages_and_events_equal_the_reference():
  """Evicted pages by age, and the cached pages according to the events."""
  managers: list[Any] = []

  def factory(manager, make_request, **options):
    def make(**arguments):
      managers.append(manager(**arguments, **options))
      return managers[-1]

    return fuzz.Factory(make, make_request)

  host = factory(CacheManager, Request, track_residency=True, num_events=10_000)
  reference = factory(fuzz.REFERENCE.manager, fuzz.REFERENCE.request)
  fuzz.run(SETUPS["full_window"], "current", 0, 1000, host, reference)
  cache = next(item for item in managers if isinstance(item, CacheManager))
  pool = next(item for item in managers if item is not cache).pool
  stats = cache.make_prefix_cache_stats()
  assert (stats.lifetime, stats.idle) == (pool.lifetime, pool.idle)
  events, num_lost = cache.take_events()
  cached: dict[int, Stored] = {}
  for event in events:
    match event:
      case Stored():
        cached[event.page] = event
      case Removed():
        stored = cached.pop(event.page)
        assert (stored.group, stored.key) == (event.group, event.key)
      case _:
        cached.clear()
  assert num_lost == 0
  assert cached.keys() == pool.keys.keys()
  assert [event.key for event in cached.values()] == cache.pages.keys(cached)


def test_compiles_nothing():
  """No call waits for a compiler or a device."""
  setup = SETUPS["full_window_latest"]
  oracle = fuzz.REFERENCE.make(setup, "current")
  tested = fuzz.host().make(setup, "current")
  num_compiled = len(_compiled)
  steps = Trace(setup, oracle, "compilations").operations()
  operation = next(steps)
  for _ in range(500):
    answer = oracle.apply(operation)
    assert tested.apply(operation) == answer
    operation = steps.send(answer)
  assert not _compiled[num_compiled:]
