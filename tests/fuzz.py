"""Compares the host cache manager with the reference model on random traces.

`python -m tests.fuzz --operations N --policy current|classic --seed I` makes N
random operations with both managers, divided among the configurations of
`tests.host.fuzz_setups`, or all in that of `--config NAME`. It compares answers
and states after each. The first difference is printed and ends the run with
exit code 1.
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
from tests.host.scheduling import move_rows
from tests.model_of_the_cache.manager import ReferenceManager
from tests.model_of_the_cache.manager import Request

_EXPECTED_ERRORS = (ValueError, KeyError)
_NUM_RECENT = 10


class Side:
  """A manager with its requests.

  Attributes:
    manager: the cache manager.
    make_request: the manager's class of requests.
    has_offload: True if there are offloaded pages.
    requests: the requests by name.
    hits: the pages of each request's last lookup, by name.
  """

  def __init__(
    self,
    manager: Any,
    make_request: Callable[..., Any],
    has_offload: bool = False,
  ):
    self.manager = manager
    self.has_offload = has_offload
    self.make_request = make_request
    self.requests: dict[str, Any] = {}
    self.hits: dict[str, Any] = {}

  def apply(self, operation: Operation) -> Any:
    """Runs an operation; returns the answer as lists and numbers, or an error.

    Pages of both managers are converted, so that answers compare as equal.
    """
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
    boundary = getattr(self.hits[name], "shared_prefix_boundary", 0)
    return pages, int(tokens), int(boundary or request.shared_prefix_boundary)

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
  oracle: Side, tested: Side, expected: Any, answer: Any, name: str = ""
) -> list[str]:
  """Returns the differences of two sides after an operation, one a line.

  Args:
    oracle: the reference side.
    tested: the side under test.
    expected: the answer of the reference.
    answer: the answer of the side under test.
    name: the request of the operation, which may be finished.
  """
  differences = []
  if expected != answer:
    differences.append(f"answer: wanted {expected}, got {answer}")
  for request in dict.fromkeys([*oracle.requests, *([name] if name else [])]):
    pages = [_lists(s.manager.get_page_ids(request)) for s in (oracle, tested)]
    if pages[0] != pages[1]:
      differences.append(
        f"pages of {request}: wanted {pages[0]}, got {pages[1]}"
      )
  views = [_view(side) for side in (oracle, tested)]
  for field, value in views[0].items():
    if value != views[1][field]:
      differences.append(f"{field}: wanted {value}, got {views[1][field]}")
  usage = [side.manager.usage for side in (oracle, tested)]
  if not math.isclose(*usage, abs_tol=1e-9):
    differences.append(f"usage: wanted {usage[0]}, got {usage[1]}")
  return differences


def _view(side):
  manager = side.manager
  view = {
    "num_free_pages": int(manager.num_free_pages),
    "free_queue": [int(page) for page in manager.free_queue()],
    "cached_page_ids": sorted(map(int, manager.cached_page_ids())),
  }
  if side.has_offload:
    view["moves"] = move_rows(manager.take_moves())
  return view


class Mismatch(AssertionError):
  """The two managers differ."""


@dataclasses.dataclass(frozen=True)
class Factory:
  """Makes sides from the classes of a manager and of its requests."""

  manager: Callable[..., Any]
  request: Callable[..., Any]

  def make(self, setup: Setup, policy: str) -> Side:
    """Makes a side of a configuration."""
    manager = self.manager(**setup.arguments(policy))
    return Side(manager, self.request, "offload_pages" in setup.options)


REFERENCE = Factory(ReferenceManager, Request)


def host() -> Factory:
  """Returns the factory of the library's manager."""
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
  """Runs random operations on both sides; raises `Mismatch` if they differ.

  Args:
    setup: the configuration.
    policy: "current" or "classic".
    seed: the seed of the trace.
    operations: the number of operations.
    factory: makes the side under test.
    oracle_factory: makes the reference side.

  Returns:
    Counts of the events that the trace is meant to cover.
  """
  oracle = oracle_factory.make(setup, policy)
  tested = factory.make(setup, policy)
  steps = Trace(setup, oracle, f"{setup.name} {policy} {seed}").operations()
  recent: collections.deque[str] = collections.deque(maxlen=_NUM_RECENT)
  counts: collections.Counter[str] = collections.Counter()
  operation = next(steps)
  for step in range(operations):
    expected = oracle.apply(operation)
    recent.append(f"{step}: {operation} -> {expected}")
    failed = isinstance(expected, str) and operation.name != "nobody"
    try:
      differences = ["the oracle itself failed"] if failed else []
      answer = tested.apply(operation)
      differences += compare(oracle, tested, expected, answer, operation.name)
    except Exception as error:
      differences = [f"{type(error).__name__}: {error}"]
      _report(setup, policy, seed, step, recent, differences, error)
    if differences:
      _report(setup, policy, seed, step, recent, differences)
    _note(counts, operation, expected)
    operation = steps.send(expected)
  return counts


def _report(setup, policy, seed, step, recent, differences, cause=None):
  lines = [
    f"MISMATCH {setup.name}, policy {policy}, seed {seed}, operation {step}",
    f"  {setup}",
    "last operations, with the oracle's answers:",
    *(f"  {line}" for line in recent),
    "differences:",
    *(f"  {line}" for line in differences),
  ]
  raise Mismatch("\n".join(lines)) from cause


def _note(counts, operation, expected):
  counts["operations"] += 1
  match operation.verb:
    case "lookup":
      counts["hits"] += expected[1] > 0
      counts["junctions"] += expected[2] > 0
    case "allocate":
      counts["refused"] += expected is None
      if operation.arguments.get("num_external_computed_tokens"):
        counts["external"] += expected is not None
    case "update":
      counts["preempted"] += operation.arguments.get("status") == "preempted"
    case "reset":
      counts["resets"] += expected is True


def main(arguments: list[str]) -> int:
  """Runs the command; returns its exit code."""
  parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
  parser.add_argument(
    "--operations", type=int, default=10_000, help="in all configurations"
  )
  parser.add_argument(
    "--policy", choices=("current", "classic"), default="current"
  )
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--config", choices=sorted(SETUPS))
  options = parser.parse_args(arguments)
  names = [options.config] if options.config else list(SETUPS)
  setups = [SETUPS[name] for name in names]
  setups = [setup for setup in setups if options.policy in setup.policies]
  if not setups:
    print(f"{options.config} is not for policy {options.policy}")
    return 2
  share = -(-options.operations // len(setups))
  num_operations = 0
  for setup in setups:
    try:
      counts = run(setup, options.policy, options.seed, share, host())
    except Mismatch as mismatch:
      print(mismatch, flush=True)
      return 1
    # Compiled programs of all configurations do not fit into memory.
    jax.clear_caches()
    num_operations += counts["operations"]
    counts = ", ".join(f"{key} {count}" for key, count in counts.items())
    print(f"{setup.name}: {counts}", flush=True)
  print(
    f"0 mismatches in {num_operations:,} operations, {len(setups)} "
    f"configurations, policy {options.policy}, seed {options.seed}"
  )
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
