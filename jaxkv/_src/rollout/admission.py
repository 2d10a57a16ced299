"""Ranks waiting sequences and chooses those that enter empty slots.

Sequences wait in the order of their priorities, then of their ids. Among the
first ones of equal priority, the one with the longest cached prefix enters
first, because the prefix may be evicted later. Two rules take precedence:

- A sequence whose next page is being computed by another one waits, a step or
  two, to find that page in the cache.
- A sequence that was overtaken too often enters before all others.

Further samples of a prompt take slots together with the first one. They hold no
pages until its prompt is computed, and then fork.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv._src.arrays import elementwise
from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import sharding
from jaxkv._src.cache.prefix import hashing
from jaxkv._src.cache.state import roots
from jaxkv._src.cache.steps.find import Prefix
from jaxkv._src.cache.steps.find import find_prefix
from jaxkv._src.rollout import sequences as queue
from jaxkv._src.rollout.config import RolloutConfig
from jaxkv._src.rollout.state import RolloutState


class Candidates(NamedTuple):
  """Waiting sequences, in order; X is the window.

  Attributes:
    numbers: int32[X], the row of each; Q for none.
    valid: bool[X], False without a sequence.
    priority: int32[X]; None if all are equal.
    found: the cached prefix of each.
    blocked: bool[X], True if a running sequence computes the next page.
    same: bool[X, X], True if candidate j would compute the next page of i.
    siblings: bool[X, X], True if both are fresh samples of one prompt.
    leader: int32[X], the slot of a sample that computes the same prompt; B for
      none.
  """

  numbers: Array
  valid: Array
  priority: Array | None
  found: Prefix
  blocked: Array
  same: Array
  siblings: Array
  leader: Array


class Chosen(NamedTuple):
  """Up to R candidates, in the order in which they enter.

  Attributes:
    candidates: int32[R], indices of candidates; X for none.
    leads: int32[R], the row of the sample that each one follows, or itself.
    leader: int32[R], the running slot that each one follows; B for none.
  """

  candidates: Array
  leads: Array
  leader: Array


def candidates(state: RolloutState, computing: Array) -> Candidates:
  """Returns the first waiting sequences and their cached prefixes.

  Args:
    state: the rollout.
    computing: bool[B], slots that hold pages.
  """
  cache, sequences, keys = state.cache, state.sequences, state.page_keys
  none = sequences.length.shape[0]
  window = min(state.config.window, none)
  waits = sequences.status == queue.SequenceStatus.WAITING
  first = queue.first_of(waits[state.order], window)
  numbers = indexing.take(state.order, first, fill=none)
  priority = sequences.priority
  if priority is not None:
    priority = indexing.take(priority, numbers)
  valid, length = numbers < none, indexing.take(sequences.length, numbers)
  nobody = jnp.zeros((window, window), bool)
  siblings, leader = nobody, jnp.full_like(numbers, state.running.shape[0])
  if state.config.num_samples > 1:
    siblings, leader = _siblings(state, numbers, computing)
  known = valid & (indexing.take(state.epochs, numbers) == cache.epoch)
  most = length
  if state.config.prompt_log_probs:
    # A cached token yields no log-prob, so it must have been computed before.
    most = jnp.minimum(length, indexing.take(state.computed, numbers) + 1)
  salts = None
  if state.salts is not None:
    salts = indexing.take(state.salts, numbers)
  root = jnp.broadcast_to(roots(cache, salts), (window, hashing.KEY_WORDS))
  own = None if keys is None else indexing.take(keys, numbers)
  found = find_prefix(
    cache,
    indexing.take(sequences.tokens, numbers),
    most,
    known,
    hashed=None if own is None else (root, own),
  )
  waiting = Candidates(
    numbers=numbers,
    valid=valid,
    priority=priority,
    found=found,
    blocked=jnp.zeros_like(valid),
    same=nobody,
    siblings=siblings,
    leader=leader,
  )
  if keys is None or own is None or keys.shape[1] == 0:
    return waiting
  if state.config.prompt_log_probs:
    return waiting
  # The end of the next page, where all groups end one.
  stop = found.num_cached_tokens + cache.config.alignment
  page = elementwise.quotient(stop, cache.config.page_size) - 1
  columns = keys.shape[1]
  wants = known & (stop < length) & (page < columns)
  key = jnp.take_along_axis(
    own, jnp.minimum(page, columns - 1)[:, None, None], axis=1
  )

  def computes(some: Array) -> Array:
    """Returns bool[X, Y], True if sequence j has the next page of i."""
    theirs = indexing.take(keys, some[None], page[:, None])
    lengths = indexing.take(sequences.start, some)
    return jnp.all(theirs == key, axis=-1) & (stop[:, None] <= lengths[None])

  blocked = computes(state.running) & computing[None]
  blocked &= cache.length[None] < stop[:, None]
  blocked = jnp.any(blocked, axis=1) & wants
  return waiting._replace(
    blocked=blocked, same=computes(numbers) & wants[:, None]
  )


def _siblings(
  state: RolloutState, numbers: Array, computing: Array
) -> tuple[Array, Array]:
  """Returns `Candidates.siblings` and `leader` of the rows int32[X].

  A sample is fresh if it has sampled nothing and has more than its last token
  to compute. Samples with different salts share nothing.
  """
  sequences, running, samples = (
    state.sequences,
    state.running,
    state.config.num_samples,
  )

  def fresh(some: Array) -> Array:
    length = indexing.take(sequences.length, some)  # 0 for no sequence
    return (length > 1) & (
      indexing.take(sequences.prompt_length, some) == length
    )

  def alike(others: Array) -> Array:
    """Returns bool[X, Y], True for equal prompts and salts."""
    same = (numbers // samples)[:, None] == (others // samples)[None]
    if state.salts is None:
      return same
    mine, theirs = (
      indexing.take(state.salts, some) for some in (numbers, others)
    )
    return same & jnp.all(mine[:, None] == theirs[None], axis=-1)

  own = fresh(numbers)[:, None]
  siblings = own & fresh(numbers)[None] & alike(numbers)
  leads = computing & fresh(running)
  leads &= indexing.take(state.epochs, running) == state.cache.epoch
  leads &= state.cache.length < indexing.take(sequences.length, running)
  same = alike(running) & own & leads[None]
  first = jnp.argmax(same, axis=1).astype(jnp.int32)
  return siblings, jnp.where(jnp.any(same, axis=1), first, running.shape[0])


def choose(
  waiting: Candidates,
  overtaken: Array,
  num_slots: int,
  free: Array,
  config: RolloutConfig,
) -> Chosen:
  """Chooses up to R candidates that enter together.

  Args:
    waiting: the candidates.
    overtaken: int32[X], how often each was overtaken.
    num_slots: B.
    free: int32[], the number of empty slots.
    config: R, and how often a sequence may be overtaken.
  """
  window = waiting.numbers.shape[0]
  rows = min(config.admissions, num_slots)
  position = jnp.arange(window, dtype=jnp.int32)
  nobody, cached = rows + num_slots, waiting.found.num_cached_tokens

  def one(row, carry):
    chosen, left, passed, blocked, following = carry
    # A candidate that was overtaken too often enters next, and none after it,
    # even if another sequence computes its pages, or it finds no room.
    often = waiting.valid & (passed >= config.max_overtaken)
    late = left & often
    first = late & (position == jnp.argmax(late).astype(jnp.int32))
    follows = following < nobody
    eligible = jnp.where(jnp.any(late), first, left & (~blocked | follows))
    if waiting.priority is not None:
      others = jnp.where(eligible, waiting.priority, jnp.int32(2**31 - 1))
      eligible &= others == jnp.min(others)
    score = jnp.where(follows, jnp.int32(indexing.NOWHERE), cached)
    pick = jnp.argmax(jnp.where(eligible, score, -1)).astype(jnp.int32)
    # A chosen candidate may still find no room, so it may be overtaken too.
    ok = jnp.any(eligible) & (row < free) & ~jnp.any(often & ~left)
    # Samples of its prompt follow its leader, or itself if it has none.
    own = following.at[pick].get(mode="clip")
    joins = ok & waiting.siblings[:, pick] & ~follows
    following = jnp.where(joins, jnp.where(own < nobody, own, row), following)
    chosen = chosen.at[row].set(jnp.where(ok, pick, window))
    left &= ~(ok & (position == pick)) & ~jnp.any(late)
    passed += (ok & (position < pick)).astype(jnp.int32)
    return (
      chosen,
      left,
      passed,
      blocked | (ok & waiting.same[:, pick]),
      following,
    )

  # Rows of this call are 0 .. R - 1, slots R .. R + B - 1; R + B is no leader.
  following = jnp.where(
    waiting.leader < num_slots, rows + waiting.leader, nobody
  )
  start = (
    jnp.full((rows,), window, jnp.int32),
    waiting.valid,
    overtaken,
    waiting.blocked,
    following.astype(jnp.int32),
  )
  chosen, _, _, _, following = lax.fori_loop(
    0, rows, one, sharding.match_varying_axes(start)
  )
  own = indexing.take(following, chosen, fill=nobody)
  row = jnp.arange(rows, dtype=jnp.int32)
  return Chosen(
    candidates=chosen,
    leads=jnp.where(own < rows, own, row),
    leader=jnp.where(own >= rows, own - rows, num_slots),
  )
