"""A worker in this process."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._src.arrays.arguments import as_count
from jaxkv._src.cache.state import Status
from jaxkv._src.cache.verbs.admit import match
from jaxkv._src.engine.generate import Until
from jaxkv._src.engine.generate import generate
from jaxkv._src.engine.hooks import Draft
from jaxkv._src.engine.hooks import Model
from jaxkv._src.engine.hooks import Process
from jaxkv._src.engine.queue import SequenceStatus
from jaxkv._src.engine.requests import Requests
from jaxkv._src.engine.results.generated import harvest
from jaxkv._src.engine.state import RolloutState
from jaxkv._src.engine.verbs.abort import abort
from jaxkv._src.engine.verbs.submit import submit
from jaxkv._src.engine.verbs.update_weights import update_weights
from jaxkv._src.transfer.export import export
from jaxkv._src.transfer.exported import Exported
from jaxkv._src.transfer.import_sequences import import_sequences
from jaxkv._src.workers.prompts import join
from jaxkv._src.workers.prompts import split
from jaxkv._src.workers.worker import Group
from jaxkv._src.workers.worker import Room


class LocalWorker:
  """A `Worker` that runs a rollout on devices of this process.

  It owns the state and donates it, so that calls update the pages in place.
  """

  def __init__(
    self,
    params: Any,
    state: RolloutState,
    *,
    model: Model,
    process: Process | None = None,
    draft: Draft | None = None,
    steps: int = 16,
  ):
    """Creates a worker of a rollout.

    All workers of a pool need rollouts with equal options and keys, so that a
    prompt gets the same samples on each; and caches with equal secrets, so that
    pages can move between workers.

    Args:
      params: the model's parameters. The worker keeps them, so do not donate
        them.
      state: a rollout of version 0 without sequences, such as one of prompts
        with `num_samples` 0. Only the pool may submit sequences.
      model: see `jaxkv.rollout.generate`.
      process: see `jaxkv.rollout.generate`.
      draft: see `jaxkv.rollout.generate`.
      steps: the maximum number of calls of the model in each `advance`. Prompts
        enter and results leave only between calls of `advance`.

    Raises:
      TypeError: `steps` is not an int.
      ValueError: `state` has sequences or another version, or `steps` is below
        1.
    """
    version = int(state.memory.cache.epoch)
    count = int(np.sum(np.asarray(state.queue.status) < SequenceStatus.EMPTY))
    # With another version, `update_weights` would keep K/V of old weights.
    if version or count:
      raise ValueError(
        "`state` must have version 0 and no sequences, got version "
        f"{version} and {count} sequences; make it of a new cache and of "
        "prompts with `num_samples` 0."
      )
    self._hooks = {"model": model, "process": process, "draft": draft}
    self._until = Until(steps=jnp.int32(as_count("steps", steps, 1)))
    self._params, self._state = jax.tree.map(jnp.asarray, params), state

  def room(self) -> Room:
    """Returns the `Room` for further prompts."""
    samples, queue = self._state.config.num_samples, self._state.queue
    status = np.asarray(queue.status).reshape(-1, samples)
    prompts = int(np.sum(np.all(status == SequenceStatus.EMPTY, axis=1)))
    # A call of `advance` may end the sequences in all slots, so each slot needs
    # a waiting sequence too.
    unfinished = int(np.sum(status < SequenceStatus.DONE))
    return Room(prompts, max(2 * self._state.slots.size - unfinished, 0))

  def match(self, requests: Requests) -> np.ndarray:
    """Returns the number of cached tokens of each prompt, int32[P]."""
    count, salts = len(requests.lengths), requests.salts
    rows = np.minimum(np.arange(_padded_size(count)), count - 1)
    tokens = np.asarray(requests.tokens)[rows]
    missing = self._state.queue.width - 1 - tokens.shape[1]
    if salts is not None:
      salts = np.asarray(salts)[rows * self._state.config.num_samples]
    num_cached = _match(
      self._state.memory.cache,
      np.pad(tokens, ((0, 0), (0, max(missing, 0)))),
      np.asarray(requests.lengths)[rows],
      salts,
    )
    return np.asarray(num_cached)[:count]

  def submit(self, requests: Requests, ids: list[int]) -> list[bool]:
    """Adds prompts to the queue; returns True for each one that was added."""
    requests, count = self._padded(requests)
    numbers = np.zeros(requests.lengths.shape, np.int32)
    numbers[:count] = ids
    mask = np.arange(numbers.size) < count
    self._state, out = _submit(self._state, requests, ids=numbers, mask=mask)
    refused = [
      f"{Status(code).name} for id {number}"
      for code, number in zip(out.code.tolist(), ids, strict=False)
      if code not in (Status.OK, Status.QUEUE_FULL)
    ]
    if refused:
      raise ValueError(
        f"`requests` must be valid prompts, got {', '.join(refused)}; see "
        "jaxkv.rollout.submit."
      )
    return np.asarray(out.ok)[:count].tolist()

  def _padded(self, requests: Requests) -> tuple[Requests, int]:
    """Pads requests to one of few shapes; also returns the original number."""
    count = len(requests.lengths)
    prompts = split(requests, self._state.config)
    prompts += prompts[-1:] * (_padded_size(count) - count)
    columns = self._state.queue.width - 1
    return join(prompts, columns), count

  def advance(self) -> list[Group]:
    """Generates tokens; removes and returns the groups that have ended."""
    self._state = _generate(
      self._params, self._state, self._until, **self._hooks
    )
    self._state, out = _harvest(self._state, groups=True)
    samples = self._state.config.num_samples
    is_ready = np.asarray(out.ok).reshape(-1, samples).any(axis=1)
    if not is_ready.any():
      return []
    results = jax.device_get(out.results)
    groups = []
    for number in np.flatnonzero(is_ready).tolist():
      rows = slice(number * samples, (number + 1) * samples)
      group = jax.tree.map(lambda array, rows=rows: array[rows], results)
      groups.append(Group(int(group.ids[0]), group))
    return groups

  def update_weights(
    self, params: Any, version: int, max_age: int | None
  ) -> list[int]:
    """Replaces the weights, which keep their dtypes and devices.

    The K/V of the old weights is not reused.
    """
    dropped = [] if max_age is None else self._drop(version - max_age)
    while int(self._state.memory.cache.epoch) < version:
      self._state = _update_weights(self._state)
    self._params = jax.tree.map(_like, self._params, params)
    return dropped

  def _drop(self, oldest: int) -> list[int]:
    """Removes groups with an unfinished token of a version before `oldest`."""
    queue, samples = self._state.queue, self._state.config.num_samples
    status, versions, ids = jax.device_get(
      (queue.status, queue.versions, queue.ids)
    )
    is_old = np.any((versions >= 0) & (versions < oldest), axis=1)
    is_old &= status < SequenceStatus.DONE
    groups = np.flatnonzero(is_old.reshape(-1, samples).any(axis=1))
    if not groups.size:
      return []
    rows = (groups[:, None] * samples + np.arange(samples)).reshape(-1)
    # A mask over all rows has the same shape in each call.
    is_removed = np.zeros(ids.shape, bool)
    is_removed[rows] = status[rows] != SequenceStatus.EMPTY
    unfinished = is_removed & (status < SequenceStatus.DONE)
    self._state, _ = _abort(self._state, ids, mask=unfinished)
    self._state, _ = _harvest(self._state, mask=is_removed)
    return ids[groups * samples].tolist()

  def export(self) -> Exported:
    """Removes and returns all sequences, and the pages of running ones.

    Other sequences keep the pages that they share with running ones.
    """
    queue, cache = self._state.queue, self._state.memory.cache
    ids, status, table = jax.device_get(
      (queue.ids, queue.status, cache.page_table)
    )
    # The export copies pages on the device, where a copy of the whole pool may
    # not fit. Multiples of 16, so that fewer sizes are compiled.
    num_held = np.unique(table[table < cache.config.no_page]).size
    max_pages = -(-num_held // 16) * 16
    # Pages go to the first sequences.
    rows = np.argsort(status != SequenceStatus.RUNNING, kind="stable")
    exists = status[rows] != SequenceStatus.EMPTY
    self._state, exported = _export(
      self._state, ids[rows], mask=exists, max_pages=max_pages
    )
    return jax.device_get(exported)

  def import_sequences(self, exported: Exported, ids: list[int]) -> list[int]:
    """Adds sequences of some prompts; returns the prompts that entered."""
    first = np.asarray(exported.queue.ids) - np.asarray(exported.sample)
    self._state, out = _import(self._state, exported, mask=np.isin(first, ids))
    # The samples of a prompt enter together, because they share a group.
    return sorted(set(first[np.asarray(out.ok)].tolist()))

  def close(self) -> None:
    """Releases the rollout and the weights."""
    del self._state, self._params


def _like(old: jax.Array, new: Any) -> jax.Array:
  """Returns new weights with the dtype and on the devices of the old ones."""
  # Another dtype would compile again, and change the log-probs.
  if new.dtype != old.dtype:
    new = new.astype(old.dtype)
  return jax.device_put(new, old.sharding)


def _padded_size(count: int) -> int:
  """Rounds up to a power of 2, so that few sizes are compiled."""
  return 1 << (count - 1).bit_length()


# At module level, so that workers with the same functions share programs.
_generate = jax.jit(
  generate, static_argnames=("model", "process", "draft"), donate_argnums=1
)
_submit = jax.jit(submit, donate_argnums=0)
_harvest = jax.jit(harvest, static_argnames="groups", donate_argnums=0)
_abort = jax.jit(abort, donate_argnums=0)
_update_weights = jax.jit(update_weights, donate_argnums=0)
_export = jax.jit(export, static_argnames="max_pages", donate_argnums=0)
_import = jax.jit(import_sequences, donate_argnums=0)


@jax.jit
def _match(cache: Any, tokens: Any, lengths: Any, salts: Any) -> jax.Array:
  return match(cache, tokens, lengths, salts=salts).num_cached_tokens
