"""A worker in this process."""

import dataclasses
import functools
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
from jaxkv._src.engine.hooks import vocab_size_of
from jaxkv._src.engine.queue import SequenceStatus
from jaxkv._src.engine.requests import Requests
from jaxkv._src.engine.requests import as_requests
from jaxkv._src.engine.requests import check_tokens
from jaxkv._src.engine.requests import take_prompts
from jaxkv._src.engine.results.generated import harvest
from jaxkv._src.engine.state import RolloutState
from jaxkv._src.engine.verbs.abort import abort
from jaxkv._src.engine.verbs.submit import submit
from jaxkv._src.engine.verbs.update_weights import update_weights
from jaxkv._src.service.prompts import padded_index
from jaxkv._src.service.samples import PromptSamples
from jaxkv._src.service.samples import split
from jaxkv._src.service.served_model import placed
from jaxkv._src.transfer.export import export
from jaxkv._src.transfer.exported import Exported
from jaxkv._src.transfer.import_sequences import import_sequences
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
        with `num_samples` 0. Only the pool may submit sequences. Each worker
        needs a state with its own cache and memory, which it donates.
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
    self._generate = functools.partial(
      _generate, model=model, process=process, draft=draft
    )
    self._vocab_size = vocab_size_of(model)
    self._until = Until(steps=jnp.int32(as_count("steps", steps, 1)))
    self._params = jax.tree.map(jnp.asarray, params)
    self._state = state

  def room(self) -> Room:
    """Returns the `Room` for further prompts."""
    samples = self._state.config.num_samples
    status = np.asarray(self._state.queue.status).reshape(-1, samples)
    prompts = int(np.sum(np.all(status == SequenceStatus.EMPTY, axis=1)))
    # A call of `advance` may end the sequences in all slots, so each slot needs
    # a waiting sequence too.
    unfinished = int(np.sum(status < SequenceStatus.DONE))
    slots = self._state.slots.size
    return Room(prompts, max(2 * slots - unfinished, 0), slots)

  def match(self, requests: Requests) -> np.ndarray:
    """Returns the number of cached tokens of each prompt, int32[P]."""
    padded = self._padded(requests)
    samples = self._state.config.num_samples
    matched = match(
      self._state.memory.cache,
      padded.tokens,
      padded.lengths,
      salts=None if padded.salts is None else padded.salts[::samples],
    )
    return np.asarray(matched.num_cached_tokens)[: len(requests.lengths)]

  def submit(self, requests: Requests, ids: list[int]) -> list[bool]:
    """Adds prompts to the queue; returns True for each one that was added."""
    padded = self._padded(requests)
    mask = np.arange(len(padded.lengths)) < len(ids)
    padded_ids = np.zeros(mask.shape, np.int32)
    padded_ids[mask] = ids
    self._state, out = _submit(self._state, padded, ids=padded_ids, mask=mask)
    refused = [
      f"{Status(code).name} for id {prompt_id}"
      for code, prompt_id in zip(out.code.tolist(), ids, strict=False)
      if code not in (Status.OK, Status.QUEUE_FULL)
    ]
    if refused:
      raise ValueError(
        f"`requests` must be valid prompts, got {', '.join(refused)}; see "
        "jaxkv.rollout.submit."
      )
    return np.asarray(out.ok)[mask].tolist()

  def _padded(self, requests: Requests) -> Requests:
    """Pads requests to one of few shapes, so that few sizes are compiled."""
    requests = as_requests(requests, self._state.config)
    check_tokens(
      "requests.tokens",
      requests.tokens,
      requests.lengths,
      vocab_size=self._vocab_size,
    )
    rows = padded_index(len(requests.lengths))
    requests = take_prompts(requests, rows, self._state.config.num_samples)
    # A prompt that is too long is refused by `submit`, and has no match.
    missing = max(self._state.queue.width - 1 - requests.tokens.shape[1], 0)
    tokens = np.pad(requests.tokens, ((0, 0), (0, missing)))
    return dataclasses.replace(requests, tokens=tokens)

  def advance(self) -> list[PromptSamples]:
    """Generates tokens; removes and returns the prompts that have ended."""
    self._state = self._generate(self._params, self._state, self._until)
    self._state, out = _harvest(self._state, whole_prompts=True)
    if not np.any(out.ok):
      return []
    results = jax.device_get(out.results)
    return split(results, self._state.config.num_samples)

  def update_weights(
    self, params: Any, version: int, max_age: int | None
  ) -> list[int]:
    """Replaces the weights, which keep their dtypes and devices.

    The K/V of the old weights is not reused.
    """
    dropped = [] if max_age is None else self._drop(version - max_age)
    while int(self._state.memory.cache.epoch) < version:
      self._state = _update_weights(self._state)

    self._params = placed(params, self._params)
    return dropped

  def _drop(self, oldest: int) -> list[int]:
    """Removes prompts with an unfinished token of a version before `oldest`."""
    queue = self._state.queue
    samples = self._state.config.num_samples
    status, versions, ids = jax.device_get(
      (queue.status, queue.versions, queue.ids)
    )
    is_unfinished = status < SequenceStatus.DONE
    is_old = np.any((versions >= 0) & (versions < oldest), axis=1)
    is_old = (is_old & is_unfinished).reshape(-1, samples).any(axis=1)
    if not is_old.any():
      return []
    is_removed = np.repeat(is_old, samples)
    # A mask over all rows has the same shape in each call.
    self._state, _ = _abort(self._state, ids, mask=is_removed & is_unfinished)
    self._state, _ = _harvest(self._state, mask=is_removed)
    return ids[::samples][is_old].tolist()

  def export(self) -> Exported:
    """Removes and returns all sequences, and the pages of running ones.

    Other sequences keep the pages that they share with running ones.
    """
    queue = self._state.queue
    cache = self._state.memory.cache
    ids, status, table = jax.device_get(
      (queue.ids, queue.status, cache.page_table)
    )
    # The export copies pages on the device, where a copy of the whole pool may
    # not fit. Multiples of 16, so that fewer sizes are compiled.
    max_pages = []
    for groups in cache.config.groups_of_pools:
      pages = table[:, np.asarray(groups)]
      num_held = np.unique(pages[pages < cache.config.no_page]).size
      max_pages.append(-(-num_held // 16) * 16)
    # Pages go to the first sequences.
    rows = np.argsort(status != SequenceStatus.RUNNING, kind="stable")
    exists = status[rows] != SequenceStatus.EMPTY
    self._state, exported = _export(
      self._state, ids[rows], mask=exists, max_pages=tuple(max_pages)
    )
    return jax.device_get(exported)

  def import_sequences(self, exported: Exported, ids: list[int]) -> list[int]:
    """Adds sequences of some prompts; returns the prompts that entered."""
    first = np.asarray(exported.queue.ids) - np.asarray(exported.sample)
    self._state, out = _import(self._state, exported, mask=np.isin(first, ids))
    # The samples of a prompt enter together, because they share rows.
    return sorted(set(first[np.asarray(out.ok)].tolist()))

  def close(self) -> None:
    """Releases the rollout and the weights."""
    vars(self).clear()


# At module level, so that workers with the same functions share programs.
_generate = jax.jit(
  generate, static_argnames=("model", "process", "draft"), donate_argnums=1
)
_submit = jax.jit(submit, donate_argnums=0)
_harvest = jax.jit(harvest, static_argnames="whole_prompts", donate_argnums=0)
_abort = jax.jit(abort, donate_argnums=0)
_update_weights = jax.jit(update_weights, donate_argnums=0)
_export = jax.jit(export, static_argnames="max_pages", donate_argnums=0)
_import = jax.jit(import_sequences, donate_argnums=0)
