"""Commits the tokens of a step, and counts them."""

import dataclasses

import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import elementwise
from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import loops
from jaxkv._src.cache.pool.page_pool import num_in_use
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.verbs.commit import commit
from jaxkv._src.engine.decode_round import Round
from jaxkv._src.engine.expert_records import save_full_pages
from jaxkv._src.engine.pages.grow import held_pages
from jaxkv._src.engine.schedule import Work
from jaxkv._src.engine.state import RolloutState
from jaxkv._src.engine.state import replaced
from jaxkv._src.engine.state import widths_of


def commit_tokens(state: RolloutState, counts: Array) -> RolloutState:
  """Commits the next `counts`, int32[B], tokens of each slot.

  `Queue.page_keys` gets the keys of pages that become full.
  """
  slots, cache = state.slots, state.memory.cache
  queue = save_full_pages(state.queue, slots, state.memory.kv, cache, counts)
  page_size = cache.config.page_size
  aligned = cache.config.alignment
  column = jnp.arange(page_size, dtype=jnp.int32)[None]
  row = slots.row[:, None]

  # One call of `commit` for a whole chunk would pad every decoding slot to the
  # length of the chunk, so each call commits at most one page.
  def commit_page(
    loop: tuple[CacheState, Array | None, Array],
  ) -> tuple[CacheState, Array | None, Array]:
    cache, keys, remaining = loop
    num_tokens = jnp.minimum(remaining, page_size)
    num_before = elementwise.quotient(cache.length, aligned)
    tokens = indexing.take(queue.tokens, row, cache.length[:, None] + column)
    cache, _ = commit(cache, tokens, num_tokens)
    if keys is not None and cache.hashes is not None:
      # `chain` is the key at the last position where all groups end a page.
      num_after = elementwise.quotient(cache.length, aligned)
      target_rows = indexing.where_valid(num_after > num_before, slots.row)
      last_column = num_after * (aligned // page_size) - 1
      keys = indexing.put(
        keys, target_rows, last_column, values=cache.hashes.chain
      )
    return cache, keys, remaining - num_tokens

  cache, keys, _ = loops.while_loop(
    lambda loop: jnp.any(loop[2] > 0),
    commit_page,
    (cache, queue.page_keys, counts),
  )
  queue = dataclasses.replace(queue, page_keys=keys)
  return replaced(state, queue=queue, cache=cache)


def read_of(cache: CacheState) -> Array:
  """Returns int32[] for `read_before`, computed from the committed tokens."""
  if cache.hashes is None:
    return jnp.zeros((), jnp.int32)
  return jnp.max(cache.hashes.tail) & jnp.int32(2**31 - 1)


def count_step(
  state: RolloutState,
  *,
  uncommitted: RolloutState,
  work: Work,
  calls: Round,
) -> RolloutState:
  """Adds the calls of a step to the counters, the log and `Queue.computed`.

  `uncommitted` is the state before the commit, and `work` that of the first
  call.
  """
  counts, sampled = calls.counts, calls.sampled.counts
  old_cache = uncommitted.memory.cache
  queue, slots, cache = state.queue, state.slots, state.memory.cache
  counters, all_widths = state.counters, widths_of(state)
  columns = jnp.asarray([width.columns for width in all_widths], jnp.int32)
  widths = jnp.arange(len(all_widths), dtype=jnp.int32)
  rows = slots.size + columns[work.width]
  calls_by_width = (widths == work.width).astype(jnp.int32)
  # Further calls only decode, in the first width.
  calls_by_width += jnp.where(widths == 0, calls.num_further, 0)
  in_use = num_in_use(cache.pool).reshape(counters.peak_pages.shape)
  shared = jnp.sum(held_pages(cache), dtype=jnp.int32)
  shared -= jnp.sum(in_use, dtype=jnp.int32)
  target_rows = indexing.where_valid(counts > 0, slots.row)
  computed = indexing.take(queue.computed, target_rows)
  recomputed = jnp.clip(computed - old_cache.length, 0, counts)
  num_sampled = jnp.minimum(sampled, counts - recomputed)
  drafted = counters.drafted
  accepted = counters.accepted
  if work.drafts is not None:
    drafted += jnp.sum(work.drafts, dtype=jnp.int32)
    accepted += jnp.sum(jnp.maximum(sampled - 1, 0), dtype=jnp.int32)
  prefilled = jnp.sum(counts - recomputed - num_sampled, dtype=jnp.int32)
  computed = jnp.maximum(computed, old_cache.length + counts)
  computed = indexing.put(queue.computed, target_rows, values=computed)
  counters = dataclasses.replace(
    counters,
    steps=counters.steps + (calls.num_further + 1),
    calls=counters.calls + calls_by_width,
    rows=counters.rows + (rows + calls.num_further * slots.size),
    generated=counters.generated + jnp.sum(sampled, dtype=jnp.int32),
    prefilled=counters.prefilled + prefilled,
    recomputed=counters.recomputed + jnp.sum(recomputed, dtype=jnp.int32),
    drafted=drafted,
    accepted=accepted,
    peak_pages=jnp.maximum(counters.peak_pages, in_use),
    peak_shared=jnp.maximum(counters.peak_shared, shared),
  )
  queue = dataclasses.replace(queue, computed=computed)
  return replaced(state, queue=queue, counters=counters, log=calls.log)
