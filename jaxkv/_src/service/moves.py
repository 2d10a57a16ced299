"""Moves sequences between engines."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from jaxkv._src.arrays import indexing
from jaxkv._src.engine.queue.queue import SequenceStatus
from jaxkv._src.engine.queue.requests import Requests
from jaxkv._src.engine.state import RolloutState
from jaxkv._src.service import programs
from jaxkv._src.service.held_rollout import HeldRollout
from jaxkv._src.transfer.exported import Exported
from jaxkv._src.transfer.import_rules import layout_of


def export(held: HeldRollout) -> Exported:
  """Removes and returns all sequences, except those of streams."""
  _check_single(held)
  state = held.read()
  num_samples = held.config.num_samples
  ids, status, table = jax.device_get(
    (state.queue.ids, state.queue.status, state.memory.cache.page_table)
  )
  # The export copies pages on the device, where a copy of the whole pool may
  # not fit. Multiples of 16, so that fewer sizes are compiled.
  max_pages = []
  for groups in held.cache.groups_of_pools:
    pages = table[:, np.asarray(groups)]
    num_held = np.unique(pages[pages < held.cache.no_page]).size
    max_pages.append(-(-num_held // 16) * 16)
  # Pages go to the first sequences.
  rows = np.argsort(status != SequenceStatus.RUNNING, kind="stable")
  moves = status != SequenceStatus.EMPTY
  is_streamed = np.isin(ids[::num_samples], list(held.streamed))
  moves &= ~np.repeat(is_streamed, num_samples)
  return held.update(
    programs.export, ids[rows], mask=moves[rows], max_pages=tuple(max_pages)
  )


def import_sequences(
  held: HeldRollout, exported: Exported, ids: Sequence[int] | None
) -> list[int]:
  """Adds the sequences of prompts; returns the prompts that entered."""
  _check_single(held)
  queue = exported.queue
  sampling = queue.sampling
  if sampling.stop_strings is not None:
    # The tables are not exported; the import compares their shapes.
    own_strings = held.read().queue.sampling.stop_strings
    if own_strings is None:
      raise ValueError(
        "`exported` must have no stop strings for an engine without them; "
        "first `generate` a prompt with the same stop strings."
      )
    strings = dataclasses.replace(
      own_strings, start=sampling.stop_strings.start
    )
    sampling = dataclasses.replace(sampling, stop_strings=strings)
  held.adopt_fields(
    Requests(
      queue.tokens,
      queue.prompt_length,
      sampling=sampling,
      priority=queue.priority,
      log_probs_from=queue.log_probs_from,
      salts=queue.salts,
      extra=queue.extra,
    )
  )
  exported = _with_fields(exported, held.read())
  first_ids = np.asarray(queue.ids) - np.asarray(exported.sample)
  mask = np.ones(first_ids.shape, bool)
  if ids is not None:
    mask = np.isin(first_ids, list(ids))
  out = held.update(programs.import_sequences, exported, mask=mask)
  held.count_ids()
  # The samples of a prompt enter together, because they share rows.
  return sorted(set(first_ids[out.ok].tolist()))


def _check_single(held: HeldRollout) -> None:
  if held.is_split:
    raise ValueError(
      "Sequences cannot move from or to an engine with `axes.data`; make an "
      "engine for each shard."
    )


def _with_fields(exported: Exported, state: RolloutState) -> Exported:
  """Adds the fields that a queue has, with values that mean none."""
  queue = exported.queue
  layout = dict(exported.layout)
  own_layout = dict(layout_of(state))
  neutral = {"priority": 0, "salts": 0, "log_probs_from": indexing.NOWHERE}
  for name, value in neutral.items():
    rows = getattr(state.queue, name)
    if rows is not None and getattr(queue, name) is None:
      shape = len(queue.ids), *rows.shape[1:]
      filled = np.full(shape, value, rows.dtype)
      queue = dataclasses.replace(queue, **{name: filled})
      layout[f"Requests.{name}"] = own_layout[f"Requests.{name}"]
  return dataclasses.replace(
    exported, queue=queue, layout=tuple(layout.items())
  )
