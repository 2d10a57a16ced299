"""Generates samples of any number of prompts, as rows of the queue are free."""

from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxkv._src.engine.queue.queue import SequenceStatus
from jaxkv._src.engine.queue.requests import Requests
from jaxkv._src.engine.queue.requests import take_prompts
from jaxkv._src.service import programs
from jaxkv._src.service import prompts as prompt_arrays
from jaxkv._src.service.held_rollout import HeldRollout
from jaxkv._src.service.samples import NewTokens
from jaxkv._src.service.samples import PromptSamples


class Stream:
  """The prompts of one call of `Engine.stream`.

  The prompts belong to the stream until it yields them: no other call harvests
  them. If the caller does not read the stream to its end, they are aborted.
  """

  def __init__(
    self,
    held: HeldRollout,
    requests: Requests,
    advance: Callable[[], Any],
    *,
    reads_tokens: bool = False,
  ):
    """Creates a stream; its prompts enter the queue in `results`.

    Args:
      held: the rollout, with its lock.
      requests: the prompts.
      advance: generates tokens of all sequences for a while.
      reads_tokens: True to yield the new tokens of sequences after each call of
        `advance`.
    """
    self._held = held
    self._requests = requests
    self._num_samples = held.config.num_samples
    self._advance = advance
    self._reads_tokens = reads_tokens
    # The prompts in the queue, and the number of tokens of each of their
    # samples that were read.
    self._generation = held.generation
    self._running: set[int] = set()
    self._num_read: dict[int, int] = {}
    with held.locked():
      held.adopt(requests)

  def results(self) -> Iterator[PromptSamples | NewTokens]:
    """Yields prompts when they end."""
    num_entered = 0
    num_prompts = len(self._requests.lengths)
    try:
      while num_entered < num_prompts or self._running:
        with self._held.locked():
          self._check_generation()
          if num_entered < num_prompts:
            num_entered += self._enter(num_entered)
          self._advance()
          new_tokens = self._new_tokens() if self._reads_tokens else []
          ended = self._take_ended()
        yield from new_tokens
        yield from ended
    finally:
      self._abandon()

  def _enter(self, first_prompt: int) -> int:
    """Adds prompts while the queue has room; returns their number."""
    self._held.harvest_streams()
    stop_prompt = min(
      first_prompt + self._held.room().prompts, len(self._requests.lengths)
    )
    if stop_prompt == first_prompt:
      if not self._running and not self._held.num_unfinished():
        raise RuntimeError(
          "The engine has no room for a prompt, because ended sequences that "
          "`submit` added fill its queue; call `harvest`."
        )
      return 0
    part = take_prompts(
      self._requests, np.arange(first_prompt, stop_prompt), self._num_samples
    )
    ids = self._held.submit(part).tolist()
    self._running |= set(ids)
    self._held.streamed |= set(ids)
    for first_id, length in zip(ids, part.lengths.tolist(), strict=True):
      samples = range(first_id, first_id + self._num_samples)
      self._num_read.update((sample, length) for sample in samples)
    return stop_prompt - first_prompt

  def _check_generation(self) -> None:
    """Raises RuntimeError if the sequences of this stream are lost."""
    if self._generation != self._held.generation:
      self._running.clear()
      raise RuntimeError(
        "The sequences of this stream are lost, because a program failed, or "
        "`restore` or `close` replaced them; call `stream` again."
      )

  def _take_ended(self) -> list[PromptSamples]:
    """Removes and returns the prompts of this stream that have ended."""
    # Ended prompts of other callers stay in the queue, for their `harvest`.
    self._held.harvest_streams()
    ids = sorted(self._running & self._held.ended.keys())
    self._running -= set(ids)
    self._held.streamed -= set(ids)
    return [self._held.ended.pop(first_id) for first_id in ids]

  def _new_tokens(self) -> list[NewTokens]:
    """Reads the tokens of this stream that no earlier call read."""
    progress = self._held.progress()
    exists = progress.status != SequenceStatus.EMPTY
    lengths = progress.lengths
    # A sequence that restarted has fewer tokens than were read.
    num_read = np.asarray(
      [
        min(self._num_read.get(seq_id, length), length) if is_row else length
        for seq_id, length, is_row in zip(
          progress.ids.tolist(), lengths.tolist(), exists.tolist(), strict=True
        )
      ],
      np.int32,
    )
    count = int((lengths - num_read).max(initial=0))
    if not count:
      return []
    columns = prompt_arrays.power_of_two(count)
    tokens = self._held.new_tokens(num_read, columns)
    results = []
    for row in np.flatnonzero(lengths > num_read).tolist():
      seq_id = int(progress.ids[row])
      new = tokens[row, : lengths[row] - num_read[row]]
      results.append(NewTokens(seq_id, new))
      self._num_read[seq_id] = int(lengths[row])
    return results

  def _abandon(self) -> None:
    """Removes the prompts that the caller did not wait for."""
    if not self._running:
      return
    with self._held.locked():
      if self._generation == self._held.generation:
        ids = [
          first_id + sample
          for first_id in self._running
          for sample in range(self._num_samples)
        ]
        self._held.by_id(programs.abort, ids)
        self._take_ended()
