"""Proposes the draft tokens of a step, and learns from the sampled tokens."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays.arguments import as_int32
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.steps.reserve import sum_by_pool
from jaxkv._src.engine.config import RolloutConfig
from jaxkv._src.engine.hooks import Draft
from jaxkv._src.engine.hooks import rows_of
from jaxkv._src.engine.pages.grow import groups_by_pool
from jaxkv._src.engine.pages.grow import needed_pages
from jaxkv._src.engine.queue.queue import Queue
from jaxkv._src.engine.sampling import ngrams
from jaxkv._src.engine.schedule import Drafts
from jaxkv._src.engine.schedule import Work
from jaxkv._src.engine.slots import Slots
from jaxkv._src.engine.slots import are_computing
from jaxkv._src.engine.slots import are_followed
from jaxkv._src.engine.slots import chunk_size
from jaxkv._src.engine.slots import missing_tokens
from jaxkv._src.engine.state import RolloutState
from jaxkv._src.engine.state import replaced


@jax.named_scope("draft")
def propose_drafts(
  params: Any, state: RolloutState, draft: Draft | None
) -> Drafts | None:
  """Returns drafts for which pages are free; None without speculation."""
  queue, slots, cache = state.queue, state.slots, state.memory.cache
  config, rates = state.config, queue.draft_rates
  if rates is None:
    return None
  missing = missing_tokens(queue, slots, cache)
  decodes = (missing == 1) & ~are_followed(slots)
  rows = jnp.where(decodes, slots.row, queue.no_row)
  if draft is None:
    tokens, counts = ngrams.propose(queue, rows, config)
  else:
    buffer = indexing.take(queue.tokens, rows)
    tokens, counts = _as_drafts(
      draft(params, rows_of(queue, rows), buffer), slots.size, config
    )
  has_match = decodes & (counts > 0)
  # The last token of a sequence is never an input, so it is never a draft.
  room = indexing.take(queue.limit, rows) - indexing.take(queue.length, rows)
  likely = ngrams.likely_lengths(rates, rows, config)
  counts = jnp.minimum(jnp.minimum(likely, room - 1), counts)
  counts = jnp.maximum(counts, 0)
  counts = lax.cond(
    jnp.any(counts > 0),
    lambda: jnp.where(_fits(queue, slots, cache, counts, config), counts, 0),
    lambda: counts,
  )
  return Drafts(tokens, counts, has_match)


def _as_drafts(
  drafts: Any, num_slots: int, config: RolloutConfig
) -> tuple[Array, Array]:
  """Returns the results of a `Draft` as int32; raises for invalid ones."""
  tokens, counts = drafts
  meaning, shape = ", as `draft` returns them", (num_slots, config.draft_tokens)
  tokens = as_int32("tokens", tokens, shape, meaning)
  counts = as_int32("counts", counts, (num_slots,), meaning)
  return jnp.asarray(tokens), jnp.asarray(counts)


def _fits(
  queue: Queue,
  slots: Slots,
  cache: CacheState,
  counts: Array,
  config: RolloutConfig,
) -> Array:
  """Returns bool[B], slots for whose drafts enough pages are free."""
  columns_for = cache.config.sizes.columns_for
  missing = missing_tokens(queue, slots, cache)
  tokens = jnp.minimum(missing, chunk_size(cache.config, config))
  without = columns_for(cache.length + tokens)
  columns = columns_for(cache.length + tokens + counts)
  columns -= jnp.maximum(without, cache.num_pages)
  num_new = sum_by_pool(cache.config, jnp.maximum(columns, 0))
  num_free = cache.pool.queue.num_free
  num_free -= needed_pages(queue, slots, cache, config)
  # For each running sequence, one page in each group stays free.
  num_running = jnp.sum(are_computing(queue, slots), dtype=jnp.int32)
  num_free -= num_running * groups_by_pool(cache.config)[0]
  num_new = jnp.cumsum(num_new, axis=0, dtype=jnp.int32)
  return jnp.all(num_new <= num_free[None], axis=1)


def learn_from(
  state: RolloutState, *, work: Work, drafts: Drafts | None, sampled: Array
) -> RolloutState:
  """Updates acceptance rates; each slot sampled `sampled`, int32[B], tokens."""
  queue = state.queue
  if drafts is None or work.drafts is None or queue.draft_rates is None:
    return state
  accepted = jnp.maximum(sampled - 1, 0)
  rates = ngrams.learn(
    queue.draft_rates, state.slots.row, drafts.found, work.drafts, accepted
  )
  return replaced(state, queue=dataclasses.replace(queue, draft_rates=rates))
