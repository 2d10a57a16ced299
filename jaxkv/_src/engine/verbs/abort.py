"""abort, requeue: end sequences, or return them to the queue."""

import dataclasses
import functools

import jax
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import sharding
from jaxkv._src.cache.state import Outcome
from jaxkv._src.cache.state import Status
from jaxkv._src.cache.state import first_code
from jaxkv._src.engine.queue.find_sequences import as_ids
from jaxkv._src.engine.queue.find_sequences import as_mask
from jaxkv._src.engine.queue.find_sequences import find
from jaxkv._src.engine.queue.queue import Finish
from jaxkv._src.engine.queue.queue import SequenceStatus
from jaxkv._src.engine.queue.queue import set_status
from jaxkv._src.engine.slots import slots_of
from jaxkv._src.engine.state import RolloutState
from jaxkv._src.engine.state import check_single
from jaxkv._src.engine.verbs.leave_slots import leave_slots


def abort(
  state: RolloutState, ids: Array, *, mask: Array | None = None
) -> tuple[RolloutState, Outcome]:
  """Ends sequences, keeps their tokens and frees their pages.

  Args:
    state: the rollout.
    ids: int32[R], ids of sequences.
    mask: bool[R], the rows to process; None for all.

  Returns:
    The rollout, and per row OK, SKIPPED, BAD_SEQUENCE, or ENDED if the sequence
    had already ended or failed.
  """
  check_single(state)
  ids = as_ids(ids)
  return _leave(state, ids, as_mask(mask, ids.shape[0]), ends=True)


def requeue(
  state: RolloutState, ids: Array, *, mask: Array | None = None
) -> tuple[RolloutState, Outcome]:
  """Puts running sequences back into the queue and frees their pages.

  The sequences resume later and sample the same tokens. Their full pages stay
  cached until they are evicted. A waiting sequence is unchanged.

  Args:
    state: the rollout.
    ids: int32[R], ids of sequences.
    mask: bool[R], the rows to process; None for all.

  Returns:
    The rollout, and per row OK, SKIPPED, BAD_SEQUENCE, or ENDED as in `abort`.
  """
  check_single(state)
  ids = as_ids(ids)
  return _leave(state, ids, as_mask(mask, ids.shape[0]), ends=False)


@functools.partial(jax.jit, static_argnames="ends")
def _leave(
  state: RolloutState, ids: Array, mask: Array, *, ends: bool
) -> tuple[RolloutState, Outcome]:
  """Puts sequences back into the queue, or ends them if `ends` is True."""
  state, ids, mask = sharding.match_varying_axes((state, ids, mask))
  rows, status, code = find(state.queue, ids, mask)
  code = first_code(
    (code != Status.OK, code), (status >= SequenceStatus.DONE, Status.ENDED)
  )
  is_served = code == Status.OK
  target_rows = indexing.where_valid(is_served, rows)
  state = leave_slots(state, slots_of(state.queue, state.slots, target_rows))
  if not ends:
    return state, Outcome(code=code)
  queue = set_status(state.queue, rows, is_served, SequenceStatus.DONE)
  finish = indexing.put(queue.finish, target_rows, values=int(Finish.ABORTED))
  queue = dataclasses.replace(queue, finish=finish)
  return dataclasses.replace(state, queue=queue), Outcome(code=code)
