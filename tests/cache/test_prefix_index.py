"""The prefix index: from keys to pages, through buckets of eight."""

import dataclasses

import jax.numpy as jnp

from jaxkv._src.cache.prefix import prefix_index
from tests.cache.by_hand import ints

TOKENS = {1: (10, 11), 2: (20, 21), 3: (10, 11)}
"""Tokens of pages 1, 2 and 3; the first and the third are equal."""


def keys(*numbers):
  """A key for each number; the first word says where its page begins."""
  return jnp.asarray([[n, 1, n, n] for n in numbers], jnp.uint32)


def insert(index, *pages, key=None):
  """The index with pages under the keys of their numbers."""
  return prefix_index.insert(
    index,
    ints(*pages),
    keys(*(key or pages)),
    ints(*(TOKENS.get(page, (0, 0)) for page in pages)),
    jnp.ones((len(pages),), bool),
    jnp.ones((len(pages),), bool),
  )


def find(index, *numbers, tokens=None):
  """Pages found under some keys, 0 where there is none."""
  asked = tokens or [TOKENS.get(key, (0, 0)) for key in numbers]
  return prefix_index.lookup(index, keys(*numbers), ints(*asked)).tolist()


def remove(index, *pages):
  """The index without pages."""
  index, was_cached = prefix_index.remove(
    index, ints(*pages), jnp.ones((len(pages),), bool)
  )
  return index, int(was_cached.sum())


def test_a_page_is_found_by_its_key():
  """Pages 1 and 2 are in, page 3 is not."""
  index = insert(prefix_index.init(16, 2), 1, 2)
  assert find(index, 1, 2, 3) == [1, 2, 0]
  is_cached = prefix_index.contains(index, ints(1, 2, 3))
  assert is_cached.tolist() == [True, True, False]


def test_a_page_with_other_tokens_is_no_hit():
  """The key of page 1 was asked for, but not its tokens 10 11."""
  index = insert(prefix_index.init(16, 2), 1)
  assert find(index, 1, tokens=[(10, 99)]) == [0]


def test_the_page_published_first_is_found():
  """Pages 3 and 1 carry one key: page 3 came first, until it is taken out."""
  index = insert(prefix_index.init(16, 2), 3, key=(7,))
  index = insert(index, 1, key=(7,))
  assert find(index, 7, tokens=[(10, 11)]) == [3]
  index, count = remove(index, 3)
  assert count == 1
  assert find(index, 7, tokens=[(10, 11)]) == [1]


def test_removing_absent_pages_changes_nothing():
  index = insert(prefix_index.init(16, 2), 1)
  index, count = remove(index, 2, 1)
  assert count == 1
  assert find(index, 1) == [0]
  assert remove(index, 1)[1] == 0


def test_a_full_bucket_sends_pages_on():
  """Of 8 buckets all eleven keys begin at bucket 1, which has room for eight.

  Pages 10, 11 and 12 go on to bucket 2, and bucket 1 counts three that passed.
  """
  pages = range(2, 13)
  index = insert(
    prefix_index.init(16, 2), *pages, key=[1 + 8 * p for p in pages]
  )
  assert index.buckets[1].tolist() == [*range(2, 10)]
  assert index.buckets[2].tolist() == [10, 11, 12, 0, 0, 0, 0, 0]
  assert index.overflow.tolist() == [0, 3, 0, 0, 0, 0, 0, 0]
  assert find(index, 1 + 8 * 12, tokens=[(0, 0)]) == [12]
  # Taking one of them out leaves no mark behind.
  index, _ = remove(index, 11)
  assert index.overflow.tolist() == [0, 2, 0, 0, 0, 0, 0, 0]
  assert find(index, 1 + 8 * 12, tokens=[(0, 0)]) == [12]


def test_the_older_page_is_found_across_a_wrap_of_the_clock():
  """Pages 1 and 3 are equal; between them the clock passes 2**32."""
  index = prefix_index.init(16, 2)
  index = dataclasses.replace(index, clock=jnp.uint32(2**32 - 1))
  index = insert(index, 1, 3, key=(1, 1))
  assert int(index.clock) == 1
  assert find(index, 1) == [1]


def test_a_cleared_index_has_nothing():
  """Nine pages of one key had filled a bucket of eight, and overflowed it."""
  pages = range(1, 10)
  index = insert(prefix_index.init(16, 2), *pages, key=[1] * 9)
  assert int(index.overflow.sum()) == 1
  index = prefix_index.clear(index)
  assert find(index, 1, tokens=[TOKENS[1]]) == [0]
  assert not index.buckets.any() and not index.overflow.any()
