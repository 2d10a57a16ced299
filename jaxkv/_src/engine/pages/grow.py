"""Frees and reserves pages of running sequences, and counts those they need."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.pool import recurrent
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import rows_of
from jaxkv._src.cache.state import without_moves
from jaxkv._src.cache.steps.reserve import sum_by_pool
from jaxkv._src.cache.verbs.allocate import make_room
from jaxkv._src.cache.verbs.recycle import recycle
from jaxkv._src.engine.config import RolloutConfig
from jaxkv._src.engine.memory import move_pages
from jaxkv._src.engine.pages.fork import Forks
from jaxkv._src.engine.queue.queue import Queue
from jaxkv._src.engine.schedule import Drafts
from jaxkv._src.engine.schedule import Work
from jaxkv._src.engine.slots import Slots
from jaxkv._src.engine.slots import are_computing
from jaxkv._src.engine.slots import chunk_size
from jaxkv._src.engine.slots import limit_to_chunk
from jaxkv._src.engine.slots import missing_tokens
from jaxkv._src.engine.state import RolloutState
from jaxkv._src.engine.state import replaced


def free_behind_windows(state: RolloutState) -> RolloutState:
  """Frees pages of running sequences that their later tokens do not need."""
  cache = without_moves(state.memory.cache)
  if cache.config.skips_pages:
    # A cache can have slots in use that are not of this rollout, see `score`.
    is_running = state.slots.row < state.queue.no_row
    cache, _ = recycle(cache, mask=is_running)
  return replaced(state, cache=cache)


@jax.named_scope("grow")
def reserve_pages(
  state: RolloutState,
  *,
  forks: Forks,
  drafts: Drafts | None,
  planned: Work | None,
) -> tuple[RolloutState, Array]:
  """Reserves pages for missing tokens, at most a chunk, and for drafts.

  `planned` has the tokens that the step will compute; None if they are chosen
  later, from those with pages. Evicted pages move to offload memory.

  Returns:
    The state; bool[B], slots with missing tokens but too few pages.
  """
  queue, slots, cache = state.queue, state.slots, state.memory.cache
  missing = missing_tokens(queue, slots, cache)
  tokens = limit_to_chunk(cache, missing, state.config)
  if planned is not None:
    # A fork needs a page for the copy of its leader's state, even if the step
    # computes none of its tokens.
    least_tokens = forks.mask.astype(jnp.int32)
    tokens = jnp.maximum(planned.counts, least_tokens)
  if drafts is not None:
    tokens += drafts.counts
  cache, room = make_room(cache, rows_of(cache, None, None), tokens)
  # Evicted pages move to offload memory before new tokens overwrite them.
  memory = move_pages(dataclasses.replace(state.memory, cache=cache))
  # Drafts starve no slot: `propose_drafts` drops those without free pages.
  starved = (missing > 0) & ~room.ok
  return dataclasses.replace(state, memory=memory), starved


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


def promised_pages(
  queue: Queue,
  slots: Slots,
  cache: CacheState,
  needed: Array,
  config: RolloutConfig,
) -> Array:
  """Returns int32[P]: the pages to keep free for running sequences.

  They need `needed`, int32[P], pages in this step.
  """
  if not cache.config.skips_pages:
    return needed
  length = indexing.take(queue.length, slots.row)
  at_once = pages_at_once(cache.config, length, config)
  # A sequence whose prompt is computed never has a chunk in flight again.
  in_decode = max(config.decode_steps, 1 + config.draft_tokens)
  is_decoding = missing_tokens(queue, slots, cache) <= 1
  at_once = jnp.where(
    is_decoding[:, None],
    jnp.minimum(at_once, _most_pages(cache.config, in_decode)),
    at_once,
  )
  at_once = jnp.where(are_computing(queue, slots)[:, None], at_once, 0)
  later = jnp.maximum(at_once - held_pages(cache), 0)
  later = jnp.sum(sum_by_pool(cache.config, later), axis=0, dtype=jnp.int32)
  return jnp.maximum(needed, later)


def held_pages(cache: CacheState) -> Array:
  """Returns int32[B, G]: the pages of each slot, without null pages."""
  # Columns behind a window hold the null page, which is not allocated.
  num_columns = cache.num_pages - cache.num_skipped_pages
  if not recurrent.has_states(cache.config):
    return num_columns
  # Between the last state at a page end and the running state, too.
  holds_states = recurrent.holds_states(cache.config)
  return jnp.where(holds_states, jnp.minimum(num_columns, 2), num_columns)


def groups_by_pool(cache_config: CacheConfig) -> Array:
  """Returns int32[1, P]: the number of groups of each pool."""
  counts = [len(groups) for groups in cache_config.groups_of_pools]
  return jnp.asarray([counts], jnp.int32)


def pages_at_once(
  cache_config: CacheConfig, length: Array, config: RolloutConfig
) -> Array:
  """Returns the most pages that sequences of a length hold, int32[R, G]."""
  columns = cache_config.sizes.columns_for(length)
  most_in_flight = chunk_size(cache_config, config) + config.decode_steps - 1
  return jnp.minimum(columns, _most_pages(cache_config, most_in_flight))


def _most_pages(cache_config: CacheConfig, in_flight: int) -> Array:
  """Returns the most pages of a sequence with tokens in flight, int32[1, G]."""
  limits = cache_config.sizes.max_pages(in_flight, cache_config.slot_tokens)
  return jnp.asarray(limits, jnp.int32)[None]
