"""recycle: pages that fell behind a window go back while a sequence runs."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jaxkv._src.cache import masked
from jaxkv._src.cache.checks import check_array
from jaxkv._src.cache.groups.sizes import skipped_pages
from jaxkv._src.cache.pool import page_table
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.verb import verb


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
  lengths = state.length if lengths is None else lengths
  check_array("lengths", lengths, (state.config.num_slots,), jnp.int32)
  state, num_pages = drop_behind(state, lengths)
  return state, Recycled(num_pages)


def drop_behind(
  state: CacheState, lengths: Array, slots: Array | None = None
) -> tuple[CacheState, Array]:
  """The same for some slots, or all.

  Args:
    state: the cache.
    lengths: int32[R].
    slots: int32[R], all different, NOWHERE for a row that is none; None for
      all slots in order, R = B.

  Returns:
    The cache, and int32[R]: pages given back.
  """
  config, held, first = state.config, state.num_pages.T, state.first_page.T
  if not config.recycles:
    return state, jnp.zeros_like(lengths)
  place = jnp.arange(config.num_slots, dtype=jnp.int32)
  if slots is not None:
    place = slots
    held, first = (masked.take(columns, slots) for columns in (held, first))
  lengths = jnp.clip(lengths, 0, config.slot_tokens)
  behind = jnp.minimum(skipped_pages(config, lengths), held)
  behind = jnp.maximum(first, behind)
  num_pages = _num_held(state, place, first, behind)
  pool, table = page_table.shrink(
    state.pool,
    state.page_table,
    page_table.rows_of(place, first, behind),
    unhashed_first=config.unhashed_first,
    cleared=0,
  )
  first_page = behind.T
  if slots is not None:
    first_page = state.first_page.at[:, slots].set(first_page, mode="drop")
  state = dataclasses.replace(
    state, page_table=table, first_page=first_page, pool=pool
  )
  return state, num_pages


def _num_held(
  state: CacheState, place: Array, first: Array, behind: Array
) -> Array:
  """int32[R]: pages in columns first .. behind, int32[R, G] both, of slots."""
  config = state.config
  counts = behind - first
  if config.holds_states:
    # Between two states there are only null pages.
    shape = (*first.shape, config.pages_per_slot)
    column = jnp.arange(config.pages_per_slot, dtype=jnp.int32)
    column = jnp.broadcast_to(column, shape)
    rows = state.page_table.swapaxes(0, 1)
    rows = rows.at[place].get(mode="fill", fill_value=0)
    inside = (column >= first[..., None]) & (column < behind[..., None])
    counts = jnp.sum(inside & (rows > 0), axis=2, dtype=jnp.int32)
  return jnp.sum(counts, axis=1, dtype=jnp.int32)
