"""Finds sequences by their ids, and removes them from slots."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays.arguments import as_bool
from jaxkv._src.arrays.arguments import as_int32
from jaxkv._src.arrays.arguments import check_shape
from jaxkv._src.cache.state import Status
from jaxkv._src.cache.state import first_code
from jaxkv._src.cache.state import is_empty
from jaxkv._src.cache.verbs.free import free
from jaxkv._src.rollout import sequences as queue
from jaxkv._src.rollout.routing import with_experts
from jaxkv._src.rollout.state import RolloutState


def as_ids(ids: Any) -> Array:
  """Returns ids of sequences as int32[R]; raises for other types or shapes."""
  ids = as_int32("ids", ids)
  rows = ids.shape[0] if ids.ndim == 1 else "R"  # R may be 0.
  check_shape("ids", ids, (rows,), ", a list of numbers")
  return jnp.asarray(ids)


def as_mask(mask: Any, rows: int) -> Array:
  """Returns the rows to process, bool[R]; all for None."""
  if mask is None:
    return jnp.ones((rows,), bool)
  mask = as_bool("mask", mask)
  check_shape("mask", mask, (rows,), ", one for each row")
  return jnp.asarray(mask)


def as_counts(name: str, counts: Any, rows: int) -> Array:
  """Returns a number for each row, int32[R]; raises for other shapes."""
  counts = as_int32(name, counts)
  check_shape(name, counts, (rows,), ", one for each row")
  return jnp.asarray(counts)


def find(
  state: RolloutState, ids: Array, mask: Array
) -> tuple[Array, Array, Array]:
  """Finds sequences by `ids`, int32[R], in rows where `mask` is True.

  Returns:
    int32[R], rows of `Sequences`, Q for none; int32[R], their status; int32[R],
    SKIPPED, BAD_SEQUENCE or OK.
  """
  sequences = state.sequences
  none = sequences.ids.shape[0]
  there = sequences.status != queue.SequenceStatus.EMPTY
  same = (ids[:, None] == sequences.ids[None]) & there[None]
  row = jnp.argmax(same, axis=1).astype(jnp.int32)
  found = jnp.any(same, axis=1) & ~indexing.any_earlier(ids, mask)
  code = first_code((~mask, Status.SKIPPED), (~found, Status.BAD_SEQUENCE))
  row = jnp.where(code == Status.OK, row, none)
  return (
    row,
    indexing.take(sequences.status, row, fill=queue.SequenceStatus.EMPTY),
    code,
  )


def leave_slots(state: RolloutState, leaving: Array) -> RolloutState:
  """Frees slots bool[B] and puts their sequences back into the queue.

  Samples that wait for a prompt in one of them also return to the queue.
  """
  none, slots = state.sequences.length.shape[0], state.running.shape[0]
  slot = jnp.arange(slots, dtype=jnp.int32)
  leaving |= indexing.take(leaving, state.leader, fill=False)
  holds = leaving & ~is_empty(state.cache, slot)
  rows = jnp.where(holds, state.running, none)
  sequences = with_experts(state.sequences, state.kv, state.cache, rows)
  cache, _ = free(state.cache, mask=holds)
  return dataclasses.replace(
    state,
    cache=cache,
    sequences=queue.with_status(
      sequences, state.running, leaving, queue.SequenceStatus.WAITING
    ),
    running=jnp.where(leaving, none, state.running),
    leader=jnp.where(leaving, slots, state.leader),
  )


def slots_of(state: RolloutState, rows: Array) -> Array:
  """Returns bool[B], slots with a sequence of `rows`, int32[R]; Q for none."""
  none = state.sequences.length.shape[0]
  same = (state.running[:, None] == rows[None]) & (rows < none)[None]
  return jnp.any(same, axis=1)
