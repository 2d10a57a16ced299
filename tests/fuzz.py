"""The host cache manager against the reference model, on random traces.

`python -m tests.fuzz --operations N --policy current|classic --seed I` makes N
random operations, shared out among the configurations of
`tests.host.fuzz_setups`, or in the one of `--config NAME`, with both managers,
and compares everything after every one. The first difference is printed and
ends the run with exit code 1.
"""

import argparse
import collections
import dataclasses
import importlib
import math
import sys
from collections.abc import Callable
from typing import Any

import jax

from tests.host.fuzz_setups import SETUPS
from tests.host.fuzz_setups import Setup
from tests.host.fuzz_trace import Operation
from tests.host.fuzz_trace import Trace
from tests.model_of_the_cache.manager import ReferenceManager
from tests.model_of_the_cache.manager import Request

_EXPECTED_ERRORS = (ValueError, KeyError)
_SHOWN = 10


class Side:
  """A manager with requests of its own.

  Attributes:
    manager: a cache manager.
    make_request: its class of requests.
    requests: name -> request.
    hits: name -> pages that its last lookup found.
  """

  def __init__(self, manager: Any, make_request: Callable[..., Any]):
    self.manager = manager
    self.make_request = make_request
    self.requests: dict[str, Any] = {}
    self.hits: dict[str, Any] = {}

  def apply(self, operation: Operation) -> Any:
    """Does one thing; the answer in lists and numbers, or which error."""
    verb = getattr(self, f"_{operation.verb}")
    arguments = dict(operation.arguments)
    if operation.name:
      arguments["name"] = operation.name
    try:
      return verb(**arguments)
    except _EXPECTED_ERRORS as error:
      return f"raises {type(error).__name__}"

  def _add(self, name, token_ids, **fields):
    self.requests[name] = self.make_request(
      request_id=name, token_ids=list(token_ids), **fields
    )

  def _update(self, name, new_tokens=(), **fields):
    self.requests[name].token_ids.extend(new_tokens)
    for field, value in fields.items():
      setattr(self.requests[name], field, value)

  def _lookup(self, name):
    request = self.requests[name]
    self.hits[name], tokens = self.manager.get_computed_pages(request)
    pages = _lists(self.hits[name].get_page_ids())
    told = getattr(self.hits[name], "shared_prefix_boundary", 0)
    return pages, int(tokens), int(told or request.shared_prefix_boundary)

  def _allocate(self, name, with_hit=False, **arguments):
    if with_hit:
      arguments["new_computed_pages"] = self.hits[name]
    pages = self.manager.allocate_slots(self.requests[name], **arguments)
    return None if pages is None else _lists(pages.get_page_ids())

  def _cache(self, name, num_computed_tokens):
    self.manager.cache_pages(self.requests[name], num_computed_tokens)

  def _free(self, name):
    self.manager.free(self.requests[name])

  def _finish(self, name):
    self.manager.free(self.requests.pop(name))
    self.hits.pop(name, None)

  def _recycle(self, name, num_computed_tokens):
    self.manager.remove_skipped_pages(name, num_computed_tokens)

  def _evict(self, page_ids):
    self.manager.evict_pages(page_ids)

  def _reset(self):
    return self.manager.reset_prefix_cache()

  def _step(self):
    self.manager.new_step_starts()

  def _common(self, name):
    return list(map(int, self.manager.get_num_common_prefix_pages(name)))


def _lists(pages):
  return [[int(page) for page in column] for column in pages]


def compare(
  oracle: Side, tested: Side, wanted: Any, got: Any, name: str = ""
) -> list[str]:
  """In what two sides differ after an operation, one line a difference.

  Args:
    oracle: the reference.
    tested: the other.
    wanted: the reference's answer.
    got: the other's.
    name: the request that it was about, which may be finished by now.
  """
  found = []
  if wanted != got:
    found.append(f"answer: wanted {wanted}, got {got}")
  for request in dict.fromkeys([*oracle.requests, *([name] if name else [])]):
    pages = [_lists(s.manager.get_page_ids(request)) for s in (oracle, tested)]
    if pages[0] != pages[1]:
      found.append(f"pages of {request}: wanted {pages[0]}, got {pages[1]}")
  views = [_view(side.manager) for side in (oracle, tested)]
  for field, value in views[0].items():
    if value != views[1][field]:
      found.append(f"{field}: wanted {value}, got {views[1][field]}")
  usage = [side.manager.usage for side in (oracle, tested)]
  if not math.isclose(*usage, abs_tol=1e-9):
    found.append(f"usage: wanted {usage[0]}, got {usage[1]}")
  return found


