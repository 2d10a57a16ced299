"""The page pool: references, the free queue and the index, kept consistent.

`pop` allocates free pages, `hold` adds a reference, and `drop` removes one. A
page without references returns to the queue.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import loops
from jaxkv._src.arrays import sharding
from jaxkv._src.arrays.loops import Items
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.pool import free_queue
from jaxkv._src.cache.pool import offload_pages
from jaxkv._src.cache.pool.free_queue import FreeQueue
from jaxkv._src.cache.pool.offload_pages import OffloadPages
from jaxkv._src.cache.prefix import prefix_index
from jaxkv._src.cache.prefix import prefix_rules
from jaxkv._src.cache.prefix.prefix_index import PrefixIndex


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolState:
  """The state of the pool.

  Attributes:
    unhashed_first: True if pages that are not cached go to the front of the
      queue; see `CacheConfig.free_policy`.
    ref_count: the number of page-table entries that hold the page, plus its
      pins; 0 for the null page.  # int32[N]
    pin_count: references taken by `pin` and `touch`.  # int32[N]
    queue: the free pages in eviction order.
    index: the cached pages; None without prefix caching.
    has_evicted: True for pools that had to evict a cached page since `init`.
      None without a `StateRetention`.  # bool[P]
    offload: the offloaded pages; None without `CacheConfig.offload_pages`.
  """

  unhashed_first: bool = dataclasses.field(metadata={"static": True})
  ref_count: Array
  pin_count: Array
  queue: FreeQueue
  index: PrefixIndex | None
  has_evicted: Array | None = None
  offload: OffloadPages | None = None


class Popped(NamedTuple):
  """The result of `pop`.

  Attributes:
    pages: int32[W], page numbers.
    rank: int32[W], the 0-based rank of a popped page among the popped pages of
      its pool.
    valid: bool[W], True if the page was popped.
    counts: int32[P], the number of popped pages of each pool.
    num_evicted: int32[], the number of popped pages that were cached.
  """

  pages: Array
  rank: Array
  valid: Array
  counts: Array
  num_evicted: Array


def init(config: CacheConfig) -> PoolState:
  """Returns pools of free pages, none of them cached."""
  pages = config.total_pages
  index = None
  if config.prefix_caching:
    index = prefix_index.init(
      config.num_numbers,
      max(config.page_sizes),
      has_reasons=config.state_retention is not None,
    )
  return PoolState(
    unhashed_first=config.free_policy == "unhashed_first",
    ref_count=jnp.zeros((pages,), jnp.int32),
    pin_count=jnp.zeros((pages,), jnp.int32),
    queue=free_queue.init(config.numbers),
    index=index,
    has_evicted=(
      jnp.zeros((config.num_pools,), bool) if config.state_retention else None
    ),
    offload=offload_pages.init(config) if config.offload_pages else None,
  )


def pop(
  pool: PoolState,
  num_pages: Array,
  *,
  window: int,
  without_loops: bool = False,
  restored: Callable[[Array, Array], Array] | None = None,
) -> tuple[PoolState, Popped]:
  """Pops up to `num_pages`, int32[P], free pages, and evicts cached ones.

  Reads the first `window` entries of the queues. A call can pop fewer pages,
  for example if entries are stale. The caller then calls again. `without_loops`
  stops before the first page whose removal from the index needs a loop.
  `restored` maps popped pages and their ranks to offload pages, int32[W].
  """
  keeps = None
  index = pool.index
  offload = pool.offload
  if offload is not None and index is not None:
    keeps = functools.partial(
      offload_pages.must_stay,
      offload,
      index,
      first_number=pool.ref_count.shape[0],
      without_loops=without_loops,
    )
  elif without_loops and index is not None:
    keeps = functools.partial(prefix_index.has_passed, index)
  num_free = pool.queue.num_free
  queue, popped = free_queue.pop(
    pool.queue, num_pages, window=window, keeps=keeps
  )
  pages, rank, valid = popped
  if index is not None and pool.has_evicted is not None:
    is_evicted = valid & prefix_index.contains(index, pages)
    by_pool = jnp.any(is_evicted.reshape(num_free.size, -1), axis=1)
    pool = dataclasses.replace(pool, has_evicted=pool.has_evicted | by_pool)
    # Without this dependency of a write on the read, XLA would copy the index.
    pages = loops.read_before(jnp.max(is_evicted.astype(jnp.int32)), pages)
  if offload is not None:
    pool, num_evicted = _exchange(
      pool,
      pages,
      valid,
      None if restored is None else restored(pages, rank),
      without_loops=without_loops,
    )
  else:
    pool, num_evicted = unpublish(
      pool, pages, valid, without_loops=without_loops
    )
  popped_pages = indexing.where_valid(valid, pages)
  # A free page has no references, so 1 is written without a read of the count.
  pool = dataclasses.replace(
    pool,
    ref_count=indexing.put(pool.ref_count, popped_pages, values=1),
    queue=queue,
  )
  return pool, Popped(*popped, num_free - queue.num_free, num_evicted)


def restore(
  pool: PoolState, pages: Array, valid: Array
) -> tuple[PoolState, Array, Array]:
  """Moves the contents of offload pages to fresh device pages, in order.

  Args:
    pool: the pool, with a free page for each valid offload page.
    pages: int32[X], offload pages as numbered in their queue; repeats are
      allowed.
    valid: bool[X].

  Returns:
    The pool; int32[X], the device page of each valid item; and int32[], the
    number of evicted pages. Each valid item gets one reference to its page.
  """
  assert pool.offload is not None
  # Only the first item of each offload page pops a device page.
  lanes = jnp.arange(pages.shape[0], dtype=jnp.int32)
  leader = indexing.first_equal(indexing.where_valid(valid, pages))
  is_first = valid & (leader == lanes)
  numbers = pool.offload.queue.numbers
  rank, counts = free_queue.rank_by_pool(numbers, pages, is_first)
  # The pages to restore are listed pool after pool.
  starts = jnp.cumsum(counts, dtype=jnp.int32) - counts
  place = rank - 1 + numbers.value_of(starts, pages)
  listed = indexing.put(
    jnp.zeros_like(pages),
    indexing.where_valid(is_first, place),
    values=pages,
  )
  num_restored = jnp.sum(counts, dtype=jnp.int32)
  offload = offload_pages.to_front(pool.offload, listed, lanes < num_restored)

  def trip(loop):
    done, evicted, pool, device_pages = loop

    def place_of(pages: Array, rank: Array) -> Array:
      # A call can pop fewer pages than are missing, so the ranks continue from
      # `done`.
      return rank + pool.queue.numbers.value_of(starts + done, pages)

    pool, popped = pop(
      pool,
      counts - done,
      window=loops.WINDOW,
      restored=lambda *popped: indexing.take(listed, place_of(*popped)),
    )
    lane = indexing.where_valid(
      popped.valid, place_of(popped.pages, popped.rank)
    )
    device_pages = indexing.put(device_pages, lane, values=popped.pages)
    done = done + popped.counts
    return done, evicted + popped.num_evicted, pool, device_pages

  start = (
    sharding.zeros_like(counts),
    sharding.zeros_like(num_restored),
    dataclasses.replace(pool, offload=offload),
    sharding.zeros_like(listed),
  )
  _, evicted, pool, device_pages = lax.while_loop(
    lambda loop: jnp.any(loop[0] < counts), trip, start
  )
  device_pages = indexing.take(device_pages, indexing.take(place, leader))
  # `pop` gave each page one reference, which belongs to its first item.
  repeated_pages = indexing.where_valid(valid & ~is_first, device_pages)
  ref_count = indexing.add(pool.ref_count, repeated_pages, values=1)
  pool = dataclasses.replace(pool, ref_count=ref_count)
  return pool, device_pages, evicted


def hold(pool: PoolState, pages: Array, valid: Array) -> PoolState:
  """Adds a reference for each valid item of `pages`, int32[W].

  Repeats are allowed. Free pages leave the queue.
  """
  queue, count = free_queue.remove(
    pool.queue, pages, valid & is_free(pool, pages)
  )
  # `is_free` read `ref_count`. Without this dependency of the update on that
  # read, XLA would copy the array.
  held_pages = loops.read_before(count, indexing.where_valid(valid, pages))
  ref_count = indexing.add(pool.ref_count, held_pages, values=1)
  return dataclasses.replace(pool, ref_count=ref_count, queue=queue)


def drop(
  pool: PoolState,
  pages: Array,
  owner: Array,
  valid: Array,
  *,
  forgets: bool = False,
) -> tuple[PoolState, Array]:
  """Removes a reference for each valid item, and queues unreferenced pages.

  With `unhashed_first`, unreferenced pages that are not cached stay outside of
  the queue. The caller must pass them to `to_front`, in the order in which to
  prepend them.

  Args:
    pool: the pool, with room reserved in its queue.
    pages: int32[W]; repeats are allowed. Each valid item has a reference.
    owner: int32[W], a number for the holder of each reference, such as the
      index of a range of columns. Pass the same numbers to `to_front`.
    valid: bool[W].
    forgets: True to remove pages without a reason to keep them from the index.

  Returns:
    The pool, and bool[W]: the items whose pages stay outside of the queue.
  """
  pool, freed, unqueued = _unreference(pool, pages, valid, forgets=forgets)
  queue = free_queue.push_back(
    pool.queue, pages, freed & ~unqueued, marks=_mark_of(owner), marked=unqueued
  )
  return dataclasses.replace(pool, queue=queue), unqueued


def drop_ranges(
  pool: PoolState,
  pages: Array,
  items: Items,
  counts: Array,
  valid: Array,
  *,
  forgets: bool = False,
) -> PoolState:
  """Combines `drop` and `to_front` for all pages in ranges of columns.

  Args:
    pool: the pool.
    pages: int32[W], see `drop`.
    items: the range of each page, and the page's offset from the range's last
      column.
    counts: int32[X], the number of items of each range.
    valid: bool[W].
    forgets: see `drop`.
  """
  pool, freed, unqueued = _unreference(pool, pages, valid, forgets=forgets)
  # The first item of a range is its last column, which must be prepended last.
  # So ranges are prepended in order, but the items of each range in reverse.
  start = jnp.arange(pages.shape[0], dtype=jnp.int32) - items.offset
  last_lane = start + indexing.take(counts, items.row) - 1
  numbers = pool.queue.numbers
  num_unqueued = free_queue.counts_by_pool(numbers, pages, unqueued)

  def count_until(lanes: Array) -> Array:
    counts = [indexing.take(count, lanes) for count in num_unqueued]
    return numbers.value_of(counts, pages)

  rank = numbers.value_of(num_unqueued, pages)
  queue = free_queue.push(
    pool.queue,
    pages,
    freed & ~unqueued,
    unqueued,
    turn=count_until(start - 1) + count_until(last_lane) - rank,
  )
  return dataclasses.replace(pool, queue=queue)


def to_front(
  pool: PoolState, pages: Array, owner: Array, valid: Array
) -> PoolState:
  """Prepends pages that `drop` left outside of the queue, one by one.

  The last valid page becomes the first in the queue.

  Args:
    pool: the pool.
    pages: int32[W], distinct where valid. A page is ignored unless `drop` left
      it outside of the queue for the same owner.
    owner: int32[W], as in the call of `drop`.
    valid: bool[W].
  """
  # A page that several owners dropped has the mark of the last owner. So the
  # page is prepended once.
  unqueued = indexing.take(pool.queue.position, pages) == _mark_of(owner)
  valid &= unqueued
  rank, _ = free_queue.rank_by_pool(pool.queue.numbers, pages, valid)
  queue = free_queue.push(
    pool.queue, pages, sharding.zeros_like(valid), valid, turn=rank - 1
  )
  return dataclasses.replace(pool, queue=queue)


def _unreference(
  pool: PoolState, pages: Array, valid: Array, *, forgets: bool
) -> tuple[PoolState, Array, Array]:
  """Removes a reference for each valid item.

  Returns:
    The pool, and two bool[W]: the items that removed the last reference to a
    page, and those of them whose pages stay outside of the queue. The caller
    must write the queue position of each page of the first array.
  """
  valid_pages = indexing.where_valid(valid, pages)
  ref_count = indexing.add(pool.ref_count, valid_pages, values=-1)
  unreferenced = valid & (indexing.take(ref_count, pages, fill=1) == 0)
  # Several items can refer to one page. Items are processed in order, so the
  # last of these items determines the page's place in the queue.
  position, freed = free_queue.mark_last(
    pool.queue.position, pages, unreferenced
  )
  if forgets:
    pool, _ = unpublish(pool, pages, freed & _is_forgettable(pool, pages))
  unqueued = jnp.zeros_like(freed)
  if pool.unhashed_first:
    unqueued = freed & ~is_cached(pool, pages)
  queue = dataclasses.replace(pool.queue, position=position)
  pool = dataclasses.replace(pool, ref_count=ref_count, queue=queue)
  return pool, freed, unqueued


def _is_forgettable(pool: PoolState, pages: Array) -> Array:
  """Returns bool[W]: True for states to give up, see `StateRetention`."""
  if pool.index is None or pool.has_evicted is None:
    return pages < 0
  has_evicted = pool.queue.numbers.value_of(pool.has_evicted, pages)
  worst = jnp.where(has_evicted, prefix_rules.RESENT, prefix_rules.PASSED)
  return prefix_index.reason_of(pool.index, pages) <= worst


def reserve(pool: PoolState, num_references: Array) -> PoolState:
  """Makes room in the queue to drop `num_references` references, int32[]."""
  count = _most_pushes(pool, num_references)
  return dataclasses.replace(pool, queue=free_queue.reserve(pool.queue, count))


def has_room(pool: PoolState, num_references: Array) -> Array:
  """Returns bool[]: True if `reserve` has nothing to do."""
  return free_queue.has_room(pool.queue, _most_pushes(pool, num_references))


def unpublish(
  pool: PoolState, pages: Array, valid: Array, *, without_loops: bool = False
) -> tuple[PoolState, Array]:
  """Removes valid pages, all distinct, from the index.

  `without_loops` is that of `prefix_index.remove`.

  Returns:
    The pool, and int32[]: the number of pages that were cached.
  """
  if pool.index is None:
    return pool, jnp.int32(0)
  index, was_cached = prefix_index.remove(
    pool.index, pages, valid, without_loops=without_loops
  )
  num_removed = jnp.sum(was_cached, dtype=jnp.int32)
  return dataclasses.replace(pool, index=index), num_removed


def end_epoch(pool: PoolState) -> PoolState:
  """Excludes all pages published so far from saves to offload memory."""
  if pool.offload is None or pool.index is None:
    return pool
  # The sum makes a new buffer: leaves of a donated state must not share one.
  clock = pool.index.clock + jnp.uint32(0)
  offload = dataclasses.replace(pool.offload, stale_before=clock)
  return dataclasses.replace(pool, offload=offload)


def _most_pushes(pool: PoolState, num_references: Array) -> Array:
  """Returns int32[P]: the most pages that `num_references` drops can free."""
  # Each page in use can become free only once, so the number of pages in use
  # bounds the pushes. After a sweep, the queue has room for all of them.
  return jnp.minimum(num_references, num_in_use(pool))


def num_in_use(pool: PoolState) -> Array:
  """Returns int32[P]: the number of pages that are not free."""
  sizes = jnp.asarray(pool.queue.numbers.sizes, jnp.int32)
  return sizes - 1 - pool.queue.num_free


def _exchange(
  pool: PoolState,
  pages: Array,
  valid: Array,
  restored: Array | None,
  *,
  without_loops: bool,
) -> tuple[PoolState, Array]:
  """Moves contents between popped device pages and offload pages.

  Returns:
    The pool, and int32[]: the popped pages that were cached, saved or not.
  """
  assert pool.offload is not None
  assert pool.index is not None
  evicted = prefix_index.cached_among(pool.index, pages, valid)

  def exchange(
    loop: tuple[OffloadPages, PrefixIndex],
  ) -> tuple[OffloadPages, PrefixIndex]:
    return offload_pages.exchange(
      *loop,
      pages,
      evicted,
      valid,
      first_number=pool.ref_count.shape[0],
      restored=restored,
      without_loops=without_loops,
    )

  loop = pool.offload, pool.index
  if restored is None:
    # Also if no cached page was popped because `must_stay` held them all. Then
    # `exchange` removes stale entries of the offload queue, so that the next
    # call finds offload pages for them.
    window = prefix_index.cached_among(pool.index, pages, pages >= 0)
    loop = loops.if_needed(window.total > 0, exchange, loop)
  else:
    loop = exchange(loop)
  pool = dataclasses.replace(pool, offload=loop[0], index=loop[1])
  return pool, evicted.total


def is_free(pool: PoolState, pages: Array) -> Array:
  """Returns bool[...]: True for pages in the free queue and the null page."""
  return indexing.take(pool.ref_count, pages, fill=1) == 0


def is_cached(pool: PoolState, pages: Array) -> Array:
  """Returns bool[...]: True for pages in the prefix index."""
  if pool.index is None:
    return jnp.zeros(pages.shape, bool)
  return prefix_index.contains(pool.index, pages)


def _mark_of(owner: Array) -> Array:
  """Returns the mark that `drop` stores as position of an unqueued page."""
  # Distinct for each owner. Above NOWHERE, so it is never a ring position.
  return indexing.NOWHERE + 1 + owner
