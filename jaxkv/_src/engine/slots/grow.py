"""Frees and reserves pages of running sequences in a step."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv._src.cache.pool import recurrent
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import rows_of
from jaxkv._src.cache.state import without_moves
from jaxkv._src.cache.steps.reserve import sum_by_pool
from jaxkv._src.cache.verbs.allocate import make_room
from jaxkv._src.cache.verbs.recycle import recycle
from jaxkv._src.engine.config import RolloutConfig
from jaxkv._src.engine.memory import move_pages
from jaxkv._src.engine.model_call.schedule import Drafts
from jaxkv._src.engine.model_call.schedule import Work
from jaxkv._src.engine.queue.queue import Queue
from jaxkv._src.engine.slots.fork import Forks
from jaxkv._src.engine.slots.slots import Slots
from jaxkv._src.engine.slots.slots import limit_to_chunk
from jaxkv._src.engine.slots.slots import missing_tokens
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
