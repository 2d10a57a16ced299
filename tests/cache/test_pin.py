"""touch, pin, unpin, evict: single pages are kept, or given up."""

import jax.numpy as jnp
import pytest

import jaxkv
from jaxkv import Status
from tests.cache.by_hand import ints
from tests.cache.by_hand import prompt
from tests.cache.by_hand import references
from tests.cache.by_hand import tiny
from tests.cache.by_hand import write


def cached_pages_1_and_2():
  """Slot 0 held 1 2 | 3 4 in pages 1 and 2, and ended."""
  state = write(tiny(), 0, 1, 2, 3, 4)
  state, _ = jaxkv.free(state, slots=ints(0))
  assert jaxkv.free_pages(state) == [3, 4, 5, 6, 7, 2, 1]
  return state


@pytest.mark.slow
def test_a_pinned_prefix_leaves_the_queue_and_comes_back():
  """Of 1 2 | 3 4 | 5 pages 1 and 2 are cached; 8 is NO_PAGE."""
  state, out = jaxkv.pin(cached_pages_1_and_2(), *prompt(1, 2, 3, 4, 5))
  assert out.pages[0, 0].tolist() == [1, 2, 8, 8]
  assert references(state, 1, 2) == [1, 1]
  assert jaxkv.free_pages(state) == [3, 4, 5, 6, 7]
  state, out = jaxkv.unpin(state, out.pages)
  assert out.code[0, 0].tolist() == [Status.OK] * 2 + [Status.SKIPPED] * 2
  # The last page of a row is the first to be used again, as by `free`.
  assert jaxkv.free_pages(state) == [3, 4, 5, 6, 7, 2, 1]


def test_touch_pins_pages_by_id():
  """Page 3 is neither held nor cached, so nothing is in it to keep."""
  state, out = jaxkv.touch(cached_pages_1_and_2(), ints(1, 3, 0))
  assert out.code.tolist() == [Status.OK, Status.NOT_CACHED, Status.BAD_PAGE]
  assert jaxkv.free_pages(state) == [3, 4, 5, 6, 7, 2]


def test_a_pin_is_removed_once():
  state, _ = jaxkv.touch(cached_pages_1_and_2(), ints(1))
  state, out = jaxkv.unpin(state, ints(1, 1))
  # In a row the last one is worked off first.
  assert out.code.tolist() == [Status.NOT_PINNED, Status.OK]
  assert references(state, 1) == [0]


def test_an_evicted_page_is_no_hit_but_keeps_its_queue_position():
  """Without page 2 only 1 2 is found."""
  state, out = jaxkv.evict(cached_pages_1_and_2(), ints(2, 2))
  assert out.code.tolist() == [Status.OK, Status.NOT_CACHED]
  hit = jaxkv.match(state, *prompt(1, 2, 3, 4, 5))
  assert hit.num_cached_tokens.tolist() == [2]
  assert jaxkv.free_pages(state) == [3, 4, 5, 6, 7, 2, 1]


def test_a_prompt_shorter_than_a_page():
  state = jaxkv.init(
    jaxkv.CacheConfig(num_pages=16, page_size=4, num_slots=2, pages_per_slot=4)
  )
  tokens = ints([1, 2, 3])
  state, out = jaxkv.admit(state, ints(0), tokens, ints(3))
  assert bool(out.ok[0])
  state, out = jaxkv.pin(state, tokens, ints(3))
  assert out.code.tolist() == [Status.NOT_CACHED]
  # What pin gives, unpin takes, also when it is no page at all.
  state, out = jaxkv.unpin(state, out.pages)
  assert out.code.shape == (1, 1, 0)
  assert jaxkv.match(state, tokens, ints(3)).num_cached_tokens.tolist() == [0]


@pytest.mark.parametrize("verb", ["touch", "unpin", "evict"])
@pytest.mark.parametrize(
  ("pages", "message"),
  [
    ([1.5], "`pages` must hold integers, got float64"),
    (jnp.ones((1,)), "`pages` must hold integers, got float32"),
  ],
)
def test_pages_of_floats_are_refused(verb, pages, message):
  with pytest.raises(TypeError, match=message):
    getattr(jaxkv, verb)(tiny(), pages)
