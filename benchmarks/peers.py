r"""Times transitions of this cache and of other cache managers.

| op          | mode         | one call                                        |
|-------------|--------------|-------------------------------------------------|
| decode_step | full, hybrid | every sequence gets one token, 1/16 of them     |
|             |              | take a page and publish one, and sequences at   |
|             |              | their last token are freed and replaced         |
| admit_4096  | hit          | one prompt of 4,096 tokens, with 255 of its 256 |
|             |              | pages as hits in the free queue                 |
| admit_4096  | miss         | the same without hits, so that 256 pages are    |
|             |              | evicted, taken, hashed and published            |
| free_4096   |              | one sequence of 256 cached pages                |
| free_16     |              | 16 sequences of 64 cached pages                 |

To publish a page is to enter it in the prefix index. The pool has 65,536 pages
of 16 tokens. All pages are cached beforehand, so taking a page evicts its
contents. "full" has one group of full attention, and sequences of up to 128
tokens (48 at 1,024 slots). "hybrid" has five more groups with a sliding window
of 1,024 tokens, and 96 of its 256 sequences have 1,024 to 1,536 tokens. All
times include hashing.

Method. A side is jaxkv or a peer. All sides run in one process and take turns
in every round, after one round of warm-up. jaxkv is timed as in
`transitions.py`, on a CPU with `jaxkv.CPU_COMPILER_OPTIONS`. A call of a Python
manager consists of the calls that a scheduler makes for the same purpose, in a
plain Python loop, with the garbage collector's heap frozen. Making a request
hashes its prompt, so admit_4096 times this, too. The other ops use requests
that were made before. All sides get equal lengths and numbers of steps. Times
are microseconds per step.

Peers. A peer that cannot be imported is skipped, and the reason is printed.

  vllm  `KVCacheManager` of vLLM 0.33. Without a GPU it is installed from its
        source distribution, which compiles nothing:
          pip install torch setuptools setuptools_scm cmake ninja wheel jinja2
          VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=0.33.0+cpu \
            pip install --no-deps --no-build-isolation vllm==0.33.0
        then the packages that `import vllm.v1.core.kv_cache_manager` lacks.
  esurge
        `CacheManager` of EasyDeL eSurge, from a checkout of EasyDeL at the path
        JAXKV_EASYDEL.

Not measured: the rest of a scheduler; the block tables that a host manager must
upload at every step; compilation; dispatch from Python; K/V memory and the
model. jaxkv runs on jax's default device. A Python manager uses no device.

  python benchmarks/peers.py [--quick] [--json FILE]
"""

import gc
import importlib
import statistics
import time
from typing import Any
from typing import NamedTuple
from typing import Protocol

import command
import jax
import jax.numpy as jnp
import numpy as np
import transition_ops as ops
import transitions
from jax import lax

import jaxkv

