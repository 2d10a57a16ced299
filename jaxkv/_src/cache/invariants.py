"""The laws of a cache, checked."""

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxkv._src.cache import masked
from jaxkv._src.cache.groups import sizes as groups
from jaxkv._src.cache.pool import free_queue
from jaxkv._src.cache.prefix import hashing
from jaxkv._src.cache.prefix import prefix_index
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import check_single
from jaxkv._src.cache.status import Code
from jaxkv._src.cache.verb import verb


class CacheError(RuntimeError):
  """A cache that broke a law or recorded a misuse; see `check`."""


def check(state: CacheState) -> None:
  """Raises if the cache broke a law or a call misused it. On the host.

  Running out of pages is no misuse; see `stats(state).failed`.

  Args:
    state: the cache.

  Raises:
    CacheError: names the laws that do not hold, or the first misuse.

  Examples:
    >>> import jaxkv
    >>> jaxkv.check(jaxkv.init(jaxkv.CacheConfig(
    ...   num_pages=8, page_size=2, num_slots=1, pages_per_slot=4)))
  """
  check_single(state)
  laws = check_invariants(state)
  broken = [name for name, holds in laws.items() if not np.all(holds)]
  if broken:
    raise CacheError(
      f"The cache broke its laws {', '.join(broken)}. See CacheState for what "
      "they say; this is a bug in jaxkv, or the state was edited by hand."
    )
  error = Code(int(state.error))
  if error not in (Code.OK, Code.OUT_OF_PAGES):
    raise CacheError(
      f"A call failed with {error.name}, which was recorded in state.error. "
      "See jaxkv.Code for its meaning and the `code` of the calls for the row; "
      "jaxkv.clear_error forgets it."
    )


@verb
def check_invariants(state: CacheState) -> dict[str, Array]:
  """Tests every law of `CacheState`. Cost grows with the pool.

  Args:
    state: the cache.

  Returns:
    bool[] by the law's name.

  Examples:
    >>> import jaxkv
    >>> laws = jaxkv.check_invariants(jaxkv.init(jaxkv.CacheConfig(
    ...   num_pages=8, page_size=2, num_slots=1, pages_per_slot=4)))
    >>> sorted(laws), all(laws.values())
    (['free', 'index', 'keys', 'lengths', 'refs', 'tables'], True)
  """
  room = groups.tokens_with_room(state.config, state.num_pages.T)
  return {
    "tables": _tables(state),
    "lengths": jnp.all((state.length >= 0) & (state.length <= room)),
    "refs": _refs(state),
    "free": _free(state),
    "index": _index(state),
    "keys": _keys(state),
  }


def _tables(state: CacheState) -> Array:
  column = jnp.arange(state.config.pages_per_slot, dtype=jnp.int32)
  held = column[None, None] < state.num_pages[..., None]
  skipped = column[None, None] < state.first_page[..., None]
  table = state.page_table
  no_page = state.config.no_page
  states = jnp.asarray([kind.holds_states for kind in state.config.groups])
  return (
    jnp.all(jnp.where(held, (table >= 0) & (table < no_page), table == no_page))
    & jnp.all(~skipped | (table == 0))
    & jnp.all(skipped | (table > 0) | states[:, None, None])
    & jnp.all(state.first_page >= 0)
    & jnp.all(state.first_page <= state.num_pages)
    & jnp.all(state.num_pages >= 0)
    & jnp.all(state.num_pages <= state.config.pages_per_slot)
  )


def _refs(state: CacheState) -> Array:
  entries = state.page_table.reshape(-1)
  entries = masked.where_valid(entries > 0, entries)
  named = masked.add(jnp.zeros_like(state.pool.ref_count), entries, values=1)
  pins = state.pool.pin_count
  return (
    jnp.all(state.pool.ref_count == named + pins)
    & jnp.all(pins >= 0)
    & (state.pool.ref_count[0] == 0)
  )


def _free(state: CacheState) -> Array:
  queue = state.pool.queue
  pages = jnp.arange(state.config.num_pages, dtype=jnp.int32)
  free = (state.pool.ref_count == 0) & (pages > 0)
  place = queue.position
  capacity = queue.ring.shape[0]
  offset = (place - queue.head) & (capacity - 1)
  live = (
    (place >= 0)
    & (place < capacity)
    & (offset < queue.span)
    & (masked.take(queue.ring, place) == pages)
  )
  return (
    jnp.all(live == free)
    & jnp.all(place <= masked.NOWHERE)
    & (queue.num_free == jnp.sum(free, dtype=jnp.int32))
    & (
      jnp.sum(free_queue.in_order(queue) > 0, dtype=jnp.int32) == queue.num_free
    )
    & (queue.span <= capacity)
  )


def _index(state: CacheState) -> Array:
  index = state.pool.index
  if index is None:
    return jnp.bool_(True)
  pages = jnp.arange(state.config.num_pages, dtype=jnp.int32)
  cached = prefix_index.contains(index, pages)
  entries = index.buckets.reshape(-1)
  places = jnp.arange(entries.shape[0], dtype=jnp.int32)
  slot, keys = (
    prefix_index.slot_of(index, pages),
    prefix_index.key_of(index, pages),
  )
  listed = masked.take(slot, entries, fill=-1) == places
  first = prefix_index.lookup(index, keys, index.tokens)
  same = prefix_index.key_of(index, first) == keys
  overflow = prefix_index.recount(index, cached)
  return (
    jnp.all(jnp.where(cached, masked.take(entries, slot) == pages, True))
    & jnp.all((entries == 0) | listed)
    & jnp.all(~cached | ((first > 0) & jnp.all(same, axis=1)))
    & jnp.all(overflow == index.overflow)
    & ~cached[0]
  )


def _keys(state: CacheState) -> Array:
  config, hashes, index = state.config, state.hashes, state.pool.index
  if hashes is None or index is None:
    return jnp.bool_(True)
  text, size = config.text_group, config.page_sizes[config.text_group]
  final = groups.final_pages(config, state.length)
  # What a window left behind, or no state was kept of, cannot be read back.
  column = jnp.arange(config.pages_per_slot, dtype=jnp.int32)[None]
  read = column < final[:, text, None]
  whole = jnp.all(~read | (state.page_table[text] > 0), axis=1)
  whole &= state.num_pages[0] > 0
  tokens = masked.take(index.tokens, state.page_table[text])[..., :size]
  slots, step = config.num_slots, size // config.page_size
  stream = tokens[:, : config.pages_per_slot // step]
  stream = stream.reshape(slots, config.pages_per_slot, config.page_size)
  chain = hashing.row_keys(config, hashes.root, stream)
  right = jnp.bool_(True)
  known = final[:, text] * size
  for group, size in enumerate(config.page_sizes):
    own = hashing.keys_of_group(config, chain, group)
    columns = jnp.arange(own.shape[1], dtype=jnp.int32)[None]
    pages = state.page_table[group, :, : own.shape[1]]
    same = prefix_index.key_of(index, pages) == own
    stop = jnp.minimum(final[:, group], known // size)[:, None]
    inside = (columns < stop) & (pages > 0)
    right &= jnp.all(jnp.all(same, axis=-1) | ~(inside & whole[:, None]))
  steps = config.alignment // config.page_size
  aligned = state.length // config.alignment * steps
  last = jnp.maximum(aligned - 1, 0)[:, None, None]
  end = jnp.take_along_axis(chain, last, axis=1)[:, 0]
  end = jnp.where(aligned[:, None] > 0, end, hashes.root)
  return right & jnp.all(jnp.all(hashes.chain == end, axis=1) | ~whole)
