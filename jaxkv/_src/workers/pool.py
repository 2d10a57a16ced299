"""A pool of workers."""

import collections
import itertools
import logging
import threading
import time
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import jax

from jaxkv._src.arrays.arguments import as_count
from jaxkv._src.arrays.arguments import as_int32
from jaxkv._src.engine.config import RolloutConfig
from jaxkv._src.engine.requests import Requests
from jaxkv._src.workers.member import Member
from jaxkv._src.workers.member import MovingPrompts
from jaxkv._src.workers.prompts import Prompt
from jaxkv._src.workers.prompts import check_joinable
from jaxkv._src.workers.prompts import join
from jaxkv._src.workers.prompts import prefixes_of
from jaxkv._src.workers.prompts import split
from jaxkv._src.workers.routing import Seen
from jaxkv._src.workers.routing import choose
from jaxkv._src.workers.worker import Group
from jaxkv._src.workers.worker import Worker

_LOGGER = logging.getLogger("jaxkv")

_LOOKAHEAD = 128
"""The number of waiting prompts from which a worker chooses."""


class _Refused(Exception):
  """A worker refused a prompt that is invalid on every worker."""


class Pool:
  """Runs a stream of prompts on workers.

  A prompt waits for the worker that has its longest prefix, unless another
  worker needs it to keep its slots busy. If a worker fails, its prompts run
  again on any worker, with the same ids, so equal weights give them equal
  samples. Each prompt is returned once.

  Each worker is called from its own thread, so workers never wait for each
  other. Use the pool in a `with` statement, or call `close`.

    with workers.Pool(make, 4, config=config) as pool:
      pool.submit(requests)
      for group in pool.results():
        ...
  """

  def __init__(
    self,
    make: Callable[[int], Worker],
    count: int,
    *,
    config: RolloutConfig,
    max_waiting: int = 1024,
    max_age: int | None = None,
    max_failures: int = 3,
  ):
    """Starts a pool.

    Args:
      make: returns a new worker for a place (0, 1, ...), with the weights of
        version 0. It is called again for the place of a worker that failed.
      count: the number of workers.
      config: the options of the workers' rollouts.
      max_waiting: the maximum number of prompts that no worker has taken;
        `submit` blocks until there are fewer.
      max_age: a prompt runs again from its start if an unfinished sample has a
        token that was sampled more than this number of versions ago. None for
        no limit. If new weights come faster than samples end, prompts begin
        again without end.
      max_failures: the maximum number of failures at a place without a group
        that ends there in between; one more stops the pool. Each failure is
        logged as a warning.
    """
    self._make, self._config = make, config
    self._max_waiting = as_count("max_waiting", max_waiting, 1)
    self._max_age = None if max_age is None else as_count("max_age", max_age, 0)
    self._max_failures = as_count("max_failures", max_failures, 0)
    self._changed = threading.Condition()
    self._waiting: collections.deque[Prompt] = collections.deque()
    self._moving: list[MovingPrompts] = []
    self._finished: collections.deque[Group] = collections.deque()
    self._params: Any = None
    self._version = self._next_id = 0
    # The first prompt, whose optional fields all others must have.
    self._first: Requests | None = None
    # The ids of all samples of prompts that have not ended.
    self._unfinished: set[int] = set()
    self._error: BaseException | None = None
    self._is_closed = False
    self._members: dict[int, Member] = {}
    self._threads: list[tuple[threading.Thread, Member]] = []
    self._next_place = 0
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
      place, self._next_place = self._next_place, self._next_place + 1
      member = self._members[place] = Member()
      thread = threading.Thread(
        target=self._serve, args=(place, member), daemon=True
      )
      self._threads.append((thread, member))
      thread.start()
    return place

  def remove(self, place: int) -> None:
    """Removes a worker; other workers then run its prompts to their end.

    Raises:
      ValueError: `place` has no worker, or the last one.
    """
    with self._changed:
      if place not in self._members:
        raise ValueError(
          f"`place` must be one of {sorted(self._members)}, got {place}."
        )
      if self._members[place].leaves:
        return
      if len([m for m in self._members.values() if not m.leaves]) < 2:
        raise ValueError("`place` must not be the last worker; add one first.")
      self._members[place].leaves = True
      self._changed.notify_all()

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
      ValueError: an array has a wrong shape, an id is out of range or in use,
        or the optional fields or stop strings are not those of the first
        prompts. A prompt that is not valid for `jaxkv.rollout.submit` stops the
        pool later, see `results`.
      RuntimeError: the pool is closed or has failed, see `results`.
    """
    samples, parts = self._config.num_samples, split(requests, self._config)
    with self._changed:
      if self._first is not None:
        check_joinable(parts[0], self._first)
      if ids is None:
        ids = range(
          self._next_id, self._next_id + len(parts) * samples, samples
        )
      ids = as_int32("ids", ids, (len(parts),), ", one for each prompt")
      ids = ids.tolist()
      numbers = [number + row for number in ids for row in range(samples)]
      is_used = len({*numbers} - self._unfinished) < len(numbers)
      if is_used or not all(0 <= number < 2**31 - 1 for number in numbers):
        raise ValueError(
          f"`ids` must be at least {samples} apart, from 0 to "
          f"{2**31 - 1 - samples} and not in use, got {ids}."
        )
      prompts = [
        Prompt(number, part, prefixes_of(part))
        for number, part in zip(ids, parts, strict=True)
      ]
      self._first = self._first or parts[0]
      self._unfinished.update(numbers)
      self._next_id = max([self._next_id, *(number + 1 for number in numbers)])
      num_added = 0
      try:
        for prompt in prompts:
          self._changed.wait_for(
            lambda: (
              self._error
              or self._is_closed
              or len(self._waiting) < self._max_waiting
            )
          )
          self._check()
          self._waiting.append(prompt)
          num_added += 1
          self._changed.notify_all()
      finally:
        # After an interrupt, `results` must not wait for the other prompts.
        self._unfinished.difference_update(numbers[num_added * samples :])
        self._changed.notify_all()
    return ids

  def results(self) -> Iterator[Group]:
    """Yields groups as they end, until all submitted prompts have ended.

    Raises:
      RuntimeError: the pool is closed, or it has stopped because a place failed
        too often or a worker refused a prompt. It is raised after the groups
        that have ended.
    """
    while True:
      with self._changed:
        self._changed.wait_for(
          lambda: (
            self._error
            or self._is_closed
            or self._finished
            or not self._unfinished
          )
        )
        if not self._finished:
          self._check()
          return
        group = self._finished.popleft()
      yield group

  def update_weights(self, params: Any) -> int:
    """Gives new weights to all workers, and returns their version.

    A `Worker.advance` that runs or is about to run may still use the old
    weights. All later calls use the new weights. The pool and its workers keep
    `params`, so a trainer that donates its weights must pass a copy.
    """
    with self._changed:
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
    with self._changed:
      self._is_closed = True
      self._changed.notify_all()
    end = time.monotonic() + timeout
    for thread, member in self._threads:
      thread.join(max(end - time.monotonic(), 0.0))
      # A Ray actor that waits for resources returns only when it is killed.
      if thread.is_alive():
        member.close()

  def _check(self) -> None:
    if self._is_closed:
      raise RuntimeError("The pool is closed.")
    if self._error is not None:
      raise RuntimeError(
        f"The pool has stopped: {self._error}"
      ) from self._error

  def _serve(self, place: int, member: Member) -> None:
    """Runs the workers of a place; the target of its thread."""
    while self._waits_for_work(member):
      try:
        if member.leaves:
          self._leave(place, member, member.worker)
          break
        if member.worker is None:
          member.worker = self._make(place)
          # The pool may have been closed meanwhile.
          continue
        self._serve_once(member, member.worker)
      except _Refused as error:
        with self._changed:
          self._error = error
          self._changed.notify_all()
      # BaseException, because SystemExit would silently end the thread.
      except BaseException as error:
        # `close` ends calls, which then fail.
        if not self._is_closed:
          self._replace(place, member, error)
        member.close()
    member.close()

  def _waits_for_work(self, member: Member) -> bool:
    """Waits for work; returns False if the pool is closed or has failed."""

    def has_work() -> bool:
      return bool(
        self._is_closed
        or self._error
        or member.leaves
        or member.prompts
        or self._waiting
        or self._moving
      )

    with self._changed:
      self._changed.wait_for(has_work)
      return not (self._is_closed or self._error)

  def _serve_once(self, member: Member, worker: Worker) -> None:
    self._update(member, worker)
    self._take_moving(member, worker)
    self._take_waiting(member, worker)
    if not member.prompts:
      return
    groups = worker.advance()
    if groups:
      member.num_failures = 0
    with self._changed:
      for group in groups:
        self._forget(member, group.id)
        self._finished.append(group)
        numbers = range(group.id, group.id + self._config.num_samples)
        self._unfinished.difference_update(numbers)
      self._changed.notify_all()

  def _forget(self, member: Member, number: int) -> Prompt:
    prompt = member.prompts.pop(number)
    member.seen.forget(prompt)
    return prompt

  def _put_back(self, prompts: list[Prompt]) -> None:
    """Puts prompts in front of the waiting prompts, in their order."""
    self._waiting.extendleft(reversed(prompts))

  def _update(self, member: Member, worker: Worker) -> None:
    with self._changed:
      params, version = self._params, self._version
    if member.version == version:
      return
    dropped = worker.update_weights(params, version, self._max_age)
    with self._changed:
      member.version = version
      self._put_back([self._forget(member, number) for number in dropped])

  def _take_moving(self, member: Member, worker: Worker) -> None:
    """Takes sequences of removed workers, if there is room."""
    if not self._moving or not worker.room().prompts:
      return
    with self._changed:
      # A worker with older weights must first get the new weights.
      if not self._moving or self._moving[-1].version > member.version:
        return
      moving = self._moving.pop()
    entered: list[int] = []
    # Not under newer weights, where tokens could exceed `max_age`.
    if self._max_age is None or moving.version == member.version:
      try:
        ids = list(moving.prompts)
        entered = worker.import_sequences(moving.exported, ids)
      except BaseException:
        with self._changed:
          self._moving.append(moving)
        raise
    with self._changed:
      for number in entered:
        prompt = member.prompts[number] = moving.prompts.pop(number)
        member.seen.running.update(prompt.prefixes)
      if moving.prompts and entered:
        self._moving.append(moving)
      else:
        # If none entered in spite of room, the prompts begin again.
        self._put_back(list(moving.prompts.values()))
      self._changed.notify_all()

  def _take_waiting(self, member: Member, worker: Worker) -> None:
    room = worker.room()
    with self._changed:
      # Reads more prompts than fit, as some may have longer prefixes elsewhere.
      waiting = list(itertools.islice(self._waiting, _LOOKAHEAD))
    if not waiting or not room.prompts:
      return
    joined = join([prompt.requests for prompt in waiting])
    num_cached = worker.match(
      Requests(joined.tokens, joined.lengths, salts=joined.salts)
    )
    cached = {p.id: int(n) for p, n in zip(waiting, num_cached, strict=True)}
    with self._changed:
      member.seen.cached = cached
      # Another worker may have taken some prompts in the meantime.
      ids = {prompt.id for prompt in self._waiting}
      others = [
        other.seen
        for other in self._members.values()
        if other is not member and not other.leaves
      ]
      waiting = [prompt for prompt in waiting if prompt.id in ids]
      chosen = choose(waiting, room, member.seen, others)
      taken = {prompt.id: prompt for prompt in chosen}
      self._waiting = collections.deque(
        prompt for prompt in self._waiting if prompt.id not in taken
      )
      member.prompts.update(taken)
      self._changed.notify_all()
    if not chosen:
      return
    try:
      joined = join([prompt.requests for prompt in chosen])
      entered = worker.submit(joined, list(taken))
    except ValueError as error:
      # Every worker would refuse the prompt.
      raise _Refused(str(error)) from error
    with self._changed:
      refused = [
        self._forget(member, prompt.id)
        for prompt, is_in in zip(chosen, entered, strict=True)
        if not is_in
      ]
      self._put_back(refused)

  def _leave(self, place: int, member: Member, worker: Worker | None) -> None:
    """Removes a place; other workers can then take its sequences."""
    moving = []
    if worker is not None and member.prompts:
      self._update(member, worker)
      exported = worker.export()
      moving = [MovingPrompts(exported, member.prompts, member.version)]
    with self._changed:
      self._moving += moving
      del self._members[place]
      self._changed.notify_all()

  def _replace(self, place: int, member: Member, error: BaseException) -> None:
    """Puts back the prompts of a worker that failed, to wait again."""
    _LOGGER.warning("The worker of place %d failed.", place, exc_info=error)
    with self._changed:
      self._put_back(list(member.prompts.values()))
      member.prompts, member.seen, member.version = {}, Seen(), 0
      member.num_failures += 1
      if member.num_failures > self._max_failures:
        self._error = RuntimeError(
          f"a worker failed {member.num_failures} times before a group ended: "
          f"{error}"
        )
        self._error.__cause__ = error
      self._changed.notify_all()
