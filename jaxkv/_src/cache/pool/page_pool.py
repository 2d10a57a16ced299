"""The page pool: references, the free queue and the index kept in step.

Three movements, and each keeps the laws: `pop` (free -> in use), `hold` (one
more reference), `drop` (one reference less, and back to the queue at none).
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv._src.cache import masked
from jaxkv._src.cache.config import CacheConfig
from jaxkv._src.cache.pool import free_queue
from jaxkv._src.cache.pool.free_queue import FreeQueue
from jaxkv._src.cache.prefix import prefix_index
from jaxkv._src.cache.prefix.prefix_index import PrefixIndex
from jaxkv._src.cache.prefix.prefix_index import Taken
from jaxkv._src.cache.telemetry import event_log
from jaxkv._src.cache.telemetry import residency
from jaxkv._src.cache.telemetry.event_log import EventLog
from jaxkv._src.cache.telemetry.residency import Ages


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PagePool:
  """Every page, and what is known of it.

  Attributes:
    ref_count: page-table entries that name the page, plus its pins; 0 for the
      null page.  # int32[N]
    pin_count: references held by `pin` and `touch`.  # int32[N]
    queue: the free pages in eviction order.
    index: the cached pages; None without prefix caching.
    events: what entered and left the index; None if nobody wants to know.
    new: pages popped since `take_new_pages`; None likewise.  # bool[N]
    ages: how long pages stay cached; None likewise.
  """

  ref_count: Array
  pin_count: Array
  queue: FreeQueue
  index: PrefixIndex | None
  events: EventLog | None = None
  new: Array | None = None
  ages: Ages | None = None


class Popped(NamedTuple):
  """Pages that `pop` took.

  Attributes:
    pages: int32[W].
    rank: int32[W], the how-manieth popped page this is.
    valid: bool[W].
    num_evicted: int32[], those of them that were cached until now.
  """

  pages: Array
  rank: Array
  valid: Array
  num_evicted: Array


def init(config: CacheConfig) -> PagePool:
  """All pages free, none cached."""
  index = None
  if config.prefix_caching:
    index = prefix_index.init(config.num_pages, max(config.page_sizes))
  return PagePool(
    ref_count=jnp.zeros((config.num_pages,), jnp.int32),
    pin_count=jnp.zeros((config.num_pages,), jnp.int32),
    queue=free_queue.init(config.num_pages),
    index=index,
    events=event_log.init(config) if config.event_log else None,
    new=jnp.zeros((config.num_pages,), bool)
    if config.track_new_pages
    else None,
    ages=residency.init(config.num_pages) if config.track_residency else None,
  )


def pop(
  pool: PagePool, wanted: Array, *, window: int
) -> tuple[PagePool, Popped]:
  """Takes up to `wanted` free pages, evicting what they cached.

  As `free_queue.pop`, it may return fewer; the caller goes on.
  """
  queue, popped = free_queue.pop(pool.queue, wanted, window=window)
  pages, _, valid = popped
  pool, taken = _unpublished(pool, pages, valid)
  num_evicted = jnp.int32(0) if taken is None else taken.total
  place, new = masked.where_valid(valid, pages), pool.new
  if new is not None:
    new = masked.put(new, place, values=True)
  pool = dataclasses.replace(
    pool,
    ref_count=masked.put(pool.ref_count, place, values=1),
    queue=queue,
    new=new,
    ages=_aged(pool, pages, taken),
  )
  return pool, Popped(*popped, num_evicted)


def hold(pool: PagePool, pages: Array, valid: Array) -> PagePool:
  """One more reference a valid item; free pages leave the queue.

  Args:
    pool: the pool.
    pages: int32[W], repeats allowed.
    valid: bool[W].
  """
  queue, count = free_queue.remove(
    pool.queue, pages, valid & is_free(pool, pages)
  )
  place = masked.after(count, masked.where_valid(valid, pages))
  return dataclasses.replace(
    pool, ref_count=masked.add(pool.ref_count, place, values=1), queue=queue
  )


def drop(
  pool: PagePool,
  pages: Array,
  owner: Array,
  valid: Array,
  *,
  unhashed_first: bool,
) -> tuple[PagePool, Array]:
  """One reference less a valid item; unreferenced pages go to the back.

  Args:
    pool: the pool, with room reserved in its queue.
    pages: int32[W], repeats allowed; every valid one is referenced.
    owner: int32[W], who gives the reference back.
    valid: bool[W].
    unhashed_first: whether pages without a key are left out of the queue for
      the caller, who gives them to `to_front` in the opposite order.

  Returns:
    The pool, and bool[W]: the items left out.
  """
  place = masked.where_valid(valid, pages)
  ref_count = masked.add(pool.ref_count, place, values=-1)
  unreferenced = valid & (masked.take(ref_count, pages, fill=1) == 0)
  position, last = free_queue.mark_last(
    pool.queue.position, pages, unreferenced
  )
  left = jnp.zeros_like(last)
  if unhashed_first:
    left = last & ~is_cached(pool, pages)
  ages = pool.ages
  if ages is not None and pool.index is not None:
    ages = residency.released(ages, pages, last, pool.index.clock)
  queue = dataclasses.replace(pool.queue, position=position)
  queue = free_queue.push_back(
    queue, pages, last & ~left, notes=_left_by(owner), noted=left
  )
  pool = dataclasses.replace(pool, ref_count=ref_count, queue=queue, ages=ages)
  return pool, left


def to_front(
  pool: PagePool, pages: Array, owner: Array, valid: Array
) -> PagePool:
  """Puts pages that `drop` left out before all others; the last is first.

  Args:
    pool: the pool.
    pages: int32[W], the valid ones all different; those that this owner did
      not leave out are passed over.
    owner: int32[W], as given to `drop`.
    valid: bool[W].
  """
  left = masked.take(pool.queue.position, pages) == _left_by(owner)
  queue = free_queue.push_front(pool.queue, pages, valid & left)
  return dataclasses.replace(pool, queue=queue)


def reserve(pool: PagePool, num_references: Array) -> PagePool:
  """Makes room in the queue before so many references are dropped."""
  in_use = jnp.int32(pool.ref_count.shape[0] - 1) - pool.queue.num_free
  count = jnp.minimum(num_references, in_use)
  return dataclasses.replace(pool, queue=free_queue.reserve(pool.queue, count))


def unpublish(
  pool: PagePool, pages: Array, valid: Array
) -> tuple[PagePool, Array]:
  """Takes valid pages, all different, out of the index, nothing else.

  Returns:
    The pool, and int32[]: how many of the pages were cached.
  """
  pool, taken = _unpublished(pool, pages, valid)
  return pool, jnp.int32(0) if taken is None else taken.total


def _unpublished(
  pool: PagePool, pages: Array, valid: Array
) -> tuple[PagePool, Taken | None]:
  """The same, and what was taken out; None without an index."""
  if pool.index is None:
    return pool, None
  index, taken = prefix_index.remove(pool.index, pages, valid)
  events = pool.events
  if events is not None:
    events = event_log.removed(events, taken.valid, pages, taken.keys)
  return dataclasses.replace(pool, index=index, events=events), taken


def _aged(pool: PagePool, pages: Array, taken: Taken | None) -> Ages | None:
  """The ages with those of the pages that were taken out of the index."""
  ages, index = pool.ages, pool.index
  if ages is None or index is None or taken is None:
    return ages
  return residency.evicted(ages, pages, taken.valid, taken.stamps, index.clock)


def is_free(pool: PagePool, pages: Array) -> Array:
  """bool[...]: whether pages, not the null page, stand in the queue."""
  return masked.take(pool.ref_count, pages, fill=1) == 0


def is_cached(pool: PagePool, pages: Array) -> Array:
  """bool[...]: whether pages have a key under which they can be found."""
  if pool.index is None:
    return jnp.zeros(pages.shape, bool)
  return prefix_index.contains(pool.index, pages)


def _left_by(owner: Array) -> Array:
  """The note in a page's queue position while it is in neither place."""
  return masked.NOWHERE + 1 + owner
