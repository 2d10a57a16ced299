"""Checks the invariants of a cache."""

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.cache.pool import free_queue
from jaxkv._src.cache.pool import recurrent
from jaxkv._src.cache.pool.free_queue import FreeQueue
from jaxkv._src.cache.prefix import hashing
from jaxkv._src.cache.prefix import prefix_index
from jaxkv._src.cache.prefix import prefix_rules
from jaxkv._src.cache.prefix.hashing import SlotHashes
from jaxkv._src.cache.prefix.prefix_index import PrefixIndex
from jaxkv._src.cache.state import CacheState
from jaxkv._src.cache.state import Status
from jaxkv._src.cache.state import check_single
from jaxkv._src.cache.state import verb


class CacheError(RuntimeError):
  """The error that `check` raises for a broken invariant or a misuse."""


def check(state: CacheState) -> None:
  """Raises if the cache broke an invariant, or if a call recorded a misuse.

  Runs on the host. Every failure except OUT_OF_PAGES is a misuse.

  Args:
    state: the cache.

  Raises:
    CacheError: an invariant does not hold, or `state.error` is a misuse.
    TypeError: `state` is not a CacheState.
    ValueError: `state` is a stack of states or was donated, or an array does
      not have the shape that `state.config` requires.

  Examples:
    >>> import jaxkv
    >>> jaxkv.check(jaxkv.init(jaxkv.CacheConfig(
    ...   num_pages=8, page_size=2, num_slots=1, pages_per_slot=4)))
  """
  check_single(state)
  check_laws(check_invariants(state), "The cache", "CacheState")
  error = Status(int(state.error))
  if error not in (Status.OK, Status.OUT_OF_PAGES):
    raise CacheError(
      f"A call failed with {error.name}, and `state.error` recorded it. See "
      "jaxkv.Status for its meaning. `out.code` of that call shows the row. "
      "jaxkv.clear_error clears the error."
    )


def check_laws(laws: dict[str, Array], subject: str, origin: str) -> None:
  """Raises CacheError unless all laws hold, which `origin` defines."""
  broken = [name for name, holds in laws.items() if not np.all(holds)]
  if broken:
    raise CacheError(
      f"{subject} broke its invariants {', '.join(broken)}, which {origin} "
      "defines. This is a bug in jaxkv, or the state was edited by hand."
    )


@verb
def check_invariants(state: CacheState) -> dict[str, Array]:
  """Tests every invariant of `CacheState`. The cost grows with the pool.

  Args:
    state: the cache.

  Returns:
    A dict from the name of an invariant to bool[].

  Examples:
    >>> import jaxkv
    >>> laws = jaxkv.check_invariants(jaxkv.init(jaxkv.CacheConfig(
    ...   num_pages=8, page_size=2, num_slots=1, pages_per_slot=4)))
    >>> sorted(laws), all(laws.values())
    (['free', 'index', 'keys', 'lengths', 'refs', 'tables'], True)
  """
  room = state.config.sizes.tokens_with_room(state.num_pages)
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
  is_held = column[None, None] < state.num_pages[..., None]
  skipped = column[None, None] < state.num_skipped_pages[..., None]
  table = state.page_table
  no_page = state.config.no_page
  # A page of another pool is out of range, as is the first page of a pool.
  numbers = state.config.numbers
  pools = jnp.asarray([kind.pool for kind in state.config.groups], jnp.int32)
  is_page = numbers.are_given(table)
  is_page &= numbers.pool_of(table) == pools[None, :, None]
  is_page |= table == 0
  # A recurrent group also has null pages in the columns between two states.
  may_be_null = recurrent.holds_states(state.config)[..., None]
  return (
    jnp.all(jnp.where(is_held, is_page, table == no_page))
    & jnp.all(~skipped | (table == 0))
    & jnp.all(skipped | (table > 0) | may_be_null)
    & jnp.all(state.num_skipped_pages >= 0)
    & jnp.all(state.num_skipped_pages <= state.num_pages)
    & jnp.all(state.num_pages >= 0)
    & jnp.all(state.num_pages <= state.config.pages_per_slot)
  )


def _refs(state: CacheState) -> Array:
  # Entries with the null page are not references. `add` drops entries with
  # NO_PAGE, which is out of range.
  entries = state.page_table.reshape(-1)
  entries = indexing.where_valid(entries > 0, entries)
  num_entries = indexing.add(
    jnp.zeros_like(state.pool.ref_count), entries, values=1
  )
  pins = state.pool.pin_count
  return (
    jnp.all(state.pool.ref_count == num_entries + pins)
    & jnp.all(pins >= 0)
    & (state.pool.ref_count[0] == 0)
  )


def _free(state: CacheState) -> Array:
  holds = _is_consistent(state.pool.queue, state.pool.ref_count == 0)
  if state.pool.offload is not None:
    queue = state.pool.offload.queue
    holds &= _is_consistent(queue, jnp.ones(queue.position.shape, bool))
  return holds


