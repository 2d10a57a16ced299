"""Times the calls of a Python scheduler to `jaxkv.host.CacheManager`.

| op         | one call                                                       |
|------------|----------------------------------------------------------------|
| decode_256 | each of 256 running requests gets a token and allocates, one   |
|            | after the other; 1/16 take a page in every group, and 1/16     |
|            | fill one                                                       |
| step_256   | the same in one call of `CacheManager.step`; jaxkv only        |
| admit_4096 | lookup and allocation for one prompt of 4,096 tokens, with its |
|            | hashes                                                         |
| free_4096  | frees one request of 4,096 tokens                              |

Modes. full: one group of full attention. hybrid: five more groups with a
sliding window of 1,024 tokens. hit: all pages but the last are hits in the free
queue. miss: no page is a hit, and pages are evicted. 96 running requests have
1,024 to 1,536 tokens, so that their windows move. The other 160 have at most
128 tokens, so that all six groups fit in 65,536 pages of 16 tokens.

Method. All sides run in one process and take turns in every round, with the
garbage collector's heap frozen. The first round is a warm-up. A round takes
several samples of a row. Median and minimum are over the samples of all rounds.

Peers are the same as in `peers.py`. A peer that cannot be imported is skipped.

Not measured: K/V memory, the model, and the rest of a scheduler.

  python benchmarks/host_manager.py [--quick] [--json FILE]
"""

import gc
import importlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import command
import numpy as np
from peers import PEERS

import jaxkv
from jaxkv.host import CacheManager
from jaxkv.host import Request

PAGES = 65536
PAGE_SIZE = 16
PROMPT = 4096
RUNNING = 256
NUM_LONG = 96
LONG = (1024, 1536)  # tokens of a long request at the start
SHORT = 128
WINDOW = 1024
STEPS = 16  # samples of a step in a round; each request takes a page in one
MODES = {"full": (0,), "hybrid": (0, *[WINDOW] * 5)}  # Windows of the groups.


class HostManager:
  """Implements `peers.Peer` with `jaxkv.host.CacheManager`."""

  def __init__(self, num_pages, page_size, windows, max_tokens):
    groups = [
      jaxkv.SlidingWindow(window, page_size=page_size)
      if window
      else jaxkv.FullAttention(page_size=page_size)
      for window in windows
    ]
    self._manager = CacheManager(
      num_pages, groups, max_tokens, max_requests=RUNNING + 1
    )
    self._count = 0

  def new(self, tokens):
    self._count += 1
    return Request(str(self._count), tokens)

  def start(self, request):
    pages, num_hit = self._manager.get_computed_pages(request)
    new = request.num_tokens - num_hit
    answer = self._manager.allocate_slots(request, new, num_hit, pages)
    assert answer is not None
    request.num_computed_tokens = request.num_tokens
    request.status = "running"
    return num_hit

  def extend(self, request, tokens):
    request.token_ids += tokens
    answer = self._manager.allocate_slots(request, len(tokens))
    assert answer is not None
    request.num_computed_tokens += len(tokens)

  def step(self, requests):
    for request in requests:
      request.token_ids.append(len(request.token_ids))
    assert None not in self._manager.step(requests)
    for request in requests:
      request.num_computed_tokens += 1

  def free(self, request):
    self._manager.free(request)


class Side:
  """A manager with its running requests, and its samples (us) by row."""

  def __init__(self, name: str, mode: str, make: Callable[..., Any]):
    """Admits all running requests."""
    self.name, self.mode, self.samples = name, mode, {}
    self._rng = np.random.default_rng(len(mode))
    self._manager = make(PAGES, PAGE_SIZE, MODES[mode], PROMPT)
    lengths = self._rng.integers(*LONG, RUNNING)
    lengths[NUM_LONG:] = self._rng.integers(1, SHORT, RUNNING - NUM_LONG)
    self._running = [self._manager.new(self._tokens(n)) for n in lengths]
    for request in self._running:
      self._manager.start(request)
    self._cached_prompt = self._tokens(PROMPT)

  def round(self) -> None:
    """Times all rows, and checks the numbers of hits."""
    for _ in range(STEPS):
      self._timed("decode_256", self._decode)
    if hasattr(self._manager, "step"):
      for _ in range(STEPS):
        self._timed("step_256", lambda: self._manager.step(self._running))
    # This call is not timed, because it only caches the prompt for the next
    # one. The page of the last token is never a hit.
    self._prompt(None, self._cached_prompt)
    expected = PROMPT - PAGE_SIZE
    assert self._prompt("hit", self._cached_prompt) == expected
    assert self._prompt("miss", self._tokens(PROMPT)) == 0

  def _decode(self) -> None:
    for request in self._running:
      self._manager.extend(request, [7])

  def _prompt(self, mode: str | None, tokens: list[int]) -> int:
    """Admits and frees a prompt, and returns the number of hit tokens."""

    def start():
      # A request of vLLM is hashed when it is made.
      request = self._manager.new(list(tokens))
      return request, self._manager.start(request)

    request, num_hit = self._timed(mode and f"admit_4096 {mode}", start)
    self._timed(mode and "free_4096", lambda: self._manager.free(request))
    return num_hit

  def _timed(self, row: str | None, call: Callable[[], Any]) -> Any:
    """Makes a call, and records its time if `row` is not None."""
    start_time = time.perf_counter()
    answer = call()
    if row:
      took = time.perf_counter() - start_time
      self.samples.setdefault(row, []).append(took * 1e6)
    return answer

  def _tokens(self, count) -> list[int]:
    return self._rng.integers(0, 2**31 - 1, count).tolist()


def managers() -> dict[str, Callable[..., Any]]:
  """Returns the managers that can be imported."""
  managers_by_name: dict[str, Callable[..., Any]] = {"jaxkv": HostManager}
  for name, module in PEERS.items():
    try:
      managers_by_name[name] = importlib.import_module(module).Manager
    except ImportError as error:
      print(f"{name} is skipped: {error}")
  return managers_by_name


def measured(rounds: int) -> list[dict[str, Any]]:
  """Measures and prints all rows."""
  sides = [
    Side(name, mode, make)
    for mode in MODES
    for name, make in managers().items()
  ]
  gc.collect()
  gc.freeze()
  for index in range(rounds + 1):
    for side in sides:
      side.round()
      if index == 0:
        side.samples.clear()
  print(f"\n{'op':14} {'mode':12} {'manager':8} {'us min':>9} {'median':>9}")
  rows = []
  for name in sorted({row for side in sides for row in side.samples}):
    for side in sides:
      if name not in side.samples:
        continue
      op, _, mode = name.partition(" ")
      row = {
        "op": op,
        "mode": f"{side.mode} {mode}".strip(),
        "manager": side.name,
        "us_median": statistics.median(side.samples[name]),
        "us_min": min(side.samples[name]),
      }
      print(
        f"{op:14} {row['mode']:12} {side.name:8} {row['us_min']:9.1f}"
        f" {row['us_median']:9.1f}",
        flush=True,
      )
      rows.append(row)
  return rows


if __name__ == "__main__":
  command.run(
    __doc__,
    lambda quick, rounds: {"rows": measured(rounds)},
    # With more rounds, the growing requests of hybrid would not fit the pool.
    rounds=5,
    quick_rounds=3,
    not_measured="K/V memory, the model, the rest of a scheduler",
  )
