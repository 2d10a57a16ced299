"""What each slot did in each step: a log on the device, and its picture."""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.rollout.state import RolloutState

IDLE, PREFILL, DECODE, WAIT, PREEMPT = range(5)

_NAMES = ("idle", "prefill", "decode", "wait", "preempt")
_COLOURS = ("none", "#e69f00", "#56b4e9", "#cccccc", "#d55e00")


class Span(NamedTuple):
  """Steps in a row in which a slot did the same for one sequence.

  Attributes:
    slot: its number.
    sequence: the sequence's number.
    kind: "prefill", "decode", "wait" or "preempt".
    start: the first step.
    stop: one past the last step.
    tokens: computed in these steps.
  """

  slot: int
  sequence: int
  kind: str
  start: int
  stop: int
  tokens: int


class Timeline(NamedTuple):
  """The last steps of a rollout. In a notebook it shows itself as a picture.

  `notebooks/04_rollouts` has examples.

  Attributes:
    start: the first step, X in all.
    sequences: the sequence in each slot, -1 for none.  # int32[X, B]
    kinds: IDLE, PREFILL, DECODE, WAIT or PREEMPT. A slot decodes where one
      token is computed and the next one drawn. It waits where nothing is
      computed: for the prompt that it forks from, for a place in the packed
      call, or for a page. It preempts in the step in which its sequence gives
      its pages back: a victim, a sample that found no page to fork, or one
      that is given up.  # int32[X, B]
    tokens: tokens computed.  # int32[X, B]
  """

  start: int
  sequences: np.ndarray
  kinds: np.ndarray
  tokens: np.ndarray

  def spans(self) -> Iterator[Span]:
    """The spans of each slot, one slot after the other."""
    for slot in range(self.kinds.shape[1]):
      kinds, owners = self.kinds[:, slot], self.sequences[:, slot]
      changes = (np.diff(kinds) != 0) | (np.diff(owners) != 0)
      edges = [0, *(np.flatnonzero(changes) + 1).tolist(), len(kinds)]
      for begin, end in itertools.pairwise(edges):
        if begin < end and kinds[begin] != IDLE:
          yield Span(
            slot=slot,
            sequence=int(owners[begin]),
            kind=_NAMES[kinds[begin]],
            start=self.start + begin,
            stop=self.start + end,
            tokens=int(self.tokens[begin:end, slot].sum()),
          )

  def svg(self, width: int = 900, row: int = 14) -> str:
    """The picture: a row for each slot, steps from left to right.

    Args:
      width: pixels of all steps.
      row: pixels of a slot.
    """
    steps, slots = self.kinds.shape
    scale, left, bottom = width / max(steps, 1), 48, slots * row + 16
    parts = [
      f'<text x="{left - 5}" y="{slot * row + row - 3}" text-anchor="end">'
      f"slot {slot}</text>"
      for slot in range(slots)
    ]
    end, named = None, False
    for span in self.spans():
      x, size = (span.start - self.start) * scale, span.stop - span.start
      colour = _COLOURS[_NAMES.index(span.kind)]
      parts.append(
        f'<rect x="{left + x:.1f}" y="{span.slot * row + 1}"'
        f' width="{max(size * scale - 0.4, 0.4):.1f}" height="{row - 2}"'
        f' fill="{colour}"><title>sequence {span.sequence}: {span.kind},'
        f" steps {span.start} .. {span.stop - 1}, {span.tokens} tokens"
        "</title></rect>"
      )
      # Once for each stay in a slot, where there is room.
      named &= (span.slot, span.sequence, span.start) == end
      end = span.slot, span.sequence, span.stop
      if not named and size * scale > 8 * len(str(span.sequence)):
        named = True
        parts.append(
          f'<text x="{left + x + 2:.1f}" y="{span.slot * row + row - 3}">'
          f"{span.sequence}</text>"
        )
    for place, step in ((0, self.start), (width, self.start + steps)):
      anchor = "end" if place else "start"
      parts.append(
        f'<text x="{left + place}" y="{bottom}" text-anchor="{anchor}">'
        f"step {step}</text>"
      )
    for number, name in enumerate(_NAMES[1:]):
      x = left + width // 2 - 150 + number * 80
      parts.append(
        f'<rect x="{x}" y="{bottom - 9}" width="10" height="10"'
        f' fill="{_COLOURS[number + 1]}"/>'
        f'<text x="{x + 14}" y="{bottom}">{name}</text>'
      )
    return (
      f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 8}"'
      f' height="{bottom + 8}" font-family="sans-serif"'
      f' font-size="{min(row - 4, 10)}" fill="#222">'
      # A dark page would hide the text.
      f'<rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}</svg>'
    )

  def _repr_svg_(self) -> str:
    return self.svg()


def record(
  state: RolloutState,
  counts: Array,
  draws: Array,
  preempted: Array,
) -> Array | None:
  """`RolloutState.log` with the step that `state` is in.

  Args:
    state: the sequences in the slots.
    counts: int32[B], tokens that the step computes.
    draws: bool[B], slots whose sequences draw a token.
    preempted: int32[B], the sequence that leaves each slot, Q for none.
  """
  log, none = state.log, state.sequences.length.shape[0]
  if log is None:
    return None
  kind = jnp.where(counts > 0, jnp.int32(PREFILL), jnp.int32(WAIT))
  kind = jnp.where(state.running < none, kind, jnp.int32(IDLE))
  kind = jnp.where(draws & (counts == 1), jnp.int32(DECODE), kind)
  kind = jnp.where(preempted < none, jnp.int32(PREEMPT), kind)
  owner = jnp.minimum(state.running, preempted)
  owner = indexing.take(state.sequences.ids, owner, fill=-1)
  row = state.counters.steps.modulo(log.shape[0])
  return log.at[row].set(jnp.stack([owner, kind, counts]))


def timeline(state: RolloutState) -> Timeline:
  """What each slot did in the last steps.

  Args:
    state: of a rollout with `RolloutConfig.timeline`, the number of steps that
      are kept.

  Returns:
    The steps; none before the first one. `print(timeline(state).svg())` writes
    the picture that a notebook shows.

  Raises:
    ValueError: no steps are kept.
  """
  if state.log is None:
    raise ValueError(
      "`state` must keep its last steps, got RolloutConfig.timeline=0; set it "
      "to a number of steps."
    )
  log, steps = np.asarray(state.log), int(state.counters.steps)
  kept = min(steps, log.shape[0])
  rows = log[np.arange(steps - kept, steps) % log.shape[0]]
  return Timeline(steps - kept, rows[:, 0], rows[:, 1], rows[:, 2])
