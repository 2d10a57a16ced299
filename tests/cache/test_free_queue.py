"""The free queue: a ring with lazy deletion, against a Python list."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._src.cache.pool import free_queue
from tests.cache.by_hand import free_list
from tests.cache.by_hand import ints


def pop_pages(queue, count):
  """The queue, and the pages that left it."""
  queue, out = free_queue.pop(queue, jnp.int32(count), window=8)
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
  queue = free_queue.init(6)
  assert free_list(queue) == [1, 2, 3, 4, 5]
  queue, pages = pop_pages(queue, 2)
  assert pages == [1, 2]
  assert free_list(queue) == [3, 4, 5]


def test_one_push_adds_pages_to_both_ends():
  queue, _ = pop_pages(free_queue.init(8), 5)
  to_front = jnp.asarray([True, False, True, False, True])
  turn = jnp.asarray([0, 0, 2, 0, 1], jnp.int32)
  queue = free_queue.push(
    queue, ints(1, 2, 3, 4, 5), ~to_front, to_front, turn=turn
  )
  assert free_list(queue) == [3, 5, 1, 6, 7, 2, 4]


def test_pages_are_pushed_to_either_end():
  """The last one pushed to the front is the first one there."""
  queue, _ = pop_pages(free_queue.init(6), 3)
  queue = push_back(queue, 2)
  assert free_list(queue) == [4, 5, 2]
  queue = push_front(queue, 1, 3)
  assert free_list(queue) == [3, 1, 4, 5, 2]
  assert pop_pages(queue, 2)[1] == [3, 1]


def test_a_page_is_taken_out_of_the_middle():
  """Its entry stays in the ring, but its page does not point back at it."""
  queue, count = remove_pages(free_queue.init(6), 2, 4, 4)
  assert count == 2
  assert free_list(queue) == [1, 3, 5]
  assert int(queue.span) == 5
  queue, pages = pop_pages(queue, 3)
  assert pages == [1, 3, 5]
  # All entries are behind the head now, stale ones too.
  assert int(queue.span) == 0


def test_a_full_ring_is_swept():
  """Half of 8 places hold stale entries, and room for 6 is asked for."""
  queue = free_queue.init(4)
  assert queue.ring.size == 8
  for _ in range(2):
    queue = push_back(remove_pages(queue, 2)[0], 2)
  assert (free_list(queue), int(queue.span)) == ([1, 3, 2], 5)
  roomy = free_queue.reserve(queue, jnp.int32(3))
  assert int(roomy.span) == 5
  swept = free_queue.reserve(queue, jnp.int32(4))
  assert (free_list(swept), int(swept.span)) == ([1, 3, 2], 3)


def test_last_of_equal_items_is_marked():
  position = jnp.full((6,), free_queue.NOWHERE, jnp.int32)
  valid = jnp.asarray([True, True, True, False])
  _, is_last = free_queue.mark_last(position, ints(3, 2, 3, 2), valid)
  assert is_last.tolist() == [False, True, True, False]


def test_random_moves_equal_those_of_a_list():
  """Three hundred moves on eleven pages, the ring swept again and again."""
  draws = np.random.default_rng(0)
  queue = free_queue.init(12)
  expected = list(range(1, 12))
  outside = []
  # Half a ring, so that it is full of stale entries soon.
  queue = dataclasses.replace(queue, ring=queue.ring[:16])
  reserve = jax.jit(free_queue.reserve)
  sweeps = 0
  for _ in range(300):
    move = draws.integers(4)
    if move == 0 and expected:
      queue, pages = pop_pages(queue, 1)
      if pages:  # None where eight stale entries are in front.
        assert pages == [expected.pop(0)]
        outside += pages
    elif move == 1 and expected:
      page = int(draws.choice(expected))
      queue, _ = remove_pages(queue, page)
      expected.remove(page)
      outside.append(page)
    elif outside:
      page = outside.pop(int(draws.integers(len(outside))))
      roomy = reserve(queue, jnp.int32(1))
      sweeps += int(roomy.span) < int(queue.span)
      push = push_back if move == 2 else push_front
      queue = push(roomy, page)
      expected = [*expected, page] if move == 2 else [page, *expected]
    assert free_list(queue) == expected
  assert sweeps > 0


def test_heads_wrap_around():
  """The head is at the last entry, and pages behind it begin at entry 0."""
  queue = free_queue.init(4)
  queue = dataclasses.replace(
    queue,
    ring=jnp.roll(queue.ring, 7),
    position=jnp.where(queue.position < 8, (queue.position + 7) % 8, 2**30),
    head=jnp.int32(7),
  )
  assert free_list(queue) == [1, 2, 3]
  queue, pages = pop_pages(queue, 2)
  assert (pages, int(queue.head)) == ([1, 2], 1)
