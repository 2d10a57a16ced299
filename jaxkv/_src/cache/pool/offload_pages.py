"""Offloaded pages, to which the device evicts cached pages.

A cached page is either on the device or offloaded. If the device evicts a page,
the page's contents overwrite the first page of the offload queue, and this
offload page goes to the back. An offloaded hit returns to a free device page,
and its offload page goes to the front of the offload queue, where the next
saved page overwrites it. Often the saved page was evicted for the hit, so the
two contents exchange places. Both queues together keep cached pages in LRU
order.

Offload page h has the number N + 1 + h in the index. In the offload queue it
has the number 1 + h, because 0 is not a page there. Each pool has offload
pages; between those of two pools, one number is not used.

The functions take pages as `free_queue.front` returns them: of W pages, the
first W // P are those of pool 0, and so on.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import elementwise
from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import loops
from jaxkv._src.arrays import sharding
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.pool import free_queue
from jaxkv._src.cache.pool.free_queue import FreeQueue
from jaxkv._src.cache.prefix import prefix_index
from jaxkv._src.cache.prefix.prefix_index import CachedPages
from jaxkv._src.cache.prefix.prefix_index import PrefixIndex


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Moves:
  """Moves of page contents between device and host, in order.

  Each move saves device page `page` to offload page `saved_to`, and then
  restores to `page` the content that offload page `restored_from` had before
  the move. The two offload pages can be equal. A verb returns X = N entries.

  Attributes:
    page: the device page of each move.  # int32[X]
    saved_to: the offload page that gets the content of `page`, or NONE.
      # int32[X]
    restored_from: the offload page whose content `page` gets, or NONE.
      # int32[X]
    count: the number of moves; later entries are ignored.  # int32[]
    start: the number of moves that the cache planned before these, modulo
      2**32; None for moves that no cache planned.  # uint32[]
    NONE: the sentinel for no offload page.
  """

  NONE: ClassVar[int] = indexing.NOWHERE

  page: Array
  saved_to: Array
  restored_from: Array
  count: Array
  start: Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class OffloadPages:
  """The offloaded pages, with counters modulo 2**32.

  Attributes:
    saves: True if evicted pages are saved; False if
      `CacheConfig.offload_policy` restores no page.
    queue: all offload pages, in the order in which they will be overwritten.
    moves: the moves of the last call of a verb.
    stale_before: the clock of the prefix index at the last `new_epoch`. Pages
      published before this time are not saved.  # uint32[]
    num_saved: pages saved since `init`.  # uint32[]
    num_restored: pages restored since `init`.  # uint32[]
    num_forgotten: cached offload pages overwritten since `init`.  # uint32[]
    num_dropped: cached pages evicted, but not saved, since `init`.  # uint32[]
  """

  saves: bool = dataclasses.field(metadata={"static": True})
  queue: FreeQueue
  moves: Moves
  stale_before: Array
  num_saved: Array
  num_restored: Array
  num_forgotten: Array
  num_dropped: Array


def init(config: CacheConfig) -> OffloadPages:
  """Returns empty offload pages."""
  counters = ("num_saved", "num_restored", "num_forgotten", "num_dropped")
  return OffloadPages(
    saves=config.max_restored_pages > 0,
    queue=free_queue.init(config.offload_numbers),
    moves=Moves(
      page=jnp.zeros((config.total_pages,), jnp.int32),
      saved_to=jnp.zeros((config.total_pages,), jnp.int32),
      restored_from=jnp.zeros((config.total_pages,), jnp.int32),
      count=jnp.zeros((), jnp.int32),
      start=jnp.zeros((), jnp.uint32),
    ),
    stale_before=jnp.zeros((), jnp.uint32),
    **{name: jnp.zeros((), jnp.uint32) for name in counters},
  )


def num_planned(offload: OffloadPages) -> Array:
  """Returns uint32[], the number of moves planned since `init`."""
  assert offload.moves.start is not None  # Only handmade moves have none.
  return offload.moves.start + offload.moves.count.astype(jnp.uint32)


def must_stay(
  offload: OffloadPages,
  index: PrefixIndex,
  pages: Array,
  *,
  first_number: int,
  without_loops: bool,
) -> Array:
  """Marks the pages that must stay in the device's queue.

  A call can save at most one page for each live entry among the first W // P
  entries of the pool's offload queue. Pages that exceed this limit must stay.

  Args:
    offload: the offload pages.
    index: the prefix index.
    pages: int32[W], the pages at the fronts of the device's queues.
    first_number: page q of the offload queue has the number `first_number` + q.
    without_loops: True to stop before a page whose removal needs a loop, see
      `prefix_index.remove`.

  Returns:
    bool[W]. A pop ends before the first live page of a pool with True.
  """
  entries = prefix_index.cached_among(index, pages, pages >= 0)

  def cached_that_stay(stays: Array) -> Array:
    targets, live = free_queue.front(offload.queue, pages.shape[0])
    saved = entries.valid & _are_saved(offload, index, entries.stamps)
    if without_loops:
      # The count ends before the first offload page whose removal needs a loop.
      passed = live & prefix_index.has_passed(index, first_number + targets)
      live &= _count_in_pool(offload, passed) == 0
    live = _by_pool(offload, live)
    num_targets = jnp.sum(live, axis=1, keepdims=True, dtype=jnp.int32)
    num_targets = jnp.broadcast_to(num_targets, live.shape).reshape(-1)
    stays |= _count_in_pool(offload, saved) > num_targets
    if without_loops:
      stays |= ~saved & prefix_index.has_passed(index, pages)
    return stays

  stays = jnp.zeros_like(entries.valid)
  return loops.if_needed(entries.total > 0, cached_that_stay, stays)


def exchange(
  offload: OffloadPages,
  index: PrefixIndex,
  pages: Array,
  evicted: CachedPages,
  valid: Array,
  *,
  first_number: int,
  restored: Array | None = None,
  without_loops: bool = False,
) -> tuple[OffloadPages, PrefixIndex]:
  """Saves contents of popped device pages, then restores offload pages there.

  Args:
    offload: the offload pages.
    index: the prefix index.
    pages: int32[W].
    evicted: the entries of the popped pages that are cached.
    valid: bool[W], the popped pages, all before the first page that must stay.
    first_number: page q of the offload queue has the number `first_number` + q.
    restored: int32[W], the offload page to restore to each page, by its number
      in the offload queue; 0 for none. None to restore no page at all.
    without_loops: see `must_stay`.
  """
  # The entries of saved and restored pages are read together and then written
  # together. XLA would copy the index if a write came before a read.
  saved = evicted.valid & _are_saved(offload, index, evicted.stamps)
  sources = pages
  moved = saved
  if restored is None:
    restored = sharding.zeros_like(pages)
  else:
    sources = jnp.concatenate([pages, first_number + restored])
    moved = jnp.concatenate([saved, valid & (restored > 0)])
  index, moving = prefix_index.lift(index, sources, moved)
  saved_by_pool = jnp.sum(_by_pool(offload, saved), axis=1, dtype=jnp.int32)
  num_saved = jnp.sum(saved_by_pool, dtype=jnp.int32)
  queue, front = free_queue.pop(
    offload.queue, saved_by_pool, window=pages.shape[0]
  )
  # Cached offload pages that saved pages overwrite leave the index, and so do
  # cached device pages that are popped and not saved.
  index, was_cached = prefix_index.remove(
    index,
    jnp.concatenate([first_number + front.pages, pages]),
    jnp.concatenate([front.valid, valid & ~saved]),
    without_loops=without_loops,
  )
  # The n-th saved page of a pool overwrites its n-th popped offload page.
  first_lane = _first_lanes(offload, pages.shape[0])
  saved_to = indexing.put(
    jnp.zeros_like(pages),
    indexing.where_valid(front.valid, first_lane + front.rank),
    values=front.pages,
  )
  rank = _count_in_pool(offload, saved) - 1
  target = indexing.take(saved_to, first_lane + rank)
  target = jnp.where(saved, target, 0)
  targets = jnp.concatenate([first_number + target, pages])
  targets = targets[: sources.shape[0]]
  index = prefix_index.settle(index, targets, moving)
  queue = free_queue.push_back(
    queue,
    target,
    saved,
    marks=sharding.zeros_like(target),
    marked=sharding.zeros_like(saved),
  )
  num_restored = jnp.sum(valid & (restored > 0), dtype=jnp.uint32)
  num_forgotten = was_cached[: pages.shape[0]]
  offload = dataclasses.replace(
    offload,
    queue=queue,
    moves=_appended(offload.moves, pages, valid, target, restored),
    num_saved=offload.num_saved + num_saved.astype(jnp.uint32),
    num_restored=offload.num_restored + num_restored,
    num_forgotten=offload.num_forgotten
    + jnp.sum(num_forgotten, dtype=jnp.uint32),
    num_dropped=offload.num_dropped
    + (evicted.total - num_saved).astype(jnp.uint32),
  )
  return offload, index


def to_front(offload: OffloadPages, pages: Array, valid: Array) -> OffloadPages:
  """Moves valid offload pages, int32[X], all distinct, to the queues' fronts.

  The first valid page of a pool becomes the first in its queue.
  """
  numbers = offload.queue.numbers
  rank, counts = free_queue.rank_by_pool(numbers, pages, valid)
  # The pages are removed first, because `push` counts them as new entries.
  queue, _ = free_queue.remove(offload.queue, pages, valid)
  queue = free_queue.reserve(queue, counts)
  queue = free_queue.push(
    queue,
    pages,
    sharding.zeros_like(valid),
    valid,
    turn=numbers.value_of(counts, pages) - rank,
  )
  return dataclasses.replace(offload, queue=queue)


def _by_pool(offload: OffloadPages, values: Array) -> Array:
  """Reshapes [W] to [P, W // P]."""
  return values.reshape(offload.queue.numbers.num_pools, -1)


def _count_in_pool(offload: OffloadPages, flags: Array) -> Array:
  """Counts the True elements of a pool up to each element: int32[W]."""
  return loops.cumulative_sums(_by_pool(offload, flags)).reshape(-1)


def _first_lanes(offload: OffloadPages, count: int) -> Array:
  """Returns int32[W]: the first element of each element's pool."""
  num_lanes = count // offload.queue.numbers.num_pools
  lanes = jnp.arange(count, dtype=jnp.int32)
  return elementwise.quotient(lanes, num_lanes) * num_lanes


def _are_saved(
  offload: OffloadPages, index: PrefixIndex, stamps: Array
) -> Array:
  """Returns bool[W]: True for cached pages to save, by their stamps.

  Pages published before the last `new_epoch` are not saved.
  """
  if not offload.saves:
    return jnp.zeros(stamps.shape, bool)
  return index.clock - stamps <= index.clock - offload.stale_before


def _appended(
  moves: Moves, pages: Array, valid: Array, target: Array, restored: Array
) -> Moves:
  """Appends moves of popped pages; `target` and `restored` are 0 for none."""
  valid &= (target > 0) | (restored > 0)
  rank = loops.cumulative_sum(valid)
  move_index = indexing.where_valid(valid, moves.count + rank - 1)
  saved_to, restored_from = (
    indexing.where_valid(page > 0, page - 1) for page in (target, restored)
  )
  return Moves(
    page=indexing.put(moves.page, move_index, values=pages),
    saved_to=indexing.put(moves.saved_to, move_index, values=saved_to),
    restored_from=indexing.put(
      moves.restored_from, move_index, values=restored_from
    ),
    count=moves.count + rank[-1],
    start=moves.start,
  )
