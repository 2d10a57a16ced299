"""Checks the invariants of a rollout between two steps."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.cache.invariants import CacheError
from jaxkv._src.cache.invariants import check_invariants as cache_invariants
from jaxkv._src.cache.state import is_empty
from jaxkv._src.rollout import sequences as queue
from jaxkv._src.rollout import slots
from jaxkv._src.rollout.page_keys import page_keys
from jaxkv._src.rollout.sequences import Finish
from jaxkv._src.rollout.state import RolloutState


def check(state: RolloutState) -> None:
  """Raises on the host if a rollout, or its cache, breaks an invariant.

  Args:
    state: the rollout.

  Raises:
    CacheError: names the invariants that do not hold.
  """
  laws = check_invariants(state)
  broken = [name for name, holds in laws.items() if not np.all(holds)]
  if broken:
    raise CacheError(
      f"The rollout broke its invariants {', '.join(broken)}, which "
      "jaxkv.rollout.check_invariants defines. This is a bug in jaxkv, or the "
      "state was edited by hand."
    )


def check_invariants(state: RolloutState) -> dict[str, Array]:
  """Tests every invariant of a rollout between two calls.

  | name      | invariant                                                    |
  |-----------|--------------------------------------------------------------|
  | numbers   | the ids of sequences are distinct and below `next_id`        |
  | order     | `order` sorts the rows by priority and id; `place` is its    |
  |           | inverse                                                      |
  | lengths   | prompt <= start <= length <= limit <= W; later tokens are 0  |
  | drawn     | only tokens after the prompt are sampled, by a version up to |
  |           | the current one; others there are tokens of `extend`         |
  | ends      | `finish` has a reason if and only if a sequence ended        |
  | slots     | each running sequence has exactly one slot and tokens left   |
  |           | to compute; other slots hold no pages                        |
  | leaders   | a sample waits for the slot of a sample of the same prompt   |
  | page_keys | the key of each page filled by a slot is that of its tokens  |

  Those of the cache have the prefix "cache_". The cost grows with the pool and
  with the queue.

  Args:
    state: the rollout.

  Returns:
    bool[] by the name of the invariant.
  """
  return _check_invariants(state)


@jax.jit
def _check_invariants(state: RolloutState) -> dict[str, Array]:
  cache = cache_invariants(state.cache)
  return {
    "numbers": _numbers(state),
    "order": _order(state),
    "lengths": _lengths(state),
    "drawn": _drawn(state),
    "ends": _ends(state),
    "slots": _slots(state),
    "leaders": _leaders(state),
    "page_keys": _page_keys(state),
  } | {f"cache_{name}": holds for name, holds in cache.items()}


def _numbers(state: RolloutState) -> Array:
  ids, there = (
    state.sequences.ids,
    state.sequences.status != queue.SequenceStatus.EMPTY,
  )
  ordered = jnp.sort(jnp.where(there, ids, jnp.int32(-1)))
  different = (ordered[1:] != ordered[:-1]) | (ordered[1:] < 0)
  return jnp.all(different) & jnp.all(~there | (ids < state.next_id))


def _order(state: RolloutState) -> Array:
  rows = jnp.arange(state.order.shape[0], dtype=jnp.int32)
  order, place = queue.order_of(state.sequences)
  return (
    jnp.all(state.order == order)
    & jnp.all(state.place == place)
    & jnp.all(order[place] == rows)
  )


def _lengths(state: RolloutState) -> Array:
  some = state.sequences
  column = jnp.arange(some.tokens.shape[1], dtype=jnp.int32)[None]
  holds = (some.prompt_length >= 1) & (some.prompt_length <= some.start)
  holds &= (some.start <= some.length) & (some.length <= some.limit)
  holds &= some.limit <= some.tokens.shape[1]
  behind = column >= some.length[:, None]
  holds &= jnp.all(~behind | (some.tokens == 0), axis=1)
  return jnp.all(holds | _is_void(state))


def _is_void(state: RolloutState) -> Array:
  """Returns bool[Q], rows that are EMPTY or FAILED."""
  status = state.sequences.status
  return (status == queue.SequenceStatus.EMPTY) | (
    status == queue.SequenceStatus.FAILED
  )


def _drawn(state: RolloutState) -> Array:
  some = state.sequences
  column = jnp.arange(some.tokens.shape[1], dtype=jnp.int32)[None]
  inside = column >= some.prompt_length[:, None]
  inside &= column < some.length[:, None]
  drawn = some.versions != queue.NOT_DRAWN
  epoch = state.cache.epoch.astype(jnp.int32)
  holds = ~drawn | (inside & (some.versions >= 0) & (some.versions <= epoch))
  # All tokens of this turn are sampled.
  now = inside & (column >= some.start[:, None])
  holds &= ~now | drawn
  holds &= drawn | (some.log_probs == 0)
  return jnp.all(jnp.all(holds, axis=1) | _is_void(state))


def _ends(state: RolloutState) -> Array:
  status, finish = state.sequences.status, state.sequences.finish
  ended = (finish > Finish.UNFINISHED) & (finish < Finish.FAILED)
  failed = finish == Finish.FAILED
  holds = jnp.where(status == queue.SequenceStatus.DONE, ended, finish == 0)
  holds = jnp.where(status == queue.SequenceStatus.FAILED, failed, holds)
  return jnp.all(holds | (status == queue.SequenceStatus.EMPTY))


def _slots(state: RolloutState) -> Array:
  none, running = state.sequences.length.shape[0], state.running
  slot = jnp.arange(running.shape[0], dtype=jnp.int32)
  held = indexing.add(
    jnp.zeros((none,), jnp.int32),
    indexing.where_valid(running < none, running),
    values=1,
  )
  runs = state.sequences.status == queue.SequenceStatus.RUNNING
  computed = state.cache.length
  computes = slots.computing(state)
  return (
    jnp.all(held == runs.astype(jnp.int32))
    & jnp.all(computes | is_empty(state.cache, slot))
    & jnp.all(~computes | (computed < slots.lengths(state)))
    & jnp.all((running >= 0) & (running <= none))
  )


def _leaders(state: RolloutState) -> Array:
  none, samples = state.sequences.length.shape[0], state.config.num_samples
  running, leader = state.running, state.leader
  waits = leader < running.shape[0]
  first = indexing.take(running, leader, fill=none)
  holds = (running < none) & (first < none)
  holds &= indexing.take(slots.computing(state), leader)
  holds &= running // samples == first // samples
  # The leader computes no more than the common prompt.
  lengths = indexing.take(state.sequences.length, running)
  holds &= indexing.take(state.cache.length, leader) < lengths
  return jnp.all(~waits | holds)


def _page_keys(state: RolloutState) -> Array:
  keys = state.page_keys
  if keys is None or keys.shape[1] == 0:
    return jnp.ones((), bool)
  rows, salts = state.running, state.salts
  wanted = page_keys(
    state.cache,
    indexing.take(state.sequences.tokens, rows),
    None if salts is None else indexing.take(salts, rows),
  )
  config = state.cache.config
  page = jnp.arange(keys.shape[1], dtype=jnp.int32)[None]
  stop = (page + 1) * config.page_size
  # The last page of those that all groups end.
  ends = stop % config.alignment == 0
  filled = ends & (stop <= state.cache.length[:, None])
  current = indexing.take(state.epochs, rows) == state.cache.epoch
  filled &= current[:, None]
  return jnp.all(
    ~filled | jnp.all(indexing.take(keys, rows) == wanted, axis=-1)
  )
