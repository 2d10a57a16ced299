"""The free pages in eviction order: a ring with lazy deletion.

The queue's entries are a span of ring positions. The entry at position q is
live if its page points back at q, that is, if `position[ring[q]] == q`. Other
entries are stale. To remove a page from the middle, `remove` only clears the
page's position. So no entry moves, and the cost does not depend on the number
of pages. `pop` skips stale entries at the front. If the ring is full, a sweep
rewrites it without stale entries. The ring is large, so sweeps are rare.
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class FreeQueue:
  """The free pages, in the order in which they will be popped.

  C is the ring's capacity, a power of two of at least 2 N.

  Attributes:
    ring: page numbers. The `span` positions from `head` on, modulo C, are the
      entries of the queue.  # int32[C]
    position: the ring position of a free page's entry. For a page that is not
      free, a number of at most NOWHERE that makes no entry live.  # int32[N]
    head: the position of the first entry.  # int32[]
    span: the number of entries, stale ones included.  # int32[]
    num_free: the number of live entries.  # int32[]
  """

  ring: Array
  position: Array
  head: Array
  span: Array
  num_free: Array


class Front(NamedTuple):
  """The W entries that `pop` read from the front of the queue.

  Attributes:
    pages: int32[W], the page of each entry.
    rank: int32[W], the 0-based rank of a popped page among all popped pages.
    valid: bool[W], True if the entry was popped.
  """

  pages: Array
  rank: Array
  valid: Array


def init(num_pages: int) -> FreeQueue:
  """Returns a queue of all pages but the null page, in ascending order."""
  pages = jnp.arange(1, capacity(num_pages) + 1, dtype=jnp.int32)
  page_numbers = jnp.arange(num_pages, dtype=jnp.int32)
  return FreeQueue(
    # Entries after the last page are outside of the span, so none is live.
    ring=jnp.where(pages < num_pages, pages, jnp.int32(0)),
    position=jnp.where(page_numbers > 0, page_numbers - 1, jnp.int32(NOWHERE)),
    head=jnp.int32(0),
    span=jnp.int32(num_pages - 1),
    num_free=jnp.int32(num_pages - 1),
  )


def capacity(num_pages: int) -> int:
  """Returns C, the number of positions of the ring."""
  # A power of two, so that `_wrap` is one bitwise operation. With at least 2 N
  # positions, there is room for N pushes between two sweeps.
  return 2 << (num_pages - 1).bit_length()


def pop(
  queue: FreeQueue,
  num_pages: Array,
  *,
  window: int,
  keeps: Callable[[Array], Array] | None = None,
) -> tuple[FreeQueue, Front]:
  """Pops up to `num_pages` pages from the first `window` entries.

  `keeps` maps pages, int32[W], to bool[W]. The first live page for which it
  returns True stays in the queue, as do all later pages. None to pop any page.

  If some of the `window` entries are stale, fewer pages can be popped. The
  caller then calls `pop` again. Each call also removes stale entries. So
  without `keeps`, repeated calls pop `num_pages` pages if as many are free.
  """
  lanes = jnp.arange(window, dtype=jnp.int32)
  pages, live = entries_at(queue, lanes)
  count = loops.cumulative_sum(live)
  valid = live & (count <= num_pages)
  if keeps is not None:
    stop_lane = jnp.min(jnp.where(live & keeps(pages), lanes, window))
    valid &= lanes < stop_lane
  num_popped = jnp.sum(valid, dtype=jnp.int32)
  # The head stops at the first live entry that was not popped, or at the end.
  stays = (live & ~valid) | (lanes >= queue.span)
  passed = jnp.min(jnp.where(stays, lanes, window))
  # The positions of popped pages need no update. The head has passed their
  # entries, and an entry outside of the span is never live.
  queue = dataclasses.replace(
    queue,
    head=_wrap(queue, queue.head + passed),
    span=queue.span - passed,
    num_free=queue.num_free - num_popped,
  )
  return queue, Front(pages, count - 1, valid)


def entries_at(queue: FreeQueue, lanes: Array) -> tuple[Array, Array]:
  """Reads the entries at distances `lanes`, int32[W], from the queue's head.

  Returns:
    int32[W], the page of each entry, and bool[W], True for live entries.
  """
  position = _wrap(queue, queue.head + lanes)
  pages = indexing.take(queue.ring, position)
  live = indexing.take(queue.position, pages, fill=NOWHERE) == position
  return pages, live & (lanes < queue.span)


def remove(
  queue: FreeQueue, pages: Array, valid: Array
) -> tuple[FreeQueue, Array]:
  """Removes valid pages, int32[W], from any position of the queue.

  All valid pages must be in the queue; repeats are allowed. Returns the queue,
  and int32[]: the number of distinct pages removed.
  """
  position, is_last = mark_last(queue.position, pages, valid)
  count = jnp.sum(is_last, dtype=jnp.int32)
  # Without this dependency of the write on the read in `mark_last`, XLA would
  # copy `position`.
  removed_pages = loops.read_before(count, indexing.where_valid(valid, pages))
  queue = dataclasses.replace(
    queue,
    position=indexing.put(position, removed_pages, values=NOWHERE),
    num_free=queue.num_free - count,
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
  rank = loops.cumulative_sum(valid)
  # Ranks count from 1, so the first appended page gets the position after the
  # span.
  position = _wrap(queue, queue.head + queue.span + rank - 1)
  return _grown(_write(queue, position, pages, valid, marks, marked), rank[-1])


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
    turn: int32[W], the 0-based rank of each page in the order of prepending. So
      the page with the highest rank becomes the first in the queue.
  """
  rank = loops.cumulative_sum(to_back)
  back = queue.head + queue.span + rank - 1
  # Negative if the head is near the start of the ring. `_wrap` then continues
  # at the ring's end.
  front = queue.head - 1 - turn
  position = _wrap(queue, jnp.where(to_front, front, back))
  valid = to_back | to_front
  queue = _write(
    queue, position, pages, valid, position, sharding.zeros_like(valid)
  )
  num_front = jnp.sum(to_front, dtype=jnp.int32)
  return _grown(
    dataclasses.replace(queue, head=_wrap(queue, queue.head - num_front)),
    rank[-1] + num_front,
  )