def _view(manager):
  return {
    "num_free_pages": int(manager.num_free_pages),
    "free_queue": [int(page) for page in manager.free_queue()],
    "cached_page_ids": sorted(map(int, manager.cached_page_ids())),
  }


class Mismatch(AssertionError):
  """The two managers differ."""


@dataclasses.dataclass(frozen=True)
class Factory:
  """How to make a side: classes of its manager and of its requests."""

  manager: Callable[..., Any]
  request: Callable[..., Any]

  def make(self, setup: Setup, policy: str) -> Side:
    """A side of this configuration."""
    return Side(self.manager(**setup.arguments(policy)), self.request)


REFERENCE = Factory(ReferenceManager, Request)


def host() -> Factory:
  """The library's manager."""
  module = importlib.import_module("jaxkv.host")
  return Factory(module.CacheManager, module.Request)


def run(
  setup: Setup,
  policy: str,
  seed: int,
  operations: int,
  factory: Factory,
  oracle_factory: Factory = REFERENCE,
) -> collections.Counter[str]:
  """Makes random operations with both; raises `Mismatch`.

  Args:
    setup: the configuration.
    policy: current or classic.
    seed: of the trace.
    operations: how many.
    factory: makes the side under test.
    oracle_factory: makes the side that is right.

  Returns:
    How often the trace came by what it is there for.
  """
  oracle = oracle_factory.make(setup, policy)
  tested = factory.make(setup, policy)
  steps = Trace(setup, oracle, f"{setup.name} {policy} {seed}").operations()
  last: collections.deque[str] = collections.deque(maxlen=_SHOWN)
  seen: collections.Counter[str] = collections.Counter()
  operation = next(steps)
  for number in range(operations):
    wanted = oracle.apply(operation)
    last.append(f"{number}: {operation} -> {wanted}")
    failed = isinstance(wanted, str) and operation.name != "nobody"
    try:
      found = ["the oracle itself failed"] if failed else []
      got = tested.apply(operation)
      found += compare(oracle, tested, wanted, got, operation.name)
    except Exception as error:
      found = [f"{type(error).__name__}: {error}"]
      _report(setup, policy, seed, number, last, found, error)
    if found:
      _report(setup, policy, seed, number, last, found)
    _note(seen, operation, wanted)
    operation = steps.send(wanted)
  return seen


def _report(setup, policy, seed, number, last, found, cause=None):
  lines = [
    f"MISMATCH {setup.name}, policy {policy}, seed {seed}, operation {number}",
    f"  {setup}",
    "last operations, with the oracle's answers:",
    *(f"  {line}" for line in last),
    "differences:",
    *(f"  {line}" for line in found),
  ]
  raise Mismatch("\n".join(lines)) from cause


def _note(seen, operation, wanted):
  seen["operations"] += 1
  match operation.verb:
    case "lookup":
      seen["hits"] += wanted[1] > 0
      seen["junctions"] += wanted[2] > 0
    case "allocate":
      seen["refused"] += wanted is None
      if operation.arguments.get("num_external_computed_tokens"):
        seen["external"] += wanted is not None
    case "update":
      seen["preempted"] += operation.arguments.get("status") == "preempted"
    case "reset":
      seen["resets"] += wanted is True


def main(arguments: list[str]) -> int:
  """The command; its exit code."""
  parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
  parser.add_argument(
    "--operations", type=int, default=10_000, help="in all configurations"
  )
  parser.add_argument(
    "--policy", choices=("current", "classic"), default="current"
  )
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--config", choices=sorted(SETUPS))
  parser.add_argument(
    "--against",
    choices=("host", "reference"),
    default="host",
    help="what is tested; reference: the model itself, to try the traces",
  )
  options = parser.parse_args(arguments)
  factory = host() if options.against == "host" else REFERENCE
  names = [options.config] if options.config else list(SETUPS)
  setups = [SETUPS[name] for name in names]
  setups = [setup for setup in setups if options.policy in setup.policies]
  if not setups:
    print(f"{options.config} is not for policy {options.policy}")
    return 2
  share, total = -(-options.operations // len(setups)), 0
  for setup in setups:
    try:
      seen = run(setup, options.policy, options.seed, share, factory)
    except Mismatch as mismatch:
      print(mismatch, flush=True)
      return 1
    # Compiled programs of a hundred configurations do not fit into memory.
    jax.clear_caches()
    total += seen["operations"]
    counts = ", ".join(f"{key} {count}" for key, count in seen.items())
    print(f"{setup.name}: {counts}", flush=True)
  print(
    f"0 mismatches in {total:,} operations, {len(setups)} configurations, "
    f"policy {options.policy}, seed {options.seed}"
  )
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
