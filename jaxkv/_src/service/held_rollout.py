"""The state of an engine, which its programs donate."""

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._src.arrays.arguments import as_count
from jaxkv._src.arrays.arguments import as_int32
from jaxkv._src.arrays.no_mesh import no_mesh
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import Status
from jaxkv._src.cache.state import init as init_cache
from jaxkv._src.engine.config import RolloutConfig
from jaxkv._src.engine.generate import Until
from jaxkv._src.engine.hooks import StaticFunction
from jaxkv._src.engine.memory import Memory
from jaxkv._src.engine.queue.queue import Queue
from jaxkv._src.engine.queue.queue import SequenceStatus
from jaxkv._src.engine.queue.requests import Requests
from jaxkv._src.engine.queue.requests import as_requests
from jaxkv._src.engine.queue.requests import check_fits
from jaxkv._src.engine.queue.requests import check_num_samples
from jaxkv._src.engine.state import RolloutState
from jaxkv._src.engine.state import init
from jaxkv._src.engine.verbs.update_weights import Policy
from jaxkv._src.kv.offload_memory import init_offload
from jaxkv._src.kv.pools import Pools
from jaxkv._src.service import programs
from jaxkv._src.service import prompts as prompt_arrays
from jaxkv._src.service import samples
from jaxkv._src.service.samples import PromptSamples
from jaxkv._src.service.samples import Room
from jaxkv._src.sharding import rollouts as on_mesh
from jaxkv._src.sharding.mesh_axes import MeshAxes

_NO_LIMIT = 2**30
_MAX_STEPS = 2**12
_SECONDS = 0.5
"""The time of a span of steps, after which the host looks at the results."""

_OPTIONAL_FIELDS = "sampling", "extra", "salts", "priority", "log_probs_from"


