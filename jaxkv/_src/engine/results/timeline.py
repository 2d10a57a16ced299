"""timeline: returns the recent work of each slot, and draws it."""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.engine.queue.queue import Queue
from jaxkv._src.engine.slots import Slots
from jaxkv._src.engine.state import RolloutState
from jaxkv._src.engine.state import check_single

IDLE, PREFILL, DECODE, WAIT, PREEMPT = range(5)

_NAMES = ("idle", "prefill", "decode", "wait", "preempt")
_COLOURS = ("none", "#e69f00", "#56b4e9", "#cccccc", "#d55e00")


class Span(NamedTuple):
  """Consecutive steps of one slot with one kind of work for one sequence.

  Attributes:
    slot: the slot.
    sequence: the id of the sequence.
    kind: "prefill", "decode", "wait" or "preempt".
    start: the first step.
    stop: one past the last step.
    tokens: the number of tokens computed.
  """

  slot: int
  sequence: int
  kind: str
  start: int
  stop: int
  tokens: int


class Timeline(NamedTuple):
  """The last X steps of a rollout, which a notebook shows as a picture.

  Here a step is one call of the model, as in `Counters.steps`.

  Attributes:
    start: the first step.
    sequences: the id of the sequence in each slot, -1 for none.  # int32[X, B]
    kinds: IDLE, PREFILL, DECODE, WAIT or PREEMPT. DECODE: the step computes one
      token and its drafts, and samples the next token. WAIT: the sequence waits
      to fork a prompt, or gets no column or no page. PREEMPT: the sequence
      loses its pages, because too few are free: it is preempted, its fork is
      refused, or it fails.  # int32[X, B]
    tokens: the number of tokens computed, without rejected drafts.
      # int32[X, B]
  """

  start: int
  sequences: np.ndarray
  kinds: np.ndarray
  tokens: np.ndarray

  def spans(self) -> Iterator[Span]:
    """Yields the spans of each slot in turn."""
    for slot in range(self.kinds.shape[1]):
      kinds = self.kinds[:, slot]
      owners = self.sequences[:, slot]
      changes = (np.diff(kinds) != 0) | (np.diff(owners) != 0)
      edges = [0, *(np.flatnonzero(changes) + 1).tolist(), len(kinds)]
      for first_step, end_step in itertools.pairwise(edges):
        if first_step < end_step and kinds[first_step] != IDLE:
          yield Span(
            slot=slot,
            sequence=int(owners[first_step]),
            kind=_NAMES[kinds[first_step]],
            start=self.start + first_step,
            stop=self.start + end_step,
            tokens=int(self.tokens[first_step:end_step, slot].sum()),
          )

  def svg(self) -> str:
    """Returns an SVG picture: a row for each slot, steps from left to right."""
    steps, slots = self.kinds.shape
    width = 900
    row = 14
    left = 48
    scale = width / max(steps, 1)
    bottom = slots * row + 16
    parts = [
      f'<text x="{left - 5}" y="{slot * row + row - 3}" text-anchor="end">'
      f"slot {slot}</text>"
      for slot in range(slots)
    ]
    previous_end = None
    named = False
    for span in self.spans():
      x = (span.start - self.start) * scale
      num_steps = span.stop - span.start
      colour = _COLOURS[_NAMES.index(span.kind)]
      parts.append(
        f'<rect x="{left + x:.1f}" y="{span.slot * row + 1}"'
        f' width="{max(num_steps * scale - 0.4, 0.4):.1f}" height="{row - 2}"'
        f' fill="{colour}"><title>sequence {span.sequence}: {span.kind},'
        f" steps {span.start} .. {span.stop - 1}, {span.tokens} tokens"
        "</title></rect>"
      )
      # The first span that is wide enough for a sequence's id shows the id.
      named &= (span.slot, span.sequence, span.start) == previous_end
      previous_end = span.slot, span.sequence, span.stop
      if not named and num_steps * scale > 8 * len(str(span.sequence)):
        named = True
        parts.append(
          f'<text x="{left + x + 2:.1f}" y="{span.slot * row + row - 3}">'
          f"{span.sequence}</text>"
        )
    for offset, step in ((0, self.start), (width, self.start + steps)):
      anchor = "end" if offset else "start"
      parts.append(
        f'<text x="{left + offset}" y="{bottom}" text-anchor="{anchor}">'
        f"step {step}</text>"
      )
    for index, name in enumerate(_NAMES[1:]):
      x = left + width // 2 - 150 + index * 80
      parts.append(
        f'<rect x="{x}" y="{bottom - 9}" width="10" height="10"'
        f' fill="{_COLOURS[index + 1]}"/>'
        f'<text x="{x + 14}" y="{bottom}">{name}</text>'
      )
    return (
      f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 8}"'
      f' height="{bottom + 8}" font-family="sans-serif"'
      f' font-size="10" fill="#222">'
      # The text would be unreadable on a dark background.
      f'<rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}</svg>'
    )

  def _repr_svg_(self) -> str:
    return self.svg()

  def __repr__(self) -> str:
    num_steps, num_slots = self.kinds.shape
    shares = ", ".join(
      f"{name} {np.mean(self.kinds == kind):.0%}"
      for kind, name in enumerate(_NAMES)
    )
    last_step = self.start + num_steps - 1
    return f"steps {self.start} .. {last_step} of {num_slots} slots: {shares}"


def record(
  log: Array | None,
  log_row: Array,
  queue: Queue,
  slots: Slots,
  counts: Array,
  decodes: Array,
  leaving: Array | None = None,
) -> Array | None:
  """Writes a call of the model into row `log_row`, int32[], of the log.

  A log of X rows does not change if `log_row` is X. Slots compute `counts`,
  int32[B], tokens. Those in `decodes`, bool[B], compute their last token,
  perhaps with drafts, and sample the next one. `leaving`, int32[B], is the row
  of the sequence that leaves each slot, Q for none; None if no sequence leaves.
  """
  if log is None:
    return None
  row = slots.row
  leaving = jnp.full_like(row, queue.no_row) if leaving is None else leaving
  slot_kind = jnp.where(counts > 0, jnp.int32(PREFILL), jnp.int32(WAIT))
  slot_kind = jnp.where(row < queue.no_row, slot_kind, jnp.int32(IDLE))
  slot_kind = jnp.where(decodes, jnp.int32(DECODE), slot_kind)
  slot_kind = jnp.where(leaving < queue.no_row, jnp.int32(PREEMPT), slot_kind)
  owner = indexing.take(queue.ids, jnp.minimum(row, leaving), fill=-1)
  return log.at[log_row].set(jnp.stack([owner, slot_kind, counts]))


def timeline(state: RolloutState) -> Timeline:
  """Returns the work of each slot in the last steps.

  Args:
    state: a rollout with a positive `RolloutConfig.timeline`.

  Returns:
    The last steps, at most `RolloutConfig.timeline`.

  Raises:
    ValueError: `RolloutConfig.timeline` is 0.
  """
  check_single(state)
  if state.log is None:
    raise ValueError(
      "`state` must have a log of its steps, got RolloutConfig.timeline=0; set "
      "this option to the number of steps."
    )
  log = np.asarray(state.log)
  steps = int(state.counters.steps)
  num_kept = min(steps, log.shape[0])
  rows = log[np.arange(steps - num_kept, steps) % log.shape[0]]
  return Timeline(steps - num_kept, rows[:, 0], rows[:, 1], rows[:, 2])
