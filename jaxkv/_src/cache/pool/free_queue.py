"""The free pages in eviction order: a ring for each pool, with lazy deletion.

Each pool has a queue, whose entries are a span of positions of the pool's ring.
The rings are parts of one array: place c of pool p's ring is position p * C +
c. The entry at position q is live if its page points back at q, that is, if
`position[ring[q]] == q`. Other entries are stale. To remove a page from the
middle, `remove` only clears the page's position. So no entry moves, and the
cost does not depend on the number of pages. `pop` skips stale entries at the
front. If a ring is full, a sweep rewrites all rings without stale entries. The
rings are large, so sweeps are rare.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import Array

from jaxkv._src.arrays import indexing
from jaxkv._src.arrays import loops
from jaxkv._src.arrays import sharding
from jaxkv._src.arrays.indexing import NOWHERE
from jaxkv._src.cache.page_numbers import PageNumbers


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class FreeQueue:
  """The free pages of each pool, in the order in which they will be popped.

  C is the capacity of a ring, a power of two of at least twice the largest
  pool.

  Attributes:
    numbers: the page numbers of the pools.
    ring: page numbers. In the part of a pool, the `span` places from `head` on,
      modulo C, are the entries of its queue.  # int32[P * C]
    position: the position in `ring` of a free page's entry. For a page that is
      not free, a number of at most NOWHERE that makes no entry live.
      # int32[N]
    head: the place of each pool's first entry, 0 .. C - 1.  # int32[P]
    span: the number of entries, stale ones included.  # int32[P]
    num_free: the number of live entries.  # int32[P]
  """

  numbers: PageNumbers = dataclasses.field(metadata={"static": True})
  ring: Array
  position: Array
  head: Array
  span: Array
  num_free: Array


class Front(NamedTuple):
  """The entries at the fronts of the queues, W // P of each pool in turn.

  Attributes:
    pages: int32[W], the page of each entry.
    rank: int32[W], the 0-based rank of a popped page among the popped pages of
      its pool.
    valid: bool[W], True if the entry was popped.
  """

  pages: Array
  rank: Array
  valid: Array


def init(numbers: PageNumbers) -> FreeQueue:
  """Returns queues of all pages but the first of each pool, ascending."""
  ring_size = capacity(numbers)
  counts = jnp.asarray(numbers.sizes, jnp.int32) - 1
  place = jnp.arange(ring_size, dtype=jnp.int32)[None]
  first_pages = jnp.asarray(numbers.first_pages, jnp.int32)
  ring = jnp.where(
    place < counts[:, None], first_pages[:, None] + 1 + place, jnp.int32(0)
  )
  pages = jnp.arange(numbers.total, dtype=jnp.int32)
  page_place = pages - numbers.value_of(first_pages, pages) - 1
  position = numbers.pool_of(pages) * ring_size + page_place
  return FreeQueue(
    numbers=numbers,
    ring=ring.reshape(-1),
    position=jnp.where(page_place >= 0, position, jnp.int32(NOWHERE)),
    head=jnp.zeros_like(counts),
    # Separate buffers, so that each can be donated.
    span=counts + jnp.int32(0),
    num_free=counts,
  )


def capacity(numbers: PageNumbers) -> int:
  """Returns C, the number of places of a ring."""
  # A power of two, so that `_position` needs only one bitwise operation. With
  # at least 2 N places, there is room for N pushes between two sweeps.
  return 2 << (max(numbers.sizes) - 1).bit_length()


def pop(
  queue: FreeQueue,
  num_pages: Array,
  *,
  window: int,
  keeps: Callable[[Array], Array] | None = None,
) -> tuple[FreeQueue, Front]:
  """Pops up to `num_pages`, int32[P], pages from the entries of `front`.

  `keeps` maps pages, int32[W], to bool[W]. The first live page of a pool for
  which it returns True stays in the queue, as do all later pages of the pool.
  None to pop any page.

  If some entries are stale, fewer pages can be popped. The caller then calls
  `pop` again. Each call also removes stale entries. So without `keeps`,
  repeated calls pop `num_pages` pages if as many are free.
  """
  pages, live = front(queue, window)
  num_pools = queue.numbers.num_pools
  shape = (num_pools, pages.shape[0] // num_pools)
  lanes = jnp.arange(shape[1], dtype=jnp.int32)[None]
  live = live.reshape(shape)
  count = loops.cumulative_sums(live)
  valid = live & (count <= num_pages[:, None])
  if keeps is not None:
    is_kept = live & keeps(pages).reshape(shape)
    stop_lane = jnp.min(jnp.where(is_kept, lanes, shape[1]), axis=1)
    valid &= lanes < stop_lane[:, None]
  num_popped = jnp.sum(valid, axis=1, dtype=jnp.int32)
  # The head stops at the first live entry that was not popped, or at the end.
  stays = (live & ~valid) | (lanes >= queue.span[:, None])
  passed = jnp.min(jnp.where(stays, lanes, shape[1]), axis=1)
  # The positions of popped pages need no update. The head has passed their
  # entries, and an entry outside of the span is never live.
  queue = dataclasses.replace(
    queue,
    head=(queue.head + passed) & (_ring_size(queue) - 1),
    span=queue.span - passed,
    num_free=queue.num_free - num_popped,
  )
  return queue, Front(pages, count.reshape(-1) - 1, valid.reshape(-1))


def front(queue: FreeQueue, window: int) -> tuple[Array, Array]:
  """Reads the first `window` // P entries of each pool, pool after pool.

  Returns:
    int32[W], the page of each entry, and bool[W], True for live entries.
  """
  num_pools = queue.numbers.num_pools
  lanes = jnp.arange(max(1, window // num_pools), dtype=jnp.int32)[None]
  pool = jnp.arange(num_pools, dtype=jnp.int32)[:, None]
  position = _position(queue, pool, queue.head[:, None] + lanes)
  pages = indexing.take(queue.ring, position)
  live = indexing.take(queue.position, pages, fill=NOWHERE) == position
  live &= lanes < queue.span[:, None]
  return pages.reshape(-1), live.reshape(-1)


def remove(
  queue: FreeQueue, pages: Array, valid: Array
) -> tuple[FreeQueue, Array]:
  """Removes valid pages, int32[W], from any position of the queue.

  All valid pages must be in the queue; repeats are allowed. Returns the queue,
  and int32[]: the number of distinct pages removed.
  """
  position, is_last = mark_last(queue.position, pages, valid)
  counts = _count_by_pool(queue.numbers, pages, is_last)
  count = jnp.sum(counts, dtype=jnp.int32)
  # Without this dependency of the write on the read in `mark_last`, XLA would
  # copy `position`.
  removed_pages = loops.read_before(count, indexing.where_valid(valid, pages))
  queue = dataclasses.replace(
    queue,
    position=indexing.put(position, removed_pages, values=NOWHERE),
    num_free=queue.num_free - counts,
  )
  return queue, count


def push_back(
  queue: FreeQueue, pages: Array, valid: Array, *, marks: Array, marked: Array
) -> FreeQueue:
  """Appends pages in the given order; the caller must have reserved room.

  Args:
    queue: the queue.
    pages: int32[W].
    valid: bool[W], the pages to append, all distinct.
    marks: int32[W], the values to store as `position` of the marked pages.
    marked: bool[W], pages that stay outside of the queue. None of them is
      valid. `page_pool.to_front` reads their marks.
  """
  chex.assert_equal_shape([pages, valid, marks, marked])
  rank, counts = rank_by_pool(queue.numbers, pages, valid)
  # Ranks count from 1, so the first appended page gets the place after the
  # span.
  position = _position_of(queue, pages, queue.head + queue.span - 1, rank)
  return _grown(_write(queue, position, pages, valid, marks, marked), counts)


def push(
  queue: FreeQueue,
  pages: Array,
  to_back: Array,
  to_front: Array,
  *,
  turn: Array,
) -> FreeQueue:
  """Appends some pages in the given order, and prepends other pages.

  Args:
    queue: the queue, with room reserved.
    pages: int32[W].
    to_back: bool[W], the pages to append, all distinct.
    to_front: bool[W], the pages to prepend one by one, all distinct. None of
      them is in `to_back`.
    turn: int32[W], the 0-based rank of each page in the order of prepending
      pages of its pool. So the page with the highest rank becomes the first in
      the queue.
  """
  rank, counts = rank_by_pool(queue.numbers, pages, to_back)
  # The places before a head near the start of the ring are negative.
  # `_position` then continues at the ring's end.
  offset = jnp.where(
    to_front, -1 - turn, rank + queue.numbers.value_of(queue.span - 1, pages)
  )
  position = _position_of(queue, pages, queue.head, offset)
  valid = to_back | to_front
  queue = _write(
    queue, position, pages, valid, position, sharding.zeros_like(valid)
  )
  num_front = _count_by_pool(queue.numbers, pages, to_front)
  head = (queue.head - num_front) & (_ring_size(queue) - 1)
  return _grown(dataclasses.replace(queue, head=head), counts + num_front)


def rank_by_pool(
  numbers: PageNumbers, pages: Array, valid: Array
) -> tuple[Array, Array]:
  """Counts the valid pages, among int32[W], of each pool.

  Returns:
    int32[W], for each page, the number of valid pages of its pool up to and
    with this page; and int32[P], the number of valid pages of each pool.
  """
  counts = counts_by_pool(numbers, pages, valid)
  return numbers.value_of(counts, pages), counts[:, -1]


def counts_by_pool(numbers: PageNumbers, pages: Array, valid: Array) -> Array:
  """Returns int32[P, W]: the valid pages of each pool up to and with a page."""
  return loops.cumulative_sums(_in_pools(numbers, pages, valid))


def _count_by_pool(numbers: PageNumbers, pages: Array, valid: Array) -> Array:
  """Returns int32[P]: the number of valid pages of each pool."""
  in_pools = _in_pools(numbers, pages, valid)
  return jnp.sum(in_pools, axis=1, dtype=jnp.int32)


def _in_pools(numbers: PageNumbers, pages: Array, valid: Array) -> Array:
  """Returns bool[P, W]: True for the valid pages of each pool."""
  if numbers.num_pools == 1:
    return valid[None]
  pool = jnp.arange(numbers.num_pools, dtype=jnp.int32)[:, None]
  return valid[None] & (numbers.pool_of(pages)[None] == pool)


def has_room(queue: FreeQueue, counts: Array) -> Array:
  """Returns bool[]: True if `counts`, int32[P], pushes need no sweep."""
  return jnp.all(queue.span + counts <= _ring_size(queue))


def reserve(queue: FreeQueue, counts: Array) -> FreeQueue:
  """Makes room for `counts`, int32[P], pushes, by a sweep if needed."""
  num_pools = queue.numbers.num_pools
  ring_size = _ring_size(queue)

  def sweep(queue: FreeQueue) -> FreeQueue:
    ring = in_order(queue)
    place = jnp.arange(ring_size, dtype=jnp.int32)[None]
    pool = jnp.arange(num_pools, dtype=jnp.int32)[:, None]
    is_entry = place < queue.num_free[:, None]
    pages = indexing.where_valid(is_entry, ring.reshape(num_pools, ring_size))
    return dataclasses.replace(
      queue,
      ring=ring,
      position=indexing.put(
        queue.position, pages, values=pool * ring_size + place
      ),
      head=sharding.zeros_like(queue.head),
      span=queue.num_free,
    )

  with jax.named_scope("rare/sweep"):
    return loops.at_most_once(~has_room(queue, counts), sweep, queue)


def mark_last(
  position: Array, pages: Array, valid: Array
) -> tuple[Array, Array]:
  """Finds the last valid item of each page; item i is the page `pages[i]`.

  `FreeQueue.position`, int32[N], must be at most NOWHERE for valid pages.

  Returns:
    `position`, in which each valid page has a temporary mark that the caller
    must overwrite; and bool[W], True for the last valid item of each page.
  """
  # The mark of an item grows with its index. So the maximum of a page's marks
  # is the mark of the page's last item. This is cheaper than a sort or a
  # comparison of all pairs of items.
  mark = NOWHERE + 1 + jnp.arange(pages.shape[0], dtype=jnp.int32)
  valid_pages = indexing.where_valid(valid, pages)
  position = indexing.put_max(position, valid_pages, values=mark)
  return position, valid & (indexing.take(position, valid_pages) == mark)


def in_order(queue: FreeQueue) -> Array:
  """Returns int32[P * C]: each pool's free pages in eviction order, then 0."""
  ring_size = _ring_size(queue)
  pages, live = front(queue, queue.ring.shape[0])
  live = live.reshape(-1, ring_size)
  rank = jnp.cumsum(live, axis=1, dtype=jnp.int32) - 1
  pool = jnp.arange(live.shape[0], dtype=jnp.int32)[:, None]
  place = indexing.where_valid(live, pool * ring_size + rank)
  return indexing.put(
    jnp.zeros_like(queue.ring), place.reshape(-1), values=pages
  )


