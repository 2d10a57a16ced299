"""The free pages in eviction order: a ring with lazy deletion.

`ring[q]` is an entry; it is live iff its page still points back at it,
`position[ring[q]] == q`. Taking a page out of the middle only forgets its
position, so that nothing moves and no operation depends on the number of
pages. Stale entries are skipped when they reach the front, and swept out when
they fill the ring, once in many pushes.
"""

import dataclasses
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
  """The free pages, in the order in which they will be taken.

  C is the ring's capacity, a power of two of at least 2 N.

  Attributes:
    ring: page numbers; the entries are those at `head .. head + span`, modulo
      C.  # int32[C]
    position: where a page's live entry is. For a page in use: a position where
      it has no entry. For the null page: NOWHERE.  # int32[N]
    head: position of the first entry.  # int32[]
    span: entries, stale ones included.  # int32[]
    num_free: live entries.  # int32[]
  """

  ring: Array
  position: Array
  head: Array
  span: Array
  num_free: Array


class Front(NamedTuple):
  """A window over the front of the queue.

  Attributes:
    pages: int32[W].
    rank: int32[W], 0-based position among all pages popped by this call.
    valid: bool[W], whether the entry was popped.
  """

  pages: Array
  rank: Array
  valid: Array


def init(num_pages: int) -> FreeQueue:
  """All pages but the null page, in order of their numbers."""
  capacity = 2 << (num_pages - 1).bit_length()
  pages = jnp.arange(1, capacity + 1, dtype=jnp.int32)
  numbers = jnp.arange(num_pages, dtype=jnp.int32)
  return FreeQueue(
    ring=jnp.where(pages < num_pages, pages, jnp.int32(0)),
    position=jnp.where(numbers > 0, numbers - 1, jnp.int32(NOWHERE)),
    head=jnp.int32(0),
    span=jnp.int32(num_pages - 1),
    num_free=jnp.int32(num_pages - 1),
  )


def pop(
  queue: FreeQueue, wanted: Array, *, window: int
) -> tuple[FreeQueue, Front]:
  """Takes up to `wanted` pages among the first `window` entries.

  Returns fewer when stale entries stand between them; the caller repeats until
  it has all, which ends if `wanted <= num_free`.
  """
  lanes = jnp.arange(window, dtype=jnp.int32)
  place = _wrap(queue, queue.head + lanes)
  pages = indexing.take(queue.ring, place)
  live = (indexing.take(queue.position, pages, fill=NOWHERE) == place) & (
    lanes < queue.span
  )
  count = jnp.cumsum(live, dtype=jnp.int32)
  valid = live & (count <= wanted)
  num_popped = count[-1] - jnp.maximum(count[-1] - wanted, 0)
  stays = (live & ~valid) | (lanes >= queue.span)
  passed = jnp.min(jnp.where(stays, lanes, window))
  # The head passes every entry that is popped, so positions can stay.
  queue = dataclasses.replace(
    queue,
    head=_wrap(queue, queue.head + passed),
    span=queue.span - passed,
    num_free=queue.num_free - num_popped,
  )
  return queue, Front(pages, count - 1, valid)


def remove(
  queue: FreeQueue, pages: Array, valid: Array
) -> tuple[FreeQueue, Array]:
  """Takes pages out of the queue, at any position.

  Args:
    queue: the queue.
    pages: int32[W]; a page may be named more than once.
    valid: bool[W], pages that stand in the queue.

  Returns:
    The queue, and int32[]: how many different pages were taken out.
  """
  position, last = mark_last(queue.position, pages, valid)
  count = jnp.sum(last, dtype=jnp.int32)
  place = loops.read_before(count, indexing.where_valid(valid, pages))
  queue = dataclasses.replace(
    queue,
    position=indexing.put(position, place, values=NOWHERE),
    num_free=queue.num_free - count,
  )
  return queue, count