def _is_consistent(queue: FreeQueue, free: Array) -> Array:
  """Returns bool[]: True if the queues hold exactly the free pages, once."""
  numbers = queue.numbers
  pages = jnp.arange(free.shape[0], dtype=jnp.int32)
  free &= numbers.are_given(pages)
  ring_position = queue.position
  capacity = queue.ring.shape[0] // numbers.num_pools
  # The distance from the head. The capacity is a power of two, so the mask
  # gives the remainder also for negative numbers.
  place = ring_position - numbers.pool_of(pages) * capacity
  offset = (place - numbers.value_of(queue.head, pages)) & (capacity - 1)
  live = (
    (place >= 0)
    & (place < capacity)
    & (offset < numbers.value_of(queue.span, pages))
    & (indexing.take(queue.ring, ring_position) == pages)
  )
  pool = jnp.arange(numbers.num_pools, dtype=jnp.int32)[:, None]
  in_pool = numbers.pool_of(pages)[None] == pool
  num_free = jnp.sum(in_pool & free[None], axis=1, dtype=jnp.int32)
  in_order = free_queue.in_order(queue).reshape(numbers.num_pools, capacity)
  num_listed = jnp.sum(in_order > 0, axis=1, dtype=jnp.int32)
  return (
    jnp.all(live == free)
    & jnp.all(ring_position <= indexing.NOWHERE)
    & jnp.all(queue.num_free == num_free)
    & jnp.all(num_listed == queue.num_free)
    & jnp.all(queue.span <= capacity)
    & jnp.all((queue.head >= 0) & (queue.head < capacity))
  )


def _index(state: CacheState) -> Array:
  index = state.pool.index
  if index is None:
    return jnp.bool_(True)
  pages = jnp.arange(state.config.num_numbers, dtype=jnp.int32)
  cached = prefix_index.contains(index, pages)
  entries = index.buckets.reshape(-1)
  entry_positions = jnp.arange(entries.shape[0], dtype=jnp.int32)
  position = prefix_index.position_of(index, pages)
  keys = prefix_index.key_of(index, pages)
  is_placed = indexing.take(position, entries, fill=-1) == entry_positions
  # If several pages have the same key, a lookup returns the page published
  # first. So the test compares the keys of pages, not the page numbers.
  hit_pages = prefix_index.lookup(index, keys, index.tokens)
  same_key = prefix_index.key_of(index, hit_pages) == keys
  # A lookup ends at a bucket whose overflow count is 0. So a count that is too
  # small would hide pages.
  overflow = prefix_index.recount(index, cached)
  return (
    jnp.all(jnp.where(cached, indexing.take(entries, position) == pages, True))
    & jnp.all((entries == 0) | is_placed)
    & jnp.all(~cached | ((hit_pages > 0) & jnp.all(same_key, axis=1)))
    & jnp.all(overflow == index.overflow)
    & ~cached[0]
    & ~indexing.take(cached, jnp.int32(state.config.no_page))
  )


def _keys(state: CacheState) -> Array:
  config = state.config
  hashes = state.hashes
  index = state.pool.index
  secret = state.secret
  if hashes is None or index is None or secret is None:
    return jnp.bool_(True)
  chain, num_read = _chain_read_back(state, secret, hashes, index)
  # A slot is checked only if the tokens of all its full pages can be read.
  complete = num_read >= 0
  final = prefix_rules.final_pages(config, state.length)
  all_match = jnp.bool_(True)
  for group, page_size in enumerate(config.page_sizes):
    keys = hashing.keys_of_group(config, secret, chain, group)
    columns = jnp.arange(keys.shape[1], dtype=jnp.int32)[None]
    pages = state.page_table[:, group, : keys.shape[1]]
    matches = prefix_index.key_of(index, pages) == keys
    stop_column = jnp.minimum(final[:, group], num_read // page_size)[:, None]
    inside = (columns < stop_column) & (pages > 0)
    all_match &= jnp.all(
      jnp.all(matches, axis=-1) | ~(inside & complete[:, None])
    )
  # `SlotHashes.chain` stands at the last multiple of A tokens; before the first
  # one, it is the root.
  steps = config.alignment // config.page_size
  aligned = state.length // config.alignment * steps
  last_step = jnp.maximum(aligned - 1, 0)[:, None, None]
  last_key = jnp.take_along_axis(chain, last_step, axis=1)[:, 0]
  last_key = jnp.where(aligned[:, None] > 0, last_key, hashes.root)
  return all_match & jnp.all(
    jnp.all(hashes.chain == last_key, axis=1) | ~complete
  )


def _chain_read_back(
  state: CacheState, secret: Array, hashes: SlotHashes, index: PrefixIndex
) -> tuple[Array, Array]:
  """Recomputes the chained hashes of each slot from the tokens in its pages.

  Returns:
    uint32[B, M, 4], the hash after every S tokens, and int32[B], the number of
    tokens read. The number is -1 for an empty slot, and for a slot that no
    longer has all the pages to read.
  """
  config = state.config
  group = config.token_group
  page_size = config.page_sizes[group]
  table = state.page_table[:, group]
  num_final = prefix_rules.final_pages(config, state.length)[:, group]
  column = jnp.arange(config.pages_per_slot, dtype=jnp.int32)[None]
  read = column < num_final[:, None]
  complete = jnp.all(~read | (table > 0), axis=1) & (state.num_pages[:, 0] > 0)
  tokens = indexing.take(index.tokens, table)[..., :page_size]
  stream = tokens[:, : config.pages_per_slot // (page_size // config.page_size)]
  stream = stream.reshape(-1, config.pages_per_slot, config.page_size)
  chain = hashing.row_keys(secret, hashes.root, stream)
  return chain, jnp.where(complete, num_final * page_size, -1)
