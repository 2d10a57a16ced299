"""vLLM's scheduler over the facade and over its own manager, side by side."""

# pyright: reportMissingImports=false

import dataclasses
import random

import pytest

from jaxkv.host import vllm as ours
from tests.host.vllm.schedulers import LONGEST
from tests.host.vllm.schedulers import Setup
from tests.host.vllm.schedulers import as_data
from tests.host.vllm.schedulers import both_sides
from tests.host.vllm.schedulers import full
from tests.host.vllm.schedulers import model_folder
from tests.host.vllm.schedulers import reaches_end
from tests.host.vllm.schedulers import states
from tests.host.vllm.schedulers import window

pytestmark = pytest.mark.filterwarnings("ignore")

STEPS = 500

SETUPS = {
  "full": Setup((full(),)),
  "full-priority": Setup((full(),), policy="priority", watermark=0.1),
  "full-uncached": Setup((full(),), caching=False, policy="priority"),
  "full-asynchronous": Setup((full(),), asynchronous=True, in_flight=2),
  "window": Setup((window(9),), 20, retention=0),
  "hybrid": Setup((full(), window(9)), num_blocks=72, policy="priority"),
  "hybrid-kept": Setup((full(), window(9), window(17)), 100, retention=0),
  "hybrid-asynchronous": Setup(
    (full(), window(9)), 72, asynchronous=True, in_flight=2
  ),
  "states": Setup(
    (full(), states()), 52, mamba_cache_mode="align", retention=0
  ),
  "states-dense": Setup((full(), states()), 52, mamba_cache_mode="align"),
  "states-uncached": Setup(
    (full(), states("none", LONGEST)), 40, caching=False
  ),
}


@pytest.fixture(scope="module")
def model():
  with model_folder() as folder:
    yield folder


def taken_events(side):
  """Returns the events since the last call, as data."""
  events = side.events
  side.events = []
  names = [field.name for field in dataclasses.fields(ours.BlockStored)]
  return [
    (type(event).__name__, [getattr(event, name, None) for name in names[:-1]])
    for event in events
  ]


class Load:
  """Random requests, and the tokens that a model samples for them."""

  def __init__(self, seed):
    self.random = random.Random(seed)
    self.prefixes = [self._tokens(length) for length in (8, 20, 33, 48)]
    self.number = 0

  def _tokens(self, length):
    return [self.random.randrange(2, 100) for _ in range(length)]

  def arrivals(self):
    for _ in range(self.random.choice((0, 0, 0, 1, 1, 2))):
      shared = self.random.choice(self.prefixes)
      cut = self.random.randint(0, len(shared))
      tokens = shared[:cut] + self._tokens(self.random.randint(1, 12))
      max_tokens = self.random.randint(1, 24)
      yield str(self.number), tokens, max_tokens, self.random.randrange(3)
      self.number += 1


def run(setup, model, seed, steps):
  """Runs both schedulers through one load; returns counts of events."""
  sides = both_sides(setup, model)
  load = Load(seed)
  flying = []
  counts = dict.fromkeys(("new", "hits", "preempted", "aborted", "events"), 0)
  for _ in range(steps):
    for arrival in load.arrivals():
      for side in sides:
        side.add(*arrival)
    alive = sorted(sides[0].scheduler.requests, key=int)
    if alive and load.random.random() < 0.05:
      name = load.random.choice(alive)
      counts["aborted"] += 1
      for side in sides:
        side.abort(name)
    outputs = [side.scheduler.schedule() for side in sides]
    expected, got = map(as_data, outputs)
    assert got == expected
    counts["new"] += len(outputs[0].scheduled_new_reqs)
    counts["preempted"] += len(outputs[0].preempted_req_ids or ())
    counts["hits"] += sum(
      new_request.num_computed_tokens > 0
      for new_request in outputs[0].scheduled_new_reqs
    )
    flying.append(outputs)
    if len(flying) == setup.in_flight:
      counts["events"] += finish(sides, flying.pop(0), load)
    assert sides[1].free_ids() == sides[0].free_ids()
    if load.random.random() < 0.02 and not flying:
      answers = [side.scheduler.reset_prefix_cache() for side in sides]
      assert answers[0] == answers[1]
  return counts


def finish(sides, outputs, load):
  """Gives both schedulers the output of one step; returns the event count."""
  sampled = {}
  for name in outputs[0].num_scheduled_tokens:
    request = sides[0].scheduler.requests.get(name)
    ends = request is not None and reaches_end(request)
    sampled[name] = [load.random.randrange(2, 100)] if ends else []
  answers = [
    side.update(output, sampled)
    for side, output in zip(sides, outputs, strict=True)
  ]
  stats = [answer[0].scheduler_stats for answer in answers if 0 in answer]
  if stats:
    expected, got = (stat and stat.prefix_cache_stats for stat in stats)
    for name in ("requests", "queries", "hits", "preempted_hits", "reset"):
      assert getattr(got, name, None) == getattr(expected, name, None)
    assert (
      stats[0] is None or stats[0].kv_cache_usage == stats[1].kv_cache_usage
    )
  events = [taken_events(side) for side in sides]
  assert events[1] == events[0]
  return len(events[0])


@pytest.mark.parametrize("name", SETUPS)
def test_outputs_equal_vllms_manager(name, model):
  counts = run(SETUPS[name], model, seed=0, steps=STEPS)
  assert (
    counts["new"] > 100 and counts["preempted"] > 0 and counts["aborted"] > 0
  )
  assert (counts["hits"] > 0) == SETUPS[name].caching
