"""Conditions under which `generate` returns."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer

from jaxkv._src.arrays.arguments import as_int32
from jaxkv._src.engine.counters import Count
from jaxkv._src.engine.queue import SequenceStatus
from jaxkv._src.engine.queue import has_ended
from jaxkv._src.engine.state import RolloutState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Until:
  """Limits of a `generate` call, which returns when it reaches one of them.

  The call also returns when all sequences have ended. If the numbers are
  traced, other values need no new compilation. `groups` and `sequences` also
  count sequences that ended before the call and are still in the queue, so a
  call may return at once.

  Attributes:
    steps: the number of model calls; None for no limit.  # int32[]
    groups: the number of prompts whose samples have all ended; None for no
      limit.  # int32[]
    sequences: the number of ended sequences; None for no limit. With 1, a
      server can harvest each sequence when it ends.  # int32[]

  Examples:
    >>> from jaxkv import rollout
    >>> rollout.Until(groups=16, steps=10_000).groups
    16
  """

  steps: Array | int | None = None
  groups: Array | int | None = None
  sequences: Array | int | None = None


def as_until(until: Until | None) -> Until:
  """Returns `until` with int32[] numbers; traced signs are not checked."""
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
  number = as_int32(f"until.{name}", value, ())
  if not isinstance(number, Tracer) and int(number) < 0:
    raise ValueError(
      f"`until.{name}` must be at least 0, got {int(number)}; use None for no "
      "limit."
    )
  return jnp.asarray(number, jnp.int32)


def goes_on(until: Until, state: RolloutState, begin: Count) -> Array:
  """Returns bool[], True if a call that began after `begin` steps continues."""
  status = state.queue.status
  going = jnp.any(status < SequenceStatus.DONE)
  num_left = calls_left(until, state, begin)
  if num_left is not None:
    going &= num_left > 0
  if until.groups is not None:
    going &= jnp.sum(ended_groups(state), dtype=jnp.int32) < until.groups
  if until.sequences is not None:
    ended = jnp.sum(has_ended(status), dtype=jnp.int32)
    going &= ended < until.sequences
  return going


def calls_left(until: Until, state: RolloutState, begin: Count) -> Array | None:
  """Returns the number of model calls left, int32[]; None for no limit."""
  if until.steps is None:
    return None
  return until.steps - state.counters.steps.since(begin)


def ended_groups(state: RolloutState) -> Array:
  """Returns bool[P], True for prompts with samples that have all ended."""
  status = state.queue.status.reshape(-1, state.config.num_samples)
  # The rows of a group without sequences are EMPTY.
  exists = jnp.any(has_ended(status), axis=1)
  return exists & jnp.all(status >= SequenceStatus.DONE, axis=1)
