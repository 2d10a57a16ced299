"""eSurge's own scheduler over its own cache manager, and over this one."""

from typing import Any

import numpy as np
import pytest

from jaxkv.host import esurge
from tests.host.esurge import easydel
from tests.host.esurge.checks import checked_queue
from tests.host.esurge.schedulers import LONGEST
from tests.host.esurge.schedulers import Load
from tests.host.esurge.schedulers import Run
from tests.host.esurge.schedulers import chunk
from tests.host.esurge.schedulers import emitting
from tests.host.esurge.schedulers import full
from tests.host.esurge.schedulers import plain
from tests.host.esurge.schedulers import states
from tests.host.esurge.schedulers import window

pytestmark = easydel.needed

STEPS = 500

LOADS = {
  "plain": Load(lambda: [full()]),
  "priority": Load(lambda: [full()], policy="priority"),
  "window": Load(lambda: [window(9)], num_pages=24),
  "hybrid": Load(lambda: [full(), window(9), window(9)], num_pages=72),
  "chunks": Load(lambda: [full(), chunk(16)], num_pages=56),
  "states": Load(lambda: [full(), states()], num_pages=40),
  "not cached": Load(lambda: [full(), window(9)], num_pages=56, caching=False),
  "two page sizes": Load(
    lambda: [full(), window(9, page_size=8)], num_pages=48, caching=False
  ),
  "draft model": Load(lambda: [full(), window(9)], num_pages=56, drafts=3),
  "whole prompts": Load(lambda: [full()], chunked=False, longest_chunk=None),
  "one step ahead": Load(lambda: [full(), window(9)], num_pages=56, ahead=True),
}


class Traffic:
  """The same requests and tokens for both schedulers, drawn from one seed."""

  def __init__(self, seed: int):
    self.random = np.random.default_rng(seed)
    self.count = 0
    self.prefixes = [self._tokens(n) for n in (8, 16, 21, 32)]

  def _tokens(self, count: int) -> list[int]:
    return self.random.integers(2, 9, count).tolist()

  def arrivals(self) -> list[tuple[str, list[int], dict[str, Any]]]:
    new = []
    for _ in range(int(self.random.poisson(0.45))):
      prompt = self._tokens(int(self.random.integers(1, 24)))
      if self.random.random() < 0.7:
        choice = int(self.random.integers(len(self.prefixes)))
        prompt = self.prefixes[choice] + prompt
      self.count += 1
      fields = {
        "arrival_time": float(self.count),
        "priority": int(self.random.integers(3)),
        "max_tokens": int(self.random.integers(1, 30)),
      }
      if self.random.random() < 0.05:
        fields["prompt_logprobs"] = 1
      new.append((f"r{self.count}", prompt[: LONGEST - 8], fields))
    return new

  def sampled(self, names: list[str], emitting: set[str]) -> dict[str, Any]:
    """Returns a token for each request that emits one."""
    tokens = self.random.integers(1, 9, len(names))
    rare = self.random.random(len(names)) < 0.2
    return {
      name: [int(token) if odd else 5] if name in emitting else []
      for name, token, odd in zip(names, tokens, rare, strict=True)
    }


class Pair:
  """Both schedulers, side by side.

  Attributes:
    seen: counts of the compared events, by name.
  """

  def __init__(self, load: Load, seed: int):
    self.load = load
    self.traffic = Traffic(seed)
    self.runs = Run(load, None), Run(load, esurge.CacheManager)
    names = "scheduled", "hits", "preempted", "aborted", "done", "refused"
    self.seen = dict.fromkeys(names, 0)
    self.in_flight: list[tuple[list[Any], set[str]]] = []

  def step(self) -> None:
    for name, prompt, fields in self.traffic.arrivals():
      for run in self.runs:
        run.add(name, prompt, **fields)
    requests = self.runs[0].scheduler.requests
    num_awaited = {
      name: request.num_output_placeholders
      for name, request in requests.items()
    }
    outputs = [run.schedule() for run in self.runs]
    assert plain(outputs[0]) == plain(outputs[1])
    if outputs[0] is None:
      self.seen["refused"] += 1
      return
    count(self.seen, outputs[0])
    self.in_flight.append(
      (outputs, emitting(self.runs[0], outputs[0], num_awaited))
    )
    if len(self.in_flight) > self.load.ahead:
      self.update()
    names = [sorted(run.scheduler.requests) for run in self.runs]
    assert names[0] == names[1]
    if self.traffic.random.random() < 0.05:
      self.abort_one(names[0])

  def update(self) -> None:
    """Gives both schedulers the tokens of the oldest step in flight."""
    outputs, names = self.in_flight.pop(0)
    names &= self.runs[0].scheduler.requests.keys()
    sampled = self.traffic.sampled([*outputs[0].num_scheduled_tokens], names)
    results = [
      run.update(scheduled, sampled)
      for run, scheduled in zip(self.runs, outputs, strict=True)
    ]
    assert results[0] == results[1]

  def abort_one(self, requests: list[str]) -> None:
    if requests:
      name = requests[int(self.traffic.random.integers(len(requests)))]
      for run in self.runs:
        run.abort(name)
      self.seen["aborted"] += 1


@pytest.mark.parametrize("name", LOADS)
def test_outputs_equal_esurges_manager(name):
  pair = Pair(LOADS[name], sum(map(ord, name)))
  for step in range(STEPS):
    pair.step()
    if step % 10 == 0:
      compare(*pair.runs, pair.load)
  print(f"\n{name}: {pair.seen}")
  assert pair.seen["scheduled"] > STEPS
  assert pair.seen["preempted"] > 0
  finds = pair.load.caching and name != "states"
  assert bool(pair.seen["hits"]) == finds
  checked_queue(pair.runs[1].cache)


def compare(reference: Run, run: Run, load: Load) -> None:
  """Compares all pages, but for the differences that are documented."""
  cache = run.cache
  pool = reference.cache.page_pool
  queue = pool.free_page_queue.get_all_free_pages()
  assert checked_queue(cache) == [page.page_id for page in queue]
  assert cache.usage == reference.cache.usage
  # eSurge counts the references of the null page.
  counts = [page.ref_cnt for page in pool.pages]
  assert cache.host.pages.ref_counts()[1:] == counts[1:]
  # Nothing is cached beside states.
  if not any(hasattr(group.kv_cache_spec, "shapes") for group in load.groups()):
    num_hashes = len(cache.page_pool.cached_page_hash_to_page)
    assert num_hashes == len(pool.cached_page_hash_to_page)


def count(counts: dict[str, int], output: Any) -> None:
  counts["scheduled"] += len(output.num_scheduled_tokens)
  counts["preempted"] += len(output.preempted_req_ids)
  counts["done"] += len(output.finished_req_ids)
  counts["hits"] += sum(
    request.num_computed_tokens > 0 for request in output.scheduled_new_reqs
  )
