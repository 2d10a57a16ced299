"""Calls the model with the tokens of a step of `score`, packed into one row.

A `PackedView` has single tokens first, so a call begins with columns of no
sequence. The tokens of all rows follow, one row after another.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import loops
from jaxkv._src.cache.state import CacheState
from jaxkv._src.exact import log_probs
from jaxkv._src.exact import row_loop
from jaxkv._src.kv.view import PackedView
from jaxkv._src.kv.view import View
from jaxkv._src.kv.view import packed_positions
from jaxkv._src.rollout import packing
from jaxkv._src.rollout import sequences as queue
from jaxkv._src.rollout.model import Model
from jaxkv._src.rollout.rows import Rows
from jaxkv._src.rollout.scoring.group import Group
from jaxkv._src.rollout.scoring.group import Turn
from jaxkv._src.rollout.scoring.group import Widths
from jaxkv._src.rollout.scoring.scored import Given
from jaxkv._src.rollout.scoring.scored import Scored
from jaxkv._src.sampling import reductions
from jaxkv._src.sampling import statistics
from jaxkv._src.sampling.logits import as_logits
from jaxkv._src.sampling.logits import check_logits
from jaxkv._src.sampling.temperature import divisor

_IDLE = 2
"""Columns of no sequence. XLA:CPU would copy a pool of states for only one: a
gather of one row becomes a slice, on which the scatter does not depend."""


def compute(
  params: Any,
  group: Group,
  turn: Turn,
  given: Given,
  widths: Widths,
  *,
  model: Model,
) -> Group:
  """Calls the model with the tokens of a step, and records log-probs.

  Args:
    params: the model's parameters.
    group: with pages for the tokens.
    turn: the number of tokens of each row.
    given: the arguments of `score`.
    widths: the columns of calls.
    model: see `Model`.
  """
  some = jnp.any(turn.counts > 0)

  def prompt(group: Group) -> Group:
    own = Turn(turn.starts[-1:], turn.counts[-1:], turn.prefills)
    # One column, because a model may need one. Nobody reads its logits.
    wanted = jnp.zeros((1,), jnp.int32)
    slots, none = group.slots[-1:], group.samples[-1:]
    packed = _Packed(group, own, given, slots, none, widths.prompt)
    return group._replace(kv=packed.logits(params, wanted, model)[1])

  def samples(group: Group) -> Group:
    rows = queue.first_of(turn.counts > 0, widths.rows)
    own = Turn(
      indexing.take(turn.starts, rows),
      indexing.take(turn.counts, rows),
      turn.prefills,
    )
    slots = indexing.take(group.slots, rows, fill=group.cache.config.num_slots)
    numbers = indexing.take(group.samples, rows, fill=given.lengths.shape[1])
    packed = _Packed(group, own, given, slots, numbers, widths.samples)
    wanted = _IDLE + jnp.arange(widths.samples, dtype=jnp.int32)
    logits, kv = packed.logits(params, wanted, model)
    return group._replace(kv=kv, scored=packed.scored(logits))

  # A conditional would copy the memory.
  group = loops.at_most_once(some & turn.prefills, prompt, group)
  return loops.at_most_once(some & ~turn.prefills, samples, group)


class _Packed:
  """Tokens of a call, in C columns after those of no sequence."""

  def __init__(
    self,
    group: Group,
    turn: Turn,
    given: Given,
    slots: Array,
    samples: Array,
    columns: int,
  ):
    cache, rows = group.cache, slots.shape[0]
    self._group, self._given = group, given
    self._views = packing.views(cache, slots, turn.starts, turn.counts)
    row, positions = packed_positions(self._views[0], columns)
    self._real = row < rows
    self._positions = jnp.maximum(positions, 0)
    none = given.lengths.shape[1]
    self._samples = indexing.take(samples, row, fill=none)
    tokens = given.tokens(group.number, self._samples, self._positions)
    self._tokens = jnp.where(self._real, tokens, 0)

  def logits(
    self, params: Any, wanted: Array, model: Model
  ) -> tuple[Array, Any]:
    """Returns logits [X, V] of columns int32[X], and the memory."""
    views = tuple(
      PackedView(decode=single, prefill=view)
      for single, view in zip(
        _idle(self._group.cache), self._views, strict=True
      )
    )
    logits, kv = model(
      params,
      jnp.pad(self._tokens, (_IDLE, 0))[None],
      jnp.pad(self._positions, (_IDLE, 0))[None],
      self._group.kv,
      views,
      wanted,
      self._rows(),
    )
    check_logits(logits, wanted.shape[0])
    return as_logits(logits), kv

  def _rows(self) -> Rows:
    """Returns the same `Rows` as when a sample drew these tokens."""
    group, given = self._group, self._given
    groups, samples = given.lengths.shape
    prompt = given.prompt_lengths[group.number]
    # A prompt's tokens are those of the first sample.
    sample = jnp.where(self._samples < samples, self._samples, 0)
    number = group.number * samples + sample
    numbers = jnp.where(self._real, number, groups * samples)
    length = jnp.maximum(self._positions + 1, prompt)
    last = given.tokens(group.number, self._samples, length - 1)
    length, last = (jnp.where(self._real, x, 0) for x in (length, last))
    user = jnp.where(self._real, group.number, groups)
    none = jnp.full((_IDLE,), groups, jnp.int32)
    user = jnp.concatenate([none, user])
    return Rows(
      numbers=jnp.concatenate([none * samples, numbers]),
      ids=jnp.pad(jnp.where(self._real, number, 0), (_IDLE, 0)),
      counts=jnp.pad(jnp.where(self._real, length - prompt, 0), (_IDLE, 0)),
      lengths=jnp.pad(length, (_IDLE, 0)),
      last_tokens=jnp.pad(last, (_IDLE, 0)),
      user=jax.tree.map(lambda leaf: indexing.take(leaf, user), given.user),
    )

  def scored(self, logits: Array) -> Scored:
    """Records statistics of the tokens that follow those of the call."""
    given, number, scored = self._given, self._group.number, self._group.scored
    after = self._positions + 1
    targets = given.tokens(number, self._samples, after)
    heat = jnp.ones((), jnp.float32)
    if given.temperature is not None:
      heat = divisor(given.temperature)
    own = log_probs.of_tokens(
      logits, targets, jnp.broadcast_to(heat, targets.shape)
    )
    place = (
      jnp.broadcast_to(number, targets.shape),
      indexing.where_valid(self._real, self._samples),
      after - given.prompt_lengths[number],
    )
    values: dict[str, Array | None] = {"log_probs": own}
    entropy, top = scored.entropy is not None, 0
    if scored.top_tokens is not None:
      top = scored.top_tokens.shape[-1]
    if entropy or top:
      observe = functools.partial(
        statistics.observe, entropy=entropy, top_log_probs=top
      )

      def observed_rows(heat: Array, logits: Array, *rows: Array) -> Any:
        # As in `log_probs`: logits over a small temperature may be infinite.
        best = reductions.maxima(logits)[:, None]
        return observe((logits - best) / heat, *rows)

      rows = (logits, targets, own)
      known = row_loop.loop(observed_rows, heat, rows, tile=log_probs.ROWS)
      values["entropy"] = known.entropy
      values["top_tokens"] = known.top_tokens
      values["top_log_probs"] = known.top_log_probs
    updated = {
      name: indexing.put(getattr(scored, name), *place, values=value)
      for name, value in values.items()
      if value is not None
    }
    return dataclasses.replace(scored, **updated)


def _idle(cache: CacheState) -> tuple[View, ...]:
  """Returns rows without a sequence, by group."""
  zero = jnp.zeros((_IDLE,), jnp.int32)
  slot = jnp.full_like(zero, cache.config.num_slots)
  return packing.views(cache, slot, zero, zero)
