"""extend: appends tokens of a tool or a user, and starts another turn."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import sharding
from jaxkv._src.arrays.arguments import as_int32
from jaxkv._src.cache.state import Outcome
from jaxkv._src.cache.state import Status
from jaxkv._src.cache.state import first_code
from jaxkv._src.engine.queue.find_sequences import as_counts
from jaxkv._src.engine.queue.find_sequences import as_ids
from jaxkv._src.engine.queue.find_sequences import as_mask
from jaxkv._src.engine.queue.find_sequences import find
from jaxkv._src.engine.queue.page_keys import rehash
from jaxkv._src.engine.queue.queue import Finish
from jaxkv._src.engine.queue.queue import SequenceStatus
from jaxkv._src.engine.queue.queue import order_of
from jaxkv._src.engine.queue.queue import set_status
from jaxkv._src.engine.queue.requests import check_tokens
from jaxkv._src.engine.slots import slots_of
from jaxkv._src.engine.state import RolloutState
from jaxkv._src.engine.state import check_single
from jaxkv._src.engine.verbs.leave_slots import leave_slots


def extend(
  state: RolloutState,
  ids: Array,
  tokens: Array,
  lengths: Array,
  *,
  max_tokens: Array | None = None,
  priority: Array | None = None,
  mask: Array | None = None,
) -> tuple[RolloutState, Outcome]:
  """Appends tokens of a tool or a user, and resumes the sequences.

  Ended and running sequences return to the queue. Pages of earlier turns are
  found in the cache unless they were evicted, so little more than the new
  tokens is computed. `Generated.mask` is False for the new tokens.

  `max_tokens`, `min_tokens`, stop strings and `Rows.counts` consider only the
  sampled tokens of the new turn. A call with other shapes compiles again, so
  pad the tokens to one width and mask unused rows.

  Args:
    state: the rollout.
    ids: int32[R], ids of sequences.
    tokens: int32[R, X], padded at the end.
    lengths: int32[R], 0 .. X.
    max_tokens: int32[R], the maximum number of tokens to sample in the new
      turn, at least 1; None for the limit of the first turn.
    priority: int32[R], the new `Requests.priority` of each sequence; None to
      keep the old ones.
    mask: bool[R], the rows to process; None for all.

  Returns:
    The rollout, and per row OK, SKIPPED, BAD_SEQUENCE, ENDED for a failed
    sequence, or BAD_LENGTH if `lengths` or `max_tokens` is out of range or the
    sequence could exceed W tokens.

  Raises:
    ValueError: `priority` is given, and `init` had no priorities; or the
      rollout samples nothing.
  """
  check_single(state)
  if not state.config.max_new_tokens:
    raise ValueError(
      "`RolloutConfig.max_new_tokens` must be at least 1 to extend sequences, "
      "got 0: the rollout has no sampler."
    )
  ids = as_ids(ids)
  rows = ids.shape[0]
  meaning = ", a row for each sequence"
  tokens = jnp.asarray(as_int32("tokens", tokens, (rows, "X"), meaning))
  if max_tokens is not None:
    max_tokens = as_counts("max_tokens", max_tokens, rows)
  if priority is not None:
    priority = as_counts("priority", priority, rows)
    if state.queue.priority is None:
      raise ValueError(
        "`priority` must be None, because `requests.priority` was None in "
        "`init`, got an array; also set it in `init`."
      )
  lengths = as_counts("lengths", lengths, rows)
  mask = as_mask(mask, rows)
  check_tokens("tokens", tokens, lengths, mask=mask)
  if rows == 0:  # There are no tokens to hash.
    return state, Outcome(code=jnp.zeros((0,), jnp.int32))
  return _extend(state, ids, tokens, lengths, max_tokens, priority, mask)


@jax.jit
def _extend(
  state: RolloutState,
  ids: Array,
  tokens: Array,
  lengths: Array,
  budget: Array | None,
  priority: Array | None,
  mask: Array,
) -> tuple[RolloutState, Outcome]:
  state, ids, tokens, lengths, budget, priority, mask = (
    sharding.match_varying_axes(
      (state, ids, tokens, lengths, budget, priority, mask)
    )
  )
  width = state.queue.width
  columns = tokens.shape[1]
  rows, status, code = find(state.queue, ids, mask)
  old_length = indexing.take(state.queue.length, rows)
  if budget is None:
    budget = indexing.take(state.queue.budget, rows)
  is_bad = (lengths < 0) | (lengths > columns) | (budget < 1)
  # A difference, because the sum of lengths and budget can overflow.
  is_bad |= budget > width - old_length - jnp.clip(lengths, 0, columns)
  code = first_code(
    (code != Status.OK, code),
    (status == SequenceStatus.FAILED, Status.ENDED),
    (is_bad, Status.BAD_LENGTH),
  )
  is_served = code == Status.OK
  target = indexing.where_valid(is_served, rows)
  # A running sequence waits too; it hits its pages when it is admitted again.
  state = leave_slots(state, slots_of(state.queue, state.slots, target))
  column = jnp.arange(columns, dtype=jnp.int32)[None]
  inside = is_served[:, None] & (column < lengths[:, None])
  length = old_length + lengths
  queue = set_status(state.queue, rows, is_served, SequenceStatus.WAITING)
  queue = dataclasses.replace(
    queue,
    tokens=indexing.put(
      queue.tokens,
      target[:, None],
      indexing.where_valid(inside, old_length[:, None] + column),
      values=tokens,
    ),
    length=indexing.put(queue.length, target, values=length),
    start=indexing.put(queue.start, target, values=length),
    limit=indexing.put(queue.limit, target, values=length + budget),
    finish=indexing.put(queue.finish, target, values=int(Finish.UNFINISHED)),
    stop=indexing.put(queue.stop, target, values=-1),
    overtaken=indexing.put(queue.overtaken, target, values=0),
  )
  if priority is not None and queue.priority is not None:
    new_priority = indexing.put(queue.priority, target, values=priority)
    order, place = order_of(queue.ids, new_priority)
    queue = dataclasses.replace(
      queue, priority=new_priority, order=order, place=place
    )
  queue = rehash(queue, state.memory.cache, target)
  return dataclasses.replace(state, queue=queue), Outcome(code=code)
