"""Frees and reserves pages of running sequences in a step."""

import jax.numpy as jnp
from jax import Array

from jaxkv._src.cache.pool import recurrent
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import rows_of
from jaxkv._src.cache.steps.reserve import sum_by_pool
from jaxkv._src.cache.verbs.allocate import make_room
from jaxkv._src.cache.verbs.recycle import recycle
from jaxkv._src.engine.config import RolloutConfig
from jaxkv._src.engine.queue import Queue
from jaxkv._src.engine.slots import Slots
from jaxkv._src.engine.slots import limit_to_chunk
from jaxkv._src.engine.slots import missing_tokens


def free_behind_windows(
  queue: Queue, slots: Slots, cache: CacheState
) -> CacheState:
  """Frees pages of running sequences that their later tokens do not need."""
  if not cache.config.skips_pages:
    return cache
  # A cache can have slots in use that are not of this rollout, see `score`.
  return recycle(cache, mask=slots.row < queue.no_row)[0]


def grow(
  queue: Queue,
  slots: Slots,
  cache: CacheState,
  drafts: Array | None,
  config: RolloutConfig,
  planned: Array | None = None,
) -> tuple[CacheState, Array]:
  """Reserves pages for missing tokens, at most a chunk, and `drafts`, int32[B].

  `planned`, int32[B], are the tokens that the step will compute; None if they
  are chosen later, from those with pages.

  Returns:
    The cache; bool[B], slots with missing tokens but too few pages.
  """
  missing = missing_tokens(queue, slots, cache)
  tokens = limit_to_chunk(cache, missing, config)
  if planned is not None:
    tokens = planned
  if drafts is not None:
    tokens += drafts
  cache, room = make_room(cache, rows_of(cache, None, None), tokens)
  # Drafts starve no slot: `propose_drafts` drops those without free pages.
  return cache, (missing > 0) & ~room.ok


def needed_pages(
  queue: Queue, slots: Slots, cache: CacheState, config: RolloutConfig
) -> Array:
  """Returns int32[P]: the pages that `grow` needs without drafts."""
  missing = missing_tokens(queue, slots, cache)
  return num_new_pages(cache, limit_to_chunk(cache, missing, config))


def num_new_pages(cache: CacheState, tokens: Array) -> Array:
  """Returns int32[P]: the new pages for `tokens`, int32[B], of all slots."""
  columns = cache.config.sizes.columns_for(cache.length + tokens)
  # Idle slots take no page, whatever their length.
  columns = jnp.where(tokens[:, None] > 0, columns, 0)
  stop = jnp.maximum(columns, cache.num_pages)
  num_new = stop - recurrent.first_fresh(
    cache.config, cache.num_pages, stop, cache.length
  )
  return jnp.sum(sum_by_pool(cache.config, num_new), axis=0, dtype=jnp.int32)
