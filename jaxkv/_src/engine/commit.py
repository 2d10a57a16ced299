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
from jaxkv._src.engine.admit import held_pages
from jaxkv._src.engine.counters import Counters
from jaxkv._src.engine.queue import Queue
from jaxkv._src.engine.schedule import Width
from jaxkv._src.engine.schedule import Work
from jaxkv._src.engine.slots import Slots


def commit_tokens(
  queue: Queue, slots: Slots, cache: CacheState, counts: Array
) -> tuple[Queue, CacheState]:
  """Commits the next `counts`, int32[B], tokens of each slot.

  Returns:
    The queue, with the new keys in `Queue.page_keys`; and the cache.
  """
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
  return dataclasses.replace(queue, page_keys=keys), cache


def read_of(cache: CacheState) -> Array:
  """Returns int32[] for `read_before`, computed from the committed tokens."""
  if cache.hashes is None:
    return jnp.zeros((), jnp.int32)
  return jnp.max(cache.hashes.tail) & jnp.int32(2**31 - 1)


def count_step(
  counters: Counters,
  queue: Queue,
  slots: Slots,
  old_cache: CacheState,
  cache: CacheState,
  work: Work,
  counts: Array,
  sampled: Array,
  all_widths: tuple[Width, ...],
  num_decodes: Array | None,
) -> tuple[Counters, Queue]:
  """Adds a step to the counters and to `Queue.computed`.

  Each slot committed `counts` and sampled `sampled` tokens, int32[B] each.
  `old_cache` is the cache before the commit. After the first call, with `work`,
  there were `num_decodes`, int32[], further calls; None for 0.
  """
  columns = jnp.asarray([width.columns for width in all_widths], jnp.int32)
  widths = jnp.arange(len(all_widths), dtype=jnp.int32)
  rows = slots.size + columns[work.width]
  num_calls = jnp.int32(1)
  calls = (widths == work.width).astype(jnp.int32)
  if num_decodes is not None:
    num_calls = num_calls + num_decodes
    rows = rows + num_decodes * slots.size
    calls += jnp.where(widths == 0, num_decodes, 0)
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
    steps=counters.steps + num_calls,
    calls=counters.calls + calls,
    rows=counters.rows + rows,
    generated=counters.generated + jnp.sum(sampled, dtype=jnp.int32),
    prefilled=counters.prefilled + prefilled,
    recomputed=counters.recomputed + jnp.sum(recomputed, dtype=jnp.int32),
    drafted=drafted,
    accepted=accepted,
    peak_pages=jnp.maximum(counters.peak_pages, in_use),
    peak_shared=jnp.maximum(counters.peak_shared, shared),
  )
  return counters, dataclasses.replace(queue, computed=computed)
