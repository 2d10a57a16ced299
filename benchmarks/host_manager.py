"""Times the calls of a Python scheduler to `jaxkv.host.CacheManager`.

| op             | one call                                                   |
|----------------|------------------------------------------------------------|
| step_256       | `step` of one token for each of 256 running requests, of   |
|                | which 1/16 take a page in every group and 1/16 publish one |
| allocate_slots | the same for one of these requests                         |
| admit_4096     | `get_computed_pages` and `allocate_slots` for one prompt   |
|                | of 4,096 tokens                                            |
| free_4096      | `free` of one request of 4,096 tokens                      |

Modes. full: one group of full attention. hybrid: five more groups with a
sliding window of 1,024 tokens. hit: all pages but the last are hits in the free
queue. miss: no page is a hit. 96 running requests have 1,024 to 1,536 tokens,
so that their windows move. The other 160 have at most 128 tokens, so that all
six groups fit in 65,536 pages of 16 tokens.

Method. A sample is the time of one Python call, including the wait until the
new state is ready. Both modes alternate in every round. Appending tokens and
updating the scheduler's own counts are not timed. The first round is a warm-up.
A round takes several samples of a row. Median and minimum are over the samples
of all rounds.

Not measured: compilation, K/V memory, the model, and an accelerator unless jax
runs on one. `peers.py` compares the cache with other managers.

  python benchmarks/host_manager.py [--quick] [--json FILE]
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import command
import numpy as np

import jaxkv
from jaxkv.host import CacheManager
from jaxkv.host import Request

PAGES = 65536
PAGE_SIZE = 16
PROMPT = 4096
RUNNING = 256
NUM_LONG = 96
LONG = (1024, 1536)  # tokens of a long request at first
SHORT = 128
WINDOW = 1024
STEPS = 16  # samples of a step in a round, in which each request takes a page
FULL = jaxkv.FullAttention(page_size=PAGE_SIZE)
MODES = {
  "full": (FULL,),
  "hybrid": (FULL, *[jaxkv.SlidingWindow(WINDOW, page_size=PAGE_SIZE)] * 5),
}


class Side:
  """A manager with its running requests, and its samples (us) by row."""

  def __init__(self, mode: str):
    """Admits all running requests."""
    self.mode, self.samples = mode, {}
    self._rng = np.random.default_rng(len(mode))
    self._manager = CacheManager(
      PAGES, MODES[mode], PROMPT, max_requests=RUNNING + 1
    )
    lengths = self._rng.integers(*LONG, RUNNING)
    lengths[NUM_LONG:] = self._rng.integers(1, SHORT, RUNNING - NUM_LONG)
    self._running = [self._request(f"r{n}", c) for n, c in enumerate(lengths)]
    for request in self._running:
      self._admit(request)
    self._cached_prompt = self._tokens(PROMPT)

  def round(self) -> None:
    """Times all rows once or more, and checks the results of the calls."""
    for _ in range(STEPS):
      self._append(self._running)
      answers = self._timed("step_256", self._step)
      assert None not in answers
      self._mark_computed(self._running)
    for request in self._running[:: RUNNING // STEPS]:
      self._append([request])
      answer = self._timed(
        "allocate_slots", lambda one=request: self._allocate(one)
      )
      assert answer is not None
      self._mark_computed([request])
    # This call is not timed, because it only caches the prompt for the next
    # one. The page of the last token is never a hit.
    self._prompt(None, self._cached_prompt)
    expected = PROMPT - PAGE_SIZE
    assert self._prompt("hit", self._cached_prompt) == expected
    assert self._prompt("miss", self._tokens(PROMPT)) == 0

  def _prompt(self, mode: str | None, tokens: list[int]) -> int:
    """Admits and frees a prompt, and returns the number of hit tokens."""
    request = Request("prompt", list(tokens))
    num_hit = self._timed(
      mode and f"admit_4096 {mode}", lambda: self._admit(request)
    )
    self._timed(mode and "free_4096", lambda: self._free(request))
    return num_hit

  def _timed(self, row: str | None, call: Callable[[], Any]) -> Any:
    """Makes a call, and records its time if `row` is not None."""
    begin = time.perf_counter()
    answer = call()
    if row:
      took = time.perf_counter() - begin
      self.samples.setdefault(row, []).append(took * 1e6)
    return answer

  def _step(self):
    return self._wait_for(self._manager.step(self._running))

  def _allocate(self, request):
    return self._wait_for(self._manager.allocate_slots(request, 1))

  def _free(self, request):
    return self._wait_for(self._manager.free(request))

  def _admit(self, request):
    """Admits a request, and returns the number of hit tokens."""
    pages, num_hit = self._manager.get_computed_pages(request)
    new = request.num_tokens - num_hit
    answer = self._manager.allocate_slots(request, new, num_hit, pages)
    assert answer is not None
    request.num_computed_tokens = request.num_tokens
    request.status = "running"
    return self._wait_for(num_hit)

  def _wait_for(self, answer):
    # Reading the number blocks until the new state is ready.
    _ = self._manager.num_free_pages
    return answer

  def _append(self, requests):
    for request in requests:
      request.token_ids.append(len(request.token_ids))

  def _mark_computed(self, requests):
    for request in requests:
      request.num_computed_tokens += 1

  def _request(self, name, length):
    return Request(name, self._tokens(length))

  def _tokens(self, count):
    return self._rng.integers(0, 2**31 - 1, count).tolist()


def measured(rounds: int) -> list[dict[str, Any]]:
  """Measures and prints all rows."""
  sides = [Side(mode) for mode in MODES]
  for number in range(rounds + 1):
    for side in sides:
      side.round()
      if number == 0:
        side.samples.clear()
  print(
    f"\n{'op':14} {'mode':12} {'running':>7} {'pages':>7} {'page':>4}"
    f" {'us min':>9} {'median':>9}"
  )
  rows = []
  for name in sorted(sides[0].samples):
    for side in sides:
      op, _, mode = name.partition(" ")
      row = {
        "op": op,
        "running": RUNNING,
        "pages": PAGES,
        "page_size": PAGE_SIZE,
        "mode": f"{side.mode} {mode}".strip(),
        "us_median": statistics.median(side.samples[name]),
        "us_min": min(side.samples[name]),
      }
      print(
        f"{row['op']:14} {row['mode']:12} {RUNNING:7} {PAGES:7} {PAGE_SIZE:4}"
        f" {row['us_min']:9.1f} {row['us_median']:9.1f}",
        flush=True,
      )
      rows.append(row)
  return rows


if __name__ == "__main__":
  command.run(
    __doc__,
    lambda quick, rounds: {"rows": measured(rounds)},
    rounds=10,
    quick_rounds=3,
    not_measured="compilation, K/V memory, the model, accelerators, other"
    " managers",
  )
