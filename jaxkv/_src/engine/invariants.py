"""Checks the invariants of a rollout between two calls."""

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.cache.invariants import check_invariants as cache_invariants
from jaxkv._src.cache.invariants import check_laws
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import is_empty
from jaxkv._src.engine.queue.page_keys import keys_of_rows
from jaxkv._src.engine.queue.queue import NOT_SAMPLED
from jaxkv._src.engine.queue.queue import Finish
from jaxkv._src.engine.queue.queue import Queue
from jaxkv._src.engine.queue.queue import SequenceStatus
from jaxkv._src.engine.queue.queue import order_of
from jaxkv._src.engine.slots import Slots
from jaxkv._src.engine.slots import are_computing
from jaxkv._src.engine.state import RolloutState
from jaxkv._src.engine.state import check_single
from jaxkv._src.kv.check import check as check_memory


def check(state: RolloutState) -> None:
  """Raises if a rollout or its cache breaks an invariant; cannot be jitted.

  Args:
    state: the rollout.

  Raises:
    CacheError: an invariant does not hold, or moves to or from offload memory
      were forgotten or repeated.
    ValueError: `state` is a stack of rollouts.
  """
  check_single(state)
  origin = "jaxkv.rollout.check_invariants"
  check_laws(check_invariants(state), "The rollout", origin)
  memory = state.memory
  check_memory(
    memory.kv, memory.cache.config, offload=memory.offload, state=memory.cache
  )


def check_invariants(state: RolloutState) -> dict[str, Array]:
  """Tests every invariant of a rollout between two calls.

  | name      | invariant                                                    |
  |-----------|--------------------------------------------------------------|
  | numbers   | the ids of sequences are distinct and below `next_id`        |
  | order     | `order` sorts the rows by priority and id; `place` is its    |
  |           | inverse                                                      |
  | lengths   | prompt <= start <= length <= limit <= W; the padding is 0;   |
  |           | this and `drawn` ignore failed sequences                     |
  | drawn     | sampled tokens follow the prompt, and no version exceeds     |
  |           | the current one; all tokens from `start` on are sampled;     |
  |           | tokens that are not sampled have log-prob 0                  |
  | ends      | `finish` has a reason if and only if the sequence has ended  |
  | slots     | each running sequence has one slot, and either has tokens    |
  |           | left, or no pages and a leader; empty slots have no pages    |
  | leaders   | a leader computes the prompt of each slot that waits for it  |
  | page_keys | each full page of a slot has the key of its tokens           |

  The names of the cache's invariants begin with "cache_". The cost grows with
  the pool and the queue.

  Args:
    state: the rollout.

  Returns:
    bool[] for each name, True if the invariant holds.
  """
  return _check_invariants(state)


@jax.jit
def _check_invariants(state: RolloutState) -> dict[str, Array]:
  queue, slots, cache = state.queue, state.slots, state.memory.cache
  return {
    "numbers": _numbers(queue),
    "order": _order(queue),
    "lengths": _lengths(queue),
    "drawn": _drawn(queue, cache),
    "ends": _ends(queue),
    "slots": _slots(queue, slots, cache),
    "leaders": _leaders(queue, slots, cache, state.config.num_samples),
    "page_keys": _page_keys(queue, slots, cache),
  } | {f"cache_{name}": law for name, law in cache_invariants(cache).items()}


def _numbers(queue: Queue) -> Array:
  ids, exists = queue.ids, queue.status != SequenceStatus.EMPTY
  ordered = jnp.sort(jnp.where(exists, ids, jnp.int32(-1)))
  differ = (ordered[1:] != ordered[:-1]) | (ordered[1:] < 0)
  return jnp.all(differ) & jnp.all(~exists | (ids < queue.next_id))


def _order(queue: Queue) -> Array:
  rows = jnp.arange(queue.size, dtype=jnp.int32)
  order, position = order_of(queue.ids, queue.priority)
  return (
    jnp.all(queue.order == order)
    & jnp.all(queue.place == position)
    & jnp.all(order[position] == rows)
  )