def _write(
  queue: FreeQueue,
  position: Array,
  pages: Array,
  valid: Array,
  marks: Array,
  marked: Array,
) -> FreeQueue:
  return dataclasses.replace(
    queue,
    ring=indexing.put(
      queue.ring, indexing.where_valid(valid, position), values=pages
    ),
    position=indexing.put(
      queue.position,
      indexing.where_valid(valid | marked, pages),
      values=jnp.where(valid, position, marks),
    ),
  )


def _grown(queue: FreeQueue, counts: Array) -> FreeQueue:
  return dataclasses.replace(
    queue, span=queue.span + counts, num_free=queue.num_free + counts
  )


def _ring_size(queue: FreeQueue) -> int:
  """Returns C, the number of places of a ring."""
  return queue.ring.shape[0] // queue.numbers.num_pools


def _position_of(
  queue: FreeQueue, pages: Array, origin: Array, offset: Array
) -> Array:
  """Returns int32[W]: positions `offset` after each pool's `origin`."""
  place = queue.numbers.value_of(origin, pages) + offset
  return _position(queue, queue.numbers.pool_of(pages), place)


def _position(queue: FreeQueue, pool: Array, place: Array) -> Array:
  """Returns the position in `ring` of a place, modulo C, of a pool's ring."""
  # C is a power of two, so this is the remainder, also of negative numbers.
  ring_size = _ring_size(queue)
  return pool * ring_size + (place & jnp.int32(ring_size - 1))