def push_back(
  queue: FreeQueue, pages: Array, valid: Array, *, notes: Array, noted: Array
) -> FreeQueue:
  """Appends pages in the order given; room must have been reserved.

  Args:
    queue: the queue.
    pages: int32[W].
    valid: bool[W], the pages to append, all different.
    notes: int32[W], the positions of noted pages.
    noted: bool[W], pages that stay outside of the queue; not valid.
  """
  chex.assert_equal_shape([pages, valid, notes, noted])
  rank = jnp.cumsum(valid, dtype=jnp.int32)
  place = _wrap(queue, queue.head + queue.span + rank - 1)
  return _grown(_write(queue, place, pages, valid, notes, noted), rank[-1])


def push_front(queue: FreeQueue, pages: Array, valid: Array) -> FreeQueue:
  """Puts pages before all others, one by one: the last one is the first."""
  rank = jnp.cumsum(valid, dtype=jnp.int32)
  place = _wrap(queue, queue.head - rank)
  queue = _write(queue, place, pages, valid, place, sharding.zeros_like(valid))
  return _grown(
    dataclasses.replace(queue, head=_wrap(queue, queue.head - rank[-1])),
    rank[-1],
  )


def reserve(queue: FreeQueue, count: Array) -> FreeQueue:
  """Makes room for `count` pushes: sweeps the ring if it is too full."""
  capacity = queue.ring.shape[0]

  def sweep(queue: FreeQueue) -> FreeQueue:
    ring = in_order(queue)
    lanes = jnp.arange(capacity, dtype=jnp.int32)
    listed = indexing.where_valid(lanes < queue.num_free, ring)
    return dataclasses.replace(
      queue,
      ring=ring,
      position=indexing.put(queue.position, listed, values=lanes),
      head=sharding.zeros_like(queue.head),
      span=queue.num_free,
    )

  return loops.at_most_once(queue.span + count > capacity, sweep, queue)


def mark_last(
  position: Array, pages: Array, valid: Array
) -> tuple[Array, Array]:
  """Finds the last of several items that name the same page.

  Args:
    position: int32[N]; at valid pages a position in the ring or NOWHERE.
    pages: int32[W].
    valid: bool[W].

  Returns:
    `position` with temporary marks at all valid pages, which the caller
    overwrites, and bool[W]: valid, and no later valid item names the page.
  """
  note = NOWHERE + 1 + jnp.arange(pages.shape[0], dtype=jnp.int32)
  place = indexing.where_valid(valid, pages)
  position = indexing.put_max(position, place, values=note)
  return position, valid & (indexing.take(position, place) == note)


def in_order(queue: FreeQueue) -> Array:
  """int32[C]: the free pages in eviction order, then zeros."""
  capacity = queue.ring.shape[0]
  lanes = jnp.arange(capacity, dtype=jnp.int32)
  place = _wrap(queue, queue.head + lanes)
  pages = indexing.take(queue.ring, place)
  live = (indexing.take(queue.position, pages, fill=NOWHERE) == place) & (
    lanes < queue.span
  )
  rank = jnp.cumsum(live, dtype=jnp.int32) - 1
  return indexing.put(
    jnp.zeros_like(queue.ring), indexing.where_valid(live, rank), values=pages
  )


def _write(
  queue: FreeQueue,
  place: Array,
  pages: Array,
  valid: Array,
  notes: Array,
  noted: Array,
) -> FreeQueue:
  return dataclasses.replace(
    queue,
    ring=indexing.put(
      queue.ring, indexing.where_valid(valid, place), values=pages
    ),
    position=indexing.put(
      queue.position,
      indexing.where_valid(valid | noted, pages),
      values=jnp.where(valid, place, notes),
    ),
  )


def _grown(queue: FreeQueue, count: Array) -> FreeQueue:
  return dataclasses.replace(
    queue, span=queue.span + count, num_free=queue.num_free + count
  )


def _wrap(queue: FreeQueue, place: Array) -> Array:
  return place & jnp.int32(queue.ring.shape[0] - 1)