PAGES = 65536
PEERS = {"vllm": "peer_vllm", "esurge": "peer_esurge"}
# The sequences that an op frees, and their pages.
FREED = {
  "free_4096": (1, ops.PROMPT // ops.PAGE_SIZE),
  "free_16": (ops.FREED, ops.FREED_PAGES),
}


class Case(NamedTuple):
  """A row of the table."""

  op: str
  mode: str
  slots: int

  @property
  def config(self) -> jaxkv.CacheConfig:
    """The cache of this row."""
    mode = "hybrid" if self.mode == "hybrid" else "full"
    return ops.config_of(self.slots, PAGES, mode)


CASES = (
  Case("decode_step", "full", 64),
  Case("decode_step", "full", 256),
  Case("decode_step", "full", 1024),
  Case("decode_step", "hybrid", 256),
  Case("admit_4096", "hit", 256),
  Case("admit_4096", "miss", 256),
  Case("free_4096", "", 256),
  Case("free_16", "", 256),
)
QUICK_CASES = (CASES[0], *CASES[4:])


class Peer(Protocol):
  """A cache manager in Python, called as its own scheduler calls it.

  A request has `num_tokens`.
  """

  def __init__(
    self,
    num_pages: int,
    page_size: int,
    windows: list[int | None],
    max_tokens: int,
  ): ...

  def new(self, tokens: list[int]) -> Any:
    """Makes a request with hashed tokens, without pages."""

  def start(self, request: Any) -> int:
    """Hits, takes and publishes pages, and returns the number of hit tokens."""
    ...

  def extend(self, request: Any, tokens: list[int]) -> None:
    """Appends tokens to a request; hashes, takes and publishes pages."""

  def free(self, request: Any) -> None:
    """Frees the request's pages, the last one first."""


def jaxkv_op(case: Case) -> ops.Op:
  """Returns the timed operation of jaxkv."""
  config = case.config
  if case.op == "decode_step":
    return ops.decode_op(config, "short")
  if case.op == "admit_4096":
    _, _, hit, miss = ops.prompt_ops(config)
    return _admit_op(hit if case.mode == "hit" else miss)
  return ops.free_op(config, *FREED[case.op])


def _admit_op(admit: ops.Op) -> ops.Op:
  """Returns `admit`, followed by a `commit` of the tokens that did not hit."""

  def step(state, prompts, trip):
    length = jnp.full((1,), ops.PROMPT, jnp.int32)
    state, out = jaxkv.admit(state, trip[None], prompts[trip], length)
    hits = out.num_cached_tokens
    tail = lax.dynamic_slice(
      jnp.pad(prompts[trip], ((0, 0), (0, ops.PROMPT))),
      (jnp.int32(0), hits[0]),
      (1, ops.PROMPT),
    )
    state, done = jaxkv.commit(state, tail, length - hits, slots=trip[None])
    failed = ~(out.ok[0] & done.ok[0])
    return state, hits[0] - failed.astype(jnp.int32)

  return admit._replace(step=step)


def jaxkv_side(case: Case, state: jaxkv.CacheState) -> transitions.Side:
  """Returns jaxkv in one case, with a copy of the state."""
  is_cpu = jax.default_backend() == "cpu"
  options = jaxkv.CPU_COMPILER_OPTIONS if is_cpu else None
  op = jaxkv_op(case)
  run = transitions.compile_steps(op.step, options)
  rng = np.random.default_rng(case.slots)
  return transitions.Side(case.config, op, run, state, rng)


class PeerSide:
  """A peer in one case, with its manager and its samples (us per step)."""

  def __init__(self, peer: type[Peer], case: Case, steps: int):
    """Makes a manager whose pages are all cached and free."""
    config = case.config
    windows = [getattr(group, "window", None) for group in config.groups]
    self.case, self.steps = case, steps
    self.samples: list[float] = []
    self._manager = peer(config.total_pages, ops.PAGE_SIZE, windows, ops.PROMPT)
    self._rng = np.random.default_rng(case.slots)
    self._running: list[Any] = []
    self._age()

  def round(self, *, record: bool) -> None:
    """Prepares, times and checks one call, and frees all requests."""
    verb = self.case.op.partition("_")[0]
    run = getattr(self, f"_{verb}")()
    start_time = time.perf_counter()
    run()
    took = time.perf_counter() - start_time
    self._release()
    if record:
      self.samples.append(took * 1e6 / self.steps)

  def times(self) -> dict[str, float]:
    """Returns the microseconds a step."""
    return {
      "us_median": statistics.median(self.samples),
      "us_min": min(self.samples),
    }

  def _decode(self):
    config, manager, running = self.case.config, self._manager, self._running
    slots = config.num_slots
    min_lengths, max_lengths = ops.decode_lengths(config, "short")
    lengths = np.arange(slots) % ops.PAGE_SIZE
    lengths += ops.PAGE_SIZE * self._rng.integers(
      min_lengths // ops.PAGE_SIZE, max_lengths // ops.PAGE_SIZE, slots
    )
    lengths = np.maximum(lengths, 1)
    self._fill(lengths)
    # Requests that replace sequences that end. Making them is not timed.
    ends = int(np.sum(self.steps // max_lengths + 2))
    spares = [manager.new([token]) for token in self._tokens(ends)]
    tokens = self._tokens(self.steps)
    lengths, ends = lengths.tolist(), max_lengths.tolist()

    def run():
      for token in tokens:
        for slot in range(slots):
          if lengths[slot]:
            manager.extend(running[slot], [token + slot])
          else:
            running[slot] = spares.pop()
            manager.start(running[slot])
          lengths[slot] += 1
          if lengths[slot] == ends[slot]:
            manager.free(running[slot])
            lengths[slot] = 0
      self._running = [r for r, n in zip(running, lengths, strict=True) if n]

    return run

  def _admit(self):
    manager = self._manager
    prompts = [self._tokens(ops.PROMPT) for _ in range(self.steps)]
    expected = 0
    if self.case.mode == "hit":
      # The last token's page is never a hit.
      expected = ops.PROMPT - ops.PAGE_SIZE
      for prompt in prompts:
        self._start(prompt)
      self._release()

    def run():
      for prompt in prompts:
        request = manager.new(prompt)
        assert manager.start(request) == expected
        self._running.append(request)

    return run

  def _free(self):
    count, pages = FREED[self.case.op]
    self._fill([pages * ops.PAGE_SIZE] * (count * self.steps))
    requests, self._running = self._running, []
    free = self._manager.free

    def run():
      for request in requests:
        free(request)

    return run

  def _start(self, tokens: list[int]) -> None:
    self._running.append(self._manager.new(tokens))
    self._manager.start(self._running[-1])

  def _fill(self, lengths) -> None:
    for length in lengths:
      self._start(self._tokens(int(length)))

  def _release(self) -> None:
    """Fills and caches partial pages, then frees all requests."""
    for request in self._running:
      missing = -request.num_tokens % ops.PAGE_SIZE
      if missing:
        self._manager.extend(request, self._tokens(missing))
      self._manager.free(request)
    self._running = []

  def _age(self) -> None:
    config = self.case.config
    left = (PAGES - 1) // config.num_groups * ops.PAGE_SIZE
    while left > 0:
      self._fill([min(left, ops.PROMPT)])
      left -= ops.PROMPT
    self._release()

  def _tokens(self, count: int) -> list[int]:
    return self._rng.integers(0, 2**30, count).tolist()


def import_peers() -> tuple[dict[str, Any], dict[str, str]]:
  """Returns the modules of peers, and the version or failure of each peer."""
  modules, versions = {}, {}
  for name, module in PEERS.items():
    try:
      modules[name] = importlib.import_module(module)
      versions[name] = modules[name].VERSION
    except ImportError as error:
      versions[name] = f"skipped: {error}"
    print(f"{name}: {versions[name]}")
  return modules, versions


def measured(quick: bool, rounds: int) -> dict[str, Any]:
  """Measures and prints all rows, and returns them with the peers."""
  modules, versions = import_peers()
  cases = QUICK_CASES if quick else CASES
  print(
    f"\n{'op':12} {'mode':7} {'slots':>5} {'side':8} {'us min':>9}"
    f" {'median':>9} {'of jaxkv':>8}"
  )
  rows, states = [], {}
  for case in cases:
    config = case.config
    if config not in states:
      # Keeps only one state, to bound the memory.
      states = {
        config: ops.full_cache(config, np.random.default_rng(case.slots))
      }
    ours = jaxkv_side(case, states[config])
    sides: dict[str, Any] = {"jaxkv": ours}
    for name, module in modules.items():
      sides[name] = PeerSide(module.Manager, case, ours.op.steps)
    new = timed(case, sides, rounds)
    for row in new:
      print_row(row, new[0])
    rows += new
  return {"peers": versions, "rows": rows}


def timed(
  case: Case, sides: dict[str, Any], rounds: int
) -> list[dict[str, Any]]:
  """Times sides in turns, and returns their rows."""
  for side in sides.values():
    side.round(record=False)
  # The heap is frozen, because the collector would scan all managers' requests.
  gc.collect()
  gc.freeze()
  for _ in range(rounds):
    for side in sides.values():
      side.round(record=True)
  gc.unfreeze()
  dims = {"pages": PAGES, "page_size": ops.PAGE_SIZE}
  return [
    {**case._asdict(), **dims, "side": name, **side.times()}
    for name, side in sides.items()
  ]


def print_row(row: dict[str, Any], ours: dict[str, Any]) -> None:
  ratio = row["us_median"] / ours["us_median"]
  print(
    f"{row['op']:12} {row['mode']:7} {row['slots']:5} {row['side']:8}"
    f" {row['us_min']:9.1f} {row['us_median']:9.1f} {ratio:8.1f}",
    flush=True,
  )


if __name__ == "__main__":
  command.run(
    __doc__,
    measured,
    rounds=15,
    quick_rounds=3,
    not_measured="the rest of a scheduler, uploads of block tables,"
    " compilation, dispatch, K/V memory, the model",
  )
