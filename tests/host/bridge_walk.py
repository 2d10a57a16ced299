"""Random walks of a manager between the host and device verbs.

Each step runs on a manager, either as a host call or as verbs on its device
state, which the manager then takes back. A second cache can make the same steps
with verbs alone, without ever leaving the device: both must agree.
"""

import random
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv._src.cache.pool import free_queue
from jaxkv.host import CacheManager
from jaxkv.host import Request
from tests.host.fuzz_setups import Setup
from tests.host.scheduling import move_rows

_VOCABULARY = 3
_SLOTS = 4

Verb = Callable[[jaxkv.CacheState], tuple[jaxkv.CacheState, Any]]


class Walk:
  """A manager, and a cache that never leaves the device.

  Attributes:
    manager: the manager.
    device_state: the state of the second cache; None for a walk without it.
    requests: the requests that hold pages, by slot.
    num_switches: changes between host and device.
  """

  def __init__(self, setup: Setup, policy: str, seed: int, is_paired=True):
    key = np.arange(4, dtype=np.uint32) + np.uint32(seed)
    arguments = setup.arguments(policy)
    arguments.pop("watermark", None)
    self.manager = CacheManager(**arguments, max_requests=_SLOTS, key=key)
    self.config = self.manager.config
    self.device_state = None
    if is_paired:
      self.device_state = jaxkv.init(self.config, jnp.asarray(key))
    self.requests: dict[int, Request] = {}
    self.num_switches = self._count = 0
    self._longest = setup.max_model_len
    self._pinned: list[int] = []
    self._draws = random.Random(seed)
    self._finished = [self._tokens(self._longest)]

  def step(self) -> str:
    """Makes one step; returns its name."""
    full = len(self.requests) == _SLOTS
    moves = {
      self._admit: 0 if full else 4,
      self._decode: 6 if self.requests else 0,
      self._free: 1 if self.requests else 0,
      self._fork: 1 if self.requests and not full else 0,
      self._truncate: 1 if self.requests else 0,
      self._touch: 1,
      self._unpin: 1 if self._pinned else 0,
      self._evict: 1,
      self._reset: 1,
    }
    move = self._draws.choices([*moves], [*moves.values()])[0]
    # Else the manager would refuse hits on states of the current step.
    self.manager.new_step_starts()
    move()
    return move.__name__

  def _make(
    self,
    verbs: list[Verb],
    call: Callable[[], bool] | None = None,
    request: tuple[int, Request] | None = None,
  ) -> None:
    """Makes a change as a host call, or by verbs until one of them fails.

    Args:
      verbs: the verbs.
      call: the host call, True if it succeeded; None if there is none.
      request: the slot that the verbs fill, and its request.
    """
    moves = None
    if call is not None and self._draws.random() < 0.5:
      ok = call()
      if self.config.offload_pages:
        moves = move_rows(self.manager.take_moves())
    else:
      self.num_switches += 2
      state, ok, _ = _run(self.manager.state, verbs)
      names = dict([request]) if request and ok else {}
      released = self.manager.take(state, names)
      missing_names = {req.request_id for req in self.requests.values()} - set(
        self.manager.request_ids()
      )
      assert set(released) == missing_names
    if self.device_state is not None:
      self.device_state, device_ok, outs = _run(self.device_state, verbs)
      assert ok == device_ok
      if moves is not None:
        assert moves == [row for x in outs for row in move_rows(x.moves)]
    self._ok = ok

  def _tokens(self, count: int) -> list[int]:
    return [self._draws.randrange(_VOCABULARY) for _ in range(count)]

  def _padded(self, tokens: list[int]) -> list[list[int]]:
    return [tokens + [0] * (self._longest - len(tokens))]

  def _name(self) -> str:
    self._count += 1
    return f"r{self._count}"

  def _admit(self) -> None:
    earlier = self._draws.choice(self._finished)
    length = max(self._draws.randint(0, len(earlier)) for _ in range(2))
    tokens = earlier[:length] + self._tokens(self._draws.randint(1, 3))
    request = Request(self._name(), tokens[: self._longest - 2])
    tokens = request.token_ids
    length = request.num_tokens
    # Vacant slots may differ in order, so the manager chooses.
    slot = self.manager._state.vacant[-1]
    pages, num_hit = self.manager.get_computed_pages(request)

    def call():
      new = self.manager.allocate_slots(
        request, length - num_hit, num_hit, pages
      )
      return new is not None

    def commit(state):
      count = length - int(state.length[slot])
      suffix = self._padded(tokens[length - count :])
      return jaxkv.commit(state, suffix, [count], slots=[slot])

    self._make(
      [
        lambda state: jaxkv.admit(
          state, [slot], self._padded(tokens), [length]
        ),
        commit,
      ],
      call,
      (slot, request),
    )
    if not self._ok:
      return
    request.num_computed_tokens = length
    request.status = "running"
    self.requests[slot] = request

  def _decode(self) -> None:
    slot = self._draws.choice([*self.requests])
    request = self.requests[slot]
    room = self._longest - request.num_tokens
    if not room:
      self._free()
      return
    old_length = request.num_tokens
    count = self._draws.randint(1, min(room, 5))
    new = self._tokens(count)
    request.token_ids += new
    self._make(
      [
        lambda state: jaxkv.recycle(state, lengths=[old_length], slots=[slot]),
        lambda state: jaxkv.allocate(state, [count], slots=[slot]),
        lambda state: jaxkv.commit(
          state, self._padded(new), [count], slots=[slot]
        ),
      ],
      lambda: self.manager.allocate_slots(request, count) is not None,
    )
    if not self._ok:
      del request.token_ids[old_length:]
      return
    request.num_computed_tokens += count

  def _free(self) -> None:
    slot = self._draws.choice([*self.requests])
    request = self.requests[slot]
    self._finished = [*self._finished[-6:], list(request.token_ids)]

    def call():
      self.manager.free(request)
      return True

    self._make([lambda state: jaxkv.free(state, slots=[slot])], call)
    del self.requests[slot]

  def _fork(self) -> None:
    source = self._draws.choice([*self.requests])
    target = self.manager._state.vacant[-1]
    parent = self.requests[source]
    child = Request(
      self._name(),
      list(parent.token_ids),
      num_prompt_tokens=parent.num_prompt_tokens,
      num_computed_tokens=parent.num_computed_tokens,
      status="running",
    )
    self._make(
      [lambda state: jaxkv.fork(state, [source], [target])],
      request=(target, child),
    )
    if self._ok:
      self.requests[target] = child

  def _truncate(self) -> None:
    slot = self._draws.choice([*self.requests])
    request = self.requests[slot]
    length = self._draws.randint(1, request.num_tokens)
    self._make([lambda state: jaxkv.truncate(state, [length], slots=[slot])])
    if self._ok:
      del request.token_ids[length:]
      request.num_computed_tokens = length

  def _cached(self) -> list[int]:
    return sorted(self.manager.cached_page_ids())

  def _touch(self) -> None:
    # The manager has no call that moves a page to the device to hold it.
    pages = self._cached()
    cached = [page for page in pages if page < self.config.total_pages]
    if not cached or len(self._pinned) > 2:
      return
    page = self._draws.choice(cached)

    def call():
      self.manager.pages.hold([page])
      return True

    self._make([lambda state: jaxkv.touch(state, [page])], call)
    assert self._ok
    self._pinned.append(page)

  def _unpin(self) -> None:
    page = self._pinned.pop()

    def call():
      self.manager.pages.release([page])
      return True

    self._make([lambda state: jaxkv.unpin(state, [page])], call)
    assert self._ok

  def _evict(self) -> None:
    cached = self._cached()
    if not cached:
      return
    page = self._draws.choice(cached)

    def call():
      self.manager.evict_pages([page])
      return True

    self._make([lambda state: jaxkv.evict(state, [page])], call)
    assert self._ok

  def _reset(self) -> None:
    if not self.requests and not self._pinned:
      self._make([jaxkv.reset_prefix_cache], self.manager.reset_prefix_cache)
      assert self._ok