def has_room(queue: FreeQueue, count: Array) -> Array:
  """Returns bool[]: True if `count` pushes need no sweep."""
  return queue.span + count <= queue.ring.shape[0]


def reserve(queue: FreeQueue, count: Array) -> FreeQueue:
  """Makes room for `count` pushes, by a sweep if the ring is too full."""
  ring_size = queue.ring.shape[0]

  def sweep(queue: FreeQueue) -> FreeQueue:
    ring = in_order(queue)
    lanes = jnp.arange(ring_size, dtype=jnp.int32)
    listed = indexing.where_valid(lanes < queue.num_free, ring)
    return dataclasses.replace(
      queue,
      ring=ring,
      position=indexing.put(queue.position, listed, values=lanes),
      head=sharding.zeros_like(queue.head),
      span=queue.num_free,
    )

  with jax.named_scope("rare/sweep"):
    return loops.at_most_once(~has_room(queue, count), sweep, queue)


def mark_last(
  position: Array, pages: Array, valid: Array
) -> tuple[Array, Array]:
  """Finds the last valid item of each page; item i is the page `pages[i]`.

  Args:
    position: int32[N], `FreeQueue.position`; at most NOWHERE for valid pages.
    pages: int32[W].
    valid: bool[W].

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
  """Returns int32[C]: the free pages in eviction order, then zeros."""
  lanes = jnp.arange(queue.ring.shape[0], dtype=jnp.int32)
  pages, live = entries_at(queue, lanes)
  rank = jnp.cumsum(live, dtype=jnp.int32) - 1
  return indexing.put(
    jnp.zeros_like(queue.ring), indexing.where_valid(live, rank), values=pages
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


def _grown(queue: FreeQueue, count: Array) -> FreeQueue:
  return dataclasses.replace(
    queue, span=queue.span + count, num_free=queue.num_free + count
  )


def _wrap(queue: FreeQueue, position: Array) -> Array:
  # The capacity is a power of two, so this is the remainder, also of negative
  # numbers.
  return position & jnp.int32(queue.ring.shape[0] - 1)
