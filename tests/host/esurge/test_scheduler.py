"""eSurge's own scheduler over its own cache manager, and over this one."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.host import esurge
from tests.host.esurge import easydel
from tests.host.esurge.checks import checked_queue

pytestmark = easydel.needed

PAGE, LONGEST, STEPS = 4, 64, 500


def _spec(kind: str, **fields: Any) -> Any:
  interface = easydel.module("core.interface")
  common = {
    "page_size": PAGE,
    "num_kv_heads": 1,
    "head_size": 4,
    "dtype": jnp.float32,
    "use_mla": False,
  }
  if kind == "Mamba":
    common = {"shapes": ((4,),), "dtype": jnp.float32}
  spec = getattr(interface, f"{kind}Spec" if kind == "Mamba" else kind)
  return interface.CacheGroupSpec(spec(**common | fields))


def full(**fields: Any) -> Any:
  return _spec("FullAttentionSpec", **fields)


def window(size: int, **fields: Any) -> Any:
  return _spec("SlidingWindowSpec", sliding_window=size, **fields)


def chunk(size: int) -> Any:
  return _spec("ChunkedLocalAttentionSpec", attention_chunk_size=size)


def states() -> Any:
  return _spec("Mamba", page_size=LONGEST)


@dataclasses.dataclass
class Load:
  """A scheduler's options, and its groups.

  Attributes:
    groups: makes them.
    num_pages: pages of the pool; few, so that requests are preempted.
    policy, caching, chunked: of the scheduler.
    ahead: whether each step is scheduled before the last one's tokens are
      known.
    drafts: tokens of a draft model that must have room.
  """

  groups: Any
  num_pages: int = 36
  policy: str = "fcfs"
  caching: bool = True
  chunked: bool = True
  ahead: bool = False
  drafts: int = 0


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
  "whole prompts": Load(lambda: [full()], chunked=False),
  "one step ahead": Load(lambda: [full(), window(9)], num_pages=56, ahead=True),
}


class Run:
  """One scheduler, and the requests that it was given."""

  def __init__(self, load: Load, manager: Any):
    config = easydel.module("config")
    name = "async_scheduler" if load.ahead else "scheduler"
    made = easydel.module("scheduler." + name)
    parent = easydel.module("scheduler.scheduler")
    interface = easydel.module("core.interface")
    before, groups = parent.CacheManager, load.groups()
    parent.CacheManager = manager or before
    try:
      make = made.AsyncScheduler if load.ahead else made.Scheduler
      self.scheduler = make(
        config=config.Config(
          scheduler_config=config.SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=40,
            max_model_len=LONGEST,
            policy=load.policy,
            chunked_prefill_enabled=load.chunked,
            long_prefill_token_threshold=13 if load.chunked else None,
            async_scheduling=load.ahead,
          ),
          cache_config=config.CacheConfig(
            num_pages=load.num_pages,
            page_size=PAGE,
            enable_prefix_caching=load.caching,
          ),
          speculative_config=(
            config.SpeculativeConfig(load.drafts, "a draft model")
            if load.drafts
            else None
          ),
        ),
        kv_cache_config=interface.CacheGroupsConfig(load.num_pages, groups),
      )
    finally:
      parent.CacheManager = before
    self.cache = self.scheduler.kv_cache_manager

  def add(self, name: str, prompt: list[int], **fields: Any) -> None:
    request = easydel.module("request").EngineRequest(
      name,
      list(prompt),
      easydel.SamplingParams(
        max_tokens=fields.pop("max_tokens"),
        prompt_logprobs=fields.pop("prompt_logprobs", None),
      ),
      eos_token_id=1,
      **fields,
    )
    self.scheduler.add_request(request)

  def abort(self, name: str) -> None:
    request = easydel.module("request")
    status = request.EngineRequestStatus.FINISHED_ABORTED
    self.scheduler.finish_requests(name, status)

  def schedule(self) -> Any:
    """Runs a step; returns None if the scheduler finds its own mistake.

    With priorities it may preempt a request that it has scheduled in the same
    step, which it only notices later.
    """
    try:
      return self.scheduler.schedule()
    except (AssertionError, RuntimeError, ValueError) as error:
      notices = "total scheduled requests", "must be RUNNING"
      if str(error) and not any(notice in str(error) for notice in notices):
        raise
      return None

  def update(self, scheduled: Any, sampled: dict[str, list[int]]) -> Any:
    names = list(scheduled.num_scheduled_tokens)
    outputs = easydel.module("outputs")
    found = self.scheduler.update_from_output(
      scheduled,
      outputs.ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: row for row, name in enumerate(names)},
        sampled_token_ids=[list(sampled[name]) for name in names],
        spec_token_ids=None,
        logprobs=None,
        prompt_logprobs_dict={},
      ),
    )
    return {
      client: [dataclasses.asdict(one) for one in outs.outputs]
      for client, outs in found.items()
    }


def plain(value: Any) -> Any:
  """A `SchedulerOutput` as lists and dicts."""
  if dataclasses.is_dataclass(value):
    names = [field.name for field in dataclasses.fields(value)]
    return {name: plain(getattr(value, name)) for name in names}
  if isinstance(value, dict):
    return {key: plain(one) for key, one in value.items()}
  if isinstance(value, list | tuple) or hasattr(value, "_x"):
    return [plain(one) for one in value]
  return value


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
    """A token for each request that emits one."""
    tokens = self.random.integers(1, 9, len(names))
    rare = self.random.random(len(names)) < 0.2
    return {
      name: [int(token) if odd else 5] if name in emitting else []
      for name, token, odd in zip(names, tokens, rare, strict=True)
    }


def emitting(run: Run, scheduled: Any, before: dict[str, int]) -> set[str]:
  """The requests scheduled whose tokens are all computed with this step.

  Args:
    run: the scheduler.
    scheduled: what it gave.
    before: tokens that were still to come before, by request.
  """
  requests, names = run.scheduler.requests, set()
  for name in scheduled.num_scheduled_tokens:
    one = requests[name]
    awaited = one.num_output_placeholders > before.get(name, 0)
    if awaited or one.num_computed_tokens == one.num_tokens:
      names.add(name)
  return names


class Pair:
  """Both schedulers, side by side.

  Attributes:
    seen: what was there to be compared.
  """

  def __init__(self, load: Load, seed: int):
    self.load, self.traffic = load, Traffic(seed)
    self.runs = Run(load, None), Run(load, esurge.CacheManager)
    names = "scheduled", "hits", "preempted", "aborted", "done", "refused"
    self.seen = dict.fromkeys(names, 0)
    self.in_flight: list[tuple[list[Any], set[str]]] = []

  def step(self) -> None:
    for name, prompt, fields in self.traffic.arrivals():
      for run in self.runs:
        run.add(name, prompt, **fields)
    requests = self.runs[0].scheduler.requests
    before = {
      name: one.num_output_placeholders for name, one in requests.items()
    }
    outputs = [run.schedule() for run in self.runs]
    assert plain(outputs[0]) == plain(outputs[1])
    if outputs[0] is None:
      self.seen["refused"] += 1
      return
    count(self.seen, outputs[0])
    self.in_flight.append((outputs, emitting(self.runs[0], outputs[0], before)))
    if len(self.in_flight) > self.load.ahead:
      self.update()
    known = [sorted(run.scheduler.requests) for run in self.runs]
    assert known[0] == known[1]
    if self.traffic.random.random() < 0.05:
      self.abort_one(known[0])

  def update(self) -> None:
    """Tells both the tokens of the oldest step in flight."""
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
def test_every_output_is_equal(name):
  pair = Pair(LOADS[name], sum(map(ord, name)))
  for number in range(STEPS):
    pair.step()
    if number % 10 == 0:
      compare(*pair.runs, pair.load)
  print(f"\n{name}: {pair.seen}")
  assert pair.seen["scheduled"] > STEPS
  assert pair.seen["preempted"] > 0
  finds = pair.load.caching and name != "states"
  assert bool(pair.seen["hits"]) == finds
  checked_queue(pair.runs[1].cache)


def compare(reference: Run, run: Run, load: Load) -> None:
  """Compares all pages, but for the differences that are documented."""
  cache, pool = run.cache, reference.cache.page_pool
  queue = pool.free_page_queue.get_all_free_pages()
  assert checked_queue(cache) == [page.page_id for page in queue]
  assert cache.usage == reference.cache.usage
  # eSurge counts the references of the null page.
  counts = [page.ref_cnt for page in pool.pages]
  assert cache.host.pages.ref_counts()[1:] == counts[1:]
  # Nothing is cached beside states.
  if not any(hasattr(one.kv_cache_spec, "shapes") for one in load.groups()):
    num_hashes = len(cache.page_pool.cached_page_hash_to_page)
    assert num_hashes == len(pool.cached_page_hash_to_page)


def count(seen: dict[str, int], output: Any) -> None:
  seen["scheduled"] += len(output.num_scheduled_tokens)
  seen["preempted"] += len(output.preempted_req_ids)
  seen["done"] += len(output.finished_req_ids)
  seen["hits"] += sum(
    one.num_computed_tokens > 0 for one in output.scheduled_new_reqs
  )