class HeldRollout:
  """A rollout whose programs update it in place, or an empty one after a fault.

  The caller is inside `locked` during each call.

  Attributes:
    streamed: the ids of the prompts of streams.
    ended: prompts of streams that were harvested for their rows.
    generation: increases when all sequences are replaced.
    version: the version of the weights.
    is_split: True if the state has several shards, see `MeshAxes.data`.
  """

  def __init__(
    self,
    config: RolloutConfig,
    cache: CacheConfig,
    *,
    axes: MeshAxes | None,
    num_prompts: int | None,
    init_kv: Callable[[], Any],
    key: jax.Array,
    secret: Any,
    first_sequence: int,
  ):
    """Creates a rollout without sequences.

    Args:
      config: the options of the rollout.
      cache: the sizes of the cache.
      axes: the mesh, with axes of type Auto; None for one device.
      num_prompts: the prompts for which the queue has room; None for enough
        that the slots stay busy.
      init_kv: makes the K/V memory, on its device.
      key: key[].
      secret: uint32[4], the secret of page keys; None for a random one.
      first_sequence: the id of the first sequence.
    """
    self._lock = threading.RLock()
    self.streamed: set[int] = set()
    self.ended: dict[int, PromptSamples] = {}
    self.generation = 0
    self.version = 0
    self.config = config
    self.cache = cache
    self._axes = axes
    self.is_split = axes is not None and axes.data is not None
    self._num_slots = cache.num_slots * (axes.num_shards if axes else 1)
    if num_prompts is None:
      num_prompts = -(-4 * self._num_slots // config.num_samples)
    self._num_prompts = as_count("num_prompts", num_prompts, 1)
    self._init_kv = init_kv
    # A key that is committed to another device could not be used on a mesh.
    self._key = key if axes is None else jax.device_put(key, axes.everywhere())
    # A random secret, so that nobody can construct equal page keys for
    # different tokens.
    if secret is None:
      secret = np.frombuffer(os.urandom(16), np.uint32)
    self._secret = jnp.asarray(secret)
    self._next_id = first_sequence
    self._span_steps = 8
    self._is_lent = False
    self._state: RolloutState | None = self._empty()

  @contextlib.contextmanager
  def locked(self) -> Iterator[None]:
    """Takes the lock of the engine, and leaves the mesh of the caller."""
    # In the contexts of other meshes, all programs would be compiled again.
    with self._lock, no_mesh(), jax.set_mesh(None):
      yield

  def read(self) -> RolloutState:
    """Returns the state, which the next `update` donates."""
    if self._state is None:
      raise RuntimeError("The engine is closed; make another one.")
    return self._state

  def lend(self) -> RolloutState:
    """Returns the state, which the next `update` copies and does not donate."""
    self._is_lent = True
    return self.read()

  def progress(self) -> programs.Progress:
    """Returns the ids, statuses and lengths, as NumPy arrays."""
    return jax.device_get(programs.read_progress(self.read()))

  def room(self) -> Room:
    """Returns the `Room` for further prompts."""
    status = self.progress().status.reshape(-1, self.config.num_samples)
    prompts = int(np.sum(np.all(status == SequenceStatus.EMPTY, axis=1)))
    # All running sequences may end in a step, so each slot needs a waiting
    # sequence too.
    unfinished = int(np.sum(status < SequenceStatus.DONE))
    needed = max(2 * self._num_slots - unfinished, 0)
    return Room(prompts, needed, self._num_slots)

  def match(self, requests: Requests) -> np.ndarray:
    """Returns the number of cached tokens of each prompt, int32[P]."""
    state = self.read()
    rows = prompt_arrays.padded(requests, self.config, self.config.max_length)
    salts = rows.salts
    if salts is not None:
      salts = salts[:: self.config.num_samples]
    counts = programs.match(
      state.memory.cache, rows.tokens, rows.lengths, salts, axes=self._axes
    )
    return np.asarray(counts)[: len(requests.lengths)]

  def new_tokens(self, first_columns: np.ndarray, count: int) -> np.ndarray:
    """Returns `count` tokens of each row from a column on, int32[Q, count]."""
    state = self.read()
    return np.asarray(programs.read_tokens(state, first_columns, count))

  def num_unfinished(self) -> int:
    """Returns the number of sequences that wait or run."""
    return int(np.sum(self.progress().status < SequenceStatus.DONE))

  def update(self, program: Callable, *arguments: Any, **options: Any) -> Any:
    """Calls a program that donates the state.

    Args:
      program: maps the state and the arguments to the new state and a result.
      *arguments: further arguments.
      **options: further arguments.

    Returns:
      The result, as NumPy arrays.

    Raises:
      RuntimeError: the program failed and the state is lost.
    """
    state = self.read()
    if self._is_lent:
      self._state = state = programs.copy(state, axes=self._axes)
      self._is_lent = False
    try:
      self._state, out = program(state, *arguments, axes=self._axes, **options)
      # Errors of a device appear when its results are read.
      return jax.device_get(out)
    except BaseException as error:
      if not _is_lost(self._state):
        raise
      self._restart()
      message = (
        "The engine lost its sequences and cached pages, because a program "
        "failed that had donated its state; it goes on with an empty cache."
      )
      if isinstance(error, Exception):
        raise RuntimeError(message) from error
      error.add_note(message)
      raise

  def submit(self, requests: Requests, ids: Any = None) -> np.ndarray:
    """Adds prompts to the queue, in a call of one of few shapes.

    The first samples get `ids`, int32[P]; None to continue after the last id.

    Returns:
      The id of each prompt's first sample; -1 for a prompt for which the queue
      has no room.  # int32[P]

    Raises:
      ValueError: a prompt is not valid.
    """
    self.adopt(requests)
    queue = self._queue()
    num_samples = self.config.num_samples
    num_prompts = len(requests.lengths)
    check_num_samples(requests, self.config, least=1)
    requests = prompt_arrays.with_salts(requests, queue, self.config)
    requests = prompt_arrays.padded(requests, self.config, queue.width)
    mask = np.arange(len(requests.lengths)) < num_prompts
    # After an interrupt, the queue can have later ids than were returned.
    self.count_ids()
    if ids is None:
      ids = self._next_id + np.arange(num_prompts, dtype=np.int32) * num_samples
    ids = np.asarray(as_int32("ids", ids, (num_prompts,), ", one for each"))
    ids = ids[prompt_arrays.padded_index(num_prompts)]
    out = self.update(programs.submit, requests, ids=ids, mask=mask)
    # Refused prompts use no ids.
    last_id = int(out.ids[:num_prompts].max(initial=-1))
    if last_id >= 0:
      self._next_id = max(self._next_id, last_id + num_samples)
    for index, code in enumerate(out.code[:num_prompts].tolist()):
      if code not in (Status.OK, Status.QUEUE_FULL):
        raise ValueError(
          f"`prompts[{index}]` must be valid, got {Status(code).name}; see "
          "jaxkv.rollout.submit."
        )
    return out.ids[:num_prompts]

  def advance(
    self,
    params: Any,
    functions: tuple[StaticFunction, ...],
    steps: int | None,
  ) -> int:
    """Generates tokens; returns the number of unfinished sequences.

    Args:
      params: the weights.
      functions: the model, the `Process` and the `Draft`.
      steps: the maximum number of model calls; None for about `_SECONDS`, or
        until as many sequences have ended as there are slots.
    """
    num_steps = self._span_steps if steps is None else steps
    max_ended = _NO_LIMIT
    if steps is None:
      num_ended = int(np.sum(_has_ended(self.progress().status)))
      max_ended = num_ended + self.cache.num_slots
    # Always both numbers, so that one program serves all calls.
    until = Until(steps=jnp.int32(num_steps), sequences=jnp.int32(max_ended))
    start_time = time.perf_counter()
    progress = self.update(programs.advance, params, until, functions=functions)
    if steps is None and progress.num_steps == num_steps:
      rate = num_steps / (time.perf_counter() - start_time)
      longest = min(2 * num_steps, _MAX_STEPS)
      self._span_steps = max(1, min(longest, round(_SECONDS * rate)))
    return int(np.sum(progress.status < SequenceStatus.DONE))

  def count_ids(self) -> None:
    """Makes new ids continue after all ids of the queue."""
    self._next_id = max(self._next_id, _largest(self.read().queue.next_id))

  def branch(self, ids: Sequence[int], num_branches: int) -> np.ndarray:
    """Copies sequences; returns the ids of the copies, int32[R, n]."""
    if not len(ids):
      return np.zeros((0, num_branches), np.int32)
    index = prompt_arrays.padded_index(len(ids))
    padded_ids = np.asarray(as_int32("ids", list(ids), (len(ids),)))[index]
    mask = np.arange(len(index)) < len(ids)
    parts = []
    for first_branch in range(0, num_branches, self.config.num_samples):
      count = min(num_branches - first_branch, self.config.num_samples)
      out = self.update(
        programs.branch, padded_ids, num_branches=count, mask=mask
      )
      first_ids = out.ids[: len(ids), None]
      copies = first_ids + np.arange(count, dtype=np.int32)
      parts.append(np.where(first_ids < 0, -1, copies))
    self.count_ids()
    return np.concatenate(parts, axis=1)

  def harvest(self) -> list[PromptSamples]:
    """Removes and returns ended prompts, except those of streams."""
    return self._harvest(of_streams=False)

  def harvest_streams(self) -> None:
    """Moves the ended prompts of all streams to `ended`."""
    self.ended |= {out.id: out for out in self._harvest(of_streams=True)}

  def _harvest(self, *, of_streams: bool) -> list[PromptSamples]:
    progress = self.progress()
    num_samples = self.config.num_samples
    status = progress.status.reshape(-1, num_samples)
    has_ended = np.any(_has_ended(status), axis=1)
    has_ended &= np.all(status >= SequenceStatus.DONE, axis=1)
    first_ids = progress.ids.reshape(-1, num_samples)[:, 0]
    has_ended &= np.isin(first_ids, list(self.streamed)) == of_streams
    if not has_ended.any():
      return []
    rows = np.repeat(has_ended, num_samples)
    out = self.update(programs.harvest, mask=rows, whole_prompts=True)
    return samples.split(out.results, num_samples)

  def next_version(self, version: int | None, first_version: int) -> int:
    """Returns the version of new weights; None is for the next one."""
    self.read()
    if version is None:
      return self.version + 1
    return as_count("version", version, first_version)

  def update_weights(
    self, policy: Policy, version: int, max_age: int | None
  ) -> list[int]:
    """Invalidates the pages; drops old prompts and returns their ids.

    A prompt is dropped if an unfinished sample has a token of a version before
    `version - max_age`; none is for None, and none of a stream.
    """
    dropped = [] if max_age is None else self._drop(version - max_age)
    for _ in range(version - self.version):
      self.update(programs.update_weights, policy=policy)
      self.version += 1
    return dropped

  def _drop(self, oldest_version: int) -> list[int]:
    queue = self.read().queue
    num_samples = self.config.num_samples
    versions = queue.versions.reshape(-1, self.config.max_length)
    versions, progress = jax.device_get((versions, self.progress()))
    status, ids = progress.status, progress.ids
    is_unfinished = status < SequenceStatus.DONE
    is_old = np.any((versions >= 0) & (versions < oldest_version), axis=1)
    is_old = (is_old & is_unfinished).reshape(-1, num_samples).any(axis=1)
    is_old &= ~np.isin(ids[::num_samples], list(self.streamed))
    if not is_old.any():
      return []
    is_dropped = np.repeat(is_old, num_samples)
    # A mask over all rows has the same shape in each call.
    self.update(programs.abort, ids, mask=is_dropped & is_unfinished)
    self.update(programs.harvest, mask=is_dropped, whole_prompts=True)
    return ids[::num_samples][is_old].tolist()

  def by_id(
    self, program: Callable, ids: Sequence[int], *rows: Any, **options: Any
  ) -> list[Status]:
    """Calls a verb of R sequences, padded to a power of two."""
    count = len(ids)
    if not count:
      return []
    index = prompt_arrays.padded_index(count)
    id_array = np.asarray(as_int32("ids", list(ids), (count,)))
    id_array, rows, options = jax.tree.map(
      lambda array: np.asarray(array)[index], (id_array, rows, options)
    )
    mask = np.arange(len(index)) < count
    out = self.update(program, id_array, *rows, mask=mask, **options)
    return [Status(code) for code in out.code[:count].tolist()]

  def replace(self, state: RolloutState | None) -> None:
    """Replaces the state, and frees the memory of the old one."""
    if self._state is not None and not self._is_lent:
      for leaf in jax.tree.leaves(self._state):
        leaf.delete()
    self._state = state
    self._is_lent = False
    self._forget()
    if state is not None:
      self._next_id = _largest(state.queue.next_id)
      self.version = _largest(state.memory.cache.epoch)

  def adopt(self, requests: Requests) -> None:
    """Gives the queue the optional fields of requests.

    Raises:
      ValueError: a sequence does not fit the cache; or the queue has sequences
        and lacks a field.
    """
    check_fits(requests, self.cache, self.config)
    self.adopt_fields(requests)

  def adopt_fields(self, fields: Requests) -> None:
    """Gives the queue optional fields, whatever the prompts."""
    state = self.read()
    queue = self._queue()
    template = prompt_arrays.without_samples(
      self._num_prompts, self.config, fields, queue
    )
    template = as_requests(template, self.config)
    if prompt_arrays.fits(template, queue):
      return
    if np.any(self.progress().status < SequenceStatus.EMPTY):
      raise ValueError(
        "`sampling` and other optional fields must be those of earlier calls "
        "while sequences are in the queue, got others; harvest them first."
      )
    memory = state.memory
    version = _largest(memory.cache.epoch)
    renewed = self._init(memory, template, version=version)
    counters = state.counters
    if (queue.log_probs_from is None) != (template.log_probs_from is None):
      # A call of the model then has other widths.
      counters = dataclasses.replace(counters, calls=renewed.counters.calls)
    self._state = dataclasses.replace(renewed, counters=counters, log=state.log)

  def _queue(self) -> Queue:
    """Returns the queue, with the fields that `adopt` reads of one shard."""
    queue = self.read().queue
    if not self.is_split:
      return queue
    own_fields = {name: getattr(queue, name) for name in _OPTIONAL_FIELDS}
    own_fields["tokens"] = queue.tokens
    of_first = jax.tree.map(lambda leaf: leaf[0], own_fields)
    return dataclasses.replace(queue, **of_first)

  def _restart(self) -> None:
    """Starts again with an empty cache, and the version of the weights."""
    self._state = None
    self._forget()
    state = self._empty()
    for _ in range(self.version):
      state, _ = programs.update_weights(state, policy="keep", axes=self._axes)
    self._state = state

  def _forget(self) -> None:
    """Makes the streams of earlier sequences raise an error."""
    self.generation += 1
    self.streamed.clear()
    self.ended.clear()

  def _empty(self) -> RolloutState:
    """Returns a state without sequences, with a new cache."""
    if self._axes is None:
      cache, kv = self._init_memory()
    else:
      cache, kv = on_mesh.init_memory(self._init_memory, axes=self._axes)
    offload = init_offload(kv, self.cache) if self.cache.offload_pages else None
    return self._init(
      Memory(cache=cache, kv=kv, offload=offload),
      prompt_arrays.without_samples(self._num_prompts, self.config),
    )

  def _init_memory(self) -> tuple[CacheState, Pools]:
    # A copy of the secret, because the state is donated.
    return init_cache(self.cache, jnp.copy(self._secret)), self._init_kv()

  def _init(
    self, memory: Memory, requests: Requests, version: Any = None
  ) -> RolloutState:
    arguments = memory.cache, memory.kv, requests, self._key, self.config
    options = {"first_sequence": self._next_id, "version": version}
    if self._axes is None:
      return init(*arguments, offload=memory.offload, **options)
    state = on_mesh.init(*arguments, axes=self._axes, **options)
    # The rows of each shard have ids of their own, of which none exists.
    next_id = state.queue.next_id * 0 + self._next_id
    queue = dataclasses.replace(state.queue, next_id=next_id)
    return dataclasses.replace(state, queue=queue)


def _largest(count: Any) -> int:
  """Returns a number, which all shards have; ids are those of any shard."""
  return int(np.max(jax.device_get(count)))


def _has_ended(status: Any) -> Any:
  """Returns True for ended sequences that are still in the queue."""
  is_ended = status >= SequenceStatus.DONE
  return is_ended & (status != SequenceStatus.EMPTY)


def _is_lost(state: RolloutState | None) -> bool:
  """Returns True if an array of a state was donated, or cannot be read."""
  if any(leaf.is_deleted() for leaf in jax.tree.leaves(state)):
    return True
  try:
    jax.block_until_ready(state)
  except jax.errors.JaxRuntimeError:
    return True
  return False
