"""When a call of `generate` returns."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer

from jaxkv._src.arrays.arguments import as_int32
from jaxkv._src.arrays.arguments import check_shape
from jaxkv._src.rollout import sequences as queue
from jaxkv._src.rollout.counts import Count
from jaxkv._src.rollout.state import RolloutState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Until:
  """`generate` returns at the first of these, or when all sequences ended.

  Numbers may be traced, so another number compiles nothing again; a number in
  place of None does. Groups and sequences are counted as they are in the queue:
  those that ended before the call count too, until `harvest` takes them out or
  `extend` makes them go on. With nothing taken out, a call may return at once.

  Attributes:
    steps: steps of this call; None for no limit.  # int32[]
    groups: prompts in the queue all of whose samples have ended; None for all.
      The others stay as they are, and a later call resumes them.  # int32[]
    sequences: sequences in the queue that have ended; None for all. With 1,
      a server returns for each answer, and harvests it.  # int32[]

  Examples:
    >>> from jaxkv import rollout
    >>> rollout.Until(groups=16, steps=10_000).groups
    16
  """

  steps: Array | int | None = None
  groups: Array | int | None = None
  sequences: Array | int | None = None


def as_until(until: Until | None) -> Until:
  """The same with int32[] for numbers.

  Raises:
    TypeError: it is no `Until`, or a number is no integer.
    ValueError: a number is not a scalar, is negative or does not fit int32.
      Traced ones are not checked: a negative one stops at once.
  """
  if until is None:
    return Until()
  if not isinstance(until, Until):
    raise TypeError(
      f"`until` must be a jaxkv.rollout.Until or None, got {until!r}; for a "
      f"number of steps write Until(steps=...)."
    )
  return Until(
    **{
      field.name: _as_count(field.name, getattr(until, field.name))
      for field in dataclasses.fields(until)
    }
  )


def _as_count(name: str, value: Any) -> Array | None:
  if value is None:
    return None
  number = as_int32(f"until.{name}", value)
  check_shape(f"until.{name}", number, ())
  if not isinstance(number, Tracer) and int(number) < 0:
    raise ValueError(
      f"`until.{name}` must be at least 0, got {int(number)}; use None for no "
      "limit."
    )
  return jnp.asarray(number, jnp.int32)


def goes_on(until: Until, state: RolloutState, begin: Count) -> Array:
  """bool[]: whether a call that began at step `begin` goes on."""
  status = state.sequences.status
  going = jnp.any(status < queue.SequenceStatus.DONE)
  if until.steps is not None:
    going &= state.counters.steps.since(begin) < until.steps
  if until.groups is not None:
    going &= jnp.sum(ended_groups(state), dtype=jnp.int32) < until.groups
  if until.sequences is not None:
    ended = jnp.sum(has_ended(status), dtype=jnp.int32)
    going &= ended < until.sequences
  return going


def has_ended(status: Array) -> Array:
  """bool[...]: whether sequences ended, of their statuses."""
  return (status == queue.SequenceStatus.DONE) | (
    status == queue.SequenceStatus.FAILED
  )


def ended_groups(state: RolloutState) -> Array:
  """bool[P]: prompts all of whose samples ended, of those that have any."""
  status = state.sequences.status.reshape(-1, state.config.num_samples)
  some = jnp.any(has_ended(status), axis=1)
  return some & jnp.all(status >= queue.SequenceStatus.DONE, axis=1)
