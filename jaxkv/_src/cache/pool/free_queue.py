"""The free pages in eviction order: a ring with lazy deletion.

`ring[q]` is an entry; it is live iff its page still points back at it,
`position[ring[q]] == q`. Taking a page out of the middle only forgets its
position, so that nothing moves and no operation depends on the number of
pages. Stale entries are skipped when they reach the front, and swept out when
they fill the ring, once in many pushes.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax import lax

from jaxkv._src.cache import masked
from jaxkv._src.cache.masked import NOWHERE


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class FreeQueue:
  """The free pages, in the order in which they will be taken.

  C is the ring's capacity, a power of two of at least 2 N.

  Attributes:
    ring: page numbers; C of them, those in `head .. head + span` (modulo C)
      are entries.  # int32[C]
    position: where a page's live entry is; for a page in use some place where
      it is not, and NOWHERE for the null page.  # int32[N]
    head: place of the first entry.  # int32[]
    span: entries, stale ones included.  # int32[]
    num_free: live entries.  # int32[]
  """

  ring: Array
  position: Array
  head: Array
  span: Array
  num_free: Array


class Popped(NamedTuple):
  """A window over the front of the queue.

  Attributes:
    pages: int32[W].
    rank: int32[W], the how-manieth popped page this is.
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
) -> tuple[FreeQueue, Popped]:
  """Takes up to `wanted` pages among the first `window` entries.

  Returns fewer when stale entries stand between; the caller goes on until it
  has all. With `wanted <= num_free` that ends.
  """
  lanes = jnp.arange(window, dtype=jnp.int32)
  place = _wrap(queue, queue.head + lanes)
  pages = masked.take(queue.ring, place)
  live = (masked.take(queue.position, pages, fill=NOWHERE) == place) & (
    lanes < queue.span
  )
  count = jnp.cumsum(live, dtype=jnp.int32)
  valid = live & (count <= wanted)
  num_popped = count[-1] - jnp.maximum(count[-1] - wanted, 0)
  # Everything before the first entry that stays is done with.
  stays = (live & ~valid) | (lanes >= queue.span)
  passed = jnp.where(jnp.any(stays), jnp.argmax(stays), window)
  passed = passed.astype(jnp.int32)
  # The head passes every entry that is popped, so positions can stay.
  queue = dataclasses.replace(
    queue,
    head=_wrap(queue, queue.head + passed),
    span=queue.span - passed,
    num_free=queue.num_free - num_popped,
  )
  return queue, Popped(pages, count - 1, valid)


def remove(
  queue: FreeQueue, pages: Array, valid: Array
) -> tuple[FreeQueue, Array]:
  """Takes pages out of wherever they stand.

  Args:
    queue: the queue.
    pages: int32[W]; a page may be named more than once.
    valid: bool[W], pages that stand in the queue.

  Returns:
    The queue, and int32[]: how many different pages were taken out.
  """
  position, last = mark_last(queue.position, pages, valid)
  count = jnp.sum(last, dtype=jnp.int32)
  place = masked.after(count, masked.where_valid(valid, pages))
  queue = dataclasses.replace(
    queue,
    position=masked.put(position, place, values=NOWHERE),
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
    notes: int32[W], what to leave as position of the pages noted.
    noted: bool[W], pages to be left outside, none of them valid.
  """
  rank = jnp.cumsum(valid, dtype=jnp.int32)
  place = _wrap(queue, queue.head + queue.span + rank - 1)
  return _grown(_write(queue, place, pages, valid, notes, noted), rank[-1])


def push_front(queue: FreeQueue, pages: Array, valid: Array) -> FreeQueue:
  """Puts pages before all others, one after the other: the last is first."""
  rank = jnp.cumsum(valid, dtype=jnp.int32)
  place = _wrap(queue, queue.head - rank)
  queue = _write(queue, place, pages, valid, place, valid & False)
  return _grown(
    dataclasses.replace(queue, head=_wrap(queue, queue.head - rank[-1])),
    rank[-1],
  )


def reserve(queue: FreeQueue, count: Array) -> FreeQueue:
  """Makes room for `count` pushes, sweeping the ring if it is too full.

  A loop of at most one trip, because XLA runs a loop's body in place where it
  would copy the operands of a conditional.
  """
  capacity = queue.ring.shape[0]

  def sweep(loop: tuple[Array, FreeQueue]) -> tuple[Array, FreeQueue]:
    tight, queue = loop
    ring = in_order(queue)
    lanes = jnp.arange(capacity, dtype=jnp.int32)
    listed = masked.where_valid(lanes < queue.num_free, ring)
    queue = dataclasses.replace(
      queue,
      ring=ring,
      position=masked.put(queue.position, listed, values=lanes),
      head=queue.head - queue.head,
      span=queue.num_free,
    )
    return tight & False, queue

  tight = queue.span + count > capacity
  return lax.while_loop(lambda loop: loop[0], sweep, (tight, queue))[1]


def mark_last(
  position: Array, pages: Array, valid: Array
) -> tuple[Array, Array]:
  """Finds the last of several items that name one page.

  Uses `position` for its notes: the caller overwrites the position of every
  valid page afterwards.

  Args:
    position: int32[N]; at valid pages a place in the ring or NOWHERE.
    pages: int32[W].
    valid: bool[W].

  Returns:
    The scribbled-on positions, and bool[W]: valid and no later valid item
    names the same page.
  """
  note = NOWHERE + 1 + jnp.arange(pages.shape[0], dtype=jnp.int32)
  place = masked.where_valid(valid, pages)
  position = masked.put_max(position, place, values=note)
  return position, valid & (masked.take(position, place) == note)


def in_order(queue: FreeQueue) -> Array:
  """int32[C]: the free pages in the order they will be taken, then zeros."""
  capacity = queue.ring.shape[0]
  lanes = jnp.arange(capacity, dtype=jnp.int32)
  place = _wrap(queue, queue.head + lanes)
  pages = masked.take(queue.ring, place)
  live = (masked.take(queue.position, pages, fill=NOWHERE) == place) & (
    lanes < queue.span
  )
  rank = jnp.cumsum(live, dtype=jnp.int32) - 1
  return masked.put(
    jnp.zeros_like(queue.ring), masked.where_valid(live, rank), values=pages
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
    ring=masked.put(queue.ring, masked.where_valid(valid, place), values=pages),
    position=masked.put(
      queue.position,
      masked.where_valid(valid | noted, pages),
      values=jnp.where(valid, place, notes),
    ),
  )


def _grown(queue: FreeQueue, count: Array) -> FreeQueue:
  return dataclasses.replace(
    queue, span=queue.span + count, num_free=queue.num_free + count
  )


def _wrap(queue: FreeQueue, place: Array) -> Array:
  return place & jnp.int32(queue.ring.shape[0] - 1)
