"""A pool of workers."""

import collections
import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxkv._src.arrays.arguments import as_count
from jaxkv._src.arrays.arguments import as_int
from jaxkv._src.arrays.arguments import as_int32
from jaxkv._src.arrays.arguments import as_seconds
from jaxkv._src.arrays.arguments import check_type
from jaxkv._src.arrays.arguments import refuse
from jaxkv._src.engine.config import RolloutConfig
from jaxkv._src.engine.queue.requests import Requests
from jaxkv._src.service.samples import PromptSamples
from jaxkv._src.transfer.exported import Exported
from jaxkv._src.workers.prompts import Prompt
from jaxkv._src.workers.prompts import check_joinable
from jaxkv._src.workers.prompts import join
from jaxkv._src.workers.prompts import join_like
from jaxkv._src.workers.prompts import prefixes_of
from jaxkv._src.workers.prompts import split
from jaxkv._src.workers.routing import choose
from jaxkv._src.workers.worker import Worker
from jaxkv._src.workers.worker_state import WorkerState

_LOGGER = logging.getLogger("jaxkv")

_LOOKAHEAD = 128
"""The number of waiting prompts from which a worker chooses."""


class Pool:
  """Runs a stream of prompts on workers, which are engines.

  A prompt waits for the worker that has its longest prefix, unless another
  worker needs it to keep its slots busy. Otherwise workers take prompts in the
  order of `submit`; `Requests.priority` orders the sequences of one worker. If
  a worker fails, its prompts run again on any worker, with the same ids, so
  equal weights give them equal samples. Each prompt is returned once. The place
  of the worker gets a new one after a pause. The pool stops only if no place is
  left.

  Each worker is called from its own thread, so workers never wait for each
  other. Use the pool in a `with` statement, or call `close`.

    with workers.Pool(make, 4, config=config) as pool:
      pool.submit(requests)
      ended = list(pool.results())
  """

  def __init__(
    self,
    make: Callable[[int], Worker],
    count: int,
    *,
    config: RolloutConfig,
    max_waiting: int = 1024,
    max_age: int | None = None,
    max_failures: int = 10,
    retry_pause: float = 1.0,
    max_retry_pause: float = 60.0,
    steps: int | None = None,
  ):
    """Starts a pool.

    Args:
      make: returns a new worker for a place (0, 1, ...), with the weights of
        version 0, and for the place of a worker that failed another one. With
        equal options and keys, a prompt gets the same samples on each worker;
        with equal secrets, pages can move. Only the pool may add sequences.
      count: the number of workers.
      config: the options of the engines; the pool needs `num_samples`.
      max_waiting: the maximum number of prompts that no worker has taken;
        `submit` blocks until there are fewer.
      max_age: a prompt runs again from its start if an unfinished sample has a
        token that was sampled more than this number of versions ago. None for
        no limit. If new weights come faster than samples end, prompts begin
        again without end.
      max_failures: the maximum number of failures at a place without a prompt
        that ends there in between. After one more, the pool gives up the place,
        as if it were removed. Each failure is logged as a warning.
      retry_pause: the seconds from the first failure at a place until the pool
        calls `make` again. Each further failure without a prompt that ends
        doubles the pause. Other workers go on meanwhile. With the default
        values, the pool gives up a place after five minutes of pauses.
      max_retry_pause: the longest pause, in seconds.
      steps: see `Engine.step`; prompts enter and leave between two calls.

    Raises:
      TypeError: `make` is not callable, `config` is not a `RolloutConfig`, or
        another argument is not a number.
      ValueError: a number is out of range.
    """
    if not callable(make):
      refuse(TypeError, "make", "a function from a place to a new worker", make)
    check_type("config", config, RolloutConfig, "a RolloutConfig")
    self._make = make
    self._config = config
    self._max_waiting = as_count("max_waiting", max_waiting, 1)
    self._max_age = None if max_age is None else as_count("max_age", max_age, 0)
    self._max_failures = as_count("max_failures", max_failures, 0)
    self._retry_pause = as_seconds("retry_pause", retry_pause)
    self._max_retry_pause = as_seconds("max_retry_pause", max_retry_pause)
    self._steps = None if steps is None else as_count("steps", steps, 1)
    self._changed = threading.Condition()
    self._states: list[WorkerState] = []
    self._waiting: dict[int, Prompt] = {}
    self._finished: collections.deque[PromptSamples] = collections.deque()
    self._params: Any = None
    self._version = self._next_id = 0
    # The digest of the first worker's weights of version 0.
    self._digest: tuple[int, ...] | None = None
    # The first prompt, whose optional fields all others must have.
    self._first: Any = None
    # The ids of prompts that have not ended.
    self._unfinished: set[int] = set()
    # Set when the pool is closed or has failed.
    self._error: RuntimeError | None = None
    for _ in range(as_count("count", count, 1)):
      self.add()

  def __enter__(self) -> "Pool":
    return self

  def __exit__(self, *error: Any) -> None:
    self.close()

  @property
  def num_waiting(self) -> int:
    """The number of prompts that no worker has taken."""
    return len(self._waiting)

  def add(self) -> int:
    """Adds a worker, and returns its place.

    Raises:
      RuntimeError: the pool is closed or has failed, see `results`.
    """
    with self._changed:
      self._check()
      state = WorkerState(len(self._states), self._serve)
      # The thread first waits for the lock, which this thread holds.
      state.thread.start()
      self._states.append(state)
      return state.place

  def remove(self, place: int, timeout: float | None = 60.0) -> None:
    """Removes a worker; other workers then run its prompts to their end.

    They continue its sequences, which it exports after the call that it is in.
    Returns at once. A worker can be removed again, with a shorter timeout.

    Args:
      place: the place of the worker.
      timeout: seconds until a worker that has not exported its sequences, for
        example because a call does not return, is left behind: its prompts
        begin again on other workers, it is closed, and what its calls still
        return is ignored. None for no limit.

    Raises:
      TypeError: `place` is not an int, or `timeout` is not a number.
      ValueError: `place` never had a worker, or has the last one; or `timeout`
        is out of range.
    """
    place = as_int("place", place)
    if timeout is not None:
      timeout = as_seconds("timeout", timeout)
    with self._changed:
      places = [state.place for state in self._states if not state.leaves]
      if not 0 <= place < len(self._states):
        raise ValueError(f"`place` must be one of {places}, got {place}.")
      if places == [place]:
        raise ValueError("`place` must not be the last worker; add one first.")
      state = self._states[place]
      state.leaves = True
      self._changed.notify_all()
    if timeout is not None:
      threading.Thread(
        target=self._leave_behind, args=(state, timeout), daemon=True
      ).start()

  def _leave_behind(self, state: WorkerState, timeout: float) -> None:
    """Waits until a worker has no prompts; takes them away after a timeout."""
    with self._changed:
      self._changed.wait_for(lambda: self._error or not state.prompts, timeout)
      if self._error or not state.prompts:
        return
      state.is_left_behind = True
      self._put_back(state, list(state.prompts))
    _LOGGER.warning(
      "The worker of place %d did not export its sequences within %g s.",
      state.place,
      timeout,
    )
    # Outside of the lock, because the worker may not answer.
    state.close()

  def submit(self, requests: Requests, ids: Any = None) -> list[int]:
    """Adds prompts; blocks while `max_waiting` prompts wait.

    After an interrupt, the prompts that were added still run.

    Args:
      requests: P prompts, see `jaxkv.rollout.Requests`. All prompts of a pool
        must have the same optional fields, and the same `StopStrings`.
      ids: int32[P], the id of each prompt's first sample; the other samples
        have the next G - 1 ids. Without `Sampling.seed`, a sample's random key
        depends on its id. None to continue after the largest id so far.

    Returns:
      The ids of the prompts.

    Raises:
      TypeError: `requests` is not a `Requests`, or an array has a wrong dtype.
      ValueError: an array has a wrong shape, a length or id is out of range, an
        id is in use, or the optional fields or stop strings are not those of
        the first prompts. A prompt that is not valid for another reason, see
        `jaxkv.rollout.submit`, stops the pool later, see `results`.
      RuntimeError: the pool is closed or has failed, see `results`.
    """
    samples = self._config.num_samples
    parts = split(requests, self._config)
    with self._changed:
      if self._first is not None:
        check_joinable(parts[0], self._first)
      if ids is None:
        ids = [self._next_id + row * samples for row in range(len(parts))]
      ids = as_int32("ids", ids, (len(parts),), ", one for each prompt")
      ids = ids.tolist()
      highest = 2**31 - 1 - samples
      distances = np.diff(np.sort([*self._unfinished, *ids]))
      if np.any(distances < samples) or min(ids) < 0 or max(ids) > highest:
        raise ValueError(
          f"`ids` must be at least {samples} apart, from 0 to {highest} and "
          f"not in use, got {ids}."
        )
      self._first = self._first or parts[0]
      self._unfinished.update(ids)
      self._next_id = max(self._next_id, max(ids) + samples)
      num_added = 0
      try:
        for number, part in zip(ids, parts, strict=True):
          self._wait_for(lambda: len(self._waiting) < self._max_waiting)
          self._check()
          self._waiting[number] = Prompt(number, part, prefixes_of(part))
          num_added += 1
          self._changed.notify_all()
      finally:
        # After an interrupt, `results` must not wait for the other prompts.
        self._unfinished.difference_update(ids[num_added:])
        self._changed.notify_all()
    return ids

  def results(self) -> Iterator[PromptSamples]:
    """Yields prompts as they end, until all submitted prompts have ended.

    Raises:
      RuntimeError: the pool is closed, or it has stopped because every place
        failed too often or a worker refused a prompt. It is raised after the
        prompts that have ended.
    """
    while True:
      with self._changed:
        self._wait_for(lambda: self._finished or not self._unfinished)
        if not self._finished:
          self._check()
          return
        samples = self._finished.popleft()
      yield samples

  def update_weights(self, params: Any) -> int:
    """Gives new weights to all workers, and returns their version.

    A `step` of a worker that runs or is about to run may still use the old
    weights. All later calls use the new weights. The pool and its workers keep
    `params`, so a trainer that donates its weights must pass a copy.

    Raises:
      RuntimeError: the pool is closed or has failed, see `results`.
    """
    with self._changed:
      self._check()
      self._version += 1
      # A new tree, so that the caller can change the old one, and workers can
      # tell updates apart by identity.
      self._params = jax.tree.map(lambda leaf: leaf, params)
      self._changed.notify_all()
      return self._version

  def close(self, timeout: float = 60.0) -> None:
    """Ends all threads. Unfinished prompts are lost.

    Args:
      timeout: seconds to wait for calls of workers. After that, workers that
        are still in a call are closed, which kills a Ray actor, and their
        threads end when the calls return.
    """
    self._end("The pool is closed.")
    end = time.monotonic() + timeout
    for state in self._states:
      if state.is_left_behind:
        continue
      state.thread.join(max(end - time.monotonic(), 0.0))
      # A Ray actor that waits for resources returns only when it is killed.
      if state.thread.is_alive():
        state.close(timeout=1.0)

  def _end(self, message: str, cause: BaseException | None = None) -> None:
    """Ends all threads, and all calls with a RuntimeError."""
    with self._changed:
      self._error = RuntimeError(message)
      self._error.__cause__ = cause
      self._changed.notify_all()

  def _check(self) -> None:
    if self._error is not None:
      raise self._error

  def _wait_for(self, condition: Callable[[], Any]) -> None:
    """Waits for a condition, or for the end of the pool."""
    self._changed.wait_for(lambda: self._error or condition())

  def _serve(self, state: WorkerState) -> None:
    """Runs the workers of a place; the target of its thread."""
    while self._waits_for_work(state):
      try:
        if state.worker is None:
          # The pool may be closed meanwhile, so the loop waits again.
          state.worker = self._make(state.place)
          self._check_weights(state, state.worker)
        else:
          self._serve_once(state, state.worker)
      # BaseException, because SystemExit would silently end the thread.
      except BaseException as error:
        # `close` and `remove` end calls, which then fail.
        if self._error is None and not state.is_left_behind:
          self._fail(state, error)
        state.close()
        self._pause(state)
    state.close()

  def _waits_for_work(self, state: WorkerState) -> bool:
    """Waits for work; returns False if there will be none."""
    with self._changed:
      self._wait_for(lambda: state.leaves or state.prompts or self._waiting)
      has_left = state.leaves and not state.prompts
      return not (self._error or has_left)

  def _check_weights(self, state: WorkerState, worker: Worker) -> None:
    """Stops the pool unless a new worker has the weights of the first one."""
    # After an update, each worker gets the pool's weights first.
    digest = None if self._version else worker.weights_digest()
    with self._changed:
      self._digest = self._digest or digest
      is_same = self._version > 0 or digest == self._digest
    if not is_same:
      self._end(
        "The pool has stopped: `make` must return workers with equal weights, "
        f"got others in place {state.place}."
      )

  def _serve_once(self, state: WorkerState, worker: Worker) -> None:
    self._update(state, worker)
    if state.leaves:
      exported = worker.export()
      with self._changed:
        self._put_back(state, list(state.prompts), exported)
      return
    self._take(state, worker)
    if not state.prompts:
      return
    worker.step(self._steps)
    ended = worker.harvest()
    with self._changed:
      for samples in ended:
        state.pop(samples.id)
        self._finished.append(samples)
        self._unfinished.remove(samples.id)
        state.num_failures = 0
      self._changed.notify_all()

  def _update(self, state: WorkerState, worker: Worker) -> None:
    with self._changed:
      params, version = self._params, self._version
    if state.version == version:
      return
    dropped = worker.update_weights(
      params, version=version, max_age=self._max_age
    )
    with self._changed:
      state.version = version
      self._put_back(state, dropped)

  def _put_back(
    self, state: WorkerState, ids: list[int], exported: Exported | None = None
  ) -> None:
    """Makes prompts of a worker wait again, before all others.

    They continue from `exported`, or begin again if it is None.
    """
    prompts = {n: state.pop(n)._replace(exported=exported) for n in ids}
    self._waiting = prompts | self._waiting
    self._changed.notify_all()

  def _take(self, state: WorkerState, worker: Worker) -> None:
    """Gives waiting prompts to a worker that has room for them."""
    room = worker.room()
    with self._changed:
      # Reads more prompts than fit, as some may have longer prefixes elsewhere.
      waiting = list(itertools.islice(self._waiting.values(), _LOOKAHEAD))
    if not waiting or not room.prompts:
      return
    joined = join([prompt.requests for prompt in waiting])
    num_cached = worker.match(
      Requests(joined.tokens, joined.lengths, salts=joined.salts)
    )
    cached = {p.id: int(n) for p, n in zip(waiting, num_cached, strict=True)}
    with self._changed:
      state.cached = cached
      # The worker may have been removed in the meantime, and left behind.
      if state.leaves:
        return
      # Other workers may have taken some prompts.
      waiting = [self._waiting[n] for n in cached if n in self._waiting]
      peers = [s for s in self._states if s is not state and s.takes_prompts]
      chosen = choose(waiting, room, state, peers)
      for prompt in chosen:
        del self._waiting[prompt.id]
        # If it does not enter, or the worker fails, it begins again.
        state.add(prompt._replace(exported=None))
      self._changed.notify_all()
    entered = self._give(state, worker, chosen)
    with self._changed:
      refused = [prompt.id for prompt in chosen if prompt.id not in entered]
      self._put_back(state, refused)

  def _give(
    self, state: WorkerState, worker: Worker, prompts: list[Prompt]
  ) -> set[int]:
    """Imports or submits prompts; returns the ids of those that entered."""
    entered: set[int] = set()
    # One call for the sequences of each export, and one for new prompts.
    for exported in {id(p.exported): p.exported for p in prompts}.values():
      part = [p for p in prompts if p.exported is exported]
      ids = [prompt.id for prompt in part]
      if exported is not None and state.may_continue(exported, self._max_age):
        # A new engine may lack stop strings; then prompts begin again.
        with contextlib.suppress(ValueError):
          entered.update(worker.import_sequences(exported, ids))
          continue
      try:
        requests = join_like(part, self._first, self._config)
        out = worker.submit(requests, ids=ids)
      except ValueError as error:
        if state.is_left_behind:
          raise
        # Every worker would refuse the prompt.
        self._end(f"The pool has stopped: {error}", error)
        break
      entered.update(set(ids) & set(out.tolist()))
    return entered

  def _fail(self, state: WorkerState, error: BaseException) -> None:
    """Puts back the prompts of a worker that failed, to begin again."""
    _LOGGER.warning(
      "The worker of place %d failed.", state.place, exc_info=error
    )
    with self._changed:
      self._put_back(state, list(state.prompts))
      state.cached = {}
      state.version = 0
      state.num_failures += 1
      if state.leaves or state.num_failures <= self._max_failures:
        return
      state.leaves = True
      is_last = all(peer.leaves for peer in self._states)
    message = (
      f"place {state.place} failed {state.num_failures} times before a prompt "
      f"ended: {error}"
    )
    if is_last:
      self._end(f"The pool has stopped: no place is left; {message}", error)
    else:
      _LOGGER.warning("The pool goes on without a place: %s", message)

  def _pause(self, state: WorkerState) -> None:
    """Waits after a failure; the end of the place or pool ends the pause."""
    seconds = state.pause(self._retry_pause, self._max_retry_pause)
    with self._changed:
      self._changed.wait_for(lambda: self._error or state.leaves, seconds)