def _run(
  state: jaxkv.CacheState, verbs: list[Verb]
) -> tuple[jaxkv.CacheState, bool, list[Any]]:
  """Runs verbs until one fails; returns the results of those that ran."""
  outs = []
  ok = True
  for verb in verbs:
    state, out = verb(state)
    outs.append(out)
    ok = bool(np.all(out.ok))
    if not ok:
      break
  state, _ = jaxkv.clear_error(state)
  return state, ok, outs


def differences(walk: Walk) -> list[str]:
  """Returns the fields in which the two caches differ."""
  assert walk.device_state is not None
  host_fields = _fields(walk.manager.state)
  return [
    f"{name}: {host_fields[name]}, on the device {value}"
    for name, value in _fields(walk.device_state).items()
    if host_fields[name] != value
  ]


def _fields(state: jaxkv.CacheState) -> dict[str, Any]:
  """Returns all fields on which later results depend, as lists."""
  pool = state.pool
  fields: dict[str, Any] = {
    "page_table": state.page_table,
    "num_pages": state.num_pages,
    "num_skipped_pages": state.num_skipped_pages,
    "length": state.length,
    "ref_count": pool.ref_count,
    "pin_count": pool.pin_count,
  }
  # A host call that refuses a request is no failed row, and the host does not
  # look for tokens that only some groups have.
  fields |= {
    f"stats.{name}": count
    for name, count in vars(state.stats).items()
    if name not in ("failed_rows", "unusable_tokens") and count is not None
  }
  is_occupied: Any = np.asarray(state.num_pages).any(axis=1)
  if state.hashes is not None and pool.index is not None:
    length = np.asarray(state.length)
    column = np.arange(state.config.alignment)[None]
    is_tail = column < (length % state.config.alignment)[:, None]
    is_tail &= is_occupied[:, None]
    fields["tail"] = np.where(is_tail, state.hashes.tail, 0)
    fields["chain"] = np.asarray(state.hashes.chain)[is_occupied]
    fields["root"] = np.asarray(state.hashes.root)[is_occupied]
    cached = jaxkv.cached_pages(state)
    fields["clock"] = pool.index.clock
    fields["keys and stamps"] = np.asarray(pool.index.entry)[cached, :5]
    fields["tokens"] = np.asarray(pool.index.tokens)[cached]
  lists = {name: np.asarray(value).tolist() for name, value in fields.items()}
  lists["free_pages"] = jaxkv.free_pages(state)
  lists["cached_pages"] = jaxkv.cached_pages(state)
  if pool.offload is not None:
    queue = free_queue.in_order(pool.offload.queue)
    lists["offload pages"] = np.asarray(queue).tolist()
  return lists
