"""Finds the heads that waiting prompts share, so that they are computed once.

With a `StateRetention`, a sequence continues only from a state that another one
kept. So a sequence keeps the states at the ends of the heads that it shares
with waiting sequences, and these wait until the states are computed.
"""

import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv._src.arrays import elementwise
from jaxkv._src.arrays import indexing
from jaxkv._src.cache.prefix.prefix_rules import kept_ends
from jaxkv._src.cache.state import CacheState
from jaxkv._src.engine.queue.queue import Queue
from jaxkv._src.engine.slots import Slots
from jaxkv._src.engine.slots import are_computing


def shared_states(
  queue: Queue,
  slots: Slots,
  cache: CacheState,
  candidates: Array,
  num_cached: Array,
  max_hit: Array,
  siblings: Array,
) -> tuple[Array, Array, Array]:
  """Finds shared heads, and the candidates that wait for their states.

  `candidates`, int32[X], are rows of the queue; Q for none. Each has
  `num_cached` cached tokens, below `max_hit`, which is 0 if its page keys are
  of another epoch. `siblings`, bool[X, X], will fork from each other. The cache
  has a `StateRetention`.

  Returns:
    bool[X], the candidates for which a slot computes a state; bool[X, X], True
    if candidate j would compute a state for candidate i; and int32[X, 2], the
    tokens of the shortest and the longest head that a candidate shares, for
    `jaxkv.admit`.
  """
  hashes = cache.hashes
  assert hashes is not None  # Requires prefix caching.
  rows = jnp.concatenate([slots.row, candidates])
  common = _common_tokens(queue, cache, candidates, rows, max_hit)
  in_slots, common = jnp.split(common, [slots.size], axis=1)
  ends = jnp.concatenate(kept_ends(cache.config, hashes), axis=-1)
  is_ahead = are_computing(queue, slots)[:, None] & (
    ends > cache.length[:, None]
  )
  is_usable = _are_usable(in_slots, num_cached, ends) & is_ahead[None]
  is_blocked = jnp.any(is_usable, axis=(1, 2))

  index = jnp.arange(candidates.shape[0], dtype=jnp.int32)
  is_other = (index[:, None] != index[None]) & ~siblings
  heads = jnp.where(is_other & (common > num_cached[:, None]), common, 0)
  longest = jnp.max(heads, axis=1)
  shortest = jnp.where(heads > 0, heads, indexing.NOWHERE)
  shortest = jnp.minimum(jnp.min(shortest, axis=1), longest)
  shared_tokens = jnp.stack([shortest, longest], axis=-1)
  needs_state = _are_usable(common, num_cached, shared_tokens)
  needs_state = jnp.any(needs_state, axis=2) & is_other
  return is_blocked, needs_state, shared_tokens


def _are_usable(common: Array, num_cached: Array, ends: Array) -> Array:
  """Returns bool[X, Y, E]: ends of row j from which candidate i continues.

  `common`, int32[X, Y], has the tokens of their common head.
  """
  is_usable = ends[None] <= common[:, :, None]
  return is_usable & (ends[None] > num_cached[:, None, None])


def _common_tokens(
  queue: Queue,
  cache: CacheState,
  candidates: Array,
  rows: Array,
  max_hit: Array,
) -> Array:
  """Returns int32[X, Y]: tokens of the longest head that two prompts share.

  The head of candidate i, `candidates[i]`, and of row j, `rows[j]`, ends where
  all groups end a page, before token `max_hit[i]`, and inside the prompt of
  row j.
  """
  keys = queue.page_keys
  assert keys is not None  # Requires prefix caching.
  align = cache.config.alignment
  steps = align // cache.config.page_size
  is_current = indexing.take(queue.epochs, rows) == cache.epoch
  limit = jnp.where(is_current, indexing.take(queue.start, rows), 0)
  limit = jnp.minimum(jnp.maximum(max_hit - 1, 0)[:, None], limit[None])
  limit = elementwise.quotient(limit, align)

  # Keys are chained. So if the keys of two pages are equal, all pages before
  # them are equal, and a binary search finds the last equal page.
  def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
    low, high = bounds
    middle = (low + high + 1) // 2
    column = middle * steps - 1
    left = indexing.take(keys, candidates[:, None], column)
    right = indexing.take(keys, rows[None], column)
    is_equal = (middle > 0) & jnp.all(left == right, axis=-1)
    return (
      jnp.where(is_equal, middle, low),
      jnp.where(is_equal, high, jnp.maximum(middle - 1, low)),
    )

  num_halvings = (keys.shape[1] // steps).bit_length() + 1
  low, _ = lax.fori_loop(0, num_halvings, halve, (jnp.zeros_like(limit), limit))
  return low * align
