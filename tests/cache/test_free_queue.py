"""The free queue: a ring with lazy deletion, against a Python list."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv._src.arrays import indexing
from jaxkv._src.cache.page_numbers import PageNumbers
from jaxkv._src.cache.pool import free_queue
from tests.cache.by_hand import free_list
from tests.cache.by_hand import ints


def pop_pages(queue, count):
  """The queue, and the pages that left it."""
  queue, out = free_queue.pop(queue, ints(count), window=8)
  return queue, out.pages[out.valid].tolist()


def remove_pages(queue, *pages):
  """The queue without some pages, and how many they were."""
  valid = jnp.ones((len(pages),), bool)
  queue, count = free_queue.remove(queue, ints(*pages), valid)
  return queue, int(count)


def push_back(queue, *pages):
  """The queue with pages behind all others."""
  pages = ints(*pages)
  valid = jnp.ones(pages.shape, bool)
  return free_queue.push_back(
    queue, pages, valid, marks=pages * 0, marked=~valid
  )


def push_front(queue, *pages):
  """The queue with pages before all others."""
  pages = ints(*pages)
  valid = jnp.ones(pages.shape, bool)
  turn = jnp.arange(pages.size, dtype=jnp.int32)
  return free_queue.push(queue, pages, ~valid, valid, turn=turn)


def test_pages_leave_from_the_front():
  """Page 0 is the null page and never in the queue."""
  queue = free_queue.init(PageNumbers((6,)))
  assert free_list(queue) == [1, 2, 3, 4, 5]
  queue, pages = pop_pages(queue, 2)
  assert pages == [1, 2]
  assert free_list(queue) == [3, 4, 5]


def test_one_push_adds_pages_to_both_ends():
  queue, _ = pop_pages(free_queue.init(PageNumbers((8,))), 5)
  to_front = jnp.asarray([True, False, True, False, True])
  turn = jnp.asarray([0, 0, 2, 0, 1], jnp.int32)
  queue = free_queue.push(
    queue, ints(1, 2, 3, 4, 5), ~to_front, to_front, turn=turn
  )
  assert free_list(queue) == [3, 5, 1, 6, 7, 2, 4]


def test_pages_are_pushed_to_either_end():
  """The last one pushed to the front is the first one there."""
  queue, _ = pop_pages(free_queue.init(PageNumbers((6,))), 3)
  queue = push_back(queue, 2)
  assert free_list(queue) == [4, 5, 2]
  queue = push_front(queue, 1, 3)
  assert free_list(queue) == [3, 1, 4, 5, 2]
  assert pop_pages(queue, 2)[1] == [3, 1]


def test_a_page_is_taken_out_of_the_middle():
  """Its entry stays in the ring, but its page does not point back at it."""
  queue, count = remove_pages(free_queue.init(PageNumbers((6,))), 2, 4, 4)
  assert count == 2
  assert free_list(queue) == [1, 3, 5]
  assert queue.span.tolist() == [5]
  queue, pages = pop_pages(queue, 3)
  assert pages == [1, 3, 5]
  # All entries are behind the head now, stale ones too.
  assert queue.span.tolist() == [0]


def test_a_full_ring_is_swept():
  """Half of 8 places hold stale entries, and room for 6 is asked for."""
  queue = free_queue.init(PageNumbers((4,)))
  assert queue.ring.size == 8
  for _ in range(2):
    queue = push_back(remove_pages(queue, 2)[0], 2)
  assert (free_list(queue), queue.span.tolist()) == ([1, 3, 2], [5])
  roomy = free_queue.reserve(queue, ints(3))
  assert roomy.span.tolist() == [5]
  swept = free_queue.reserve(queue, ints(4))
  assert (free_list(swept), swept.span.tolist()) == ([1, 3, 2], [3])


def test_last_of_equal_items_is_marked():
  position = jnp.full((6,), indexing.NOWHERE, jnp.int32)
  valid = jnp.asarray([True, True, True, False])
  _, is_last = free_queue.mark_last(position, ints(3, 2, 3, 2), valid)
  assert is_last.tolist() == [False, True, True, False]


@pytest.mark.parametrize("sizes", [(12,), (7, 6)])
def test_random_moves_equal_those_of_a_list(sizes):
  """Three hundred moves on eleven pages, the rings swept again and again."""
  draws = np.random.default_rng(0)
  numbers = PageNumbers(sizes)
  with pytest.MonkeyPatch.context() as patch:
    # Half a ring, so that it is full of stale entries soon.
    size = 1 << max(sizes).bit_length()
    patch.setattr(free_queue, "capacity", lambda _: size)
    queue = free_queue.init(numbers)
  first_pages = (*numbers.first_pages, numbers.total)
  expected = [list(range(a + 1, b)) for a, b in itertools.pairwise(first_pages)]
  outside = []
  reserve = jax.jit(free_queue.reserve)
  sweeps = 0
  for _ in range(300):
    move = draws.integers(4)
    pool = int(draws.integers(len(sizes)))
    counts = np.eye(len(sizes), dtype=np.int32)[pool]
    if move == 0 and expected[pool]:
      queue, out = free_queue.pop(queue, jnp.asarray(counts), window=16)
      pages = out.pages[out.valid].tolist()
      if pages:  # None where only stale entries are in front.
        assert pages == [expected[pool].pop(0)]
        outside += pages
    elif move == 1 and expected[pool]:
      page = int(draws.choice(expected[pool]))
      queue, _ = remove_pages(queue, page)
      expected[pool].remove(page)
      outside.append(page)
    elif outside:
      page = outside.pop(int(draws.integers(len(outside))))
      pool = int(numbers.pool_of(jnp.int32(page)))
      counts = np.eye(len(sizes), dtype=np.int32)[pool]
      roomy = reserve(queue, jnp.asarray(counts))
      sweeps += int(jnp.sum(roomy.span) < jnp.sum(queue.span))
      push = push_back if move == 2 else push_front
      queue = push(roomy, page)
      expected[pool].insert(len(expected[pool]) if move == 2 else 0, page)
    assert free_list(queue) == [page for pages in expected for page in pages]
    assert queue.num_free.tolist() == [len(pages) for pages in expected]
  assert sweeps > 0


def test_heads_wrap_around():
  """The head is at the last entry, and pages behind it begin at entry 0."""
  queue = free_queue.init(PageNumbers((4,)))
  queue = dataclasses.replace(
    queue,
    ring=jnp.roll(queue.ring, 7),
    position=jnp.where(queue.position < 8, (queue.position + 7) % 8, 2**30),
    head=ints(7),
  )
  assert free_list(queue) == [1, 2, 3]
  queue, pages = pop_pages(queue, 2)
  assert (pages, queue.head.tolist()) == ([1, 2], [1])
