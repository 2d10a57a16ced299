"""recycle: pages that fell behind a window go back while a sequence runs."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxkv.cache import page_table
from jaxkv.cache.arguments import check_array
from jaxkv.cache.groups import skipped_pages
from jaxkv.cache.state import CacheState
from jaxkv.cache.verbs import verb


class Recycled(NamedTuple):
  """What `recycle` did.

  Attributes:
    num_pages: int32[B], pages that a slot gave back, all groups together.
  """

  num_pages: Array


@verb
def recycle(
  state: CacheState, lengths: Array | None = None
) -> tuple[CacheState, Recycled]:
  """Gives back pages that no later token of their sequence attends to.

  A sliding window or a chunk leaves pages behind; the null page takes their
  places in the page table, the last of them first. Published ones stay cached
  until they are taken from the free queue. Cannot fail, and costs next to
  nothing where nothing fell behind. Called before `allocate` in a loop, it
  bounds what a sequence holds: of a window of w tokens, at most
  `ceil((w - 1) / S) + 1` pages besides those for new tokens.

  Args:
    state: the cache.
    lengths: int32[B], tokens whose K/V no write in flight still needs; None
      for `state.length`. Negative for none.

  Returns:
    The cache, and the pages given back.

  Examples:
    >>> import jax.numpy as jnp, jaxkv
    >>> state = jaxkv.init(jaxkv.CacheConfig(
    ...   num_pages=8, page_size=2, num_slots=1, pages_per_slot=4,
    ...   groups=(jaxkv.SlidingWindow(3),)))
    >>> seven = jnp.asarray([7], jnp.int32)
    >>> state, _ = jaxkv.allocate(state, seven)
    >>> state, _ = jaxkv.commit(state, jnp.zeros((1, 7), jnp.int32), seven)
    >>> state, out = jaxkv.recycle(state)
    >>> out.num_pages.tolist(), state.page_table[0].tolist()
    ([2], [[0, 0, 3, 4]])
  """
  config = state.config
  lengths = state.length if lengths is None else lengths
  check_array("lengths", lengths, (config.num_slots,), jnp.int32)
  if not config.recycles:
    return state, Recycled(jnp.zeros_like(lengths))
  lengths = jnp.clip(lengths, 0, config.slot_tokens)
  first = state.first_page.T
  behind = jnp.minimum(skipped_pages(config, lengths), state.num_pages.T)
  behind = jnp.maximum(first, behind)
  slots = jnp.arange(config.num_slots, dtype=jnp.int32)
  pool, table = page_table.shrink(
    state.pool,
    state.page_table,
    page_table.rows_of(slots, first, behind),
    unhashed_first=config.unhashed_first,
    cleared=0,
  )
  state = dataclasses.replace(
    state, page_table=table, first_page=behind.T, pool=pool
  )
  return state, Recycled(jnp.sum(behind - first, axis=1, dtype=jnp.int32))
