"""Removes the pages of a token sequence from the prefix index."""

import dataclasses

import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.cache.pool import page_pool
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.steps.longest_hit import look_up


def unpublish_unheld(
  state: CacheState, keys: Array, tokens: Array, num_tokens: Array
) -> tuple[CacheState, Array]:
  """Removes cached pages of a sequence that no slot holds from the index.

  A call finds one page for each column and group. Pages on the device and in
  offload memory can have the same key, so call again until none is found. Takes
  the chained hash after every S tokens, uint32[P, 4], the tokens, int32[P, S],
  and their number, int32[].

  Returns:
    The cache, and bool[], True if a page was removed.
  """
  pool = state.pool
  config = state.config
  if pool.index is None or state.secret is None:
    return state, num_tokens < 0

  def are_unheld(pages: Array) -> Array:
    # An offloaded page is past the end of the counts, and has no reference.
    num_references = indexing.take(pool.ref_count, pages)
    return num_references == indexing.take(pool.pin_count, pages)

  pages = look_up(
    state.config, state.secret, pool.index, keys[None], tokens[None], are_unheld
  )
  num_full = config.sizes.full_pages(num_tokens[None])
  is_full = indexing.between(jnp.zeros_like(num_full), num_full, pages.shape[2])
  is_removed = (pages > 0) & is_full
  pool, num_removed = page_pool.unpublish(
    pool, pages.reshape(-1), is_removed.reshape(-1)
  )
  return dataclasses.replace(state, pool=pool), num_removed > 0