def _lengths(queue: Queue) -> Array:
  column = jnp.arange(queue.width, dtype=jnp.int32)[None]
  holds = (queue.prompt_length >= 1) & (queue.prompt_length <= queue.start)
  holds &= (queue.start <= queue.length) & (queue.length <= queue.limit)
  holds &= queue.limit <= queue.width
  is_padding = column >= queue.length[:, None]
  holds &= jnp.all(~is_padding | (queue.tokens == 0), axis=1)
  return jnp.all(holds | _is_void(queue))


def _is_void(queue: Queue) -> Array:
  """Returns bool[Q], rows that are EMPTY or FAILED."""
  is_empty_row = queue.status == SequenceStatus.EMPTY
  return is_empty_row | (queue.status == SequenceStatus.FAILED)


def _drawn(queue: Queue, cache: CacheState) -> Array:
  column = jnp.arange(queue.width, dtype=jnp.int32)[None]
  inside = column >= queue.prompt_length[:, None]
  inside &= column < queue.length[:, None]
  is_sampled = queue.versions != NOT_SAMPLED
  epoch = cache.epoch.astype(jnp.int32)
  is_version = (queue.versions >= 0) & (queue.versions <= epoch)
  holds = ~is_sampled | (inside & is_version)
  in_turn = inside & (column >= queue.start[:, None])
  holds &= ~in_turn | is_sampled
  holds &= is_sampled | (queue.log_probs == 0)
  return jnp.all(jnp.all(holds, axis=1) | _is_void(queue))


def _ends(queue: Queue) -> Array:
  status, finish = queue.status, queue.finish
  ended = (finish > Finish.UNFINISHED) & (finish < Finish.FAILED)
  failed = finish == Finish.FAILED
  holds = jnp.where(status == SequenceStatus.DONE, ended, finish == 0)
  holds = jnp.where(status == SequenceStatus.FAILED, failed, holds)
  return jnp.all(holds | (status == SequenceStatus.EMPTY))


def _slots(queue: Queue, slots: Slots, cache: CacheState) -> Array:
  row, length = slots.row, indexing.take(queue.length, slots.row)
  slot = jnp.arange(slots.size, dtype=jnp.int32)
  num_slots_of = indexing.add(
    jnp.zeros((queue.size,), jnp.int32),
    indexing.where_valid(row < queue.no_row, row),
    values=1,
  )
  runs = queue.status == SequenceStatus.RUNNING
  computing = are_computing(queue, slots)
  return (
    jnp.all(num_slots_of == runs.astype(jnp.int32))
    & jnp.all(computing | is_empty(cache, slot))
    & jnp.all(~computing | (cache.length < length))
    & jnp.all((row >= 0) & (row <= queue.no_row))
  )


def _leaders(
  queue: Queue, slots: Slots, cache: CacheState, samples: int
) -> Array:
  row, leader = slots.row, slots.leader
  length = indexing.take(queue.length, row)
  waits = leader < slots.no_slot
  leader_row = indexing.take(row, leader, fill=queue.no_row)
  holds = (row < queue.no_row) & (leader_row < queue.no_row)
  holds &= indexing.take(are_computing(queue, slots), leader)
  holds &= row // samples == leader_row // samples
  # A leader has not computed the last token of the prompt.
  holds &= indexing.take(cache.length, leader) < length
  return jnp.all(~waits | holds)


def _page_keys(queue: Queue, slots: Slots, cache: CacheState) -> Array:
  keys = queue.page_keys
  if keys is None or keys.shape[1] == 0:
    return jnp.ones((), bool)
  rows = slots.row
  expected = keys_of_rows(queue, cache, rows)
  config = cache.config
  page = jnp.arange(keys.shape[1], dtype=jnp.int32)[None]
  stop_column = (page + 1) * config.page_size
  # Pages after the prompt have keys only where all groups end a page.
  is_end = stop_column % config.alignment == 0
  is_filled = is_end & (stop_column <= cache.length[:, None])
  is_current = indexing.take(queue.epochs, rows) == cache.epoch
  is_filled &= is_current[:, None]
  is_equal = jnp.all(indexing.take(keys, rows) == expected, axis=-1)
  return jnp.all(~is_filled | is_equal)
